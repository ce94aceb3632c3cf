"""What every framework's run must be: whole, and without anything to warn of."""

import numpy as np

from amp_core import Run, diagnose

FULL = ("loss", "loss_scale", "grad_norm", "lr", "samples", "step_ms", "data_ms", "forward_ms", "backward_ms")


def assert_whole(run: Run, steps: int, every: int, parameters: set[str]) -> None:
    """A row for each step with nothing missing, and every parameter's gradient on each sampled step."""
    assert run.status == "finished"
    assert run.steps.step.tolist() == list(range(steps))
    for column in FULL:
        assert run.table("steps").column(column).null_count == 0, column
    assert np.isfinite(run.steps.loss).all() and (run.steps.samples > 0).all()
    grads = run.tensors(kind="weight_grad")
    assert sorted(grads.step.unique()) == list(range(0, steps, every))
    for _, rows in grads.groupby("step"):
        assert set(rows.name) == parameters
    assert len(run.tensors(kind="output_grad")) > 0


def warned(run: Run) -> list[str]:
    """Codes of the errors and warnings that `diagnose` finds."""
    return [f.code for f in diagnose(run) if f.severity != "info"]
