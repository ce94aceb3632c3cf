"""The text and tables of a report: findings, comparison, numbers of a run, settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from amp_core.analysis import Comparison, Overview, StepCost, format_labels, precision_disagreements
from amp_core.analysis.comparison.answer import parity_in_words
from amp_core.analysis.performance.memory import MemorySummary
from amp_core.findings import Diagnosis, Finding
from amp_core.report.attachments import offered
from amp_core.store.run import Run
from amp_core.text import formatting
from amp_core.text.html import Html, join, table, tag

_RECIPES = (
    "Recipe",
    "Seeds",
    "Step time",
    "Speed",
    "Verdict",
    "Peak memory",
    "Memory",
    "Energy per sample",
    "On tensor cores",
    "Final loss",
    "Held-out loss",
    "Skipped",
)
_RUNS = ("Run", "Recipe", "Step time", "Peak memory", "Final loss", "Held-out loss", "Skipped", "Last scale")
_DEEPEST = 4
"""Settings nested deeper are shown as they are."""


def headline(findings: Sequence[Finding], sentence: str = "") -> Html | None:
    """The number of errors and warnings in one line, coloured by the worst; none where a trace's `sentence` says what
    could be saved, without a finding."""
    counts = [(sum(f.severity == level for f in findings), level) for level in ("error", "warning")]
    counted = " and ".join(formatting.plural(count, level) for count, level in counts if count)
    worst = next((level for count, level in counts if count), "fine")
    if not counted and sentence:
        return None
    return tag("p", f"{counted} found." if counted else "Nothing wrong was found.", class_=f"verdict {worst}")


def summary(view: Overview, cost: StepCost, *, is_trace: bool = False) -> str:
    """The number of steps of a run, and its loss; of a trace, which has no loss, what was profiled."""
    if view.loss_first is None and cost.source == "profile":
        return profiled(cost)
    if is_trace:
        return "The trace holds no work of a device."
    planned = f" of {view.steps_planned:,}" if view.steps_planned else ""
    time = f" in {formatting.duration(view.duration_s)}" if view.duration_s is not None else ""
    ended = f"{view.status}: {view.steps_done:,}{planned} steps{time}"
    loss = f"loss {formatting.loss(view.loss_first)} at the start, {formatting.loss(view.loss_final)} at the end"
    reason = f" {formatting.sentence(view.end_reason)}" if view.end_reason and view.status != "finished" else ""
    return f"{ended}; {loss}.{reason}"


def first(sentence: str) -> Html | None:
    """The sentence of a trace that comes before its findings."""
    return tag("p", tag("b", sentence)) if sentence else None


def chain(diagnosed: Diagnosis) -> Html | None:
    """Verdict, origin, evidence and patch; nothing if there is no fault."""
    if diagnosed.cause is None:
        return None
    return join(
        [
            tag("p", tag("b", formatting.sentence(diagnosed.verdict)), f" {diagnosed.began}"),
            tag("p", " · ".join(diagnosed.evidence), class_="quiet"),
            tag("pre", diagnosed.patch) if diagnosed.patch else None,
        ]
    )


def profiled(cost: StepCost) -> str:
    """What was profiled, in one line."""
    if cost.steps:
        steps = formatting.plural(cost.steps, "profiled step")
        return f"A step takes {formatting.duration(cost.step_us / 1e6)} (mean of {steps})."
    return f"The profiled window takes {formatting.duration(cost.step_us / 1e6)}; it has no step markers."


def finding_html(finding: Finding) -> Html:
    """One finding: its evidence, its advice, and the code for it."""
    evidence = finding.evidence()
    if finding.follows:
        evidence.append(f"follows from {finding.follows}")
    return tag(
        "article",
        tag("h4", tag("span", finding.severity, class_="badge"), " ", finding.title),
        tag("p", " · ".join(evidence), class_="quiet") if evidence else None,
        tag("p", finding.advice),
        tag("pre", finding.snippet) if finding.snippet else None,
        class_=f"finding {finding.severity}",
    )


def comparison_html(comparison: Comparison) -> Html:
    """The answers, both tables, the differing settings and the notes of a comparison."""
    recipes, runs = comparison.recipes.to_dict("records"), comparison.table.to_dict("records")
    parity = {row["recipe"]: parity_in_words(str(row["parity"])) for row in recipes}
    lines = [
        tag(
            "li",
            tag("b", answer),
            ". ",
            formatting.sentence(f"Convergence parity {parity.get(recipe, formatting.NONE)}"),
        )
        for recipe, answer in comparison.answers.items()
    ]
    differing = comparison.differences
    settings = (
        table([str(c) for c in differing.columns], differing.astype(str).to_numpy().tolist(), "What differs")
        if len(differing)
        else None
    )
    cells = [
        (
            row["recipe"],
            str(row["seeds"]),
            formatting.number(row["step_ms"], "ms"),
            _ratio(row, "speed_ratio"),
            row["speed_verdict"],
            formatting.size(row["memory_peak_bytes"]),
            f"{formatting.number(row['memory_ratio'])} ×",
            formatting.number(row["energy_j"], "J"),
            formatting.percent(row["tensor_frac"]),
            formatting.loss(row["loss_final"]),
            formatting.number(row["eval_loss"]),
            formatting.share_of(row["skips"], row["steps"]),
        )
        for row in recipes
    ]
    each = [
        (
            row["run"],
            row["precision"] or formatting.NONE,
            formatting.number(row["step_ms"], "ms"),
            formatting.size(row["memory_peak_bytes"]),
            formatting.loss(row["loss_final"]),
            formatting.number(row["eval_loss"]),
            formatting.share_of(row["skips"], row["steps"]),
            formatting.scale(row["scale_last"]),
        )
        for row in runs
    ]
    notes = [tag("p", note, class_="quiet") for note in comparison.notes]
    head = tag("p", f"Against {recipes[0]['recipe']}:")
    tables = [(_known(_RECIPES, cells), "Recipes", comparison.recipes), (_known(_RUNS, each), "Runs", comparison.table)]
    if settings is not None:
        tables.insert(0, (settings, "What differs", differing))
    shown = [part for table_, name, frame in tables for part in (table_, offered(name, frame))]
    return join([head, tag("ul", *lines), *shown, *notes])


def _known(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """The table without columns that have no value."""
    kept = [i for i in range(len(head)) if any(not row[i].startswith(formatting.NONE) for row in rows)]
    return tag("div", table([head[i] for i in kept], [[row[i] for i in kept] for row in rows]), class_="compact")


def _ratio(row: Mapping[Any, Any], column: str) -> str:
    return formatting.ratio(row[column], row.get(f"{column}_low"), row.get(f"{column}_high"))


def numbers(view: Overview, cost: StepCost) -> Html:
    """The run's numbers, as on the cards of the app; of a trace, which has no loss, those of its window."""
    if view.loss_first is None and cost.source == "profile":
        return _profiled_numbers(cost)
    scale, speed, memory = view.scale, view.speed, view.memory
    spread = f" ({formatting.span(speed.step_ms_low, speed.step_ms_high)})" if speed.step_ms_low is not None else ""
    rows = [
        ("Loss", f"{formatting.loss(view.loss_first)} → {formatting.loss(view.loss_final)}"),
        ("Loss scale", formatting.scale(scale.last) if scale.has_scaler else "none: no scaler"),
        (
            "Skipped steps",
            formatting.share_of(scale.skips, scale.attempts) if scale.skips_recorded else "not recorded",
        ),
        ("Step time", f"{formatting.number(speed.step_ms, 'ms')}{spread}"),
        ("Samples per second", formatting.number(speed.samples_per_s)),
        ("Recording overhead", formatting.percent(speed.watch_frac)),
        ("Peak memory", _peak(memory)),
        *((str(name).replace("eval_", "held-out "), _value(value)) for name, value in view.results.items()),
    ]
    return join([table((), rows), offered("Numbers", pd.DataFrame(rows, columns=["number", "value"]))])


