"""Rules on the loss and the loss scale, from the steps and the scale itself.

The codes and their reasons: PyTorch's notes on automatic mixed precision, "Gradient scaling", and the docstring of
`torch.amp.GradScaler` ("skipping should occur rarely, once every few hundred or thousand iterations").
"""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis import scale_summary, scale_trace, skip_episodes
from amp_core.analysis.numerics.loss_scale import CALIBRATION_STEPS
from amp_core.analysis.numerics.what_if import GRADIENTS
from amp_core.analysis.steps import attempts
from amp_core.findings import remedies
from amp_core.findings.first_cause import Cause, divergence, failing_steps, first_cause, stretch_end
from amp_core.findings.model import LOSS_SCALING, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.scaler import scaler_with_bf16
from amp_core.findings.signals import signals
from amp_core.findings.snippets import BF16
from amp_core.formats import FORMATS
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_STRETCHES = 32
"""Most stretches of failing steps whose cause is searched."""
MIN_COLLAPSE_SKIPS = 5
"""This number of skips in a row below a scale of 1 is not calibration."""
MIN_RISE_RATIO, MIN_NORM_RATIO = 1000.0, 10.0
"""A finite loss that rose so much, and the norms of gradients with it, diverged: no objective that changes during a
training does both."""
HIGH_SCALE = 2.0**24
"""At this scale 2^-48 is not zero in FP16."""
MIN_ZERO_GROWTHS = 4
"""Fewest growths of the scale while all gradients are zero: a loss with a margin may be zero for a while."""
FAR_FROM_OVERFLOW_RATIO = 2.0**-8
"""A largest value below this ratio to the format's largest is far from overflow."""


@rule(
    Entry(
        code="loss-nonfinite",
        severity="error",
        family=LOSS_SCALING,
        order=200,
        follows=(
            "hidden-overflow",
            "bf16-model-in-fp16",
            "activation-overflow",
            "eps-rounds-to-zero",
            "mask-constant-overflow",
            "fully-masked-row",
            "optimizer-eps-rounds-to-zero",
            "own-loss-scale",
            "optimizer-step-bypasses-scaler",
            "unscale-per-microbatch",
            "half-model",
        ),
        follows_in_place=("half-accumulation",),
        what="The loss is NaN or infinite. Skipped steps with non-finite gradients are normal; such a loss is not.",
        signal="The recorded loss, the first module with a non-finite output, and whether the loss rose before.",
        threshold="One such loss; a step without a recorded loss does not count. A loss that rose 10-fold or more "
        "while everything was finite is reported as divergence.",
        advice="A non-finite loss is never normal, and no loss scale fixes it: the data was not finite, the "
        "learning rate was too high, or the forward pass overflowed. Clean the data, lower the learning rate, or "
        "find the first module with a non-finite output and, if it overflows float16, run it in float32 or use "
        "bfloat16.",
        snippet="def check(module, args, output):\n"
        "    if torch.is_tensor(output) and not output.isfinite().all():\n"
        "        raise FloatingPointError(f'{names[module]} produced a non-finite output')\n"
        "\n"
        "names = {module: name for name, module in model.named_modules()}\n"
        "for module in names:\n"
        "    module.register_forward_hook(check)",
        frameworks=BF16,
        page="",
    )
)
def loss_nonfinite(run: Run) -> list[Finding]:
    """`loss-nonfinite`: a recorded loss is NaN or infinite. A loss that was not recorded does not count."""
    steps = run.table("steps").select(["step", "loss"]).drop_null()
    loss = steps.column("loss").to_numpy()
    bad = np.flatnonzero(~np.isfinite(loss))
    if not len(bad):
        return []
    numbers = steps.column("step").to_numpy()
    first, last = int(numbers[bad[0]]), int(numbers[bad[-1]])
    num_steps, steps_bad = (len(np.unique(some)) for some in (numbers, numbers[bad]))  # several ranks have a row each
    value = float(loss[bad[0]])
    word = "NaN" if math.isnan(value) else "infinite"
    if word == "infinite" and np.isnan(loss[bad]).any():
        word = "infinite or NaN"
    cause = _cause_of_loss(run, numbers[bad])
    remedy = remedies.loss_remedy(run, cause)
    return [
        make_finding(
            "loss-nonfinite",
            f"The loss is {word} from step {first:,} on ({steps_bad:,} of {num_steps:,} steps)"
            + (f"; {cause.in_words()}" if cause else ""),
            cause.where if cause else "loss",
            steps=(first, last),
            value=float(steps_bad),
            limit=0.0,
            unit="steps",
            remedy=remedy,
        )
    ]


