"""The figures of a run, of its steps and of several runs: the numbers that are sent to the browser."""

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import (
    baseline_band,
    compare,
    loss_curves,
    memory_trace,
    phase_times,
    rank_table,
    scale_trace,
    shares_over_steps,
    skip_episodes,
    step_marks,
)
from amp_core.analysis.format_lab.rounding import accumulated, format_ranges
from amp_core.figures import (
    accumulation_figure,
    compare_bars,
    device_figure,
    difference_figure,
    format_range_figure,
    grad_norm_figure,
    loss_figure,
    memory_figure,
    phase_figure,
    rank_figure,
    recipe_colour,
    scale_figure,
    step_heatmap,
    with_baseline,
)
from amp_core.figures.marks import with_marks
from amp_core.figures.step_time import CUT_RATIO, PEAK_RATIO
from amp_core.figures.style import legend_top
from amp_core.formats import FORMATS
from amp_core.views import RUN_VIEWS
from tests.figures.rendered import limits, texts, trace
from tests.synthetic import SAMPLES

# baseline ------------------------------------------------------------------------------------------------------------


def test_a_longer_legend_makes_a_figure_higher_and_leaves_its_plot_as_high(runs: dict[str, Run]) -> None:
    trace = scale_trace(runs["overflowing"])
    plain = grad_norm_figure(trace)
    baseline = with_baseline(plain, baseline_band(trace, "grad_norm"), "an FP32 run with a very long name " * 3, "fp32")
    marked = with_marks(baseline, step_marks(runs["overflowing"]), "step")
    heights = [f.layout.height - f.layout.margin.t - f.layout.margin.b for f in (plain, baseline, marked)]
    assert heights[0] == heights[1] == heights[2]
    assert baseline.layout.margin.t > plain.layout.margin.t
    assert [f.layout.legend.y for f in (baseline, marked)] == [legend_top(f.layout.height) for f in (baseline, marked)]


def test_the_noise_around_a_difference_has_a_visible_entry_in_the_legend() -> None:
    changes = pd.DataFrame({"name": ["head"], "baseline": [0.1], "value": [0.2], "change": [0.1], "noise": [0.02]})
    figure = difference_figure(changes.assign(outside=True), "fp32", "difference", percent=True)
    shown = next(t for t in figure.data if t.name == "noise of fp32" and t.showlegend is None)
    noise = next(t for t in figure.data if t.showlegend is False)
    assert shown.marker.color == noise.error_x.color and len(noise.error_x.array) == 1


# loss ----------------------------------------------------------------------------------------------------------------


def test_runs_have_a_colour_each_beginning_with_that_of_their_recipe_and_distinct_dashes(runs: dict[str, Run]) -> None:
    figure = loss_figure(loss_curves([runs["fp32"], runs["healthy"], runs["static"]]))
    thick = {t.name: t for t in figure.data if t.showlegend is None}
    assert list(thick) == ["fp32", "healthy", "static"]
    assert thick["fp32"].line.color == recipe_colour("fp32")
    assert thick["healthy"].line.color == recipe_colour("fp16")
    assert len({t.line.color for t in thick.values()}) == 3
    assert [t.line.dash for t in thick.values()] == ["solid", "solid", "dash"]


def test_a_loss_is_marked_at_the_step_where_it_stops_being_finite(runs: dict[str, Run]) -> None:
    figure = loss_figure(loss_curves([runs["collapsing"]]))
    assert limits(figure) == [50]
    assert texts(figure) == ["collapsing: not finite"]
    assert "not finite from step 50" in figure.layout.meta["alt"]
    assert not limits(loss_figure(loss_curves([runs["healthy"]])))


def test_figures_over_the_steps_of_a_run_have_aligned_axes(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    figures = [loss_figure(loss_curves([run])), phase_figure(phase_times(run)), grad_norm_figure(scale_trace(run))]
    assert len({with_marks(figure, step_marks(run)).layout.xaxis.range for figure in figures}) == 1
    for figure in figures:
        assert figure.layout.xaxis.range == pytest.approx((-1.19, 120.19))


def test_phases_have_the_same_names_on_all_figures(runs: dict[str, Run]) -> None:
    steps = {t.name for t in phase_figure(phase_times(runs["two-ranks"])).data}
    ranks = [t.name for t in rank_figure(rank_table(runs["two-ranks"])).data]
    assert ranks[0] == "waiting for data" and set(ranks) == steps - {"other"}


def test_what_no_phase_of_a_rank_covers_is_drawn_as_other(runs: dict[str, Run]) -> None:
    ranks = rank_table(runs["two-ranks"])
    marked = ranks[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]].sum(axis=1)
    figure = rank_figure(ranks.assign(step_ms=marked + 40.0))
    assert figure.data[-1].name == "other" and list(figure.data[-1].x) == pytest.approx([40.0, 40.0])


def test_a_single_device_counter_has_a_legend() -> None:
    alone = device_figure(pd.DataFrame({"time_s": [0.0, 1.0], "gpu_util_frac": [0.5, 0.9]}))
    assert len(alone.data) == 1 and alone.layout.showlegend


def test_rows_of_tensors_keep_their_height_with_three_lines_of_legend(runs: dict[str, Run]) -> None:
    shares = shares_over_steps(runs["collapsing"], "output_grad")
    padding = step_heatmap(shares).layout.height - 52 - 60 - 3 * 22  # title, axis, legend
    assert padding >= 14 * shares["name"].nunique()


