"""Contract of every figure of every run: titles, units, alternative text, explicit colours."""

import functools
import inspect
import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import amp_core.analysis as analysis
import amp_core.figures as figures
from amp_core import Run, load_run
from amp_core.analysis.format_lab.blocks import quantized_values
from amp_core.analysis.format_lab.rounding import accumulated, format_ranges
from amp_core.analysis.numerics.layers import layer_exponents, layer_trace, tensor_names
from amp_core.figures.browser import for_browser
from amp_core.figures.chart_data import chart_csv, chart_data
from amp_core.forecast import forecast, traces_of_run
from amp_core.formats import FORMATS
from tests.error_notes import note_on_error
from tests.figures.test_style import oklab
from tests.synthetic import SAMPLES, SCENARIOS, write


def kind(run: Run) -> str:
    return (analysis.kinds_present(run) or ["weight_grad"])[0]


def of_steps(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    return frame if len(run.steps) else frame.iloc[:0]


def of_a_tensor(function: Callable[..., pd.DataFrame], run: Run, columns: list[str]) -> pd.DataFrame:
    names = tensor_names(run, kind(run))
    return function(run, kind(run), names[-1]) if names else pd.DataFrame(columns=columns)


@functools.cache
def profiled() -> Run:
    """A run with a profiled window, for the figures of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(write(Path(folder) / "profiled", "profiled"))
        for table in ("steps", "kernels", "windows", "device"):
            run.table(table)  # read before the folder is removed
        return run


@functools.cache
def traced() -> Run:
    """A run with a traced step, for the figures of operators."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(write(Path(folder) / "traced", "traced"))
        for table in ("ops", "events", "steps", "memory"):
            run.table(table)
        return run


AGREEMENT = pd.DataFrame(
    {
        "run": ["a", "a", "b", "b"],
        "precision": ["bf16", "bf16", "fp16", "fp16"],
        "name": ["head.weight", "embed.weight"] * 2,
        "rel_error": [0.01, 0.02, 0.001, 0.004],
        "cosine": [0.999, 0.998, 1.0, 0.9999],
    }
)
"""What `gradient_agreement` makes of two audited runs; made-up runs have no audits."""


CHANGES = pd.DataFrame(
    {
        "name": ["head", "head", "blocks.0.fc"],
        "exponent": [-25, -24, -3],
        "baseline": [0.1, 0.2, 0.5],
        "value": [0.0, 0.21, 0.50001],
        "change": [-0.1, 0.01, 0.00001],
        "noise": [0.02, 0.001, np.nan],
        "outside": [True, True, False],
    }
)
"""What `exponent_changes` makes of a run that flushes the smallest values of `head`."""


LAYERS = pd.DataFrame(
    {
        "layer": ["head", "blocks.0.fc"] * 2,
        "format": ["nvfp4"] * 2 + ["mxfp8-e4m3"] * 2,
        "rel_error": [0.2, 0.13, 0.05, 0.0],
        "rel_error_db": [13.98, 17.72, 26.02, np.inf],
        "product": ["forward", "input_grad", "weight_grad", "forward"],
        "operand": ["weight", "output_grad", "activation", "weight"],
        "rank": [1, 2, 1, 2],
    }
)
"""What `layer_errors` makes of a run with blocks."""


APART = pd.DataFrame(
    {
        "step": [3, 3, 4, 4],
        "rank": [0, 1] * 2,
        "loss_scale": [8.0, 8.0, 8.0, 4.0],
        "skipped": [False, True] + [False] * 2,
    }
)
"""What `rank_scales` makes of two ranks that went apart."""

TIMELINE = pd.DataFrame(
    {
        "lane": ["phase", "stream 7", "stream 7", "stream 20"],
        "part": ["forward", "tensor", "memory_bound", "communication"],
        "label": ["forward", "GEMM/conv, on tensor cores", "memory-bound", "communication"],
        "start_ms": [0.0, 0.0, 0.5, 0.2],
        "end_ms": [1.0, 0.4, 1.0, 0.9],
        "name": ["aten::mm", "ampere_gemm", "relu", "nccl"],
        "count": [3, 1, 7, 1],
        "step": [5.0] * 4,
    }
)
"""What `timeline_bars` makes of a step."""


@functools.lru_cache(maxsize=1)
def with_itself(run: Run) -> analysis.Comparison:
    """Two figures show it; a run is compared once."""
    return analysis.compare([run, run])


OF_A_RUN: dict[str, Callable[[Run], tuple[Any, ...]]] = {
    "loss_figure": lambda run: (analysis.loss_curves([run]),),
    "scale_figure": lambda run: (analysis.scale_trace(run), analysis.skip_episodes(run)),
    "grad_norm_figure": lambda run: (analysis.scale_trace(run),),
    "memory_figure": lambda run: (analysis.memory_trace(run),),
    "memory_parts_figure": lambda run: (analysis.memory_breakdown(run).parts.assign(run=run.name),),
    "memory_moments_figure": lambda run: (analysis.memory_moments(run),),
    "phase_figure": lambda run: (analysis.phase_times(run),),
    "exponent_heatmap": lambda run: (analysis.exponent_shares(run, kind(run)),),
    "step_heatmap": lambda run: (analysis.shares_over_steps(run, kind(run)),),
    "class_bars": lambda run: (analysis.class_shares(run, kind(run)),),
    "compare_bars": lambda run: (with_itself(run).table, "speed_ratio"),
    "deviation_figure": lambda run: (with_itself(run).recipes,),
    "exponents_over_time": lambda run: (of_a_tensor(layer_exponents, run, ["step", "exponent", "share"]),),
    "classes_over_time": lambda run: (of_a_tensor(layer_trace, run, ["step"]),),
    "magnitude_figure": lambda run: (of_a_tensor(layer_trace, run, ["step"]),),
    "underflow_figure": lambda run: (analysis.what_if(run, ("fp16",), (-20,), (kind(run),)),),
    "step_cost_figure": lambda run: (analysis.step_cost(run).parts,),
    "rank_figure": lambda run: (analysis.rank_table(run),),
}
"""What each figure draws of a run."""

OF_NO_RUN: dict[str, Callable[[Run], tuple[Any, ...]]] = {
    "device_figure": lambda run: (of_steps(run, analysis.device_samples(profiled())),),
    "exponent_change_figure": lambda run: (of_steps(run, CHANGES[CHANGES["name"] == "head"]), "fp32", "fp32"),
    "difference_figure": lambda run: (of_steps(run, CHANGES), "fp32", "difference in lost updates (percentage points)"),
    "exponent_change_heatmap": lambda run: (of_steps(run, CHANGES), "fp32"),
    "agreement_figure": lambda run: (of_steps(run, AGREEMENT),),
    "tensor_core_figure": lambda run: (of_steps(run, analysis.tensor_core_shares(profiled())),),
    "kernel_figure": lambda run: (of_steps(run, analysis.kernel_table(profiled())),),
    "layer_error_figure": lambda run: (of_steps(run, LAYERS), 0.15),
    "timeline_figure": lambda run: (of_steps(run, TIMELINE),),
    "rank_scale_figure": lambda run: (of_steps(run, APART),),
    "precision_figure": lambda run: (of_steps(run, analysis.precision_cells(traced())),),
    "forecast_figure": lambda run: (of_steps(run, forecast(traces_of_run(traced()), ["T4", "A100"]).table),),
    "format_range_figure": lambda run: (of_steps(run, format_ranges()), [("1", 0.0), ("2^200", 200.0)]),
    "accumulation_figure": lambda run: (
        of_steps(run, accumulated(Fraction(0), Fraction(1), 50, FORMATS["bf16"])),
        "BF16",
    ),
    "block_figure": lambda run: (of_steps(run, quantized_values([0.01] * 15 + [100.0], "nvfp4")), "NVFP4"),
}
"""What the others draw: formats belong to no run, and few runs have kernels. For a run without steps theirs are empty
too."""

FRAMES = OF_A_RUN | OF_NO_RUN

DRAWN = {
    name
    for name in figures.__all__
    if inspect.isfunction(f := getattr(figures, name))
    and f.__annotations__["return"] is go.Figure
    and "figure" not in f.__annotations__  # those that add to a figure
}


def drawn(name: str, run: Run, dark: bool = False) -> go.Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return getattr(figures, name)(*FRAMES[name](run), dark=dark)


@functools.cache
def shown(name: str, run: Run, dark: bool = False) -> go.Figure:
    """A figure that several tests look at; do not modify it."""
    return drawn(name, run, dark)


def test_every_figure_is_under_test() -> None:
    assert set(FRAMES) == DRAWN and len(DRAWN) >= 10


@pytest.mark.parametrize("scenario", [*SCENARIOS, *(f"sample {name}" for name in SAMPLES)])
def test_every_figure_of_every_run_is_complete(scenario: str, runs: dict[str, Run]) -> None:
    for name in OF_A_RUN:
        with note_on_error(name):
            assert_sound(drawn(name, runs[scenario]))


@pytest.mark.parametrize("name", OF_NO_RUN)
def test_every_figure_of_other_numbers_is_complete(name: str, runs: dict[str, Run]) -> None:
    assert_sound(shown(name, runs["overflowing"]))
    assert_sound(shown(name, runs["empty"]))


def assert_sound(figure: go.Figure) -> None:
    alt = figure.layout.meta["alt"]
    assert figure.layout.title.text and len(alt) > 20 and "nan" not in alt
    assert_plotly_agrees(figure)
    json.dumps(for_browser(figure), allow_nan=False)  # as a report writes it
    if not figure.data:
        assert figure.layout.annotations[0].text.endswith(".")  # a sentence says why it is empty
        assert not figure.layout.xaxis.visible
        return
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text or figure.layout.yaxis.type == "category"
    for trace in figure.data:
        assert explicit(trace), f"{trace.type} {trace.name} leaves its colour to the theme"


def assert_plotly_agrees(figure: go.Figure) -> None:
    """Figures are made without plotly's validation of each value; plotly's validation changes nothing in them."""
    unvalidated, validated = (json.loads(f.to_json()) for f in (figure, go.Figure(figure.to_dict())))
    assert unvalidated["layout"].pop("template") == {} and validated["layout"].pop("template")
    assert unvalidated == validated


def explicit(trace: Any) -> bool:
    """Whether a trace sets the colour of everything in it that is not text."""
    if trace.type == "heatmap":
        return trace.colorscale is not None
    if trace.type == "bar":
        return trace.marker.color is not None
    modes = set(trace.mode.split("+"))
    return ("lines" not in modes or trace.line.color is not None) and (
        "markers" not in modes or trace.marker.color is not None
    )


@pytest.mark.parametrize("name", FRAMES)
def test_a_figure_without_data_shows_only_a_sentence(name: str, runs: dict[str, Run]) -> None:
    figure = shown(name, runs["empty"])
    assert not figure.data
    assert figure.layout.meta["alt"].endswith(figure.layout.annotations[0].text)


@pytest.mark.parametrize("name", FRAMES)
def test_dark_and_light_differ_only_in_colour(name: str, runs: dict[str, Run]) -> None:
    light, dark = shown(name, runs["overflowing"]), shown(name, runs["overflowing"], dark=True)
    assert light.to_json() != dark.to_json()
    assert len(light.data) == len(dark.data)
    assert light.layout.meta == dark.layout.meta
    assert light.layout.xaxis == dark.layout.xaxis


@pytest.mark.parametrize("name", FRAMES)
def test_background_font_and_grid_are_left_to_the_page(name: str, runs: dict[str, Run]) -> None:
    layout = shown(name, runs["overflowing"]).layout
    assert layout.paper_bgcolor is layout.plot_bgcolor is layout.font.color is None
    assert layout.xaxis.gridcolor is layout.yaxis.gridcolor is None


@pytest.mark.parametrize("name", FRAMES)
def test_numbers_are_sent_as_32_bit_arrays(name: str, runs: dict[str, Run]) -> None:
    for trace in shown(name, runs["overflowing"]).data:
        for axis in {"x", "y", "z"} & set(trace):
            values = trace[axis]
            if values[0] is None or isinstance(values[0], str):
                continue
            assert isinstance(values, np.ndarray) and values.dtype.itemsize == 4, f"{trace.type} {axis}"


BARE = re.compile(
    r"step|loss|loss scale|sum|numbers added|number of the value|GPU|operator|module|magnitude.*"
    r"|moments of the step, in order|gradient norm, unscaled|norm of the difference over .*|times .*"
)
"""Axes of what has no unit: counts, names, ratios and values as they stand in a tensor."""


@pytest.mark.parametrize("name", FRAMES)
def test_every_axis_has_a_unit(name: str, runs: dict[str, Run]) -> None:
    layout = shown(name, runs["overflowing"]).layout
    for axis in (layout.xaxis, layout.yaxis):
        title = axis.title.text or ""
        if title.startswith("share"):
            assert "%" in f"{title} {axis.tickformat or ''} {axis.ticktext or ''}", title
        elif axis.type != "category":
            assert re.search(r"\((ms|s|GiB|MiB|KiB|bytes|percentage points)\)|^% of ", title) or BARE.fullmatch(
                title
            ), title


@pytest.mark.parametrize("name", FRAMES)
def test_hover_texts_describe_their_numbers(name: str, runs: dict[str, Run]) -> None:
    figure = shown(name, runs["overflowing"])
    for trace in figure.data:
        if trace.hoverinfo == "skip":
            continue
        recorded = trace.hovertemplate or " ".join(trace.hovertext)
        if "%{text}" in recorded:
            recorded += " ".join(map(str, np.atleast_1d(trace.text)))
        text = re.sub(r"%\{[^}]*\}|<[^>]*>", " ", recorded) + (trace.name or "")
        assert len(re.findall(r"[^\W\d_]{2,}", text)) >= 2, f"{trace.name}: {recorded[:80]}"


STACKED = {
    "class_bars",
    "timeline_figure",
    "classes_over_time",
    "kernel_figure",
    "tensor_core_figure",
    "phase_figure",
    "memory_moments_figure",
    "memory_parts_figure",
    "step_cost_figure",
    "rank_figure",
}
"""Parts of a whole, also distinguished by their order: neighbours differ in lightness or hatching."""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", FRAMES)
def test_nothing_relies_on_hue_alone(name: str, dark: bool, runs: dict[str, Run]) -> None:
    named = [
        trace for trace in shown(name, runs["overflowing"], dark).data if trace.name and trace.showlegend is not False
    ]
    named = [trace for trace in named if trace.type != "heatmap" and trace.hoverinfo != "skip"]
    if name in STACKED:
        for one, other in itertools.pairwise(named):
            assert mark(one) != mark(other) or lightness_apart(hue(one), hue(other)) > 0.04, (one.name, other.name)
    else:
        assert len({mark(trace) for trace in named}) == len(named), [trace.name for trace in named]


def mark(trace: Any) -> tuple[Any, ...]:
    """The properties of a trace that are visible without colour."""
    marker, line = trace.marker, getattr(trace, "line", None)
    fill = getattr(trace, "fillpattern", None)
    return (
        trace.type,
        getattr(trace, "mode", None),
        getattr(marker, "symbol", None),
        marker.pattern.shape if trace.type == "bar" else fill.shape if fill is not None else None,
        (line.dash, line.width) if line is not None else None,
        getattr(trace, "fill", None),
    )


def hue(trace: Any) -> str:
    return str(trace.marker.color if trace.type == "bar" else trace.line.color)


def lightness_apart(one: str, other: str) -> float:
    return abs(float(oklab(one, "all cones")[0] - oklab(other, "all cones")[0]))


@pytest.mark.parametrize("name", FRAMES)
def test_a_live_update_keeps_the_zoom(name: str, runs: dict[str, Run]) -> None:
    early, late = shown(name, runs["overflowing"]).layout, shown(name, runs["healthy"]).layout
    assert early.uirevision and (early.uirevision == late.uirevision or early.title.text != late.title.text)


@pytest.mark.parametrize("name", FRAMES)
def test_the_numbers_of_every_figure_are_available_as_data(name: str, runs: dict[str, Run]) -> None:
    figure = shown(name, runs["overflowing"])
    table = chart_data(figure)
    assert len(table) and {"trace", "x", "y"} <= set(table)
    assert chart_csv(figure).count(b"\n") == len(table) + 1
    unnamed = table["trace"].str.fullmatch(r"trace \d+")
    assert table["trace"].nunique() == 1 or "z" in table or not unnamed.any()
    assert all(trace.meta for trace in figure.data if trace.type == "scatter" and trace.mode == "text")  # labels
