"""The numbers of a figure as a file: what is drawn, under the names of the axes."""

import io

import numpy as np
import pandas as pd

from amp_core import load_run
from amp_core.analysis import exponent_shares, precision_cells, scale_trace, skip_episodes
from amp_core.figures import exponent_heatmap, grad_norm_figure, precision_figure, scale_figure
from amp_core.figures.data import chart_csv, chart_data
from tests.synthetic import write


def test_a_curves_numbers_are_those_recorded(tmp_path):
    run = load_run(write(tmp_path / "a", "overflowing"))
    trace = scale_trace(run)
    figure = scale_figure(trace, skip_episodes(run))
    back = pd.read_csv(io.BytesIO(chart_csv(figure)))
    assert list(back.columns) == ["trace", "step", "loss scale"]
    assert np.allclose(back.loc[back["trace"] == "loss scale", "loss scale"], trace["loss_scale"])
    assert (back["trace"] == "skipped step").sum() == trace["skipped"].sum()


def test_many_skipped_steps_are_strokes_each_of_which_tells_and_is_one_row():
    steps = np.arange(400)
    trace = pd.DataFrame({"step": steps, "loss_scale": 2.0**16, "skipped": steps % 4 == 1})
    trace["grad_norm"] = np.where(trace["skipped"], np.inf, 1.0)
    at = trace["step"][trace["skipped"]].tolist()
    episodes = pd.DataFrame({"first": at, "last": at, "skips": 1, "scale_before": 2.0**16, "scale_after": 2.0**15})
    figure = scale_figure(trace, episodes.assign(tensors="head"))
    strokes, told = figure.data[-2:]
    assert strokes.mode == "lines" and len(strokes.x) == 300 and strokes.showlegend is None and not told.showlegend
    assert told.x.tolist() == at and "not finite: head" in told.customdata[0] and told.marker.maxdisplayed == 1
    for drawn, height in ((figure, 2.0**16), (grad_norm_figure(trace), None)):
        rows = chart_data(drawn).iloc[-100:]
        assert rows["x"].tolist() == at and rows["trace"].nunique() == 1
        assert height is None or set(rows["y"]) == {height}


def test_a_heatmap_has_a_row_for_each_cell_that_is_drawn(tmp_path):
    shares = exponent_shares(load_run(write(tmp_path / "a", "healthy")), "output_grad")
    data = chart_data(exponent_heatmap(shares))
    assert len(data) == (shares["share"] > 0).sum() and set(data["y"]) == set(shares["name"])


def test_the_precision_map_gives_formats_by_name_not_by_number(tmp_path):
    cells = precision_cells(load_run(write(tmp_path / "a", "traced")))
    data = chart_data(precision_figure(cells))
    mapped = data[data["z"].notna()]
    assert len(mapped) == len(cells) and {"FP16", "FP32"} <= set(mapped["z"]) and data["x"].notna().all()
