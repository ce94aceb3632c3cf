"""Skipped steps and harmless patterns: branches, several optimizers, a static loss scale."""

from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import diagnose
from amp_core.findings.rules.skips import partial_skips
from tests.synthetic import write_rows

SCALER = {"scaler": {"enabled": True}}


def test_a_static_scale_that_skips_to_the_end_has_not_collapsed(tmp_path: Path) -> None:
    steps = {"step": range(40), "loss_scale": [128.0] * 40, "skipped": [False] * 30 + [True] * 10}
    run = load_run(write_rows(tmp_path / "run", steps=steps, config=SCALER))
    assert "scale-collapse" not in {f.code for f in diagnose(run)}


def test_a_slow_backoff_is_compared_with_the_earlier_scale(tmp_path: Path) -> None:
    scales = [2.0**16] * 30 + [2.0**16 * 0.9**i for i in range(20)]
    steps = {"step": range(50), "loss_scale": scales, "skipped": [False] * 30 + [True] * 20}
    run = load_run(write_rows(tmp_path / "run", steps=steps, config=SCALER))
    assert "scale-collapse" not in {f.code for f in diagnose(run)}


def test_a_first_branch_that_was_only_calibrating_is_not_reported(tmp_path: Path) -> None:
    """The first set of parameters with gradients has no event, so its added parameters are unknown."""
    skipped = [True] * 4 + [False] * 60
    steps = {"step": range(64), "loss_scale": [2.0**-i for i in range(4)] + [2.0**-4] * 60, "skipped": skipped}
    events = [{"kind": "branch", "name": "branch 1", "step": 4, "detail": "head.weight"}]
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=events, config=SCALER))
    assert "branch-always-skipped" not in {f.code for f in diagnose(run)}


def test_a_branch_that_is_always_skipped_is_named_by_its_added_parameters(tmp_path: Path) -> None:
    rare = [30, 40, 50, 60]
    events = [{"kind": "branch", "name": "branch 1", "step": at, "detail": "rare.weight"} for at in rare]
    events += [{"kind": "branch", "name": "branch 0", "step": at + 1} for at in rare]
    steps = {"step": range(70), "loss_scale": [2.0**10] * 70, "skipped": [step in rare for step in range(70)]}
    events.sort(key=lambda event: event["step"])
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=events, config=SCALER))
    (finding,) = [f for f in diagnose(run) if f.code == "branch-always-skipped"]
    assert (finding.where, finding.steps, finding.value) == ("rare.weight", (30, 60), 4.0)


@pytest.mark.parametrize(("every", "result"), [(1, True), (10, False)])
def test_a_per_step_schedule_that_advances_at_a_skipped_step_is_reported(
    every: int, result: bool, tmp_path: Path
) -> None:
    """A schedule that advances rarely, such as per epoch, may do so at a skipped step."""
    rates = [0.1 * 0.9 ** (step // every) for step in range(60)]
    steps = {"step": range(60), "lr": rates, "loss_scale": [2.0**10] * 60}
    steps["skipped"] = [step in (29, 39) for step in range(60)]
    run = load_run(write_rows(tmp_path / "run", steps=steps, config=SCALER))
    assert ("scheduler-steps-on-skip" in {f.code for f in diagnose(run)}) is result


@pytest.mark.parametrize("begin", [0, 5000])
def test_skips_of_one_optimizer_during_calibration_are_no_shared_backoff(tmp_path: Path, begin: int) -> None:
    """A run from a checkpoint begins at the step of the checkpoint, and calibrates there."""
    at = [begin + i // 2 for i in range(120)]
    skipped = [step < begin + 10 and place % 2 == 0 for place, step in enumerate(at)]
    steps = {"step": at, "optimizer": [0, 1] * 60, "loss_scale": [2.0**10] * 120, "skipped": skipped}
    run = load_run(write_rows(tmp_path / "run", steps=steps, config=SCALER))
    assert partial_skips(run).empty
    assert "shared-backoff" not in {f.code for f in diagnose(run)}


def test_skips_of_two_optimizers_are_counted_separately(tmp_path: Path) -> None:
    """Five steps were skipped by one of them, three of these by the first."""
    alone = {(30, 0), (34, 0), (38, 0), (40, 1), (44, 1)}
    at = [(step, optimizer) for step in range(60) for optimizer in (0, 1)]
    steps = {
        "step": [step for step, _ in at],
        "optimizer": [optimizer for _, optimizer in at],
        "skipped": [one in alone for one in at],
        "loss_scale": [2.0**10] * len(at),
    }
    config = SCALER | {"optimizers": ["Adam", "SGD"]}
    (finding,) = [
        f
        for f in diagnose(load_run(write_rows(tmp_path / "run", steps=steps, config=config)))
        if f.code == "shared-backoff"
    ]
    assert finding.where == "Adam (optimizer 0)" and finding.value == 3.0 and finding.steps == (30, 38)
    assert "separate scalers" in finding.advice and "Call" not in finding.advice


def test_an_update_after_each_optimizer_is_advised_to_come_once(tmp_path: Path) -> None:
    steps = {"step": range(60), "optimizer": [0, 1] * 30, "loss_scale": [2.0**10] * 60}
    run = load_run(write_rows(tmp_path / "run", steps=steps, config=SCALER | {"optimizers": ["Adam", "SGD"]}))
    (finding,) = [f for f in diagnose(run) if f.code == "shared-backoff"]
    assert finding.where == "scaler.update" and "Call `update()` once" in finding.advice
    assert finding.snippet.count("update") == 1


def test_a_fresh_scaler_explains_the_skips_after_a_resume(tmp_path: Path) -> None:
    scales = [2.0**10] * 40 + [2.0 ** (16 - i) for i in range(6)] + [2.0**10] * 34
    skipped = [40 <= step < 46 for step in range(80)]
    events = [{"kind": "resumed", "step": 40}]
    resumed = {"optimizer": True, "scaler": False, "first_scale": 2.0**16}
    steps = {"step": range(80), "loss_scale": scales, "skipped": skipped}
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=events, config=SCALER | {"resumed": resumed}))
    assert [f.code for f in diagnose(run) if f.severity != "info"] == ["scaler-state-not-restored"]
