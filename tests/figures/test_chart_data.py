"""The numbers of a figure as a file: the drawn values, under the names of the axes."""

import io

import numpy as np
import pandas as pd
import pytest

from amp_core import load_run
from amp_core.analysis import (
    class_shares,
    exponent_shares,
    loss_curves,
    precision_cells,
    scale_trace,
    skip_episodes,
    step_marks,
)
from amp_core.analysis.numerics.layers import layer_trace
from amp_core.figures import (
    class_bars,
    classes_over_time,
    compare_bars,
    exponent_heatmap,
    grad_norm_figure,
    loss_figure,
    magnitude_figure,
    precision_figure,
    scale_figure,
)
from amp_core.figures.chart_data import chart_csv, chart_data
from amp_core.figures.marks import with_marks
from tests.synthetic import write


def test_the_numbers_of_a_curve_are_those_recorded(tmp_path):
    run = load_run(write(tmp_path / "a", "overflowing"))
    trace = scale_trace(run)
    figure = scale_figure(trace, skip_episodes(run))
    back = pd.read_csv(io.BytesIO(chart_csv(figure)))
    assert list(back.columns) == ["trace", "step", "loss scale"]
    assert np.allclose(back.loc[back["trace"] == "loss scale", "loss scale"], trace["loss_scale"])
    assert (back["trace"] == "skipped step").sum() == trace["skipped"].sum()


def test_each_of_many_skipped_steps_is_a_stroke_with_a_hover_text_and_one_row():
    steps = np.arange(400)
    trace = pd.DataFrame({"step": steps, "loss_scale": 2.0**16, "skipped": steps % 4 == 1})
    trace["grad_norm"] = np.where(trace["skipped"], np.inf, 1.0)
    at = trace["step"][trace["skipped"]].tolist()
    episodes = pd.DataFrame({"first": at, "last": at, "skips": 1, "scale_before": 2.0**16, "scale_after": 2.0**15})
    figure = scale_figure(trace, episodes.assign(tensors="head"))
    strokes, recorded = figure.data[-2:]
    assert strokes.mode == "lines" and len(strokes.x) == 300 and strokes.showlegend is None and not recorded.showlegend
    assert (
        recorded.x.tolist() == at and "not finite: head" in recorded.customdata[0] and recorded.marker.maxdisplayed == 1
    )
    for drawn, height in ((figure, 2.0**16), (grad_norm_figure(trace), None)):
        rows = chart_data(drawn).iloc[-100:]
        assert rows["x"].tolist() == at and rows["trace"].nunique() == 1
        assert rows["y"].isna().all() if height is None else set(rows["y"]) == {height}


def test_labels_beside_bars_are_not_chart_data(tmp_path):
    table = pd.DataFrame({"run": ["a", "b"], "precision": ["fp32", "fp16"], "speed_ratio": [1.0, 0.12]})
    data = chart_data(
        compare_bars(table.assign(speed_ratio_low=[1.0, 0.1], speed_ratio_high=[1.0, 0.15]), "speed_ratio")
    )
    assert data.to_numpy().tolist() == [["Speed", 1.0, "a"], ["Speed", pytest.approx(0.12), "b"]]
    shares = class_shares(load_run(write(tmp_path / "a", "overflowing")), "weight_grad")
    data = chart_data(class_bars(shares))
    assert set(data["trace"]) == {"exactly zero", "normal", "infinite"}  # the labels beside a bar are not among them


def test_a_mark_in_a_strip_or_at_an_edge_has_its_step_and_no_value(tmp_path):
    run = load_run(write(tmp_path / "a", "overflowing"))
    crosses = scale_trace(run)
    data = chart_data(with_marks(loss_figure(loss_curves([run])), step_marks(run)))
    marked = data[data["trace"].isin(["skipped step", "phase change"])]
    assert set(crosses["step"][crosses["skipped"]]) <= set(marked["x"]) and marked["y"].isna().all()
    data = chart_data(grad_norm_figure(crosses)).set_index("trace")
    assert data.loc["not finite: step skipped", "y"].isna().all() and data.loc["gradient norm", "y"].notna().any()
    tensor = layer_trace(run, "weight_grad", "blocks.0.attention.qkv.weight")
    for figure in (classes_over_time(tensor), magnitude_figure(tensor)):
        crosses = chart_data(figure).set_index("trace").loc[["∞ or NaN"]]
        assert crosses["y"].isna().all() and crosses["x"].notna().all()
    shares, classes = exponent_shares(run, "weight_grad"), class_shares(run, "weight_grad")
    not_finite = chart_data(exponent_heatmap(shares, classes=classes)).set_index("trace").loc[["not finite"]]
    assert not_finite["x"].isna().all() and set(not_finite["y"]) <= set(shares["name"])


def test_recorded_losses_are_named_after_their_run_without_a_legend_entry(tmp_path):
    runs = [load_run(write(tmp_path / name, "healthy")) for name in ("a", "b")]
    curves = loss_curves(runs)
    band = pd.DataFrame({"step": [0, 1], "low": [1.0, 1.0], "high": [2.0, 2.0]})
    figure = loss_figure(curves, band=band)
    names = ["noise from seed to seed (lowest)", "noise from seed to seed", "a (recorded)", "b (recorded)", "a", "b"]
    data = chart_data(figure)
    assert list(dict.fromkeys(data["trace"])) == names
    recorded = data.loc[data["trace"] == "b (recorded)", "y"]
    assert np.allclose(recorded, curves.loc[curves["run"] == "b", "loss"])
    assert [t.name for t in figure.data if t.showlegend is not False] == [names[1], "a", "b"]


def test_a_heatmap_has_a_row_for_each_drawn_cell(tmp_path):
    shares = exponent_shares(load_run(write(tmp_path / "a", "healthy")), "output_grad")
    data = chart_data(exponent_heatmap(shares))
    assert len(data) == (shares["share"] > 0).sum() and set(data["y"]) == set(shares["name"])


def test_the_precision_map_gives_formats_by_name_not_by_number(tmp_path):
    cells = precision_cells(load_run(write(tmp_path / "a", "traced")))
    data = chart_data(precision_figure(cells))
    mapped = data[data["z"].notna()]
    assert len(mapped) == len(cells) and {"FP16", "FP32"} <= set(mapped["z"]) and data["x"].notna().all()
