"""What each figure shows: asserted on the numbers that go to the browser."""

from fractions import Fraction

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from amp_core import Run, RunError
from amp_core.analysis import (
    class_shares,
    compare,
    exponent_shares,
    loss_curves,
    memory_trace,
    phase_times,
    safe_window_over_time,
    scale_trace,
    skip_episodes,
    what_if,
)
from amp_core.analysis.formatlab import accumulated, format_ranges
from amp_core.analysis.layers import layer_exponents, layer_trace
from amp_core.figures import (
    accumulation_figure,
    class_bars,
    classes,
    classes_over_time,
    compare_bars,
    exponent_heatmap,
    exponents_over_time,
    format_range_figure,
    grad_norm_figure,
    loss_figure,
    lost,
    lost_figure,
    magnitude_figure,
    memory_figure,
    phase_figure,
    ranges,
    recipe_colour,
    scale_figure,
)
from amp_core.formats import FORMATS


def trace(figure: go.Figure, name: str) -> go.Scatter:
    return next(t for t in figure.data if t.name == name)


def texts(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations]


def limits(figure: go.Figure) -> list[float]:
    return [s.x0 for s in figure.layout.shapes if s.type == "line"]


# loss ----------------------------------------------------------------------------------------------------------------


def test_runs_have_the_colour_of_their_recipe_and_dashes_of_their_own(runs: dict[str, Run]) -> None:
    figure = loss_figure(loss_curves([runs["fp32"], runs["healthy"], runs["static"]]))
    thick = {t.name: t for t in figure.data if t.showlegend is None}
    assert list(thick) == ["fp32", "healthy", "static"]
    assert thick["fp32"].line.color == recipe_colour("fp32")
    assert thick["healthy"].line.color == thick["static"].line.color == recipe_colour("fp16")
    assert [t.line.dash for t in thick.values()] == ["solid", "solid", "dash"]


def test_a_loss_that_stops_being_finite_is_marked_where_it_does(runs: dict[str, Run]) -> None:
    figure = loss_figure(loss_curves([runs["collapsing"]]))
    assert limits(figure) == [50]
    assert texts(figure) == ["collapsing: not finite"]
    assert "not finite from step 50" in figure.layout.meta["alt"]
    assert not limits(loss_figure(loss_curves([runs["healthy"]])))


def test_axes_name_what_they_count(runs: dict[str, Run]) -> None:
    titles = {x: loss_figure(loss_curves([runs["healthy"]], x)).layout.xaxis.title.text for x in ("step", "samples")}  # type: ignore[arg-type]
    assert titles == {"step": "step", "samples": "samples seen"}
    assert loss_figure(loss_curves([runs["healthy"]]), log=True).layout.yaxis.type == "log"


# loss scale ----------------------------------------------------------------------------------------------------------


