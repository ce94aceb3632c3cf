"""Speed comparisons are right in at least nineteen of twenty simulations with known timings."""

from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis import compare
from amp_core.analysis.comparison import ratios
from tests.synthetic import write_rows

BLOCK = 10
STEPS = 200


def drift(random: np.random.Generator, steps: int) -> np.ndarray:
    """The relative slowness of the machine at each step: drifts by several percent, as on shared machines."""
    steps_of = random.standard_normal(steps) * 0.01
    return np.exp(np.cumsum(steps_of) - np.linspace(0, 1, steps) * steps_of.sum())


def noise(random: np.random.Generator, steps: int) -> np.ndarray:
    """Correlated noise; occasionally a step takes three times as long."""
    rough = random.standard_normal(steps)
    for i in range(1, steps):
        rough[i] = 0.5 * rough[i - 1] + 0.87 * rough[i]
    return np.exp(0.02 * rough) * np.where(random.random(steps) < 0.02, 3.0, 1.0)


def run(path: Path, step_ms: np.ndarray, turns: dict[str, object] | None = None, **config: object) -> Run:
    count = len(step_ms)
    columns = {"step": range(count), "step_ms": step_ms, "samples": [16] * count, "time_s": np.cumsum(step_ms) / 1e3}
    settings = {"workload": "w", "seed": 0} | config | ({"comparison": turns} if turns else {})
    return load_run(write_rows(path, steps=columns, config=settings))


def pair(folder: Path, seed: int, slowdown: float = 1.0, turns: bool = True) -> tuple[Run, Run]:
    """Two runs of 20 ms steps, the second `slowdown` times as slow. If they take turns, both have the same drift."""
    random = np.random.default_rng(seed)
    shared = drift(random, STEPS)
    own = shared if turns else np.ones(STEPS)
    about: dict[str, object] | None = {"id": "one", "block_steps": BLOCK} if turns else None
    first = run(folder / f"a{seed}", 20 * own * noise(random, STEPS), about, precision="fp32")
    second = run(folder / f"b{seed}", 20 * slowdown * own * noise(random, STEPS), about, precision="bf16")
    return first, second


@pytest.mark.parametrize("turns", [True, False])
def test_a_recipe_against_itself_shows_no_difference(turns: bool, tmp_path: Path) -> None:
    text = [ratios.speed_ratio([pair(tmp_path, seed, turns=turns)]).speed_verdict for seed in range(40)]
    assert text.count("no difference seen") >= 38, text


@pytest.mark.parametrize("turns", [True, False])
def test_a_slowdown_of_five_percent_is_detected(turns: bool, tmp_path: Path) -> None:
    text = [ratios.speed_ratio([pair(tmp_path, seed, 1.05, turns)]).speed_verdict for seed in range(40)]
    assert text.count("slower") >= 38, text


def test_the_interval_of_paired_blocks_covers_the_truth(tmp_path: Path) -> None:
    covered = 0
    for seed in range(60):
        ratio = ratios.speed_ratio([pair(tmp_path, seed, 1.05)])
        covered += ratio.low <= 1 / 1.05 <= ratio.high
    assert 51 <= covered <= 60  # 95 % of 60, less the error of a bootstrap of nineteen blocks


