"""The completeness of a recording, from its own events and from its tables."""

from pathlib import Path
from typing import Any

import pytest

from amp_core import Finding, diagnose, load_run
from amp_core.record.loop.unrecorded import (
    NO_FORWARD,
    NO_FORWARD_ANY_MORE,
    NO_LOSS,
    NO_MORE_STEPS,
    NO_STEP,
    NO_VALUES,
    NOTHING,
)
from amp_core.record.torch_internals.captures import UNSEEN
from amp_core.store.writer import RunWriter


def recorded(
    path: Path, *events: tuple[Any, ...], steps: int = 8, status: str = "finished", watching: bool = True, **config: Any
) -> list[Finding]:
    """The finding on the recording of a run with these events and `steps` steps."""
    writer = RunWriter(path, config=config)
    if watching:
        writer.event("started", detail="watching Net")
    if steps:
        writer.append("steps", {"step": range(steps), "loss": [1.0] * steps})
    for event in events:
        writer.event(*event)
    writer.close(status)
    return [f for f in diagnose(load_run(path)) if f.code == "recording-incomplete"]


def test_a_run_without_steps_is_an_error_once_it_has_ended(tmp_path: Path) -> None:
    (finding,) = recorded(tmp_path / "finished", steps=0)
    assert (finding.severity, finding.where) == ("error", "steps") and finding.title == "No step was recorded"
    assert not recorded(tmp_path / "stopped", steps=0, status="stopped")  # before its first step, perhaps
    assert not recorded(tmp_path / "imported", steps=0, watching=False)
    backward = ("calls", " ".join(["backward"] * 60), "", 0)
    (finding,) = recorded(tmp_path / "failed", backward, steps=0, status="failed")
    assert "backward was called at least 60 times" in finding.title and "optimizer" in finding.advice


def test_the_recorder_s_reason_for_missing_steps_is_reported(tmp_path: Path) -> None:
    text = "watching failed, and nothing is recorded; training continues: TypeError: complex gradients"
    (finding,) = recorded(tmp_path / "run", ("warning", "not recorded", text, 0), steps=0)
    assert finding.severity == "error" and "complex gradients" in finding.title


def test_steps_that_stop_while_backward_continues_are_missing(tmp_path: Path) -> None:
    micro_batches = ("calls", " ".join(["backward"] * 8) + " optimizer.step", "", 0)
    (finding,) = recorded(tmp_path / "gone", micro_batches, ("calls", "backward " * 40, "", 8))
    assert finding.severity == "warning" and finding.title.startswith("No step is recorded after step 7")
    assert finding.steps == (8, 8)
    assert not recorded(tmp_path / "ended", micro_batches, ("calls", "backward " * 7, "", 8))


def test_calls_of_unrecorded_steps_are_not_faults_of_the_loop(tmp_path: Path) -> None:
    """The optimizer was replaced: its steps and `unscale_` are not recorded, but the scaler's `update` is."""
    with RunWriter(tmp_path / "run", config={"scaler": {"enabled": True}}) as writer:
        writer.event("started", detail="watching Net")
        writer.append("steps", {"step": range(8), "loss": [1.0] * 8, "loss_scale": [8.0] * 8})
        writer.event("calls", "scale backward unscale_ clip scaler.step update", step=0)
        writer.event("calls", "scale backward clip update " * 30, step=8)
    assert {f.code for f in diagnose(load_run(tmp_path / "run"))} == {"recording-incomplete"}


def test_calls_for_one_of_two_optimizers_do_not_count_for_the_other(tmp_path: Path) -> None:
    """The second optimizer is replaced at step 4; the first continues."""
    both = "scale backward scaler.step:0 update scale backward scaler.step:1 update"
    steps = {"step": [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7], "optimizer": [0, 1] * 4 + [0] * 4}
    with RunWriter(tmp_path / "run", config={"scaler": {"enabled": True}, "optimizers": ["A", "B"]}) as writer:
        writer.append("steps", steps | {"loss_scale": [8.0] * 12})
        writer.event("calls", both, step=0)
        writer.event("calls", "scale backward update scale backward scaler.step:0 update", step=5)
    assert "unscale-per-microbatch" not in {f.code for f in diagnose(load_run(tmp_path / "run"))}