def test_skipped_steps_are_crosses_at_their_scale(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    steps = scale_trace(run)
    figure = scale_figure(steps, skip_episodes(run))
    crosses = trace(figure, "skipped step")
    assert crosses.x.tolist() == steps["step"][steps["skipped"]].tolist()
    assert crosses.y.tolist() == steps["loss_scale"][steps["skipped"]].tolist()
    assert crosses.marker.symbol == "x"
    told = dict(zip(crosses.x.tolist(), crosses.customdata.tolist(), strict=True))
    assert "steps 60 to 63 skipped in a row, loss scale from 2<sup>16</sup> to 2<sup>12</sup>" in told[62]
    assert "not finite: head.weight" in told[0]


def test_the_scale_is_a_stair_on_powers_of_two(runs: dict[str, Run]) -> None:
    figure = scale_figure(scale_trace(runs["healthy"]), skip_episodes(runs["healthy"]))
    line = trace(figure, "loss scale")
    assert line.line.shape == "hv" and set(line.y) == {2.0**16, 2.0**17, 2.0**18}
    axis = figure.layout.yaxis
    assert axis.type == "log" and "2<sup>17</sup>" in axis.ticktext
    low, high = (10**v for v in axis.range)
    assert low < 2**16 and high > 2**18


# gradient norm -------------------------------------------------------------------------------------------------------


def test_a_norm_that_is_not_finite_is_a_cross_at_the_edge(runs: dict[str, Run]) -> None:
    steps = scale_trace(runs["overflowing"])
    figure = grad_norm_figure(steps)
    crosses = trace(figure, "not finite: step skipped")
    assert crosses.x.tolist() == steps["step"][steps["skipped"]].tolist()
    assert crosses.y.min() > steps["grad_norm"][np.isfinite(steps["grad_norm"])].max()
    assert np.isnan(trace(figure, "gradient norm").y[0])


# ranges --------------------------------------------------------------------------------------------------------------


def test_format_limits_stand_where_they_are(runs: dict[str, Run]) -> None:
    figure = exponent_heatmap(exponent_shares(runs["healthy"], "output_grad"), ("fp16",))
    assert limits(figure) == pytest.approx([-24, -14, np.log2(65504)])
    assert texts(figure) == [
        "FP16 min. subnormal 2<sup>−24</sup>",
        "FP16 min. normal 2<sup>−14</sup>",
        "FP16 max. 65504",
    ]


def test_a_cell_holds_the_share_of_its_exponent(runs: dict[str, Run]) -> None:
    shares = exponent_shares(runs["healthy"], "output_grad")
    heat = exponent_heatmap(shares).data[0]
    exponents = [int(np.floor(x)) for x in heat.x]
    for name, exponent, share in shares[["name", "exponent", "share"]].itertuples(index=False):
        z = heat.z[list(heat.y).index(name), exponents.index(exponent)]
        assert 10.0**z == pytest.approx(max(share, 1e-5), rel=1e-4)
    assert np.isfinite(heat.z).sum() == len(shares)  # a cell without values shows the background
    assert (heat.x - np.floor(heat.x) == 0.5).all()  # from e to e + 1


def test_cells_report_tensor_and_exponent_when_clicked(runs: dict[str, Run]) -> None:
    shares = exponent_shares(runs["healthy"], "output_grad")
    cells = trace(exponent_heatmap(shares), "cells")
    assert len(cells.x) == len(shares)
    assert cells.marker.color == "rgba(0,0,0,0)" and cells.hoverinfo != "skip"
    name, exponent = cells.customdata[0]
    assert name == cells.y[0] == shares["name"].iloc[0] and exponent == shares["exponent"].iloc[0]


def test_formats_too_wide_for_the_axis_say_so(runs: dict[str, Run]) -> None:
    figure = exponent_heatmap(exponent_shares(runs["bf16"], "output_grad"), ("bf16", "fp8-e5m2"))
    assert texts(figure)[0].startswith("BF16 reaches from 2<sup>−133</sup> to 2<sup>128</sup>")
    assert limits(figure) == pytest.approx([-16, -14, np.log2(57344)])
    assert figure.layout.xaxis.range[0] <= -19


def test_a_fixed_axis_stays_fixed(runs: dict[str, Run]) -> None:
    shares = [exponent_shares(runs[s], "output_grad") for s in ("healthy", "underflowing")]
    assert {exponent_heatmap(s, exponents=(-40, 20)).layout.xaxis.range for s in shares} == {(-40, 20)}


def test_what_has_no_exponent_is_told_beside(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    figure = exponent_heatmap(exponent_shares(run, "output_grad"), classes=class_shares(run, "output_grad"))
    beside = trace(figure, "not finite")
    assert list(beside.y) == class_shares(run, "output_grad").query("inf_frac > 0")["name"].tolist()
    assert beside.text[-1] == "∞ 6.9 % "


def test_a_tensor_without_finite_values_has_a_row() -> None:
    shares = pd.DataFrame({"name": ["a"], "exponent": [0], "share": [1.0]})
    columns = dict.fromkeys(("zero_frac", "subnormal_frac", "normal_frac", "nan_frac"), 0.0)
    found = pd.DataFrame([{"name": "dead", "inf_frac": 1.0} | columns, {"name": "a", "inf_frac": 0.0} | columns])
    assert list(exponent_heatmap(shares).data[0].y) == ["a"]
    assert list(exponent_heatmap(shares, classes=found).data[0].y) == ["dead", "a"]


def test_too_many_cells_are_pooled_by_their_mean() -> None:
    count, width = 10_001, 100
    random = np.random.default_rng(0)
    shares = pd.DataFrame(
        {
            "name": np.repeat([f"layer{i}" for i in range(count)], width),
            "exponent": np.tile(np.arange(width) - 50, count),
            "share": random.random(count * width) / width,
        }
    )
    figure = exponent_heatmap(shares)
    heat = figure.data[0]
    assert heat.z.size <= ranges.MOST_CELLS and len(figure.data) == 1
    assert heat.y[0] == "layer0 and 2 more" and heat.y[-1] == "layer9999 and 1 more"
    assert heat.customdata[0] == pytest.approx(shares["share"].to_numpy().reshape(-1, width)[:3].mean(axis=0), rel=1e-5)
    assert len(figure.layout.yaxis.tickvals) <= 45
    assert "10,001 tensors (in 3,334 rows)" in figure.layout.meta["alt"]


def test_bars_of_classes_fill_the_whole_and_tell_the_small_ones(runs: dict[str, Run]) -> None:
    figure = class_bars(class_shares(runs["overflowing"], "output_grad"))
    bars = [t for t in figure.data if t.type == "bar"]
    assert [b.name for b in bars] == ["exactly zero", "normal", "subnormal", "infinite", "NaN"]
    assert np.sum([b.x for b in bars], axis=0) == pytest.approx(1.0)
    assert "6.9 % inf" in figure.data[-1].text[-1]


def test_of_many_tensors_the_worst_are_drawn_in_the_models_order() -> None:
    count = 500
    frame = pd.DataFrame(
        {"name": [f"l{i}" for i in range(count)], "zero_frac": 0.0, "normal_frac": 1.0, "nan_frac": 0.0}
    )
    frame["inf_frac"] = np.where(np.arange(count) == 400, 1e-6, 0.0)
    frame["subnormal_frac"] = np.arange(count) / count
    figure = class_bars(frame)
    names = list(figure.data[0].y)
    assert len(names) == classes.MOST_BARS and names == sorted(names, key=lambda n: int(n[1:]))
    assert "l400" in names and "l499" in names
    assert f"{classes.MOST_BARS} of 500 tensors" in figure.layout.title.text


# speed and comparison ------------------------------------------------------------------------------------------------


def test_phases_stack_to_the_step(runs: dict[str, Run]) -> None:
    times = phase_times(runs["healthy"])
    figure = phase_figure(times)
    assert {t.stackgroup for t in figure.data} == {"phases"}
    total = np.sum([t.y for t in figure.data], axis=0)
    assert total == pytest.approx(times["step_ms"].to_numpy(), rel=0.05)  # medians of parts, not parts of the median


def test_a_legend_of_many_phases_keeps_clear_of_the_title(runs: dict[str, Run]) -> None:
    legend = phase_figure(phase_times(runs["healthy"])).layout.legend
    assert (legend.yref, legend.y, legend.yanchor) == ("container", 0, "bottom")


def test_long_run_names_leave_room_for_bars_and_title(runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["healthy"]]).table
    table["run"] = ["a-run-with-a-name-as-long-as-they-come", "another-run-with-a-long-name-for-a-bar"]
    figure = compare_bars(table, "loss_ratio")
    assert figure.layout.title.xref == "container"
    assert max(map(len, figure.layout.yaxis.ticktext)) <= 20 and len(figure.layout.xaxis.title.text) <= 35


def test_a_peak_is_cut_off_and_told() -> None:
    times = pd.DataFrame({"step": range(5), "forward_ms": [500.0, 10.0, 10.0, 10.0, 10.0]})
    figure = phase_figure(times)
    assert figure.layout.yaxis.range == (0, 24.0)
    assert texts(figure) == ["peaks up to 500 ms lie beyond the axis"]
    assert phase_figure(times[1:]).layout.yaxis.range is None


def test_memory_is_in_binary_units(runs: dict[str, Run]) -> None:
    figure = memory_figure(memory_trace(runs["healthy"]), what="resident set of the process")
    assert trace(figure, "at the step").y[-1] == pytest.approx(300, rel=0.01)
    assert figure.layout.yaxis.title.text == "memory (MiB)"
    assert figure.layout.title.text == "Memory: resident set of the process"


def test_compared_runs_carry_value_spread_and_recipe(runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["bf16"], runs["healthy"], runs["empty"]]).table
    figure = compare_bars(table, "speed_ratio")
    bar = figure.data[0]
    assert list(bar.y) == ["fp32", "bf16", "healthy"]  # the empty run has no speed
    assert bar.x == pytest.approx(table["speed_ratio"].to_numpy()[:3])
    assert list(bar.marker.color) == [recipe_colour(r) for r in ("fp32", "bf16", "fp16")]
    assert bar.x + bar.error_x.array == pytest.approx(table["speed_ratio_high"].to_numpy()[:3])
    assert limits(figure) == [1.0]
    assert figure.layout.xaxis.title.text == "times as fast as fp32"


