"""The figures of number ranges: exponents, classes, one tensor over time, and predicted underflow and overflow."""

import numpy as np
import pandas as pd
import pytest

from amp_core import Run
from amp_core.analysis import (
    class_shares,
    exponent_shares,
    safe_window_over_time,
    scale_trace,
    skip_episodes,
    step_marks,
    what_if,
)
from amp_core.analysis.numerics.layers import layer_exponents, layer_trace
from amp_core.figures import (
    class_bars,
    classes,
    classes_over_time,
    exponent_heatmap,
    exponents_over_time,
    magnitude_figure,
    ranges,
    scale_figure,
    underflow,
    underflow_figure,
)
from amp_core.figures.marks import with_marks
from tests.figures.rendered import limits, texts, trace

# ranges --------------------------------------------------------------------------------------------------------------


def test_format_limits_are_drawn_at_their_exponents(runs: dict[str, Run]) -> None:
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


def test_formats_too_wide_for_the_axis_are_labelled_as_such(runs: dict[str, Run]) -> None:
    figure = exponent_heatmap(exponent_shares(runs["bf16"], "output_grad"), ("bf16", "fp8-e5m2"))
    assert texts(figure)[0].startswith("BF16 reaches from 2<sup>−133</sup> to 2<sup>128</sup>")
    assert limits(figure) == pytest.approx([-16, -14, np.log2(57344)])
    assert figure.layout.xaxis.range[0] <= -19


def test_a_fixed_axis_stays_fixed(runs: dict[str, Run]) -> None:
    shares = [exponent_shares(runs[s], "output_grad") for s in ("healthy", "underflowing")]
    assert {exponent_heatmap(s, exponents=(-40, 20)).layout.xaxis.range for s in shares} == {(-40, 20)}


