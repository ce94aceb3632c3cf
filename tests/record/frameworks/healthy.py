"""What every framework's run must be: whole, and without anything to warn of."""

from collections.abc import Sequence

import numpy as np

from amp_core import Run, diagnose

FULL = ("loss", "loss_scale", "grad_norm", "lr", "samples", "step_ms", "data_ms", "forward_ms", "backward_ms")


def holes(run: Run, steps: int, every: int, parameters: set[str], columns: Sequence[str] = FULL) -> list[str]:
    """What is missing: there should be a row for each step with nothing missing in these columns, and every parameter's
    gradient on each sampled step."""
    found = [] if run.status == "finished" else [f"status {run.status}: {run.end_reason}"]
    if run.steps.step.tolist() != list(range(steps)):
        found.append(f"{len(run.steps)} rows of {steps} steps")
    nulls = {column: run.table("steps").column(column).null_count for column in columns}
    found += [f"{column} null {count} times" for column, count in nulls.items() if count]
    if not ((run.steps.samples > 0).all() and np.isfinite(run.steps.loss).all()):
        found.append("samples or losses that are no number")
    grads = run.tensors(kind="weight_grad")
    if sorted(grads.step.unique()) != list(range(0, steps, every)):
        found.append(f"{grads.step.nunique()} steps sampled of {len(range(0, steps, every))}")
    few = [step for step, rows in grads.groupby("step") if sorted(rows.name) != sorted(parameters)]
    return found + ([f"not every parameter once at steps {few}"] if few else [])


def assert_whole(run: Run, steps: int, every: int, parameters: set[str]) -> None:
    """Nothing is missing, and the outputs of modules were seen."""
    assert holes(run, steps, every, parameters) == []
    assert len(run.tensors(kind="output_grad")) > 0


def warned(run: Run) -> list[str]:
    """Codes of the errors and warnings that `diagnose` finds."""
    return [f.code for f in diagnose(run) if f.severity != "info"]
