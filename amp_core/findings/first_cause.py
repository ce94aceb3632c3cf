"""The first cause of a stretch of failing steps: the tensor, forward or backward, the module, the step.

    >>> first_cause(run, first=0, last=131)
    Cause(step=120, phase='forward', where='blocks.3.mlp.up', op='Linear', dtype='float16', value=812.0, ...)

One infinity spreads to everything after it in forward, to the loss and to every gradient. Rules that detect a
consequence name the first cause. A failing step from which the training recovered is not part of the stretch: most FP16
runs skip a few steps while the scaler calibrates its scale.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.steps import attempts, autocast_dtype
from amp_core.findings.signals import facts, model_name, signals
from amp_core.schema.event_kinds import NONFINITE_CONSTANT
from amp_core.store.run import Run
from amp_core.text import formatting

INPUT_DATA, LEARNING_RATE, LOSS = "input data", "learning rate", "loss"
"""Values of `Cause.where` if no module is to blame."""
MASKED_ROWS = "softmax of fully masked rows"
"""`Cause.op` if a mask made whole rows of scores -inf."""
ITS_BACKWARD = "its backward"
"""`Cause.op` if a module's backward made NaN of a finite gradient."""
_OPERATOR = "operator "
_ALL_BAD = re.compile(r"(\d+) of (\d+) gradients non-finite")
DIVERGED_RATIO, EARLY_DIVERGED_RATIO = 10.0, 100.0
"""A loss that rose by such a factor diverged; the second applies with only one or two losses before the rise."""
EXPLODED_NORM_RATIO = 10.0
"""A gradient norm this many times that of the previous steps, with a loss `PERSISTENT_RATIO` times theirs, exploded."""
RECENT_STEPS = 50
"""A rise that began within this number of last steps, or in the second half of them, caused the failure after it."""
PERSISTENT_RATIO = 3.0
"""So did an earlier rise that persisted: it ends at this multiple of the median of all losses."""

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cause:
    """The first cause of a stretch of failing steps."""

    step: int
    phase: str
    """`forward`, `backward`, or `divergence`: the loss rose over several steps while everything was finite."""
    where: str
    """Module, parameter whose gradient it is, `loss`, `input data`, or `learning rate`."""
    op: str
    """Class of the module, or another description of the operation; empty if unknown."""
    dtype: str
    """Of the output; empty for a gradient."""
    value: float | None
    """Largest magnitude of the module's input if that was finite; for a divergence the factor of the rise."""
    limit: float | None
    """The largest finite number of `dtype`."""
    clean: bool
    """Whether the module's input and weights were finite, so that the module itself is the cause."""

    @property
    def of_operator(self) -> bool:
        """Whether the operator is known that a module calls itself."""
        return self.op.startswith(_OPERATOR)

    @property
    def of_constant(self) -> bool:
        """Whether an argument without a gradient, such as a target, was not finite: `op` names it."""
        return self.op.startswith(NONFINITE_CONSTANT)

    @property
    def operator(self) -> str:
        """The operator of a module, or of the loss; otherwise as `op`."""
        return self.op.removeprefix(_OPERATOR)

    def in_words(self) -> str:
        """A clause for a title: `first in forward at step 120: blocks.3.mlp.up (Linear, float16)`."""
        if self.phase == "divergence":
            rise = formatting.number(self.value or 0.0)
            return f"the loss rose {rise}-fold while every value was still finite, up to step {self.step:,}"
        what = ", ".join(part for part in (self.op, self.dtype) if part)
        return f"first in {self.phase} at step {self.step:,}: {self.where}" + (f" ({what})" if what else "")


def first_cause(run: Run, first: int, last: int) -> Cause | None:
    """The first cause of the stretch of failing steps that ends in `last`, or of the last one before; None if the run
    does not show it. Steps before `first` do not count.

    A stretch ends at the first step made with finite loss and gradients. A skipped step leaves the weights unchanged,
    so it does not explain later non-finite outputs; non-finite gradients that were applied do.
    """
    outputs = signals(run, "non-finite output")
    output_steps = [s for s in (last,) if (outputs["step"] == s).any()]
    failing = np.union1d(failing_steps(run), np.array(output_steps, dtype=np.int64))
    failing = failing[(failing >= first) & (failing <= last)]
    if not len(failing):
        return None
    end = int(failing[-1])
    before = recovered_steps(run)
    before = before[before < end]
    begin = max(first, int(before[-1]) + 1) if len(before) else first
    cause = _first_in(run, outputs, begin, end)
    if cause is not None and cause.op == "its weights":
        applied = _applied(run)
        applied = applied[(applied >= first) & (applied < cause.step)]
        if len(applied) and (earlier := first_cause(run, first, int(applied[-1]))) is not None:
            return earlier
    if cause is None or (cause.where != INPUT_DATA and cause.op not in ("its weights", MASKED_ROWS)):
        return divergence(run, _broken_at(run, outputs, begin, end)) or cause
    return cause


