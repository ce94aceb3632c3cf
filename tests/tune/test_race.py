"""The order of a race: a recipe that gains less than the margin is not chosen over a simpler one."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis.comparison.ratios import SAME_SPEED_FRAC
from amp_core.tune.race import Race, ranked, slower_reason
from tests.synthetic import write_rows

STEPS = 120
TURNS = {"id": "one", "block_steps": 10}


def run_of(folder, name, step_ms):
    """A run whose steps all take `step_ms`, in turns with the others of its folder."""
    columns = {"step": range(STEPS), "step_ms": np.full(STEPS, step_ms), "loss": np.ones(STEPS)}
    return load_run(write_rows(folder / name, steps=columns, config={"seed": 0, "comparison": TURNS}))


@pytest.mark.parametrize(("faster", "chosen"), [(1.0, "fp32"), (1.02, "fp32"), (1.04, "bf16")])
def test_a_recipe_is_chosen_over_a_simpler_one_only_beyond_the_margin(tmp_path, faster, chosen):
    assert 1.02 < 1 + SAME_SPEED_FRAC < 1.04
    runs = {"fp32": run_of(tmp_path, "fp32", 10.0), "bf16": run_of(tmp_path, "bf16", 10.0 / faster)}
    assert list(runs)[ranked([[run] for run in runs.values()])[0]] == chosen


def test_two_equally_fast_recipes_keep_their_order_even_if_both_beat_fp32(tmp_path):
    runs = [run_of(tmp_path, name, ms) for name, ms in (("fp32", 10.0), ("bf16", 5.0), ("fp16", 5.0 / 1.02))]
    assert ranked([[run] for run in runs]) == [1, 2, 0]
    faster = run_of(tmp_path, "fp16-fused", 5.0 / 1.04)
    assert ranked([[run] for run in (*runs[:2], faster)]) == [2, 1, 0]


def test_a_recipe_slower_than_the_lead_by_more_than_the_margin_leaves_and_fp32_stays(tmp_path):
    names = ["fp32", "bf16", "near", "far"]
    times = [10.0, 5.0, 5.0 * 1.02, 5.0 * 1.04]
    runs = [run_of(tmp_path, name, ms) for name, ms in zip(names, times, strict=True)]
    assert slower_reason(runs[1], runs[2], "bf16") == "" and slower_reason(runs[1], runs[3], "bf16").startswith(
        "slower than bf16"
    )
    race = Race(names, [tmp_path / name for name in names], over=lambda: False)
    race.judge()
    assert race.out == {3: "slower than bf16: 0.962 × its speed"}


def test_over_seeds_all_recipes_with_finite_losses_continue(tmp_path):
    run_of(tmp_path, "slow", 10.0), run_of(tmp_path, "fast", 1.0)
    write_rows(tmp_path / "broken", steps={"step": range(STEPS), "loss": np.full(STEPS, np.nan)})
    race = Race(["a"] * 4, [tmp_path / name for name in ("slow", "broken", "none", "fast")], over=lambda: False)
    assert race.unbroken(STEPS) == {0, 3}
    assert Race(["a"], [tmp_path / "slow"], over=lambda: True).unbroken(STEPS) == set()


def test_an_untimed_recipe_ranks_last(tmp_path):
    untimed = load_run(write_rows(tmp_path / "none", steps={"step": range(5), "loss": [1.0] * 5}))
    assert ranked([[run_of(tmp_path, "fp32", 10.0)], [untimed], [run_of(tmp_path, "bf16", 5.0)]]) == [2, 0, 1]