@pytest.mark.parametrize("column", ["memory_ratio", "loss_ratio", "step_ms", "samples_per_s", "memory_peak_bytes"])
def test_every_column_of_a_comparison_can_be_drawn(column: str, runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["healthy"]]).table
    figure = compare_bars(table, column)
    assert len(figure.data[0].x) == 2 and figure.layout.xaxis.range[1] >= max(figure.data[0].x)


def test_a_column_that_cannot_be_drawn_is_refused(runs: dict[str, Run]) -> None:
    with pytest.raises(RunError, match="column='parity' cannot be drawn; choose one of speed_ratio"):
        compare_bars(compare([runs["fp32"]]).table, "parity")


# formats -------------------------------------------------------------------------------------------------------------


def test_formats_reach_from_their_smallest_to_their_largest() -> None:
    ranges = format_ranges()
    figure = format_range_figure(ranges, [("0.1", -3.3), ("2^200", 200.0)])
    subnormal, normal = figure.data[:2]
    row = list(subnormal.y).index("FP16")
    assert (subnormal.base[row], subnormal.base[row] + subnormal.x[row]) == (
        -24,
        -14,
    ) and subnormal.marker.pattern.shape
    assert normal.base[row] == -14 and normal.base[row] + normal.x[row] == pytest.approx(np.log2(65504))
    assert "40 powers of two, 11 bits" in figure.data[2].text[row]
    assert texts(figure) == ["0.1", "2^200 (beyond the axis)"]
    assert limits(figure)[0] == -3.3 and limits(figure)[1] < 140


