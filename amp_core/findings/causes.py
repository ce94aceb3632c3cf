"""The first thing that was not finite: which tensor, in forward or backward, in which module, by what, at which step.

    >>> first_cause(run, first=120, last=131)
    Cause(step=120, phase='forward', where='blocks.3.mlp.up', op='Linear', dtype='float16', value=812.0, ...)

One infinity makes hundreds: everything after it in forward, the loss, and every gradient. Rules that find what became
of it name what came first.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.findings._signals import model_name, signals
from amp_core.run import Run


@dataclass(frozen=True)
class Cause:
    """What was first not finite in a stretch of steps."""

    step: int
    phase: str
    """`forward` or `backward`."""
    where: str
    """Module, parameter whose gradient it is, `loss`, or `input data`."""
    op: str
    """Class of the module, or what else is known of the operation; empty where nothing is."""
    dtype: str
    """Of the output; empty for a gradient."""
    value: float | None
    """Largest magnitude of the module's input, where its input was finite."""
    limit: float | None
    """The largest finite number of `dtype`."""
    clean: bool
    """Whether what went into the module, input and weights, was finite: then it is its own doing."""

    def in_words(self) -> str:
        """A clause for a title: `first in forward at step 120: blocks.3.mlp.up (Linear, float16)`."""
        what = ", ".join(part for part in (self.op, self.dtype) if part)
        return f"first in {self.phase} at step {self.step:,}: {self.where}" + (f" ({what})" if what else "")


def first_cause(run: Run, first: int, last: int) -> Cause | None:
    """What was first not finite from step `first` to step `last`; None where the run does not tell."""
    outputs = signals(run, "non-finite output")
    gradients = signals(run, "skipped", "non-finite")
    outputs = outputs[outputs["step"].between(first, last)]
    backward = gradients[gradients["step"].between(first, last) & gradients["name"].ne("")]
    # Weights that are not finite are mostly what bad gradients left; where there were none before, they come first.
    since = backward["step"].min() if len(backward) else np.inf
    forward = outputs[outputs["detail"].ne("weights") | (outputs["step"] <= since)]
    if forward.empty and backward.empty:
        return None
    if forward.empty:
        return _of_gradient(backward.iloc[0])
    if backward.empty or forward["step"].iloc[0] <= backward["step"].iloc[0] or _loss_broke(run, backward):
        return _of_output(run, forward.iloc[0])
    return _of_gradient(backward.iloc[0])


def _loss_broke(run: Run, backward: pd.DataFrame) -> bool:
    """Whether the loss was not finite at the step of the first bad gradient: then forward was, seen only later."""
    steps = run.table("steps").select(["step", "loss"]).drop_null()
    at = steps.column("step").to_numpy() == int(backward["step"].iloc[0])
    return bool((at & ~np.isfinite(steps.column("loss").to_numpy())).any())


def _of_output(run: Run, row: "pd.Series[Any]") -> Cause:
    name, detail, op = str(row["name"]), str(row["detail"]), str(row["op"])
    if op == "loss":
        where, op = "loss", ""
    elif detail == "data":
        where, op = "input data", ""
    elif detail == "input":  # made between two modules, by the one around them
        where, op = name.rpartition(".")[0] or model_name(run), f"before {name}"
    else:
        where, op = name or model_name(run), "its weights" if detail == "weights" else op
    return Cause(
        step=int(float(str(row["step"]))),
        phase="forward",
        where=where,
        op=op,
        dtype=row["dtype"] if isinstance(row["dtype"], str) else "",
        value=_number(row["value"]),
        limit=_number(row["limit"]),
        clean=detail == "" and where != "loss",
    )


def _of_gradient(row: "pd.Series[Any]") -> Cause:
    step = int(float(str(row["step"])))
    return Cause(step, "backward", str(row["name"]), "gradient", "", None, None, clean=False)


def _number(value: object) -> float | None:
    number = float(str(value)) if value is not None else float("nan")
    return number if np.isfinite(number) else None
