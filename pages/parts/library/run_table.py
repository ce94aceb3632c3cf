"""The library's table: a row per run, and the zip of one.

Opening and diagnosing a run takes tens of milliseconds, so a pass does that for as many as `READING_TIMEOUT_S` allows,
and `read_waiting` continues until every row is full. The rows of ended runs are kept for the session.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from amp_core import Finding, RunError, diagnose
from amp_core.analysis import overview, sparkline
from amp_core.library.mutes import muted
from amp_core.store.packing import pack
from amp_core.store.urls import Address
from pages.parts import loaders, picker, tables, words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry, runs_dir

READING_TIMEOUT_S = 0.25
"""How long one pass reads runs that have no row yet."""
TICK_S = 0.5
UNREAD = "…"
CODES = "Codes"
"""What is kept with a row and not shown in it: the codes of the run's findings that are not muted."""

VERDICT_HELP = "Errors and warnings, each with its consequences"
COLUMNS: dict[str, Any] = {
    "Name": st.column_config.TextColumn(pinned=True, width="medium"),
    "Verdict": None,
    "Loss": st.column_config.LineChartColumn(help="From the first step to the last", width="small"),
    "Final loss": st.column_config.NumberColumn(
        format="%.4g", help="Mean of the last tenth of the steps, as on Overview and Compare", width=80
    ),
    "Recipe": st.column_config.TextColumn(width=105),
    "Steps": st.column_config.TextColumn(width=95, help="Steps done of steps planned"),
    "Samples/s": tables.measured(help_="Median, warm-up left out", width=80),
    "Skipped": st.column_config.TextColumn(help="Of the steps attempted", width=130),
    "Tags": st.column_config.ListColumn(),
    "Created (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
    "Size (MiB)": st.column_config.NumberColumn(format="%.2f", help="Bytes on disk; 1 MiB is 1,048,576 bytes"),
}
SEVERITY = {"error": "red", "warning": "orange", "damaged": "red", "failed": "red", "lost": "red", "stopped": "orange"}
"""Colour of a badge by a word of the verdict."""
HEALTHY = "nothing wrong"
KINDS = {"sample": "sample", "run": "own run", "upload": "upload", "elsewhere": "another place"}


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    """The table's columns; the verdict as badges."""
    badges = (
        sorted({part for verdict in frame["Verdict"].dropna() for part in verdict.split(",")}) if len(frame) else []
    )
    hues = [next((c for w, c in SEVERITY.items() if w in badge), "gray") for badge in badges]
    hues = ["green" if badge == HEALTHY else hue for badge, hue in zip(badges, hues, strict=True)]
    verdict = st.column_config.MultiselectColumn(width=170, help=VERDICT_HELP, options=badges, color=hues)
    return COLUMNS | {"Verdict": verdict}


def matches(entry: Entry, asked: str) -> bool:
    """Whether every word of the search occurs in what is known of the run."""
    config = entry.config or {}
    facts = [entry.name, entry.key, entry.status, KINDS[entry.origin], entry.note, *entry.tags]
    facts += [str(config.get(name) or "") for name in ("precision", "workload", "size", "device")]
    text = " ".join(facts).lower()
    return all(word in text for word in asked.lower().split())


def in_folder(entries: Sequence[Entry], folder: str | None) -> tuple[list[Entry], dict[str, int]]:
    """The runs of one folder; without a folder, all but those of searches, and how many of each are omitted."""
    if folder is not None:
        return [entry for entry in entries if entry.group == folder], {}
    searches = {g for g in {e.group for e in entries if e.origin == "run"} if g and run_list.is_search(runs_dir() / g)}
    folded = Counter(entry.group for entry in entries if entry.origin == "run" and entry.group in searches)
    return [e for e in entries if e.origin != "run" or e.group not in searches], dict(folded)


def table(entries: Sequence[Entry]) -> tuple[pd.DataFrame, int]:
    """A row per run, and how many rows are not read yet."""
    known: dict[str, tuple[object, dict[str, Any]]] = st.session_state.setdefault("rows.known", {})
    began, waiting, rows = time.monotonic(), 0, []
    for entry in entries:
        row = _about(entry)
        if entry.readable and not isinstance(entry.path, Address):  # listing must not fetch every run of a bucket
            stamp = _stamp(entry)
            kept = known.get(entry.key)
            if (kept is None or kept[0] != stamp) and time.monotonic() - began < READING_TIMEOUT_S:
                kept = known[entry.key] = (stamp, read_row(entry))
            if kept is None:
                waiting += 1
            row |= {k: v for k, v in kept[1].items() if k != CODES} if kept is not None else {"Verdict": UNREAD}
        rows.append(row)
    return pd.DataFrame(rows), waiting