def _cause_of_loss(run: Run, bad: npt.NDArray[np.int64]) -> Cause | None:
    """The first known cause of the stretches of steps with a non-finite loss."""
    first = int(bad[0])
    for _ in range(MAX_STRETCHES):
        end = stretch_end(run, int(bad[0]))
        cause = first_cause(run, 0, end)  # gradients may have broken before the loss did
        # All gradients of a non-finite loss are non-finite, so they are not its cause.
        if cause is not None and (cause.phase != "backward" or cause.step < bad[0]):
            return cause
        bad = bad[bad > end]
        if not len(bad):
            break
    half = signals(run, "loss dtype")
    half = half[half["dtype"] == "float16"]
    if half.empty:
        return None
    largest = FORMATS["fp16"].max_value  # on a GPU only the dtype of the loss is known
    return Cause(first, "forward", "loss", "", "float16", None, largest, clean=False)


@rule(
    Entry(
        code="loss-diverged",
        severity="error",
        family=LOSS_SCALING,
        order=205,
        what="The loss rose without end while every value was finite: the training diverged.",
        signal="The recorded loss and the norm of the gradients.",
        threshold="Every loss since the rise began is above all earlier ones, and the last are 1,000 times as high, "
        "with gradients 10 times as large. If the loss was not finite in the end, `loss-nonfinite` has it.",
        advice="A loss that grows while all values are finite is not a matter of the number format: the updates are "
        "too large. Lower the learning rate, add warm-up, or clip the gradients.",
        snippet=remedies.SLOWER,
        page="",
    )
)
def loss_diverged(run: Run) -> list[Finding]:
    """`loss-diverged`: the loss rose a thousandfold and is still finite."""
    frame = attempts(run)
    loss = frame["loss"][frame["has_loss"]]
    if loss.empty or not np.isfinite(loss).all():
        return []
    cause = divergence(run, int(frame["step"].iloc[-1]) + 1)
    failing = failing_steps(run)
    if cause is None or (rise := cause.value or 0.0) < MIN_RISE_RATIO or (len(failing) and failing[-1] > cause.step):
        return []
    norms = frame["grad_norm"].dropna().to_numpy(dtype=float)
    if len(norms) < 4 or not np.median(norms[-3:]) >= MIN_NORM_RATIO * np.median(norms[: len(norms) // 2]):
        return []
    title = f"The loss rose {formatting.number(rise)}-fold, while every value was finite, up to step {cause.step:,}"
    return [
        make_finding(
            "loss-diverged",
            title,
            cause.where,
            steps=(int(frame["step"].iloc[0]), cause.step),
            value=rise,
            limit=MIN_RISE_RATIO,
            unit="times the loss before",
        )
    ]


@rule(
    Entry(
        code="scale-collapse",
        severity="error",
        family=LOSS_SCALING,
        order=210,
        follows=(
            "unscale-per-microbatch",
            "bf16-model-in-fp16",
            "activation-overflow",
            "eps-rounds-to-zero",
            "mask-constant-overflow",
            "fully-masked-row",
            "loss-nonfinite",
        ),
        what="Consecutive steps are skipped and the loss scale falls below 1: gradients are non-finite at any scale.",
        signal="Consecutive skips, the scale, and whether the forward pass itself was finite.",
        threshold="5 skips in a row and a scale below 1, where scaling only shrinks gradients. PyTorch's GradScaler "
        "documents that a scale below 1 means that float16 cannot hold the gradients. A warning if the last steps "
        "were not skipped.",
        advice="A smaller loss scale no longer helps: gradients are non-finite at any scale, so the overflow is in "
        "the forward pass, the data or the learning rate. Check that the loss is finite, run the module that "
        "overflows in float32, or use bfloat16.",
        snippet="with torch.autocast(device_type, dtype=torch.bfloat16):   # the range of float32: no GradScaler\n"
        "    loss = loss_fn(model(x), y)\n"
        "loss.backward()\n"
        "optimizer.step()",
        frameworks=BF16,
    )
)
def scale_collapse(run: Run) -> list[Finding]:
    """`scale-collapse`: consecutive steps are skipped while the loss scale falls below 1. An error if the run does not
    recover, a warning if it does."""
    episodes = skip_episodes(run)
    if not len(episodes):
        return []
    trace = scale_trace(run)
    after = episodes["scale_after"].fillna(trace["loss_scale"].iloc[-1])  # NaN in an episode that is not over
    collapsed = episodes[(after < 1) & (episodes["skips"] >= MIN_COLLAPSE_SKIPS)]
    if not len(collapsed):
        return []
    place = int(collapsed["skips"].to_numpy().argmax())
    worst = collapsed.iloc[place]
    first, last, skips = int(worst["first"]), int(worst["last"]), int(worst["skips"])
    lowest = float(after[collapsed.index].iloc[place])
    lost = bool(trace["skipped"].iloc[-MIN_COLLAPSE_SKIPS:].all())
    cause = first_cause(run, first, last)
    return [
        make_finding(
            "scale-collapse",
            f"{skips:,} steps in a row were skipped and the loss scale fell to {formatting.scale(lowest)}"
            + (f"; {cause.in_words()}" if cause else ""),
            (cause.where if cause else str(worst["tensors"])) or "loss scale",
            severity="error" if lost else "warning",
            steps=(first, last),
            value=lowest,
            limit=1.0,
            unit="loss scale",
            remedy=remedies.scale_remedy(run, cause, recovers=not lost),
        )
    ]


@rule(
    Entry(
        code="scale-unbounded",
        severity="warning",
        family=LOSS_SCALING,
        order=330,
        follows=("fp16-without-scaler",),
        what="The loss scale grows without bound, because gradients are zero or so small that they never overflow.",
        signal="The loss scale, and the largest gradient at that scale.",
        threshold="Every recorded gradient is zero while the scale grows, or from some step below a scale of 2^24 on; "
        "or the scale is 2^24 or more, where even 2^-48 is representable, and the largest scaled value is at least 2^8 "
        "below the FP16 maximum.",
        advice="Nothing limits the growth, so gradients that should flow are missing or vanishingly small. Look for "
        "a detached loss, a branch multiplied by zero, or a loss divided too often, and use bfloat16 if such small "
        "gradients are intended.",
        snippet="for name, parameter in model.named_parameters():\n"
        "    if parameter.grad is None or not parameter.grad.any():\n"
        "        print(name, 'has no gradient')",
        frameworks=BF16,
    )
)
def scale_unbounded(run: Run) -> list[Finding]:
    """`scale-unbounded`: the scale grows while every gradient is zero, or beyond `HIGH_SCALE` although the largest
    value stays far from overflowing."""
    summary = scale_summary(run)
    if not summary.has_scaler or not summary.growths or summary.last is None or scaler_with_bf16(run):
        return []
    trace = scale_trace(run)
    norms = trace["grad_norm"].to_numpy()
    first, last = int(trace["step"].iloc[0]), int(trace["step"].iloc[-1])
    grown_to = formatting.scale(summary.last)
    dead = signals(run, "dead operator")
    where, remedy = "loss scale", None
    if np.isfinite(norms).any() and not np.nan_to_num(norms).any():
        times = formatting.plural(summary.growths, "time")
        title = f"The loss scale grew {times} to {grown_to} while every gradient was zero"
        if len(dead):
            op = str(dead["op"].iloc[0])
            title += f": {op} next to the loss passes none"
            where, remedy = "loss", _dead_remedy(op)
    elif summary.last >= HIGH_SCALE and (since := _zero_since(trace)) is not None:
        title = f"The loss scale grew to {grown_to}, and every gradient is zero from step {since:,} on"
        first = since
    elif summary.last >= HIGH_SCALE and not _backed_off(trace) and _far_from_overflow(run):
        title = f"The loss scale grew to {grown_to} and no gradient comes near overflow"
    else:
        return []
    return [
        make_finding(
            "scale-unbounded",
            title,
            where,
            steps=(first, last),
            value=summary.last,
            limit=HIGH_SCALE,
            unit="loss scale",
            remedy=remedy,
        )
    ]


def _dead_remedy(op: str) -> Remedy:
    return Remedy(
        f"All values that {op} gets are where it is flat, such as an output far outside of its limits, so nothing is "
        "learned at any loss scale. Initialize the output within them, or leave the operator out of the training.",
        "print(output.min(), output.max())   # before the clamp, relu or sigmoid",
    )


def _zero_since(trace: pd.DataFrame) -> int | None:
    """The step from which on all recorded gradients are zero, if the scale reached `HIGH_SCALE` only after it, by
    growing `MIN_ZERO_GROWTHS` times or more."""
    norms = trace["grad_norm"].to_numpy(dtype=float)
    nonzero = np.flatnonzero(norms != 0)  # NaN, of a norm that was not recorded, too
    begin = int(nonzero[-1]) + 1 if len(nonzero) else 0
    scales = trace["loss_scale"].to_numpy(dtype=float)[begin:]
    if not len(scales) or scales[0] >= HIGH_SCALE or np.count_nonzero(scales[1:] > scales[:-1]) < MIN_ZERO_GROWTHS:
        return None
    return int(trace["step"].iloc[begin])


def _backed_off(trace: pd.DataFrame) -> bool:
    """Whether the scale fell after the calibration."""
    settled = trace[trace["step"] >= trace["step"].iloc[0] + CALIBRATION_STEPS]
    scales = settled["loss_scale"].to_numpy()
    return bool((scales[1:] < scales[:-1]).any())


def _far_from_overflow(run: Run) -> bool:
    """Whether the largest gradient of the last sampled step, as scaled, was far below FP16's largest value."""
    table = run.table("tensors").select(["step", "kind", "absmax", "loss_scale"])
    table = table.filter(pc.is_in(table.column("kind"), pa.array(GRADIENTS)))
    if not table.num_rows:
        return False
    table = table.filter(pc.equal(table.column("step"), pc.max(table.column("step"))))
    largest = pc.max(table.column("absmax")).as_py()
    return largest is not None and 0 < largest < FORMATS["fp16"].max_value * FAR_FROM_OVERFLOW_RATIO
