"""Rules on the loss, the loss scale and the scaler: what follows from steps, settings and the scale itself.

The codes and their reasons: PyTorch's notes on automatic mixed precision, "Gradient scaling", and the docstring of
`torch.amp.GradScaler` ("skipping should occur rarely, once every few hundred or thousand iterations").
"""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core import words
from amp_core.analysis import rank_scales, scale_summary, scale_trace, skip_episodes
from amp_core.analysis._steps import attempts, counted
from amp_core.analysis.whatif import GRADIENTS
from amp_core.findings import remedies
from amp_core.findings._found import Remedy, found
from amp_core.findings._signals import facts, last_step, signals
from amp_core.findings.causes import Cause, first_cause, stretch_end
from amp_core.findings.guide.scaling import LOOP
from amp_core.findings.model import Finding
from amp_core.formats import FORMATS
from amp_core.run import Run

MOST_STRETCHES = 32
"""So many stretches of failing steps are asked for their cause."""
CALIBRATION_STEPS = 25
"""Skips that begin within the first so many steps are a scaler finding its scale: from 2^16 down to 1 takes 16."""
COLLAPSE_SKIPS = 5
"""So many skips in a row below a scale of 1 are no calibration."""
HIGH_SCALE = 2.0**24
"""At this scale 2^-48 is still a number in FP16."""
FAR = 2.0**-8
"""A largest value below this part of the format's largest is far from overflowing."""


