"""The charts of a report: which ones a run has, each in a light and a dark version.

charts = Charts()
html = charts.add(lambda dark: loss_figure(curves, dark=dark))
charts.record()             # {"0": {"light": {data, layout}, "dark": …}}: what page.js draws
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amp_core import figures
from amp_core._html import Html, join, tag
from amp_core.analysis import (
    Comparison,
    answer_shares,
    class_shares,
    device_samples,
    exponent_shares,
    first_runs,
    gradient_agreement,
    kernel_table,
    kinds_present,
    loss_curves,
    memory_breakdown,
    memory_steps,
    memory_trace,
    phase_times,
    precision_cells,
    scale_summary,
    scale_trace,
    skip_episodes,
    step_cost,
    thin,
    what_memory,
)
from amp_core.figures.browser import SYSTEM_FONT, for_browser
from amp_core.run import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for its name alone

MOST_POINTS = 1500
"""Of longer curves so many points are shown: a page 900 pixels wide cannot show more."""
_KINDS = {"output_grad": "output gradients", "weight_grad": "weight gradients"}

Draw = Callable[[bool], "go.Figure"]


class Charts:
    """The charts of one report, in the order in which they were added."""

    def __init__(self) -> None:
        self._drawn: dict[str, dict[str, Any]] = {}

    def add(self, draw: Draw) -> Html:
        """The place of a chart in the page; `draw(dark)` makes its figure."""
        light, dark = draw(False), draw(True)
        key = str(len(self._drawn))
        self._drawn[key] = {
            "light": for_browser(light, False, SYSTEM_FONT),
            "dark": for_browser(dark, True, SYSTEM_FONT),
        }
        alt = light.layout.meta["alt"]
        box = tag("div", data_chart=key, role="img", aria_label=alt, style=f"min-height:{light.layout.height}px")
        return tag("figure", box, tag("figcaption", alt))

    def record(self) -> dict[str, dict[str, Any]]:
        """All of them as plain data."""
        return self._drawn


def together(charts: Charts, runs: list[Run], comparison: Comparison | None) -> Html:
    """Charts that show all runs at once."""
    curves = loss_curves(runs, "step", most=MOST_POINTS)
    parts = [charts.add(lambda dark: figures.loss_figure(curves, dark=dark))]
    if comparison is not None:
        bars = [_bars(charts, comparison, column) for column in ("speed_ratio", "memory_ratio", "loss_ratio")]
        parts.append(tag("div", *bars, class_="row"))
        parts.append(charts.add(lambda dark: figures.deviation_figure(comparison.recipes, dark=dark)))
        agreement = gradient_agreement(first_runs(runs))
        if len(agreement):
            parts.append(charts.add(lambda dark: figures.agreement_figure(agreement, dark)))
    return join(parts)


def _bars(charts: Charts, comparison: Comparison, column: str) -> Html:
    return charts.add(lambda dark: figures.compare_bars(comparison.table, column, dark=dark))


def of_run(charts: Charts, run: Run) -> Html:
    """What there is to see of one run: loss scale, ranges, speed, memory, device, kernels, precision map."""
    parts = [*_scale(charts, run), *_ranges(charts, run), *_speed(charts, run), *_memory(charts, run)]
    return join([*parts, *_device(charts, run), *_traced(charts, run)])


def _scale(charts: Charts, run: Run) -> list[Html]:
    if not scale_summary(run).has_scaler:
        return []
    trace, episodes = scale_trace(run), skip_episodes(run)
    shown = thin(trace, "step", "loss_scale", keep="skipped", most=MOST_POINTS)
    return [charts.add(lambda dark: figures.scale_figure(shown, episodes, dark))]


def _ranges(charts: Charts, run: Run) -> list[Html]:
    present = kinds_present(run)
    kind = next((kind for kind in _KINDS if kind in present), None)
    if kind is None:
        return []
    shares, classes = exponent_shares(run, kind), class_shares(run, kind)
    title = f"Number ranges of {_KINDS[kind]}, as stored"
    return [charts.add(lambda dark: figures.exponent_heatmap(shares, dark=dark, title=title, classes=classes))]


def _speed(charts: Charts, run: Run) -> list[Html]:
    times = thin(phase_times(run), "step", "step_ms", most=MOST_POINTS)
    parts = [charts.add(lambda dark: figures.phase_figure(times, dark=dark))]
    cost = step_cost(run)
    if cost.source != "nothing":
        unit = "step" if cost.steps else "window"
        shares, title = cost.parts.assign(per=unit), f"Where the time of a {unit} goes"
        parts.append(charts.add(lambda dark: figures.step_cost_figure(shares, dark, title)))
    return parts


def _memory(charts: Charts, run: Run) -> list[Html]:
    parts = []
    if memory_steps(run):
        found = memory_breakdown(run)
        shown = found.parts if found.reserved_bytes is not None else found.parts[found.parts["category"] != "other"]
        named = shown.assign(run=run.name)
        parts.append(charts.add(lambda dark: figures.memory_parts_figure(named, dark)))
    trace, what = thin(memory_trace(run), "step", "allocated_bytes", most=MOST_POINTS), what_memory(run)
    if len(trace):
        parts.append(charts.add(lambda dark: figures.memory_figure(trace, dark=dark, what=what)))
    return parts


def _device(charts: Charts, run: Run) -> list[Html]:
    samples = thin(device_samples(run), "time_s", "gpu_util_frac", most=MOST_POINTS)
    return [charts.add(lambda dark: figures.device_figure(samples, dark=dark))] if len(samples) else []


def _traced(charts: Charts, run: Run) -> list[Html]:
    parts = []
    if not run.kernels.empty:
        answers, kernels = answer_shares(run), kernel_table(run)
        if len(answers):
            parts.append(charts.add(lambda dark: figures.answer_figure(answers, dark)))
        parts.append(charts.add(lambda dark: figures.kernel_figure(kernels, dark)))
    if not run.ops.empty:
        cells = precision_cells(run)
        parts.append(charts.add(lambda dark: figures.precision_figure(cells, dark)))
    return parts