def test_values_without_an_exponent_are_shown_beside_the_plot(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    figure = exponent_heatmap(exponent_shares(run, "output_grad"), classes=class_shares(run, "output_grad"))
    not_finite = trace(figure, "not finite")
    assert list(not_finite.y) == class_shares(run, "output_grad").query("inf_frac > 0")["name"].tolist()
    assert not_finite.text[-1] == " ∞ 6.9 %" and figure.layout.margin.r > 60


def test_a_tensor_without_finite_values_has_a_row() -> None:
    shares = pd.DataFrame({"name": ["a"], "exponent": [0], "share": [1.0]})
    columns = dict.fromkeys(("zero_frac", "subnormal_frac", "normal_frac", "nan_frac"), 0.0)
    result = pd.DataFrame([{"name": "dead", "inf_frac": 1.0} | columns, {"name": "a", "inf_frac": 0.0} | columns])
    assert list(exponent_heatmap(shares).data[0].y) == ["a"]
    assert list(exponent_heatmap(shares, classes=result).data[0].y) == ["dead", "a"]


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
    assert heat.z.size <= ranges.MAX_CELLS and len(figure.data) == 1
    assert heat.y[0] == "layer0 and 2 more" and heat.y[-1] == "layer9999 and 1 more"
    mean = shares["share"].to_numpy().reshape(-1, width)[:3].mean(axis=0)
    assert heat.customdata[0] == pytest.approx(100 * mean, rel=1e-5)  # in percent, as in the hover text
    assert len(figure.layout.yaxis.tickvals) <= 45
    assert "10,001 tensors (in 3,334 rows)" in figure.layout.meta["alt"]


def test_bars_of_classes_add_up_and_label_small_classes(runs: dict[str, Run]) -> None:
    figure = class_bars(class_shares(runs["overflowing"], "output_grad"))
    bars = [t for t in figure.data if t.type == "bar"]
    assert [b.name for b in bars] == ["exactly zero", "normal", "subnormal", "infinite"]
    assert np.sum([b.x for b in bars], axis=0) == pytest.approx(1.0)
    assert "6.9 % inf" in figure.data[-1].text[-1]


def test_the_worst_of_many_tensors_are_drawn_in_the_models_order() -> None:
    count = 500
    frame = pd.DataFrame(
        {"name": [f"l{i}" for i in range(count)], "zero_frac": 0.0, "normal_frac": 1.0, "nan_frac": 0.0}
    )
    frame["inf_frac"] = np.where(np.arange(count) == 400, 1e-6, 0.0)
    frame["subnormal_frac"] = np.arange(count) / count
    figure = class_bars(frame)
    names = list(figure.data[0].y)
    assert len(names) == classes.MAX_BARS and names == sorted(names, key=lambda n: int(n[1:]))
    assert "l400" in names and "l499" in names
    assert f"{classes.MAX_BARS} of 500 tensors" in figure.layout.title.text


# one tensor over time ------------------------------------------------------------------------------------------------


def test_the_exponents_of_a_tensor_are_drawn_at_their_steps(runs: dict[str, Run]) -> None:
    shares = layer_exponents(runs["healthy"], "output_grad", "head")
    figure = exponents_over_time(shares)
    heat = figure.data[0]
    assert heat.x.tolist() == list(range(0, 120, 10))
    for step, exponent, share in shares[["step", "exponent", "share"]].itertuples(index=False):
        z = heat.z[int(exponent - heat.y[0] + 0.5), heat.x.tolist().index(step)]
        assert 10.0**z == pytest.approx(max(share, 1e-5), rel=1e-4)
    assert [s.y0 for s in figure.layout.shapes] == pytest.approx([-24, -14, np.log2(65504)])
    assert texts(figure)[2] == "FP16 max. 65504"


def test_steps_without_finite_values_are_empty_columns_and_the_three_axes_end_at_the_same_step(
    runs: dict[str, Run],
) -> None:
    shares = layer_exponents(runs["healthy"], "output_grad", "head")
    there = shares[~shares["step"].isin([0, 50])]
    heat = exponents_over_time(there, without=[0, 50])
    assert heat.data[0].x.tolist() == list(range(0, 120, 10))
    assert np.isnan(heat.data[0].z[:, [0, 5]]).all() and np.isfinite(heat.data[0].z[:, 4]).any()
    trace = layer_trace(runs["healthy"], "output_grad", "head")
    ranges_of = {f.layout.xaxis.range for f in (heat, classes_over_time(trace), magnitude_figure(trace))}
    assert len(ranges_of) == 1


def test_steps_with_infinities_are_crosses_even_if_there_are_few(runs: dict[str, Run]) -> None:
    bad = layer_trace(runs["overflowing"], "output_grad", "head").query("inf_frac + nan_frac > 0")["step"].tolist()
    result = layer_trace(runs["overflowing"], "output_grad", "head")
    for figure in (classes_over_time(result), magnitude_figure(result)):
        crosses = trace(figure, "∞ or NaN")
        assert crosses.x.tolist() == bad and crosses.marker.symbol == "x"
    clean = layer_trace(runs["healthy"], "output_grad", "head")
    assert [t.name for t in classes_over_time(clean).data] == ["normal", "exactly zero"]


def test_the_axis_of_a_heatmap_ends_with_its_cells(runs: dict[str, Run]) -> None:
    shares = layer_exponents(runs["healthy"], "output_grad", "head")
    steps = sorted(shares["step"].unique())
    low, high = with_marks(exponents_over_time(shares), step_marks(runs["healthy"])).layout.xaxis.range
    assert low == steps[0] - (steps[1] - steps[0]) / 2 and high == steps[-1] + (steps[-1] - steps[-2]) / 2
    low, high = exponents_over_time(shares[shares["step"] == steps[0]]).layout.xaxis.range
    assert (low, high) == (steps[0] - 0.5, steps[0] + 0.5)


def test_magnitudes_are_drawn_with_the_limits_of_the_format(runs: dict[str, Run]) -> None:
    result = layer_trace(runs["healthy"], "output_grad", "head")
    figure = magnitude_figure(result)
    assert trace(figure, "largest magnitude").y == pytest.approx(result["absmax"].to_numpy())
    assert [s.y0 for s in figure.layout.shapes] == [65504.0, 2.0**-14]
    assert figure.layout.yaxis.type == "log" and not magnitude_figure(result, ("bf16",)).layout.shapes


# predictions ---------------------------------------------------------------------------------------------------------


def test_predicted_losses_are_bars_on_a_fixed_axis(runs: dict[str, Run]) -> None:
    predictions = what_if(runs["fp32"], ("fp16",), (-10, 30), ("output_grad",))
    low, high = (underflow_figure(predictions[predictions["log2_scale"] == k]) for k in (-10, 30))
    assert low.layout.xaxis.range == high.layout.xaxis.range == (-6, 0)
    under, mass, over = low.data
    expected = predictions[predictions["log2_scale"] == -10]["underflow_frac"].to_numpy()
    drawn = expected > 1e-6
    assert drawn.any() and under.x[drawn] == pytest.approx(expected[drawn]) and np.isnan(under.x[~drawn]).all()
    assert np.isnan(over.x).all() and not np.isnan(high.data[2].x).all()
    assert mass.marker.pattern.shape and not texts(low)


def test_a_prediction_without_underflow_says_so(runs: dict[str, Run]) -> None:
    figure = underflow_figure(what_if(runs["fp32"], ("bf16",), (0,), ("output_grad",)))
    assert texts(figure) == ["Nothing of what was recorded would be lost."]


def test_the_tensors_with_the_largest_losses_are_drawn() -> None:
    frame = pd.DataFrame({"name": [f"l{i}" for i in range(200)], "underflow_frac": np.linspace(0, 0.5, 200)})
    figure = underflow_figure(
        frame.assign(underflow_mass_frac=0.0, overflow_frac=np.where(frame.index == 3, 1e-3, 0.0))
    )
    assert len(figure.data[0].y) == underflow.MAX_BARS and {"l3", "l199"} <= set(figure.data[0].y)
    assert f"{underflow.MAX_BARS} of 200 tensors" in figure.layout.title.text
    nothing = underflow_figure(frame.assign(underflow_frac=0.0, underflow_mass_frac=0.0, overflow_frac=0.0))
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