def _peak(memory: MemorySummary) -> str:
    tensors = f"{formatting.size(memory.tensors_peak_bytes)} in tensors, " if memory.tensors_peak_bytes else ""
    return f"{tensors}{formatting.size(memory.peak_bytes)} ({memory.what})"


def _profiled_numbers(cost: StepCost) -> Html:
    parts = cost.parts[cost.parts["us"] > 0]
    rows = [
        ("Step time" if cost.steps else "Window", formatting.number(cost.step_us / 1e3, "ms")),
        *(
            (label.capitalize(), f"{formatting.number(us / 1e3, 'ms')} ({formatting.percent(frac)})")
            for label, us, frac in zip(parts["label"], parts["us"], parts["frac"], strict=True)
        ),
        ("Kernels, copies and fills", formatting.count(cost.launches)),
        ("Host syncs", formatting.NONE if cost.syncs is None else formatting.mean_count(cost.syncs)),
        ("Device", cost.device_name or formatting.NONE),
    ]
    return join([table((), rows), offered("Numbers", pd.DataFrame(rows, columns=["number", "value"]))])


def precision(asked: pd.DataFrame) -> Html | None:
    """The requested and the observed precision of each stage, and where they differ; nothing where neither is known."""
    if asked.empty:
        return None
    rows = [
        [row.stage, format_labels(row.asked), row.source or formatting.NONE, format_labels(row.seen)]
        for row in asked.itertuples()
    ]
    return join(
        [
            *(tag("p", tag("b", sentence)) for sentence in precision_disagreements(asked)),
            table(("Stage", "Requested", "By", "Observed"), rows, "Requested and observed precision"),
        ]
    )


def settings(run: Run) -> Html:
    """The run's head, one line per setting."""
    head = run.head
    about = {"run_id": head.run_id, "created_at": head.created_at, "folder schema": head.schema}
    parts, everything = [], []
    for title, facts in (
        ("Configuration", head.config),
        ("Environment", head.environment),
        ("Model", {key: value for key, value in head.model.items() if not isinstance(value, dict | list)}),
        ("Run", about),
    ):
        rows = list(_flat(facts))
        if rows:
            parts.append(table(("Setting", "Value"), rows, title))
            everything += [(title, *row) for row in rows]
    frame = pd.DataFrame(everything, columns=["part", "setting", "value"])
    return join([*parts, offered("Settings", frame)])


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
        return formatting.NONE
    return formatting.number(value, digits=4) if isinstance(value, float) else str(value)
