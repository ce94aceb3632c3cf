"""Differences of means over steps from a baseline's, with its noise."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import update_changes
from amp_core.analysis.comparison.mean_change import layer_error_changes, mean_changes
from amp_core.analysis.numerics.layer_choice import layer_errors
from amp_core.quantization import RECIPES
from tests.analysis.numerics.test_update_losses import run_of, updates
from tests.synthetic import SAMPLES, write_rows

RECIPE = (RECIPES["nvfp4"],)


def test_the_noise_of_one_seed_is_that_of_the_difference_of_two_means_over_steps() -> None:
    base, own = np.array([[1.0, 3.0, 1.0, 3.0]]), np.array([[5.0, 5.0, np.nan, 5.0]])
    changed = mean_changes(own, [base])
    assert (changed["baseline"][0], changed["value"][0], changed["change"][0]) == (2.0, 5.0, 3.0)
    assert changed["noise"][0] == pytest.approx(2 * (4 / 3 / 4) ** 0.5) and changed["outside"][0]


def test_three_seeds_give_the_noise() -> None:
    changed = mean_changes(np.array([[2.5, 2.5]]), [np.full((1, 2), level) for level in (1.0, 2.0, 3.0)])
    assert changed["baseline"][0] == 2.0 and changed["noise"][0] == pytest.approx(2.0) and not changed["outside"][0]


def test_a_single_step_has_no_noise_and_any_difference_counts() -> None:
    changed = mean_changes(np.array([[1.5], [1.0]]), [np.array([[1.0], [1.0]])])
    assert np.isnan(changed["noise"]).all() and changed["outside"].tolist() == [True, False]


def test_tensors_that_lose_more_than_the_baseline_come_first(tmp_path: Path) -> None:
    base = run_of(tmp_path / "a", {"head": [0.1, 0.12, 0.1], "norm": [0.2, 0.3, 0.1], "gone": [0.5] * 3})
    run = run_of(tmp_path / "b", {"norm": [0.2, 0.25, 0.2], "head": [0.9, 0.9, 0.8]})
    changes = update_changes([base, run])
    assert changes["name"].tolist() == ["head", "norm"]
    assert changes["outside"].tolist() == [True, False] and changes["change"][0] == pytest.approx(0.76)


def test_other_compared_steps_and_an_absent_ledger_leave_nothing(tmp_path: Path) -> None:
    base = run_of(tmp_path / "a", {"head": [0.1, 0.1]})
    table = updates({"head": [0.9, 0.9]})
    later = load_run(write_rows(tmp_path / "b", steps={"step": [0, 5, 15]}, updates=table | {"step": [5, 15]}))
    assert update_changes([base, later]).empty
    assert update_changes([base, load_run(write_rows(tmp_path / "c", steps={"step": [0]}))]).empty


@pytest.fixture(scope="module")
def blocks() -> Run:
    return load_run(SAMPLES["bf16-blocks"])


def test_a_run_with_blocks_does_not_differ_from_itself(blocks: Run) -> None:
    changes = layer_error_changes([blocks, blocks], RECIPE)
    errors = layer_errors(blocks, RECIPE)
    assert sorted(changes["layer"]) == sorted(errors["layer"])
    assert (changes["change"] == 0).all() and not changes["outside"].any() and (changes["noise"] > 0).all()
    both = changes.merge(errors, on=["layer", "format"])
    assert both["value"].to_numpy() == pytest.approx(both["rel_error"].to_numpy(), rel=0.05)  # over all steps


def test_a_baseline_without_blocks_is_refused(blocks: Run, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES["fp32"], tmp_path / "fp32")
    with pytest.raises(RunError, match="without blocks"):
        layer_error_changes([load_run(tmp_path / "fp32"), blocks], RECIPE)
