import math
from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis import scale_summary, scale_trace, skip_episodes
from tests.synthetic import write_rows

SKIPS = [False, True, True, False, False, True, False, True]
SCALES = [8.0, 8.0, 4.0, 2.0, 4.0, 8.0, 4.0, 4.0]


@pytest.fixture
def small(tmp_path: Path) -> Run:
    path = write_rows(
        tmp_path / "small",
        steps={"step": range(8), "loss_scale": SCALES, "skipped": SKIPS, "growth_tracker": [0] * 8},
        events=[
            {"kind": "skipped", "name": "a", "step": 1},
            {"kind": "skipped", "name": "b", "step": 2},
            {"kind": "non-finite", "name": "a", "step": 2},
            {"kind": "warning", "name": "z", "step": 2},
            {"kind": "skipped", "name": "c, d, e, f, g, h, i", "step": 5},
        ],
    )
    return load_run(path)


def test_summary_counts_skips_growths_and_backoffs(small: Run) -> None:
    summary = scale_summary(small)
    assert (summary.first, summary.last, summary.lowest, summary.highest) == (8.0, 4.0, 2.0, 8.0)
    assert (summary.skips, summary.attempts, summary.skip_frac) == (4, 8, 0.5)
    assert (summary.growths, summary.backoffs) == (2, 3)
    assert summary.has_scaler


def test_steps_skipped_in_a_row_are_one_episode(small: Run) -> None:
    episodes = skip_episodes(small)
    assert episodes["first"].tolist() == [1, 5, 7]
    assert episodes["last"].tolist() == [2, 5, 7]
    assert episodes["skips"].tolist() == [2, 1, 1]
    assert episodes["scale_before"].tolist() == [8.0, 8.0, 4.0]
    assert episodes["scale_after"].tolist()[:2] == [2.0, 4.0]
    assert math.isnan(episodes["scale_after"].iloc[2])  # no step has followed the last skip yet


def test_an_episode_names_the_gradients_that_were_not_finite(small: Run) -> None:
    assert skip_episodes(small)["tensors"].tolist() == ["a, b", "c, d, e, f, g and 2 more", ""]


def test_a_loss_that_was_finite_leaves_backward_as_the_origin(tmp_path: Path) -> None:
    losses = [1.0, 2.0, math.nan, 1.0, 1.0, math.inf, 1.0, None]
    steps = {"step": range(8), "loss_scale": SCALES, "skipped": SKIPS, "loss": losses}
    episodes = skip_episodes(load_run(write_rows(tmp_path / "run", steps=steps)))
    assert episodes["origin"].tolist() == ["backward", "forward", ""]


def test_a_recorded_run_is_consistent_with_its_scaler(runs: dict[str, Run]) -> None:
    trace, summary = scale_trace(runs["overflowing"]), scale_summary(runs["overflowing"])
    change = np.diff(np.log2(trace["loss_scale"]))
    skipped = trace["skipped"].to_numpy()
    assert set(change) <= {-1.0, 0.0, 1.0}
    assert ((change == -1) == skipped[:-1]).all()  # the scale halves in the step after each skip, and only then
    assert summary.backoffs == skipped[:-1].sum() and summary.skips == skipped.sum() > 5


@pytest.mark.parametrize(
    ("scenario", "has_scaler"),
    [("healthy", True), ("static", True), ("fp32", False), ("underflowing", False), ("bare", False), ("empty", True)],
)
def test_the_presence_of_a_scaler_is_detected(scenario: str, has_scaler: bool, runs: dict[str, Run]) -> None:
    assert scale_summary(runs[scenario]).has_scaler is has_scaler


def test_an_unrecorded_scaler_is_inferred_from_loss_scales(tmp_path: Path) -> None:
    moved = load_run(write_rows(tmp_path / "a", steps={"step": [0], "loss_scale": [4.0]}))
    still = load_run(write_rows(tmp_path / "b", steps={"step": [0], "loss_scale": [1.0]}))
    assert scale_summary(moved).has_scaler and not scale_summary(still).has_scaler


def test_an_unrecorded_loss_scale_is_nan(runs: dict[str, Run]) -> None:
    assert scale_trace(runs["bare"])["loss_scale"].isna().all()
    assert not scale_trace(runs["bare"])["skipped"].any()
    assert scale_summary(runs["bare"]).first is None


def test_a_step_counts_as_skipped_if_one_of_two_optimizers_skips(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "gan",
        steps={
            "step": [0, 0, 1, 1],
            "optimizer": [0, 1, 0, 1],
            "skipped": [False, True, False, None],
            "loss_scale": [8.0, 8.0, 4.0, 4.0],
        },
    )
    trace = scale_trace(load_run(path))
    assert trace["step"].tolist() == [0, 1]
    assert trace["skipped"].tolist() == [True, False]
    assert scale_summary(load_run(path)).attempts == 2
