"""HTML of runs, findings and comparisons: a table, and a chart of the size of a line of text.

>>> run_html(run)[:32]
'<div style="max-width:60em"><tab'
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text.html import Html, join, tag

if TYPE_CHECKING:
    from amp_core.analysis import Comparison
    from amp_core.findings import Finding

WIDTH, HEIGHT = 240, 48
"""Pixels of a chart."""
MAX_POINTS = 240
NONE = "–"


def run_html(run: Run) -> str:
    """A run: its configuration, steps, loss, and loss scale as lines. A damaged run shows its error."""
    try:
        from amp_core.analysis import overview

        run = run.salvaged()
        view = overview(run)
        steps = run.steps
        steps = steps[steps["rank"] == 0]
    except RunError as error:
        return _framed(run.name, [("cannot be read", str(error))])
    planned = f" of {view.steps_planned:,}" if view.steps_planned else ""
    skipped = (
        f"{view.scale.skips:,} ({view.scale.skip_frac:.1%})"
        if view.scale.has_scaler and view.scale.skips_recorded
        else NONE
    )
    rows: list[tuple[str, object]] = [
        ("status", f"{view.status}{f': {view.end_reason}' if view.end_reason else ''}"),
        ("recipe", view.recipe or NONE),
        ("workload", view.workload or NONE),
        ("device", view.device or NONE),
        ("steps", f"{view.steps_done:,}{planned}"),
        ("skipped steps", skipped),
        ("loss", join([f"{_number(view.loss_first)} → {_number(view.loss_final)} ", _line(steps["loss"], "loss")])),
    ]
    if view.scale.has_scaler:
        drawn = _line(_log2(steps["loss_scale"].to_numpy(dtype=np.float64)), "log2 of the loss scale")
        content = f"{_number(view.scale.first)} → {_number(view.scale.last)} "
        rows.append(("loss scale", join([content, drawn])))
    rows += [("cannot be read", reason) for reason in filter(None, map(run.damaged, ("tensors", "events")))]
    return _framed(run.name, rows)


def finding_html(finding: "Finding") -> str:
    """A finding: what, where, the evidence beside its limit as bars, and what to change."""
    rows: list[tuple[str, object]] = [("severity", f"{finding.severity} [{finding.code}]"), ("where", finding.where)]
    if finding.steps is not None:
        first, last = finding.steps
        rows.append(("steps", f"{first:,}" if first == last else f"{first:,}–{last:,}"))
    if finding.value is not None:
        limit = f", limit {_number(finding.limit)}" if finding.limit is not None else ""
        content = f"{_number(finding.value)}{limit} {finding.unit} "
        rows.append(("evidence", join([content, _limit_bars(finding.value, finding.limit)])))
    rows.append(("advice", finding.advice))
    if finding.snippet:
        rows.append(("change", tag("pre", finding.snippet, style="margin:0;text-align:left")))
    if finding.follows:
        rows.append(("follows from", finding.follows))
    return _framed(finding.title, rows)


def comparison_html(comparison: "Comparison") -> str:
    """A comparison: one row per run, with its speed as a bar, and the answers in words."""
    from amp_core.analysis.comparison.answer import parity_in_words

    table = comparison.table
    speeds = [float(v) for v in table["speed_ratio"]]
    longest = max((v for v in speeds if math.isfinite(v)), default=1.0)
    head = ("run", "precision", "steps", "step", "speed", "", "peak memory", "final loss", "convergence")
    rows = [
        (
            row["run"],
            row["precision"] or NONE,
            f"{row['steps']:,}",
            f"{_number(row['step_ms'])} ms",
            f"{_number(row['speed_ratio'])} ×",
            _bars([float(row["speed_ratio"])], longest, "speed against the first run"),
            f"{_number(row['memory_ratio'])} ×",
            _number(row["loss_final"]),
            parity_in_words(str(row["parity"])),
        )
        for _, row in table.iterrows()
    ]
    header = tag("tr", *(tag("th", cell, scope="col", style="text-align:left") for cell in head))
    body = [tag("tr", *(tag("td", cell, style="text-align:left") for cell in row)) for row in rows]
    content = [tag("p", answer, style="margin:.3em 0") for answer in comparison.answers.values()]
    notes = [tag("p", note, style="margin:.3em 0;opacity:.75") for note in comparison.notes]
    return tag("div", tag("table", tag("thead", header), tag("tbody", *body)), *content, *notes, style="max-width:80em")


def _framed(title: str, rows: Sequence[tuple[str, object]]) -> Html:
    style = "text-align:left;vertical-align:top;white-space:normal"
    body = [tag("tr", tag("th", name, scope="row", style=style), tag("td", value, style=style)) for name, value in rows]
    caption = tag("caption", tag("b", title), style="text-align:left;caption-side:top")
    return tag("div", tag("table", caption, tag("tbody", *body)), style="max-width:60em")


def _log2(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """NaN if the logarithm is undefined."""
    return np.log2(np.where(values > 0, values, math.nan))


def _number(value: object) -> str:
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    return NONE if math.isnan(number) else f"{number:,.4g}"


def _line(values: npt.ArrayLike, what: str) -> Html | None:
    """A line through the finite values; None if there are fewer than two."""
    numbers = np.asarray(values, dtype=np.float64)
    shown = np.flatnonzero(np.isfinite(numbers))
    if len(shown) < 2:
        return None
    shown = shown[np.unique(np.linspace(0, len(shown) - 1, min(len(shown), MAX_POINTS)).round().astype(int))]
    low, high = float(numbers[shown].min()), float(numbers[shown].max())
    x = 1 + shown / max(1, len(numbers) - 1) * (WIDTH - 2)
    y = HEIGHT - 2 - (numbers[shown] - low) / (high - low or 1.0) * (HEIGHT - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    line = tag("polyline", points=points, fill="none", stroke="currentColor", stroke_width="1.5")
    return _svg(f"{what}, from {_number(low)} to {_number(high)}", HEIGHT, line)


def _limit_bars(value: float, limit: float | None) -> Html | None:
    """The value and its limit as two bars; None if either cannot be drawn."""
    if limit is None or not (math.isfinite(value) and math.isfinite(limit)) or max(abs(value), abs(limit)) == 0:
        return None
    return _bars([abs(value), abs(limit)], max(abs(value), abs(limit)), "the value above, its limit below")


def _bars(values: Sequence[float], longest: float, what: str) -> Html | None:
    if not all(math.isfinite(v) for v in values) or longest <= 0:
        return None
    bars = [
        tag(
            "rect",
            x=0,
            y=1 + 11 * i,
            width=f"{max(1.0, value / longest * WIDTH):.1f}",
            height=9,
            fill="currentColor",
            fill_opacity="0.75" if i == 0 else "0.35",
        )
        for i, value in enumerate(values)
    ]
    return _svg(what, 11 * len(values), *bars)


def _svg(alt: str, height: int, *parts: Html) -> Html:
    box = f"0 0 {WIDTH} {height}"
    return tag(
        "svg",
        *parts,
        role="img",
        aria_label=alt,
        width=WIDTH,
        height=height,
        viewBox=box,
        style="vertical-align:middle",
    )