def _broken_at(run: Run, outputs: pd.DataFrame, begin: int, end: int) -> int:
    """The first of these steps at which values other than scaled gradients were not finite; the step after them if
    there is none. A scaler skips steps when gradients grow with the loss, whose values are still finite."""
    frame = attempts(run)
    frame = frame[frame["has_loss"] & ~np.isfinite(frame["loss"])]
    steps = np.concatenate([frame["step"].to_numpy(), outputs["step"].dropna().to_numpy(), _applied(run)])
    steps = steps[(steps >= begin) & (steps <= end)]
    return int(steps.min()) if len(steps) else end + 1


def _first_in(run: Run, outputs: pd.DataFrame, begin: int, end: int) -> Cause | None:
    outputs = outputs[outputs["step"].between(begin, end)]
    backward = signals(run, "skipped", "non-finite")
    backward = backward[backward["step"].between(begin, end) & backward["name"].ne("")]
    applied = backward[backward["kind"] == "non-finite"]
    # Non-finite weights are usually the result of non-finite gradients; without such gradients before, they come first.
    since = applied["step"].min() if len(applied) else np.inf
    forward = outputs[outputs["detail"].ne("weights") | (outputs["step"] <= since)]
    if len(forward) and (forward["step"].iloc[0] <= since or _loss_broke(run, int(since))):
        return _output_cause(run, forward.iloc[0])
    gradients = applied if len(outputs) and len(applied) else backward
    return _gradient_cause(run, gradients.iloc[0], end) if len(gradients) else None


def failing_steps(run: Run) -> Steps:
    """Steps that were skipped, or whose loss or gradients were not finite, in order."""
    frame = run.cached_frame(["steps", "events"], _step_states)
    return frame["step"][frame["failing"]].to_numpy(dtype=np.int64)


def recovered_steps(run: Run) -> Steps:
    """All other steps, in order: made with finite loss and gradients."""
    frame = run.cached_frame(["steps", "events"], _step_states)
    return frame["step"][~frame["failing"]].to_numpy(dtype=np.int64)


def _step_states(run: Run) -> pd.DataFrame:
    """One row per step: step, failing."""
    table = run.table("steps")
    bad = pc.fill_null(table.column("skipped"), False).to_numpy()
    for column in ("loss", "grad_norm"):  # null is not a failure
        values = table.column(column).cast(pa.float64())
        bad = bad | (pc.is_valid(values).to_numpy() & ~np.isfinite(pc.fill_null(values, 0.0).to_numpy()))
    reported = signals(run, "skipped", "non-finite")["step"].dropna().to_numpy(dtype=np.int64)
    every = table.column("step").to_numpy().astype(np.int64)
    failing = np.union1d(every[bad], reported)
    steps = np.union1d(every, reported)
    return pd.DataFrame({"step": steps, "failing": np.isin(steps, failing)})


def stretch_end(run: Run, step: int) -> int:
    """The last step of the stretch of failing steps that contains `step`."""
    after = recovered_steps(run)
    after = after[after > step]
    failing = failing_steps(run)
    failing = failing[(failing >= step) & (failing < (after[0] if len(after) else np.inf))]
    return int(failing[-1]) if len(failing) else step


def stays_broken(run: Run) -> bool:
    """Whether anything other than a skipped step was not finite, or the run ends with skipped steps."""
    failing, good = failing_steps(run), recovered_steps(run)
    if len(signals(run, "non-finite", "non-finite output")):
        return True
    return len(failing) > 0 and (not len(good) or bool(failing[-1] > good[-1]))


