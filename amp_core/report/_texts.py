"""What a report says in words and tables: verdict, findings, comparison, numbers of a run, settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from amp_core import words
from amp_core.analysis import Comparison, Overview
from amp_core.findings import Finding
from amp_core.report._html import Html, join, table, tag
from amp_core.run import Run

_COLUMNS = (
    "Run",
    "Recipe",
    "Step time",
    "Speed",
    "Peak memory",
    "Memory",
    "Final loss",
    "Held-out loss",
    "Skipped",
    "Last scale",
)
_DEEPEST = 4
"""Settings nested deeper are shown as they are."""


def verdict(found: Sequence[Finding]) -> Html:
    """What was found, in one line: its colour says how bad."""
    counts = [(sum(f.severity == level for f in found), level) for level in ("error", "warning")]
    said = " and ".join(words.plural(count, level) for count, level in counts if count)
    worst = next((level for count, level in counts if count), "fine")
    return tag("p", f"{said} found." if said else "Nothing wrong was found.", class_=f"verdict {worst}")


def summary(view: Overview) -> str:
    """How far a run came, and what became of its loss."""
    of = f" of {view.steps_planned:,}" if view.steps_planned else ""
    time = f" in {words.duration(view.duration_s)}" if view.duration_s is not None else ""
    ended = f"{view.status}: {view.steps_done:,}{of} steps{time}"
    loss = f"loss {words.loss(view.loss_first)} at first, {words.loss(view.loss_last)} at the end"
    reason = f" {words.sentence(view.end_reason)}" if view.end_reason and view.status != "finished" else ""
    return f"{ended}; {loss}.{reason}"


def finding(found: Finding) -> Html:
    """One finding: its evidence, what to do, and the code for it."""
    where = [found.where] if found.where else []
    if found.steps is not None:
        first, last = found.steps
        where.append(f"step {first:,}" if first == last else f"steps {first:,}–{last:,}")
    if found.value is not None:
        limit = f", limit {words.number(found.limit)}" if found.limit is not None else ""
        where.append(f"{words.number(found.value)}{limit} {found.unit}".strip())
    if found.follows:
        where.append(f"follows from {found.follows}")
    return tag(
        "article",
        tag("h4", tag("span", found.severity, class_="badge"), " ", found.title),
        tag("p", " · ".join(where), class_="quiet") if where else None,
        tag("p", found.advice),
        tag("pre", found.snippet) if found.snippet else None,
        class_=f"finding {found.severity}",
    )


def comparison(found: Comparison) -> Html:
    """Verdicts beside the first run, the table, what differs and what a reader must know."""
    rows = found.table.to_dict("records")
    first = rows[0]["run"]
    lines = [
        tag(
            "li",
            tag("b", row["run"]),
            f": {_ratio(row, 'speed_ratio')} the speed of {first}, {words.number(row['memory_ratio'])} × the memory. "
            f"Learning: {words.sentence(row['parity'])}",
        )
        for row in rows[1:]
    ]
    cells = [
        (
            row["run"],
            row["precision"] or words.NONE,
            words.number(row["step_ms"], "ms"),
            _ratio(row, "speed_ratio"),
            words.size(row["memory_peak_bytes"]),
            f"{words.number(row['memory_ratio'])} ×",
            words.loss(row["loss_final"]),
            words.loss(row["eval_loss"]),
            words.percent(row["skip_frac"]),
            words.scale(row["scale_last"]),
        )
        for row in rows
    ]
    differing = found.differences
    settings = (
        table([str(c) for c in differing.columns], differing.astype(str).to_numpy().tolist(), "What differs")
        if len(differing)
        else None
    )
    notes = [tag("p", note, class_="quiet") for note in found.notes]
    return join([tag("ul", *lines), table(_COLUMNS, cells), settings, *notes])


def _ratio(row: Mapping[Any, Any], column: str) -> str:
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    span = f" ({words.number(low)}–{words.number(high)})" if low == low and low is not None and low != high else ""
    return f"{words.number(row[column])} ×{span}"


def numbers(view: Overview) -> Html:
    """The run's numbers, as the app has them on its cards."""
    scale, speed, memory = view.scale, view.speed, view.memory
    spread = f" ({words.number(speed.step_ms_low)}–{words.number(speed.step_ms_high)})"
    rows = [
        ("Loss", f"{words.loss(view.loss_first)} → {words.loss(view.loss_last)}"),
        ("Loss scale", words.scale(scale.last) if scale.has_scaler else "none: no scaler"),
        ("Skipped steps", f"{words.count(scale.skips)} ({words.percent(scale.skip_frac)})"),
        ("Step time", f"{words.number(speed.step_ms, 'ms')}{spread if speed.step_ms is not None else ''}"),
        ("Samples per second", words.number(speed.samples_per_s)),
        ("Watching", f"{words.percent(speed.watch_frac)} of the time"),
        ("Peak memory", f"{words.size(memory.peak_bytes)} ({memory.what})"),
        *((str(name).replace("eval_", "held-out "), _value(value)) for name, value in view.results.items()),
    ]
    return table((), rows)


def settings(run: Run) -> Html:
    """Everything that the run's head says, one line per setting."""
    head = run.head
    about = {"run_id": head.run_id, "created_at": head.created_at, "folder schema": head.schema}
    parts = []
    for title, facts in (
        ("Configuration", head.config),
        ("Environment", head.environment),
        ("Model", {key: value for key, value in head.model.items() if not isinstance(value, dict | list)}),
        ("Run", about),
    ):
        rows = list(_flat(facts))
        if rows:
            parts.append(table(("Setting", "Value"), rows, title))
    return join(parts)


def _flat(facts: Mapping[str, Any], above: str = "", depth: int = 1) -> list[tuple[str, str]]:
    rows = []
    for key, value in facts.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            rows += _flat(value, f"{name}.", depth + 1)
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value) and depth < _DEEPEST:
            for i, each in enumerate(value):
                rows += _flat(each, f"{name}[{i}].", depth + 1)
        else:
            rows.append((name, _value(value)))
    return rows


def _value(value: object) -> str:
    if value is None:
        return words.NONE
    return words.number(value, digits=4) if isinstance(value, float) else str(value)