def test_a_sum_is_drawn_beside_the_exact_one() -> None:
    figure = accumulation_figure(accumulated(Fraction(0), Fraction(1), 300, FORMATS["bf16"]), "BF16")
    assert trace(figure, "in BF16").y.max() == 256 and trace(figure, "exact").y[-1] == 300
    assert "256 in BF16, exactly 300" in figure.layout.meta["alt"]


# one tensor over time ------------------------------------------------------------------------------------------------


def test_a_tensors_exponents_stand_at_their_steps(runs: dict[str, Run]) -> None:
    shares = layer_exponents(runs["healthy"], "output_grad", "head")
    figure = exponents_over_time(shares)
    heat = figure.data[0]
    assert heat.x.tolist() == list(range(0, 120, 10))
    for step, exponent, share in shares[["step", "exponent", "share"]].itertuples(index=False):
        z = heat.z[int(exponent - heat.y[0] + 0.5), heat.x.tolist().index(step)]
        assert 10.0**z == pytest.approx(max(share, 1e-5), rel=1e-4)
    assert [s.y0 for s in figure.layout.shapes] == pytest.approx([-24, -14, np.log2(65504)])
    assert texts(figure)[2] == "FP16 max. 65504"


def test_steps_with_infinities_are_crosses_however_few_there_are(runs: dict[str, Run]) -> None:
    bad = layer_trace(runs["overflowing"], "output_grad", "head").query("inf_frac + nan_frac > 0")["step"].tolist()
    found = layer_trace(runs["overflowing"], "output_grad", "head")
    for figure in (classes_over_time(found), magnitude_figure(found)):
        crosses = trace(figure, "∞ or NaN")
        assert crosses.x.tolist() == bad and crosses.marker.symbol == "x"
    clean = layer_trace(runs["healthy"], "output_grad", "head")
    assert [t.name for t in classes_over_time(clean).data] == ["normal", "exactly zero"]