def divergence(run: Run, before: int) -> Cause | None:
    """A loss that rose over several steps before step `before` while it and the forward pass were finite; None if it
    did not. This happens if the learning rate is too high, in any precision."""
    frame = attempts(run)
    good = frame["has_loss"] & np.isfinite(frame["loss"]) & (frame["step"] < before)
    good &= ~frame["step"].isin(_applied(run))
    loss = frame["loss"][good].to_numpy(dtype=float)
    count = len(loss)
    if count < 2:
        return None
    if (rise := _explosion(loss, frame["grad_norm"][good].to_numpy(dtype=float))) is not None:
        step = int(frame["step"][good].iloc[-1])
        return Cause(step, "divergence", LEARNING_RATE, "", "", rise, None, clean=False)
    # The rise begins at the first step from which every loss is above all earlier ones.
    highest, lowest = np.maximum.accumulate(loss)[:-1], np.minimum.accumulate(loss[::-1])[::-1][1:]
    starts = np.flatnonzero(lowest > highest) + 1
    if not len(starts) or (
        count - starts[0] < 2 < count
    ):  # a single high loss is not a rise, except after the first update
        return None
    calm, top = float(np.median(loss[: starts[0]])), float(loss[-3:].max())
    lately = starts[0] >= count - max(RECENT_STEPS, count // 2)
    if calm <= 0 or not (lately or top >= PERSISTENT_RATIO * float(np.median(loss))):
        return None
    if top < (DIVERGED_RATIO if starts[0] >= 3 else EARLY_DIVERGED_RATIO) * calm:
        return None
    step = int(frame["step"][good].iloc[-1])
    return Cause(step, "divergence", LEARNING_RATE, "", "", top / calm, None, clean=False)


def _explosion(losses: npt.NDArray[np.float64], norms: npt.NDArray[np.float64]) -> float | None:
    """By how much the last loss is above those before, if the norm of the gradients exploded with it; else None. A
    recurrent model may go from small numbers to infinity in three steps."""
    made = np.isfinite(norms) & (norms > 0)  # a scaler skips steps while the gradients grow
    losses, norms, last = losses[made], norms[made], bool(made[-1])
    calm = float(np.median(losses[:-1])) if last and len(losses) > 1 else 0.0
    if calm <= 0:
        return None
    rise = float(losses[-1]) / calm
    exploded = norms[-1] >= EXPLODED_NORM_RATIO * float(np.median(norms[:-1]))
    return rise if rise >= PERSISTENT_RATIO and exploded else None


def _applied(run: Run) -> Steps:
    """Steps that were made with non-finite gradients."""
    return signals(run, "non-finite")["step"].dropna().to_numpy(dtype=np.int64)


def _loss_broke(run: Run, step: int) -> bool:
    """Whether the loss of a step was not finite: then forward was not either, even if recorded only later."""
    steps = run.table("steps").select(["step", "loss"]).drop_null()
    at = steps.column("step").to_numpy() == step
    return bool((at & ~np.isfinite(steps.column("loss").to_numpy())).any())


def _output_cause(run: Run, row: "pd.Series[Any]") -> Cause:
    name, detail, op = str(row["name"]), str(row["detail"]), str(row["op"])
    if op == "loss":
        return _loss_cause(run, row)
    if detail == "data":
        where, op = INPUT_DATA, ""
    elif detail == "input":  # computed between two modules, by their parent
        where, op = name.rpartition(".")[0] or model_name(run), f"before {name}"
    else:
        where, op = name or model_name(run), "its weights" if detail == "weights" else op
    step = int(float(str(row["step"])))
    dtype = row["dtype"] if isinstance(row["dtype"], str) else ""
    inner = signals(run, "inner overflow")
    inner = inner[(inner["step"] == step) & (inner["name"] == name.rpartition(".")[0])]
    if detail == "input" and len(inner):
        op, dtype = f"{inner['op'].iloc[0]} before {name}", str(inner["dtype"].iloc[0])
    clean = detail == "" and where != LOSS
    if detail in ("", "input") and (masked := _masked_in(run, step, where)) is not None:
        return _forward_cause(step, masked or where, MASKED_ROWS, dtype, row, clean=False)
    if detail in ("", "input") and (made := _operator_in(run, step, name, detail)) is not None:
        found = str(made["op"])
        if found.startswith(NONFINITE_CONSTANT):
            return _forward_cause(step, where, found, str(made["dtype"]), made, clean=False)
        return _forward_cause(step, where, _OPERATOR + found, str(made["dtype"]), made, clean=clean)
    return _forward_cause(step, where, op, dtype, row, clean=clean)


def _forward_cause(step: int, where: str, op: str, dtype: str, row: "pd.Series[Any]", *, clean: bool) -> Cause:
    return Cause(step, "forward", where, op, dtype, _number(row["value"]), _number(row["limit"]), clean)


def _operator_in(run: Run, step: int, name: str, detail: str) -> "pd.Series[Any] | None":
    """The operator that made the output of module `name` non-finite, or its input, if it was found since."""
    module = name.rpartition(".")[0] if detail == "input" else name
    frame = signals(run, "non-finite operator")
    frame = frame[(frame["step"] >= step) & (frame["detail"] == "module") & (frame["name"] == module)]
    return frame.iloc[0] if len(frame) else None


def _loss_cause(run: Run, row: "pd.Series[Any]") -> Cause:
    """A loss that is not finite although the outputs of all modules are, with its operator if that was found since."""
    step, where, op, source = int(float(str(row["step"]))), LOSS, "", row
    operators = signals(run, "non-finite operator")
    operators = operators[(operators["step"] >= step) & (operators["detail"] != "module")]
    if (masked := _masked_in(run, step, LOSS)) is not None:
        where, op = masked or LOSS, MASKED_ROWS
    elif len(operators):
        source = operators.iloc[0]
        op = str(source["op"])
    dtype = source["dtype"] if isinstance(source["dtype"], str) else ""
    return _forward_cause(step, where, op, dtype, source, clean=False)


def _masked_in(run: Run, step: int, where: str) -> str | None:
    """The module whose fully masked rows explain that `where` was not finite, empty if not known; else None."""
    frame = signals(run, "masked rows")
    for name in frame["name"][frame["step"] == step]:
        inner, outer = f"{name}.", f"{where}."
        if not name or inner.startswith(outer) or outer.startswith(inner):
            return str(name)
    return None


def _gradient_cause(run: Run, row: "pd.Series[Any]", end: int) -> Cause:
    step, name = int(float(str(row["step"]))), str(row["name"])
    if _born_in_loss(run, row, end):
        return Cause(step, "backward", LOSS, "its derivative", "", None, None, clean=False)
    if (module := _nan_made_in_backward_of(run, step, end)) is not None:
        return Cause(step, "backward", module, ITS_BACKWARD, "", None, None, clean=False)
    return Cause(step, "backward", name, "gradient", "", None, None, clean=False)


def _born_in_loss(run: Run, row: "pd.Series[Any]", end: int) -> bool:
    """Whether every gradient was non-finite, and the last module already got NaN from the loss.

    Under a loss scale, FP16 gradients overflow to infinities first; a gradient that holds NaN and no infinity did not
    overflow there. Without FP16, the gradient of a finite product is finite.
    """
    match = _ALL_BAD.match(str(row["detail"]))
    if match is None or match[1] != match[2]:
        return False
    if autocast_dtype(run) != "float16" and "float16" not in facts(run.head.model, "dtypes").values():
        return True
    step, module = int(float(str(row["step"]))), str(row["name"]).rpartition(".")[0]
    table = run.table("tensors").select(["step", "name", "kind", "inf", "nan"])
    table = table.filter(pc.and_(pc.equal(table.column("kind"), "output_grad"), pc.equal(table.column("name"), module)))
    frame = table.to_pandas()
    frame = frame[frame["step"].between(step, end)]
    return len(frame) > 0 and bool((frame["nan"] > 0).all() and (frame["inf"] == 0).all())


def _nan_made_in_backward_of(run: Run, step: int, end: int) -> str | None:
    """The module whose backward made NaN, in all sampled steps of the stretch: the gradient that flows into it is
    finite, and the next that arrived holds NaN and no infinity. A scaled gradient that overflows is infinite first."""
    table = run.table("tensors").select(["step", "name", "kind", "rank", "inf", "nan"])
    table = table.filter(pc.and_(pc.equal(table.column("kind"), "output_grad"), pc.equal(table.column("rank"), 0)))
    frame = table.to_pandas()
    made: set[str | None] = set()
    for _, rows in frame[frame["step"].between(step, end)].groupby("step"):
        bad = np.flatnonzero((rows["nan"] > 0) | (rows["inf"] > 0))
        first = int(bad[0]) if len(bad) else 0
        clean = first > 0 and rows["inf"].iloc[first] == 0
        made.add(str(rows["name"].iloc[first - 1]) if clean else None)
    return made.pop() if len(made) == 1 else None


def _number(value: object) -> float | None:
    number = float(str(value)) if value is not None else float("nan")
    return number if np.isfinite(number) else None