def test_axes_name_the_quantity_that_they_count(runs: dict[str, Run]) -> None:
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
    recorded = dict(zip(crosses.x.tolist(), crosses.customdata.tolist(), strict=True))
    assert "steps 60 to 63 skipped in a row, loss scale from 2<sup>16</sup> to 2<sup>12</sup>" in recorded[62]
    assert "not finite: head.weight" in recorded[0]


def test_the_loss_scale_is_a_step_line_on_powers_of_two(runs: dict[str, Run]) -> None:
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


# speed and comparison ------------------------------------------------------------------------------------------------


def test_phases_stack_to_the_step_time(runs: dict[str, Run]) -> None:
    times = phase_times(runs["healthy"])
    figure = phase_figure(times)
    assert {t.stackgroup for t in figure.data} == {"phases"} and {t.line.shape for t in figure.data} == {"hvh"}
    total = np.sum([t.y for t in figure.data], axis=0)
    # The sum of medians, not the median of the sum.
    assert total == pytest.approx(times["step_ms"].to_numpy(), rel=0.05)


def test_a_legend_of_many_phases_does_not_overlap_the_title(runs: dict[str, Run]) -> None:
    legend = phase_figure(phase_times(runs["healthy"])).layout.legend
    assert (legend.yref, legend.yanchor) == ("container", "top")  # plotly then enlarges the margin for more lines
    assert 0.85 < legend.y < 1  # below the title


def test_long_run_names_are_shortened_beside_bars_and_title(runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["healthy"]]).table
    table["run"] = ["a-run-with-a-name-as-long-as-they-come", "another-run-with-a-long-name-for-a-bar"]
    figure = compare_bars(table, "loss_ratio")
    assert figure.layout.title.xref == "container"
    assert max(map(len, figure.layout.yaxis.ticktext)) <= 20 and len(figure.layout.xaxis.title.text) <= 35


def test_a_peak_is_cut_off_with_a_mark_at_its_step() -> None:
    times = pd.DataFrame({"step": range(5), "forward_ms": [500.0, 10.0, 10.0, 10.0, 10.0]})
    figure = phase_figure(times)
    assert figure.layout.yaxis.range == (0, CUT_RATIO * 10.0)
    mark = trace(figure, "beyond the axis, up to 500 ms")
    assert (mark.x.tolist(), mark.customdata.tolist(), mark.marker.symbol) == ([0], [500.0], "triangle-up")
    assert phase_figure(times[1:]).layout.yaxis.range is None
    times.loc[0, "forward_ms"] = PEAK_RATIO * 10.0
    assert phase_figure(times).layout.yaxis.range is None  # up to that value every step is drawn in full


def test_memory_is_in_binary_units(runs: dict[str, Run]) -> None:
    figure = memory_figure(memory_trace(runs["healthy"]), what="resident set of the process")
    assert trace(figure, "at the step").y[-1] == pytest.approx(300, rel=0.01)
    assert figure.layout.yaxis.title.text == "memory (MiB)"
    assert figure.layout.title.text == "Memory: resident set of the process"


def test_memory_is_drawn_where_only_the_peak_is_known(runs: dict[str, Run]) -> None:
    figure = memory_figure(memory_trace(runs["healthy"]).assign(allocated_bytes=np.nan))
    assert figure.layout.yaxis.range[1] > 300 and "highest 299 MiB" in figure.layout.meta["alt"]


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


def test_the_bar_of_a_format_spans_its_smallest_to_its_largest_value() -> None:
    ranges = format_ranges()
    figure = format_range_figure(ranges, [("0.1", -3.3), ("2^200", 200.0)])
    subnormal, normal = figure.data[:2]
    row = list(subnormal.y).index("FP16")
    assert (subnormal.base[row], subnormal.base[row] + subnormal.x[row]) == (
        -24,
        -14,
    ) and subnormal.marker.pattern.shape
    assert normal.base[row] == -14 and normal.base[row] + normal.x[row] == pytest.approx(np.log2(65504))
    assert "11 bits" in figure.data[2].text[row] and figure.data[1].customdata[row][2] == 40
    assert texts(figure) == ["0.1", "2^200 (beyond the axis)"]
    assert limits(figure)[0] == -3.3 and limits(figure)[1] < 140


def test_a_running_sum_is_drawn_with_the_exact_sum() -> None:
    figure = accumulation_figure(accumulated(Fraction(0), Fraction(1), 300, FORMATS["bf16"]), "BF16")
    assert trace(figure, "in BF16").y.max() == 256 and trace(figure, "exact").y[-1] == 300
    assert "256 in BF16, exactly 300" in figure.layout.meta["alt"]


@pytest.mark.parametrize("name", ["memory_parts", "precision_map"])
def test_low_charts_keep_their_plot_under_a_legend_of_several_rows(name):
    for run in (load_run(SAMPLES["fp16-overflow"]), load_run(SAMPLES["bf16-blocks"])):
        layout = RUN_VIEWS[name].draw(run).layout
        plot_px = layout.height - layout.margin.t - layout.margin.b
        assert plot_px >= 59, (plot_px, layout.height)
