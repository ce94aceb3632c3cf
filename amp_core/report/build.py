"""Assemble the report file from runs."""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files

from amp_core._version import __version__
from amp_core.analysis import compare, overview, precision_settings, step_cost, unique_labels
from amp_core.analysis.performance.kernels import is_trace
from amp_core.analysis.steps import recipe
from amp_core.figures.browser import plotly_script
from amp_core.findings import Finding, diagnose, diagnosis, first_sentence
from amp_core.report import chart_html, texts
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text.html import Html, join, tag

MAX_RUNS = 16


def report_html(runs: Sequence[Run]) -> str:
    """The report as one HTML document; the first of several runs is the baseline.

    Raises `RunError` if there is no run, more than `MAX_RUNS`, or one with neither a step nor a profiled window.
    """
    runs = [run.salvaged() for run in runs]
    if not 1 <= len(runs) <= MAX_RUNS:
        raise RunError(f"runs holds {len(runs)} of them; a report takes 1 to {MAX_RUNS}")
    for run in runs:
        if not any(run.table(name).num_rows for name in ("steps", "windows", "kernels", "ops")):
            if damage := run.damage():
                raise RunError(f"run {run.name!r} has no readable data: {'; '.join(damage.values())}")
            raise RunError(f"run {run.name!r} has no steps and no profiled window; a report needs one of them")
    names = unique_labels(runs)
    findings_by_run = [diagnose(run, _baseline(runs, run)) for run in runs]
    side_by_side = compare(runs) if len(runs) > 1 else None
    charts = chart_html.Charts()
    parts = [_head(names, runs, findings_by_run)]
    if side_by_side is not None:
        parts.append(_section("Comparison", texts.comparison_html(side_by_side)))
    parts.append(
        _section("Loss" if side_by_side is None else "Side by side", chart_html.together(charts, runs, side_by_side))
    )
    parts += [_of_run(charts, *each, alone=len(runs) == 1) for each in zip(names, runs, findings_by_run, strict=True)]
    title = f"AMPscope report: {', '.join(names)}"
    return _document(title, join(parts), json.dumps(charts.record(), allow_nan=False, separators=(",", ":")))


def _baseline(runs: list[Run], run: Run) -> Run | None:
    """The baseline to diagnose a run with: the first run, if it is in FP32 and not the run itself."""
    return runs[0] if run is not runs[0] and recipe(runs[0]) == "fp32" else None


def _head(names: list[str], runs: list[Run], findings_by_run: list[list[Finding]]) -> Html:
    summaries = []
    for name, run, findings in zip(names, runs, findings_by_run, strict=True):
        label, sentence = tag("h3", name) if len(runs) > 1 else None, first_sentence(run)
        summaries += [
            label,
            texts.headline(findings, sentence),
            texts.chain(diagnosis(run, findings)) or texts.first(sentence),
            tag("p", texts.summary(overview(run), step_cost(run), is_trace=is_trace(run))),
        ]
    return tag("header", tag("h1", "AMPscope report"), tag("p", " · ".join(names), class_="quiet"), *summaries)


def _of_run(charts: chart_html.Charts, name: str, run: Run, findings: list[Finding], *, alone: bool) -> Html:
    return join(
        [
            _section("Findings" if alone else f"{name}: findings", *map(texts.finding_html, findings))
            if findings
            else None,
            _section(
                "Numbers" if alone else f"{name}: numbers",
                texts.numbers(overview(run), step_cost(run)),
                texts.precision(precision_settings(run)),
                chart_html.of_run(charts, run),
            ),
            _section("Settings and environment" if alone else f"{name}: settings", texts.settings(run)),
        ]
    )


def _section(title: str, *parts: object) -> Html:
    return tag("section", tag("h2", title), *parts)


def _document(title: str, body: Html, charts: str) -> str:
    """The page around `body`. Only the two scripts whose hashes the policy names can run; nothing can be fetched."""
    here = files("amp_core.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    drawing, drawing_hash = _drawing()
    allowed = " ".join(f"'sha256-{sha256}'" for sha256 in (_sha256(script), drawing_hash))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'),
        Html(f'<meta name="generator" content="AMPscope {__version__}">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    button = tag("button", "Light or dark", type="button", id="theme", hidden=True)
    foot = tag(
        "footer", (f"Made by AMPscope {__version__}. This file is self-contained and loads nothing from the network.")
    )
    scripts = Html(
        f'<script type="application/x-gzip" id="charts">{_packed(charts)}</script>'
        f'<script type="application/x-gzip" id="plotly">{drawing}</script>'
        f"<script>{script}</script>"
    )
    page = tag("html", head, tag("body", button, tag("main", body, foot), scripts), lang="en")
    return f"<!doctype html>\n{page}\n"


@functools.cache
def _drawing() -> tuple[str, str]:
    """plotly.js, packed, and its hash. Every report contains it, and packing it takes a fifth of a second."""
    script = plotly_script()
    return _packed(script), _sha256(script)


def _packed(text: str) -> str:
    """`text` as base64 of gzip: a third of plotly.js's size, and nothing in it can end a script element."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
