"""Checks that a framework's run is complete and has no findings."""

from collections.abc import Sequence

import numpy as np

from amp_core import Run, diagnose

FULL = ("loss", "loss_scale", "grad_norm", "lr", "samples", "step_ms", "data_ms", "forward_ms", "backward_ms")


def missing_values(run: Run, steps: int, every: int, parameters: set[str], columns: Sequence[str] = FULL) -> list[str]:
    """The missing values: each step must have a row without nulls in these columns, and each sampled step the gradients
    of all parameters."""
    missing = [] if run.status == "finished" else [f"status {run.status}: {run.end_reason}"]
    if run.steps.step.tolist() != list(range(steps)):
        missing.append(f"{len(run.steps)} rows of {steps} steps")
    nulls = {column: run.table("steps").column(column).null_count for column in columns}
    missing += [f"{column} null {count} times" for column, count in nulls.items() if count]
    if not ((run.steps.samples > 0).all() and np.isfinite(run.steps.loss).all()):
        missing.append("samples or losses that are no number")
    grads = run.tensors(kind="weight_grad")
    if sorted(grads.step.unique()) != list(range(0, steps, every)):
        missing.append(f"{grads.step.nunique()} steps sampled of {len(range(0, steps, every))}")
    few = [step for step, rows in grads.groupby("step") if sorted(rows.name) != sorted(parameters)]
    return missing + ([f"not every parameter once at steps {few}"] if few else [])


def assert_complete(run: Run, steps: int, every: int, parameters: set[str]) -> None:
    """No value is missing, and module outputs were recorded."""
    assert missing_values(run, steps, every, parameters) == []
    assert len(run.tensors(kind="output_grad")) > 0


def warning_codes(run: Run) -> list[str]:
    """Codes of the errors and warnings that `diagnose` reports."""
    return [f.code for f in diagnose(run) if f.severity != "info"]
