"""Parity of learning: from simulated seeds with a known truth, and from real run folders."""

from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis import compare
from amp_core.analysis.comparison.noise_band import gradient_agreement, noise_band
from amp_core.analysis.comparison.parity import judge, t_quantile
from tests.synthetic import write_rows

SEEDS = range(6)
LOOKS = (3, 4, 5, 6, 8, 10, 12)


def simulated(repeat: int, bias: float = 0.0, chaos: float = 0.3, seeds: range = SEEDS) -> str:
    """Losses of 2.0 with a standard deviation of 0.02 between seeds. The recipe differs from the baseline of the same
    seed by `chaos` times that, and has a bias of `bias` times that."""
    random = np.random.default_rng(repeat)
    first = {seed: 2.0 + 0.02 * random.standard_normal() for seed in seeds}
    this = {seed: value + 0.02 * (bias + chaos * random.standard_normal()) for seed, value in first.items()}
    return judge(first, this).parity


def test_no_bias_is_within_noise() -> None:
    text = [simulated(repeat) for repeat in range(200)]
    assert text.count("within noise") >= 190 and text.count("worse") + text.count("better") <= 2


@pytest.mark.parametrize(("bias", "outcome"), [(3.0, "worse"), (-3.0, "better")])
def test_a_planted_bias_is_detected(bias: float, outcome: str) -> None:
    text = [simulated(repeat, bias) for repeat in range(200)]
    assert text.count(outcome) >= 190


def test_a_recipe_that_differs_as_much_as_another_seed_is_not_called_worse() -> None:
    text = [simulated(repeat, chaos=1.4) for repeat in range(400)]
    assert text.count("worse") <= 0.05 * 400 and text.count("better") <= 0.05 * 400


def sequential_parity(repeat: int, bias: float, correlation: float) -> str:
    """The result of a search that adds seeds until parity is decided. `bias` is in standard deviations over seeds,
    `alike` the correlation of a seed's two trainings."""
    random = np.random.default_rng([repeat, round(100 * correlation)])
    ours, own = random.standard_normal((2, LOOKS[-1]))
    theirs = bias + correlation * ours + np.sqrt(1 - correlation**2) * own
    for seeds in LOOKS:
        first, this = (dict(enumerate(2.0 + 0.02 * values[:seeds])) for values in (ours, theirs))
        outcome = judge(first, this, repeatedly=True).parity
        if outcome != "cannot tell":
            break
    return outcome


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 0.99])
def test_repeated_tests_accept_few_recipes_that_are_worse(correlation: float) -> None:
    text = [sequential_parity(repeat, 2.0, correlation) for repeat in range(1000)]
    assert text.count("within noise") + text.count("better") <= 0.05 * 1000


@pytest.mark.parametrize(("correlation", "passes"), [(0.0, 0.85), (0.5, 0.93), (0.9, 0.97), (0.99, 0.99)])
def test_repeated_tests_decide_correctly(correlation: float, passes: float) -> None:
    text = [sequential_parity(repeat, 0.0, correlation) for repeat in range(1000)]
    assert text.count("within noise") + text.count("better") >= passes * 1000
    assert text.count("worse") <= (0.025 if correlation == 0 else 0.02 if correlation == 0.5 else 0.004) * 1000


def test_too_few_seeds_leave_parity_undecided() -> None:
    assert {simulated(repeat, 3.0, seeds=range(2)) for repeat in range(20)} == {"cannot tell"}
    first = {seed: 2.0 + 0.01 * seed for seed in range(3)}
    assert judge(first, {0: 2.0}).parity == "cannot tell"
    assert judge(first, {0: 2.5}).parity == "worse"  # far beyond the deviation of another seed of the baseline


def test_unpaired_seeds_are_compared_by_their_means() -> None:
    first = {seed: 2.0 + 0.01 * seed for seed in range(4)}
    assert judge(first, {9: 2.51, 10: 2.52, 11: 2.5}).parity == "worse"
    assert judge(first, {9: 2.01, 10: 2.02}).parity in ("cannot tell", "within noise")


def test_quantiles_of_students_t_distribution() -> None:
    for freedom, share, quantile in [(1, 0.95, 6.3138), (2, 0.975, 4.3027), (10, 0.95, 1.8125), (3, 0.999, 10.2145)]:
        assert t_quantile(freedom, share) == pytest.approx(quantile, rel=1e-4)
    assert t_quantile(60, 0.975) == pytest.approx(2.000, abs=0.002)
    assert t_quantile(1e9, 0.95) == pytest.approx(1.645, abs=1e-3)