@pytest.mark.parametrize(
    ("name", "text", "severity", "where"),
    [
        ("not recorded", "watching failed, and nothing is sampled until step 19; …: MemoryError", "warning", "watch"),
        ("not recorded", "rows lost because memory was full: 40 of tensors", "warning", "run folder"),
        ("not recorded", "Branches stopped at step_ended: KeyError: 3", "warning", "watch"),
        ("not recorded", "steps: another optimizer steps than the one given", "warning", "steps"),
        ("not recorded", NO_MORE_STEPS.format(count=60), "warning", "steps"),
        ("not recorded", NO_LOSS.format(step=3), "info", "loss"),
        ("not recorded", NO_FORWARD, "info", "forward of the model"),
        ("not recorded", NO_FORWARD_ANY_MORE, "info", "forward of the model"),
        ("not recorded", NO_VALUES, "info", "gradients of parameters on the meta device"),
        ("not recorded", UNSEEN, "info", UNSEEN[:60]),
        ("not recorded", "loss scale and skipped steps: a GradScaler", "warning", "loss scale and skipped steps"),
        ("steps lost", "the last 3 steps stayed on it: CUDA error", "warning", "steps"),
        ("include", "include='x' and exclude=None leave no tensor to measure", "warning", "include, exclude"),
        ("not recorded", "kernels of steps 5 to 7: another profiler is running", "warning", "kernels of steps 5 to 7"),
        ("not recorded", "operators: another TorchDispatchMode was active", "info", "operators"),
        ("not recorded", "blocks: the model has no linear layer", "warning", "blocks"),
        ("not recorded", "output_grad: hooks do not reach into a compiled graph", None, ""),
        ("not recorded", "output_grad: layers of Keras do not show theirs", None, ""),
        ("not recorded", "operators: the run ended before step 20", None, ""),
        ("not recorded", "sm_active_frac, dram_active_frac: GPM needs a newer GPU; power_w: no", None, ""),
        ("checkpoint", "not written: disk full", None, ""),
    ],
)
def test_warnings_of_the_recorder_are_reported(
    name: str, text: str, severity: str | None, where: str, tmp_path: Path
) -> None:
    findings = recorded(tmp_path / "run", ("warning", name, text, 3))
    assert [(f.severity, f.where) for f in findings] == ([] if severity is None else [(severity, where)])
    for finding in findings:
        assert text[:20] in finding.title and finding.advice.count(". ") == 1 and finding.steps == (3, 7)
        compile(finding.snippet, finding.code, "exec")


@pytest.mark.parametrize(
    ("text", "advised"),
    [
        (NO_STEP, "torch.optim.Optimizer"),
        (NOTHING, "the model and optimizer that the loop uses"),
        (NO_MORE_STEPS.format(count=60), "torch.optim.Optimizer"),
        (NO_LOSS.format(step=3), "Log the loss"),
        (NO_FORWARD, "the model and optimizer that the loop uses"),
        (NO_FORWARD_ANY_MORE, "the model and optimizer that the loop uses"),
        (NO_VALUES, "weights before calling `watch`"),
        (UNSEEN, "outside the graph"),
        ("loss scale and skipped steps: a GradScaler is at work that watch was not given", "the scaler"),
        ("operators: another TorchDispatchMode was active", "another mode"),
        ("blocks: the model has no linear layer", "operands of linear layers"),
    ],
)
def test_the_advice_fits_the_reason(text: str, advised: str, tmp_path: Path) -> None:
    (finding,) = recorded(tmp_path / "run", ("warning", "not recorded", text, 3))
    assert advised in finding.advice


def test_several_reasons_for_missing_steps_are_one_finding(tmp_path: Path) -> None:
    kernels = ("warning", "not recorded", "kernels of steps 5 to 7: another profiler is running")
    (finding,) = recorded(tmp_path / "run", kernels, ("warning", "not recorded", NO_STEP), steps=0)
    assert finding.title == f"No step was recorded: {NO_STEP} (and 1 more reason)" and finding.value == 2.0


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_a_run_that_ended_before_its_first_step_has_no_missing_steps(status: str, tmp_path: Path) -> None:
    for text in (NO_STEP, NOTHING):
        assert not recorded(tmp_path / text[7:20], ("warning", "not recorded", text), steps=0, status=status)


def test_the_worst_of_several_reasons_is_reported_and_the_rest_counted(tmp_path: Path) -> None:
    events = [("warning", "not recorded", f"{what} stopped at close: OSError", 5) for what in ("A", "B", "B")]
    (finding,) = recorded(tmp_path / "run", ("warning", "not recorded", "operators: no", 1), *events)
    assert finding.title.endswith("(and 2 more reasons)") and finding.value == 3.0


def test_requested_tensors_that_were_never_measured_are_missing(tmp_path: Path) -> None:
    (finding,) = recorded(tmp_path / "none", kinds=["weight_grad"])
    assert finding.where == "tensors" and "weight_grad" in finding.title
    assert not recorded(tmp_path / "unasked", kinds=[])


def test_a_finished_run_with_half_of_its_planned_steps_has_missing_steps(tmp_path: Path) -> None:
    (finding,) = recorded_with_plan(tmp_path / "planned", 60)
    assert "up to step 7 of 60 planned" in finding.title
    assert not recorded_with_plan(tmp_path / "whole", 8)


def recorded_with_plan(path: Path, planned: int) -> list[Finding]:
    with RunWriter(path, config={"steps": planned}) as writer:
        writer.event("started", detail="watching Net")
        writer.append("steps", {"step": range(8), "loss": [1.0] * 8})
    return [f for f in diagnose(load_run(path)) if f.code == "recording-incomplete"]
