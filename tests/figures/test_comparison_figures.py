"""Charts of a comparison: one colour per run on all of them, differences from the baseline, dots, counts."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, load_run
from amp_core.analysis import compare, loss_curves, loss_difference
from amp_core.figures import agreement_figure, compare_bars, deviation_figure, loss_figure, run_colours
from amp_core.figures.style import legend_top
from amp_core.views import LOSSES
from tests.figures.rendered import trace
from tests.synthetic import write_rows

AUDITED = pd.DataFrame(
    {"run": ["static"], "precision": ["fp16"], "name": ["head.weight"], "rel_error": [0.02], "cosine": [1.0]}
)
"""What `gradient_agreement` makes of runs of which one was audited."""


def test_a_run_has_one_colour_on_every_chart_of_a_comparison(runs: dict[str, Run]) -> None:
    """What a run lacks, such as an audit, changes the colour of no other run."""
    chosen = [runs["fp32"], runs["healthy"], runs["bf16"], runs["static"]]
    compared = compare(chosen)
    hues = run_colours(compared.table)
    assert len({hues[run.name] for run in chosen}) == 4
    curves = {t.name: t.line.color for t in LOSSES.draw(chosen).data if t.mode == "lines" and t.showlegend is None}
    table = compared.table.assign(eval_loss=[1.0, np.nan, 1.1, 1.2])
    dots = compare_bars(table, "eval_loss", hues=hues).data[0]
    deviations = deviation_figure(compared.recipes, hues=hues).data[0]
    assert {name: curves[name] for name in ("fp32", "healthy", "bf16", "static")} == {n: hues[n] for n in curves}
    assert dict(zip(dots.y, dots.marker.color, strict=True)) == {n: hues[n] for n in ("fp32", "bf16", "static")}
    assert agreement_figure(AUDITED, hues=hues).data[0].marker.color == hues["static"]
    assert all(hues[n] == c for n, c in zip(deviations.y, deviations.marker.color, strict=True))


def test_the_difference_from_the_baseline_has_a_panel_of_its_own(runs: dict[str, Run]) -> None:
    curves = loss_curves([runs["fp32"], runs["healthy"]])
    delta = loss_difference(curves)
    figure = loss_figure(curves, delta=delta)
    drawn = trace(figure, "Δ healthy")
    assert drawn.yaxis == "y2" and drawn.line.color == trace(figure, "healthy").line.color
    smooth = {run: rows.set_index("step")["smooth"] for run, rows in curves.groupby("run")}
    apart = (smooth["healthy"] - smooth["fp32"]).dropna()
    assert drawn.y[~np.isnan(drawn.y)] == pytest.approx(apart.to_numpy(), rel=1e-4, abs=1e-6)
    assert figure.layout.yaxis2.domain[1] < figure.layout.yaxis.domain[0]
    assert "difference from the baseline: healthy" in figure.layout.meta["alt"]
    assert loss_figure(curves, delta=delta.iloc[:0]) == loss_figure(curves)  # no panel without a second run


def test_early_differences_are_cut_off_with_a_mark(runs: dict[str, Run]) -> None:
    curves = loss_curves([runs["fp32"], runs["healthy"]])
    delta = loss_difference(curves).assign(delta=lambda frame: np.where(frame["step"] < 3, 40.0, 0.01))
    figure = loss_figure(curves, delta=delta)
    mark = trace(figure, "Δ healthy, beyond the axis")
    assert figure.layout.yaxis2.range[1] < 0.02 and mark.marker.symbol == "arrow-up"
    assert mark.customdata.tolist() == [40.0] and mark.y[0] <= figure.layout.yaxis2.range[1]


def curve(name: str, steps: range, loss: float) -> pd.DataFrame:
    return pd.DataFrame({"run": name, "precision": "fp32", "step": steps, "loss": loss, "smooth": loss})


def test_only_steps_that_both_runs_have_are_compared() -> None:
    delta = loss_difference(pd.concat([curve("a", range(10), 2.0), curve("b", range(5, 20), 3.0)]))
    assert delta["step"].tolist() == [5, 6, 7, 8, 9] and (delta["delta"] == 1.0).all()


def test_with_seeds_of_the_baseline_their_mean_is_the_baseline() -> None:
    band = pd.DataFrame({"step": [0.0, 9.0], "low": [1.0, 1.0], "middle": [2.0, 2.0], "high": [3.0, 3.0]})
    curves = pd.concat([curve("seed 0", range(10), 1.5), curve("seed 1", range(10), 2.5)])
    delta = loss_difference(curves, band)
    assert delta.groupby("run")["delta"].mean().to_dict() == {"seed 0": -0.5, "seed 1": 0.5}
    panel = [t for t in loss_figure(curves, delta=delta, band=band).data if t.yaxis == "y2" and t.fill == "tonexty"]
    assert len(panel) == 1 and panel[0].y.tolist() == [1.0, 1.0]  # the noise band, around 0


def test_runs_of_different_tasks_have_no_difference_in_loss(tmp_path: Path) -> None:
    steps = {"step": [0, 1, 2], "loss": [3.0, 2.0, 1.0]}
    made = [load_run(write_rows(tmp_path / n, config={"workload": n}, steps=steps)) for n in ("text-gpt", "digits-cnn")]
    assert not len(LOSSES.frame(made).delta) and len(LOSSES.frame(made[:1] * 2).delta)


def test_marks_of_several_runs_are_below_both_panels(runs: dict[str, Run]) -> None:
    figure = LOSSES.draw([runs["fp32"], runs["overflowing"], runs["calibrating"]])
    layout = figure.layout
    strips = [layout[name].domain for name in ("yaxis9", "yaxis10", "yaxis11") if layout[name].domain]
    assert strips and max(high for _, high in strips) < layout.yaxis2.domain[0]
    assert layout.yaxis2.domain[0] < layout.yaxis2.domain[1] < layout.yaxis.domain[0]
    assert layout.legend.y == legend_top(layout.height)


def test_held_out_losses_are_dots_with_intervals_around_them() -> None:
    table = pd.DataFrame(
        {
            "run": ["fp32", "fp16"], "precision": ["fp32", "fp16"], "eval_loss": [2.42, 2.43],
            "eval_loss_low": [2.40, np.nan], "eval_loss_high": [2.44, np.nan],
        }
    )  # fmt: skip
    figure = compare_bars(table, "eval_loss")
    dots = figure.data[0]
    assert (dots.type, dots.mode) == ("scatter", "markers") and figure.layout.xaxis.range[0] > 2.3  # not from zero
    assert dots.error_x.array == pytest.approx([0.02, 0.0], abs=1e-6)


def test_held_out_losses_of_several_seeds_have_an_interval(tmp_path: Path) -> None:
    made = []
    for seed, loss in enumerate((2.0, 2.2, 2.4)):
        config = {"workload": "text-gpt", "precision": "fp32", "seed": seed}
        folder = write_rows(tmp_path / str(seed), config=config, steps={"step": [0, 1], "loss": [3.0, loss]})
        run = load_run(folder)
        run.head.results["eval_loss"] = loss
        made.append(run)
    row = compare(made).recipes.iloc[0]
    assert row["eval_loss"] == pytest.approx(2.2)
    reach = 4.303 * 0.2 / np.sqrt(3)  # t of 2 degrees of freedom
    assert (row["eval_loss_low"], row["eval_loss_high"]) == pytest.approx((2.2 - reach, 2.2 + reach), abs=1e-3)
    assert np.isnan(compare(made[:1]).recipes.iloc[0]["eval_loss_low"])


def test_a_few_skipped_steps_are_counts_without_a_percentage(runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["overflowing"]]).table
    table.loc[1, ["skips", "steps", "skip_frac"]] = [1, 400, 1 / 400]
    assert list(compare_bars(table, "skip_frac").data[0].text)[1] == "1 of 400"
    table.loc[1, ["skips", "steps", "skip_frac"]] = [40, 400, 0.1]
    assert list(compare_bars(table, "skip_frac").data[0].text)[1] == "40 of 400 (10.0 %)"