def trained(folder: Path, precision: str, seed: int, bias: float = 0.0, steps: int = 200, batch: int = 16) -> Run:
    random = np.random.default_rng(seed)
    end = 2.0 + 0.02 * random.standard_normal()
    loss = end + 3 * np.exp(-np.arange(steps) / 30) + 0.05 * random.standard_normal(steps) + bias
    own = np.random.default_rng([seed, sum(map(ord, precision))])
    loss += 0.003 * own.standard_normal() if precision != "fp32" else 0.0
    columns = {"step": range(steps), "loss": loss, "samples": [batch] * steps, "step_ms": [10.0] * steps}
    config = {"precision": precision, "seed": seed, "workload": "w", "batch_size": batch}
    return load_run(write_rows(folder / f"{precision}-{seed}-{bias}-{steps}", steps=columns, config=config))


def both(folder: Path, bias: float = 0.0, seeds: range = SEEDS, **options: int) -> list[Run]:
    first = [trained(folder, "fp32", seed) for seed in seeds]
    return first + [trained(folder, "bf16", seed, bias, **options) for seed in seeds]


def test_runs_over_seeds_give_one_result_per_recipe(tmp_path: Path) -> None:
    comparison = compare(both(tmp_path / "same"))
    assert comparison.recipes["recipe"].tolist() == ["fp32", "bf16"] and comparison.recipes["seeds"].tolist() == [6, 6]
    assert comparison.recipes["parity"].iloc[1].startswith("within noise (final loss ")
    assert comparison.answers["bf16"].endswith("same loss within noise")
    assert set(list(comparison.parity.values())[6:]) == {comparison.recipes["parity"].iloc[1]}
    row = comparison.recipes.iloc[1]
    assert row["loss_change_low"] < row["loss_change_frac"] < row["loss_change_high"] < 2 * row["noise_frac"]
    worse = compare(both(tmp_path / "worse", bias=0.1))
    assert worse.recipes["parity"].iloc[1].startswith("worse (final loss +")
    assert worse.answers["bf16"].endswith("higher final loss")


def test_losses_that_are_identical_at_each_step_need_no_seeds(tmp_path: Path) -> None:
    columns = {"step": range(50), "loss": np.linspace(3, 2, 50)}
    runs = [
        load_run(write_rows(tmp_path / p, steps=columns, config={"precision": p, "seed": 0})) for p in ("fp32", "tf32")
    ]
    assert compare(runs).parity["tf32"].startswith("within noise: the loss is bitwise identical at every step")


def test_runs_with_different_batch_sizes_are_compared_over_samples(tmp_path: Path) -> None:
    comparison = compare(both(tmp_path, seeds=range(3), steps=100, batch=64))
    assert "3,200 common samples" in comparison.recipes["parity"].iloc[1]
    assert any("Batch sizes differ" in note for note in comparison.notes)


def test_a_worse_held_out_loss_decides(tmp_path: Path) -> None:
    runs = both(tmp_path)
    for run in runs:
        seed = run.head.config["seed"]
        run.head.results["eval_loss"] = 2.0 + 0.01 * seed + (0.5 if run.head.config["precision"] == "bf16" else 0.0)
    comparison = compare(runs).recipes["parity"].iloc[1]
    assert comparison.startswith("worse (") and "held-out loss +24" in comparison


def test_the_noise_band_needs_three_seeds(tmp_path: Path) -> None:
    runs = both(tmp_path, seeds=range(4))
    band = noise_band(runs, "step")
    assert (band["low"] < band["middle"]).all() and (band["middle"] < band["high"]).all()
    assert band["step"].iloc[[0, -1]].tolist() == [0, 199]
    assert noise_band(both(tmp_path / "few", seeds=range(2)), "step").empty and noise_band([], "step").empty


def test_agreement_is_that_of_the_runs_own_recipe_and_loss_scale(tmp_path: Path) -> None:
    audits = {
        "step": [0, 0, 0, 10, 10, 10],
        "name": ["w"] * 6,
        "loss_scale": [1.0, 1024.0, 65536.0, 1.0, 512.0, 512.0],
        "precision": ["fp16"] * 5 + ["bf16"],
        "numel": [8] * 6,
        "rel_error": [0.9, 0.1, float("nan"), 0.9, 0.3, 0.8],
        "cosine": [0.5, 0.99, float("nan"), 0.5, 0.97, 0.6],
        "lost_mass_frac": [0.5, 0.0, 0.0, 0.5, 0.0, 0.0],
    }
    steps = {"step": [0, 1, 10, 11], "loss_scale": [1024.0, 1024.0, 1024.0, 512.0]}  # step 10: after the update
    run = load_run(write_rows(tmp_path / "run", steps=steps, audits=audits, config={"precision": "fp16"}))
    agreement = gradient_agreement([run])
    assert agreement[["run", "name", "rel_error", "cosine", "audits"]].to_numpy().tolist() == [
        ["run", "w", 0.2, 0.98, 2]
    ]
    assert gradient_agreement([]).empty