def runs_by_code(entries: Sequence[Entry]) -> tuple[dict[str, list[Entry]], int]:
    """The runs in which each finding was detected, and how many runs are not read yet."""
    waiting = table(entries)[1]
    known: dict[str, tuple[object, dict[str, Any]]] = st.session_state["rows.known"]
    by_code: dict[str, list[Entry]] = {}
    for entry in entries:
        for code in dict.fromkeys(known[entry.key][1].get(CODES, ()) if entry.key in known else ()):
            by_code.setdefault(code, []).append(entry)
    return by_code, waiting


def read_waiting(waiting: int) -> None:
    """Run the page again soon if rows are not read yet."""
    if waiting:
        st.session_state["rows.drawn"] = True
        st.fragment(_rerun, run_every=TICK_S)()


def _rerun() -> None:
    """The first call is part of the page's own pass, which may carry a click; rerun only on later ticks."""
    if not st.session_state.pop("rows.drawn", False):
        st.rerun()


def _about(entry: Entry) -> dict[str, Any]:
    """The columns that the listing alone provides; for a damaged run, its sentence."""
    config: Mapping[str, Any] = entry.config or {}
    return {
        "Name": picker.name_and_place(entry),
        "Verdict": "damaged" if entry.status == "damaged" else None,
        "Recipe": config.get("precision"),
        "Workload": words.workload(config) or None,
        "Steps": None,
        "Loss": None,
        "Final loss": None,
        "Samples/s": None,
        "Skipped": None,
        "Status": entry.status,
        "Tags": list(entry.tags) or None,
        "Size (MiB)": None if isinstance(entry.path, Address) else run_list.size_bytes(entry.path) / 2**20,
        "Created (UTC)": pd.to_datetime(entry.created_at, errors="coerce", utc=True),
        "Sentence": entry.sentence or None,
        "Kind": KINDS[entry.origin],
    }


def read_row(entry: Entry) -> dict[str, Any]:
    """The columns that need the run itself."""
    try:
        run = loaders.open_run(entry)
        view = loaders.analysed(overview, run)
        findings = loaders.analysed(diagnose, run)
    except RunError as error:
        return {"Verdict": "damaged", "Status": "damaged", "Sentence": str(error)}
    verdict = severity_counts(findings, muted(run.path))
    little = entry.status in ("failed", "lost") or (entry.status == "stopped" and not view.steps_done)
    if verdict == HEALTHY and little:  # too little was recorded to call it healthy
        verdict = entry.status
    planned = f" of {view.steps_planned:,}" if view.steps_planned else ""
    return {
        "Verdict": verdict,
        "Loss": sparkline(run.steps["loss"].astype(float)) or None,
        "Final loss": view.loss_final,
        "Samples/s": view.speed.samples_per_s,
        "Skipped": words.share_of(view.scale.skips, view.scale.attempts) if view.scale.skips_recorded else words.NONE,
        "Steps": f"{view.steps_done:,}{planned}",
        CODES: [f.code for f in findings if f.code not in muted(run.path)],
    }


def severity_counts(findings: Sequence[Finding], silent: frozenset[str] = frozenset()) -> str:
    """The number of errors and warnings as text."""
    grave = [f.severity for f in findings if f.severity != "info" and f.code not in silent]
    parts = [words.plural(n, kind) for kind in ("error", "warning") if (n := grave.count(kind))]
    return ", ".join(parts) or HEALTHY


def _stamp(entry: Entry) -> object:
    """Changes whenever the row of the run may have changed."""
    assert isinstance(entry.path, Path)
    try:
        head = (entry.path / "run.json").stat().st_mtime_ns
    except OSError:
        head = 0
    return (head, entry.status, run_list.size_bytes(entry.path) if entry.under_way else 0, muted(entry.path))


def packed(entry: Entry) -> bytes:
    """The run as a zip; called on download."""
    with tempfile.TemporaryDirectory(prefix="ampscope-pack-") as aside:
        return pack(entry.path, Path(aside) / "run.zip").read_bytes()