def test_a_common_drift_cancels_only_if_blocks_are_paired(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    slow_later = np.where(np.arange(STEPS) < STEPS // 2, 1.0, 1.5)
    about: dict[str, object] = {"id": "one", "block_steps": BLOCK}
    times = [20 * slow_later * np.exp(0.01 * random.standard_normal(STEPS)) for _ in range(2)]
    paired = [
        run(tmp_path / f"p{i}", t, about, precision=p) for i, (t, p) in enumerate(zip(times, ("x", "y"), strict=True))
    ]
    alone = [run(tmp_path / f"u{i}", t, precision=p) for i, (t, p) in enumerate(zip(times, ("x", "y"), strict=True))]
    by_pairs, by_runs = (ratios.speed_ratio([(a, b)]) for a, b in (paired, alone))
    assert by_pairs.paired and not by_runs.paired
    assert by_pairs.speed_verdict == "no difference seen" and by_pairs.high - by_pairs.low < 0.02
    assert by_runs.high - by_runs.low > 10 * (by_pairs.high - by_pairs.low)


def test_only_runs_that_took_turns_under_one_seed_are_paired(tmp_path: Path) -> None:
    flat = np.full(STEPS, 20.0)
    one = run(tmp_path / "one", flat, {"id": "one", "block_steps": BLOCK})
    assert ratios.took_turns(one, run(tmp_path / "same", flat, {"id": "one", "block_steps": BLOCK})) == BLOCK
    assert ratios.took_turns(one, run(tmp_path / "later", flat, {"id": "two", "block_steps": BLOCK})) is None
    assert ratios.took_turns(one, run(tmp_path / "seed", flat, {"id": "one", "block_steps": BLOCK}, seed=1)) is None
    assert ratios.took_turns(one, run(tmp_path / "alone", flat)) is None
    assert ratios.took_turns(one, run(tmp_path / "odd", flat, {"id": "one", "block_steps": "ten"})) is None


def test_the_first_step_of_a_turn_is_left_out(tmp_path: Path) -> None:
    cold = np.full(STEPS, 20.0)
    cold[::BLOCK] = 500.0
    about: dict[str, object] = {"id": "one", "block_steps": BLOCK}
    ratio = ratios.speed_ratio([(run(tmp_path / "a", np.full(STEPS, 20.0), about), run(tmp_path / "b", cold, about))])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.0, 1.0, 1.0))
    assert ratio.blocks == STEPS // BLOCK - 1  # the warm-up is a block


def test_seeds_are_pooled_and_few_blocks_decide_nothing(tmp_path: Path) -> None:
    pairs = []
    for seed in range(3):
        about: dict[str, object] = {"id": f"round {seed}", "block_steps": BLOCK}
        a = run(tmp_path / f"a{seed}", np.full(STEPS, 20.0), about, seed=seed, precision="fp32")
        b = run(tmp_path / f"b{seed}", np.full(STEPS, 10.0 + seed), about, seed=seed, precision="bf16")
        pairs.append((a, b))
    comparison = compare([run_ for both in pairs for run_ in both]).recipes.set_index("recipe")
    row = comparison.loc["bf16"]
    assert (row["seeds"], row["blocks"], row["paired"]) == (3, 57, True)
    assert row["speed_ratio"] == pytest.approx((2 * 20 / 11 * 20 / 12) ** (1 / 3))
    assert row["speed_ratio_low"] < row["speed_ratio"] < row["speed_ratio_high"]
    short: dict[str, object] = {"id": "short", "block_steps": BLOCK}
    few = [run(tmp_path / f"f{i}", np.full(50, 20.0 + i), short) for i in range(2)]
    assert ratios.speed_ratio([(few[0], few[1])]).speed_verdict == "cannot tell: run more steps"


def test_one_block_has_a_ratio_and_no_interval(tmp_path: Path) -> None:
    turns: dict[str, object] = {"id": "short", "block_steps": 20}
    for about in (turns, None):
        one, other = (run(tmp_path / f"{about is None}{i}", np.full(12, 20.0 + i), about) for i in range(2))
        ratio = ratios.speed_ratio([(one, other)])
        assert ratio.value == pytest.approx(20 / 21) and np.isnan([ratio.low, ratio.high]).all()


def test_repeats_are_distinguished_from_runs_to_compare(tmp_path: Path) -> None:
    flat = np.full(60, 20.0)
    runs = [run(tmp_path / f"fp32-{i}", flat, seed=i, precision="fp32") for i in range(2)]
    again = run(tmp_path / "again", flat, seed=0, precision="fp32")
    faster = run(tmp_path / "faster", flat / 2, seed=0, precision="fp32", fused=True)
    comparison = compare([*runs, again, faster]).recipes
    assert comparison["recipe"].tolist() == ["fp32-0", "again", "faster"]
    assert comparison["seeds"].tolist() == [2, 1, 1]
    assert comparison["speed_verdict"].tolist() == ["reference", "no difference seen", "faster"]


def test_runs_without_step_times_are_not_measured(tmp_path: Path) -> None:
    bare = load_run(write_rows(tmp_path / "bare", steps={"step": range(5), "loss": [1.0] * 5}))
    ratio = ratios.speed_ratio([(bare, bare)])
    assert ratio.speed_verdict == "not measured" and np.isnan(ratio.value)