def loss_nonfinite(run: Run) -> list[Finding]:
    """`loss-nonfinite`: a recorded loss is NaN or infinite. A loss that was not recorded says nothing."""
    steps = run.table("steps").select(["step", "loss"]).drop_null()
    loss = steps.column("loss").to_numpy()
    bad = np.flatnonzero(~np.isfinite(loss))
    if not len(bad):
        return []
    numbers = steps.column("step").to_numpy()
    first, last = int(numbers[bad[0]]), int(numbers[bad[-1]])
    each = attempts(run)[["step", "stands_for"]]  # of several ranks each has a row above
    every, steps_bad = (counted(each[each["step"].isin(some)]) for some in (numbers, numbers[bad]))
    value = float(loss[bad[0]])
    word = "NaN" if math.isnan(value) else "infinite"
    cause = _cause_of_loss(run, numbers[bad])
    remedy = remedies.of_loss(run, cause)
    return [
        found(
            "loss-nonfinite",
            f"The loss is {word} from step {first:,} on ({steps_bad:,} of {every:,} steps)"
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
    """What began the first stretch of steps with such a loss of which that is known."""
    first = int(bad[0])
    for _ in range(MOST_STRETCHES):
        end = stretch_end(run, int(bad[0]))
        cause = first_cause(run, 0, end)  # gradients may have broken before the loss did
        # Every gradient of a loss that is not finite is not: that names no cause.
        if cause is not None and (cause.phase != "backward" or cause.step < bad[0]):
            return cause
        bad = bad[bad > end]
        if not len(bad):
            break
    half = signals(run, "loss dtype")
    half = half[half["dtype"] == "float16"]
    if half.empty:
        return None
    largest = FORMATS["fp16"].max_value  # on a GPU the loss itself is not looked at: its dtype is all that is known
    return Cause(first, "forward", "loss", "", "float16", None, largest, clean=False)


def scale_collapse(run: Run) -> list[Finding]:
    """`scale-collapse`: step after step is skipped while the loss scale falls below 1. An error where the run does not
    recover, a warning where it does."""
    episodes = skip_episodes(run)
    if not len(episodes):
        return []
    trace = scale_trace(run)
    after = episodes["scale_after"].fillna(trace["loss_scale"].iloc[-1])  # of one that goes on: how far it has come
    collapsed = episodes[(after < 1) & (episodes["skips"] >= COLLAPSE_SKIPS)]
    if not len(collapsed):
        return []
    worst = collapsed.iloc[int(collapsed["skips"].to_numpy().argmax())]
    first, last, skips = int(worst["first"]), int(worst["last"]), int(worst["skips"])
    lowest = float(after[collapsed.index].min())
    lost = bool(trace["skipped"].iloc[-COLLAPSE_SKIPS:].all())
    cause = first_cause(run, first, last)
    return [
        found(
            "scale-collapse",
            f"{skips:,} steps in a row were skipped and the loss scale fell to {lowest:.3g}"
            + (f"; {cause.in_words()}" if cause else ""),
            (cause.where if cause else str(worst["tensors"])) or "loss scale",
            severity="error" if lost else "warning",
            steps=(first, last),
            value=lowest,
            limit=1.0,
            unit="loss scale",
            remedy=remedies.of_scale(run, cause),
        )
    ]


def fp16_without_scaler(run: Run) -> list[Finding]:
    """`fp16-without-scaler`: the forward pass ran in float16 autocast and no GradScaler was at work, or one whose loss
    scale was 1 all the time, which does nothing. A warning where one was at work of which the recorder knew nothing."""
    summary = scale_summary(run)
    if run.head.config.get("autocast_dtype") != "float16" and run.head.config.get("precision") != "fp16-unscaled":
        return []
    if not summary.attempts or (summary.has_scaler and summary.highest != 1.0):
        return []
    if run.head.config.get("scaler_unseen"):
        return [_unseen_scaler()]
    if _is_idle(run):
        return [_idle_scaler()]
    said = "with a loss scale of 1, which lifts nothing" if summary.has_scaler else "without a loss scale"
    return [
        found(
            "fp16-without-scaler", f"Training in float16 {said}", "GradScaler", value=1.0, unit="loss scale", limit=None
        )
    ]


def _is_idle(run: Run) -> bool:
    """Whether the watched scaler began with a scale other than 1 and never scaled a loss."""
    scaler = facts(run.head.config, "scaler")
    begun = scaler.get("init_scale")
    return scaler.get("enabled") is True and isinstance(begun, int | float) and begun != 1


def _idle_scaler() -> Finding:
    return found(
        "fp16-without-scaler",
        "Training in float16 with a GradScaler that scaled no loss: another one is at work, or none",
        "GradScaler",
        severity="warning",
        unit="loss scale",
        remedy=Remedy(
            "The scaler that `watch` was given scaled no loss: the loop does not use it, or made a new one since, "
            "whose scale and skipped steps are not in this run. Use this one scaler for the whole training.",
            LOOP,
        ),
    )


def _unseen_scaler() -> Finding:
    return found(
        "fp16-without-scaler",
        "Training in float16 with a GradScaler that is not watched: losses and gradients were recorded as scaled",
        "GradScaler",
        severity="warning",
        unit="loss scale",
        remedy=Remedy(
            "The scaler was made after watch was called, so its loss scale and the steps it skipped are not in this "
            "run. Call watch after the scaler is made, or give it the scaler. The training itself may be in order.",
            "watch(model, optimizer, scaler=scaler, into=into)",
        ),
    )


def scaler_with_bf16(run: Run) -> list[Finding]:
    """`scaler-with-bf16`: a GradScaler was at work although autocast used bfloat16."""
    config = run.head.config
    dtype = config.get("autocast_dtype")
    if dtype != "bfloat16" and not (dtype is None and config.get("precision") == "bf16"):
        return []
    summary = scale_summary(run)
    if not summary.has_scaler or not summary.attempts:
        return []
    if summary.highest == 1.0 and _is_idle(run):
        return []  # `watch` met a scaler that the loop does not use
    return [
        found(
            "scaler-with-bf16",
            f"A GradScaler runs with bfloat16, which needs none ({summary.skips:,} steps skipped)",
            "GradScaler",
            value=float(summary.skips),
            limit=0.0,
            unit="skipped steps",
        )
    ]


def scale_unbounded(run: Run) -> list[Finding]:
    """`scale-unbounded`: the scale grows while every gradient is zero, or beyond `HIGH_SCALE` although the largest
    value stays far from overflowing."""
    summary = scale_summary(run)
    if not summary.has_scaler or not summary.growths or summary.last is None or scaler_with_bf16(run):
        return []
    trace = scale_trace(run)
    norms = trace["grad_norm"].to_numpy()
    first, last = int(trace["step"].iloc[0]), int(trace["step"].iloc[-1])
    if np.isfinite(norms).any() and not np.nan_to_num(norms).any():
        title = f"The loss scale grew {summary.growths:,} times to {summary.last:.3g} while every gradient is zero"
    elif summary.last >= HIGH_SCALE and not _backed_off(trace) and _far_from_overflow(run):
        title = f"The loss scale grew to {summary.last:.3g} and no gradient comes near overflowing"
    else:
        return []
    return [
        found(
            "scale-unbounded",
            title,
            "loss scale",
            steps=(first, last),
            value=summary.last,
            limit=HIGH_SCALE,
            unit="loss scale",
        )
    ]


def _backed_off(trace: pd.DataFrame) -> bool:
    """Whether the scale fell after the first steps, in which the scaler finds it."""
    settled = trace[trace["step"] >= trace["step"].iloc[0] + CALIBRATION_STEPS]
    scales = settled["loss_scale"].to_numpy()
    return bool((scales[1:] < scales[:-1]).any())


def _far_from_overflow(run: Run) -> bool:
    """Whether the largest gradient of the last sampled step was far below what FP16 holds, scale included."""
    table = run.table("tensors").select(["step", "kind", "absmax", "loss_scale"])
    table = table.filter(pc.is_in(table.column("kind"), pa.array(GRADIENTS)))
    if not table.num_rows:
        return False
    table = table.filter(pc.equal(table.column("step"), pc.max(table.column("step"))))
    largest = pc.max(table.column("absmax")).as_py()
    return largest is not None and 0 < largest < FORMATS["fp16"].max_value * FAR


def rank_scale_desync(run: Run) -> list[Finding]:
    """`rank-scale-desync`: at one step, ranks have different loss scales, or one skips what another makes."""
    apart = rank_scales(run) if run.head.world_size > 1 else pd.DataFrame()
    if apart.empty:
        return []
    first, last, steps = int(apart["step"].min()), int(apart["step"].max()), apart["step"].nunique()
    at = apart[apart["step"] == first]
    scale = at["loss_scale"].astype(float)
    odd = (
        at[scale != scale.mode().iloc[0]] if scale.nunique() > 1 else at[at["skipped"] != at["skipped"].mode().iloc[0]]
    )
    rank = int(odd["rank"].iloc[0]) if len(odd) else 0
    at_end = apart[apart["step"] == last]["loss_scale"].dropna().to_numpy(dtype=float)
    return [
        found(
            "rank-scale-desync",
            f"The ranks disagree on the loss scale or on skipping at {words.plural(steps, 'step')}, from {first:,} on",
            f"rank {rank}",
            steps=(first, last),
            value=_times_apart(at_end),
            limit=1.0,
            unit="times (highest over lowest loss scale)",
        )
    ]


def _times_apart(scales: np.ndarray) -> float | None:
    """The highest over the lowest; None where none was recorded."""
    if not len(scales):
        return None
    return float(scales.max() / scales.min()) if scales.min() > 0 else math.inf


def scaler_state_not_restored(run: Run) -> list[Finding]:
    """`scaler-state-not-restored`: the optimizer brought the state of earlier steps, the scaler did not."""
    resumed = facts(run.head.config, "resumed")
    if resumed.get("optimizer") is not True or resumed.get("scaler") is not False:
        return []
    begun = signals(run, "resumed")["step"].dropna()
    first = int(begun.iloc[-1]) if len(begun) else 0
    scales = run.table("steps").column("loss_scale").drop_null()
    if first and len(scales) and resumed.get("first_scale") != scales[0].as_py():
        return []  # not what this run's scaler begins with: it was loaded, just after its scale had changed
    skips = skip_episodes(run)
    start = skips[(skips["first"] >= first) & (skips["first"] < first + CALIBRATION_STEPS)]["skips"].sum()
    scale = resumed.get("first_scale")
    return [
        found(
            "scaler-state-not-restored",
            f"Training was resumed with a fresh GradScaler, which skipped {int(start):,} of its first steps",
            "GradScaler",
            steps=(first, min(first + CALIBRATION_STEPS, last_step(run) or 0)),
            value=float(scale) if isinstance(scale, int | float) else None,
            unit="loss scale",
        )
    ]


def partial_skips(run: Run) -> pd.DataFrame:
    """Steps after calibration that some optimizer skipped and another made: step, optimizer (the one that skipped)."""
    frame = run.table("steps").select(["step", "rank", "optimizer", "skipped"]).to_pandas()
    frame = frame[(frame["rank"] == 0) & (frame["step"] >= frame["step"].min() + CALIBRATION_STEPS)]
    by_step = frame.groupby("step")["skipped"]
    mixed = by_step.transform("any") & ~by_step.transform("all")
    partial: pd.DataFrame = frame[mixed & frame["skipped"]][["step", "optimizer"]]
    return partial