def test_magnitudes_are_held_against_the_format(runs: dict[str, Run]) -> None:
    found = layer_trace(runs["healthy"], "output_grad", "head")
    figure = magnitude_figure(found)
    assert trace(figure, "largest magnitude").y == pytest.approx(found["absmax"].to_numpy())
    assert [s.y0 for s in figure.layout.shapes] == [65504.0, 2.0**-14]
    assert figure.layout.yaxis.type == "log" and not magnitude_figure(found, ("bf16",)).layout.shapes


# predictions ---------------------------------------------------------------------------------------------------------


def test_predicted_losses_are_bars_on_an_axis_that_stands_still(runs: dict[str, Run]) -> None:
    found = what_if(runs["fp32"], ("fp16",), (-10, 30), ("output_grad",))
    low, high = (lost_figure(found[found["log2_scale"] == k]) for k in (-10, 30))
    assert low.layout.xaxis.range == high.layout.xaxis.range == (-6, 0)
    under, mass, over = low.data
    expected = found[found["log2_scale"] == -10]["underflow_frac"].to_numpy()
    drawn = expected > 1e-6
    assert drawn.any() and under.x[drawn] == pytest.approx(expected[drawn]) and np.isnan(under.x[~drawn]).all()
    assert np.isnan(over.x).all() and not np.isnan(high.data[2].x).all()
    assert mass.marker.pattern.shape and not texts(low)


def test_where_nothing_would_be_lost_it_says_so(runs: dict[str, Run]) -> None:
    figure = lost_figure(what_if(runs["fp32"], ("bf16",), (0,), ("output_grad",)))
    assert texts(figure) == ["Nothing of what was recorded would be lost."]


def test_the_tensors_that_lose_most_are_drawn() -> None:
    frame = pd.DataFrame({"name": [f"l{i}" for i in range(200)], "underflow_frac": np.linspace(0, 0.5, 200)})
    figure = lost_figure(frame.assign(underflow_mass_frac=0.0, overflow_frac=np.where(frame.index == 3, 1e-3, 0.0)))
    assert len(figure.data[0].y) == lost.MOST_BARS and {"l3", "l199"} <= set(figure.data[0].y)
    assert f"{lost.MOST_BARS} of 200 tensors" in figure.layout.title.text
    nothing = lost_figure(frame.assign(underflow_frac=0.0, underflow_mass_frac=0.0, overflow_frac=0.0))
    assert not nothing.data and "None of the 200 tensors" in texts(nothing)[0]


def test_the_safe_window_is_a_band_behind_the_scale(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    window = safe_window_over_time(run)
    window.loc[1, "lowest"] = 2.0**60  # no scale is safe at this step
    figure = scale_figure(scale_trace(run), skip_episodes(run), window=window)
    bottom, top = figure.data[:2]
    assert (top.fill, top.name, bottom.showlegend) == ("tonexty", "safe for FP16, predicted", False)
    assert top.x.tolist() == window["step"].tolist() and np.isnan(top.y[1]) and np.isnan(bottom.y[1])
    known = np.arange(len(window)) != 1
    assert top.y[known] == pytest.approx(window["highest"].to_numpy()[known])
    assert figure.layout.yaxis.range[1] > np.log10(top.y[known].max())
    assert [t.name for t in figure.data[2:]] == ["loss scale", "skipped step"]
