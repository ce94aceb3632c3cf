"""The order of a race: a recipe that gains less than the margin is not chosen over a simpler one."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis.comparison.ratios import SAME_SPEED_FRAC
from amp_core.tune.evidence import may_be_faster, speed
from amp_core.tune.race import INTERIM_BLOCKS, Race, ranked, slower_reason
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


def busy_runs(tmp_path, ratio, seed, blocks=19, sd=0.3):
    """FP32 and a recipe of `ratio` times its speed; other work changes the ratio of each block by a factor."""
    random = np.random.default_rng(seed)
    noise = np.repeat(np.exp(sd * random.standard_normal(blocks + 1)), 10)
    columns = {"step": range(len(noise)), "loss": np.ones(len(noise))}
    about = {"seed": 0, "comparison": {"id": f"{seed}", "block_steps": 10}}
    for name, ms in (("fp32", np.full(len(noise), 10.0)), ("bf16", 10.0 / ratio * noise)):
        write_rows(tmp_path / f"{seed}" / name, steps=columns | {"step_ms": ms}, config=about)
    return [load_run(tmp_path / f"{seed}" / name) for name in ("fp32", "bf16")]


def test_three_blocks_that_a_burst_of_other_work_slows_do_not_make_a_recipe_leave(tmp_path):
    lead = run_of(tmp_path, "fp32", 10.0)
    ms = np.full(STEPS, 10.0)
    ms[-30:] *= 2.5
    columns = {"step": range(STEPS), "step_ms": ms, "loss": np.ones(STEPS)}
    slowed = load_run(write_rows(tmp_path / "slowed", steps=columns, config={"seed": 0, "comparison": TURNS}))
    assert slower_reason(lead, slowed, "fp32") == ""
    columns["step_ms"][-30:] *= 2
    far = load_run(write_rows(tmp_path / "far", steps=columns, config={"seed": 0, "comparison": TURNS}))
    assert slower_reason(lead, far, "fp32", tested=False).startswith("slower than fp32")


def test_speeds_are_tested_after_few_rounds(tmp_path):
    for name, ms in (("fp32", 10.0), ("bf16", 5.0), ("fp16", 7.0)):
        run_of(tmp_path, name, ms)
    names = ["fp32", "bf16", "fp16"]
    race = Race(names, [tmp_path / name for name in names], over=lambda: False, block_steps=10)
    between = next(n for n in range(2, 100) if n not in INTERIM_BLOCKS and n - 1 not in INTERIM_BLOCKS and n > 1)
    race._rounds = between - 1
    assert race.keep(10 * between) == {0, 1, 2} and not race.out
    assert race.keep(10 * INTERIM_BLOCKS[-1]) == set() and [*race.out] == [2]


def test_on_a_busy_machine_an_equally_fast_recipe_is_not_called_faster(tmp_path):
    """Each of 40 races is tested as often as a real one; at 95 % some would err."""
    errors = 0
    for seed in range(40):
        runs = busy_runs(tmp_path, 1.0, seed)
        errors += speed([(runs[0], runs[1])]).speed_verdict in ("faster", "slower")
    assert not errors


def test_a_recipe_whose_speed_noise_leaves_open_may_be_faster(tmp_path):
    """Else the answer would be FP32 although the recipe may be much faster."""
    open_, slow = (speed([tuple(busy_runs(tmp_path, ratio, seed))]) for ratio, seed in ((0.9, 3), (0.3, 4)))
    assert open_.value < 1.03 and may_be_faster(open_)
    assert not may_be_faster(slow)


def test_a_recipe_that_left_early_as_slower_is_not_ranked_before_the_fastest(tmp_path):
    """Of its few blocks no interval is known, but it left because of them."""
    steps = 30
    columns = {"step": range(steps), "step_ms": np.full(steps, 60.0), "loss": np.ones(steps)}
    slow = load_run(write_rows(tmp_path / "bf16", steps=columns, config={"seed": 0, "comparison": TURNS}))
    runs = [[run_of(tmp_path, "fp32", 40.0)], [slow], [run_of(tmp_path, "fp16", 15.0)]]
    assert ranked(runs)[0] == 1 and ranked(runs, slow={1}) == [2, 0, 1]
