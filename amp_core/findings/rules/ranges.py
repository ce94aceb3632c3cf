"""Rules on what exceeds the range of float16, or is not finite: activations, weights, masks, running statistics."""

from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.steps import attempts, autocast_dtype
from amp_core.findings import remedies
from amp_core.findings.first_cause import (
    INPUT_DATA,
    LEARNING_RATE,
    LOSS,
    MASKED_ROWS,
    Cause,
    first_cause,
    recovered_steps,
    stretch_end,
)
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.scaling import loss_nonfinite
from amp_core.findings.signals import facts, model_name, signals
from amp_core.findings.snippets import BF16, ISLAND
from amp_core.formats import FORMATS
from amp_core.schema.event_kinds import BY_ZERO, OF_ZERO
from amp_core.store.run import Run
from amp_core.text import formatting

FP16 = FORMATS["fp16"]
STATISTICS_INTERVAL_STEPS = 10
"""Most steps between two checks of running statistics."""
MIN_BF16_EXACT_FRAC = 0.99
"""Weights are from BF16 if BF16 represents at least this share of the nonzero ones exactly; of others it is 2^-16."""


def _first_overflow(run: Run) -> Cause | None:
    """The first module, or operator, with a non-finite FP16 output from finite input, which began a stretch of failing
    steps."""
    frame = signals(run, "non-finite output")
    frame = frame[frame["detail"].isin(("", "input"))]
    done, harmless = -1, set(_made_with_finite_loss(run))
    otherwise: set[str] = set()  # where other causes were seen, which in later steps are not told from an overflow
    for step in map(int, frame["step"].dropna()):
        if step <= done or step in harmless:
            continue
        done = stretch_end(run, step)
        cause = first_cause(run, 0, step)
        if cause is not None and cause.phase == "divergence":
            return None  # after a divergence any format would overflow
        if cause is not None and (
            cause.op == MASKED_ROWS or cause.of_constant or cause.op.endswith((OF_ZERO, BY_ZERO))
        ):
            otherwise.add(cause.where)
            continue
        if cause is not None and cause.where in otherwise:
            continue
        known = cause is not None and (cause.where != LOSS or cause.op != "")
        if cause is not None and known and (cause.phase, cause.dtype) == ("forward", "float16"):
            return cause
    return None


def _made_with_finite_loss(run: Run) -> list[int]:
    """Steps that were made with a finite loss. A module whose output was not finite then returned a mask of -inf, or
    values that nothing depends on."""
    return [int(step) for step in np.intersect1d(_with_finite_loss(run), recovered_steps(run))]


def _with_finite_loss(run: Run) -> "pd.Series[int]":
    """Steps with a finite loss, skipped ones too: the first are often skipped for the gradients' sake."""
    frame = attempts(run)
    steps: pd.Series[int] = frame["step"][frame["has_loss"] & np.isfinite(frame["loss"])]
    return steps


@rule(
    Entry(
        code="activation-overflow",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=150,
        follows=(
            "own-loss-scale",
            "hidden-overflow",
            "bf16-model-in-fp16",
        ),
        follows_in_place=("eps-rounds-to-zero",),
        what="The output of a module, or of an operator of the loss, overflows float16: values above 65504 become "
        "infinite.",
        signal="The first module, in forward order, with a non-finite float16 output from finite input and weights, "
        "and the operator in it, or in the loss, that made it so, by what autograd saved; outputs within a factor of 2 "
        "of the limit; products, sums, norms and variances in the first step.",
        threshold="One infinite value, a warning if the loss is finite; a warning from 32752 on, where one doubling of "
        "headroom remains.",
        advice="No loss scale helps, because it is the forward pass that overflows. Run this module in float32, "
        "reduce its inputs or weights, or use bfloat16.",
        snippet=ISLAND,
        frameworks=BF16,
        page="layer-detail",
    )
)
def activation_overflow(run: Run) -> list[Finding]:
    """`activation-overflow`: FP16 outputs beyond 65504, or within a factor of 2 of it."""
    cause = _first_overflow(run)
    if cause is not None:
        size = f", from inputs of up to {formatting.number(cause.value)}" if cause.value is not None else ""
        last = signals(run, "non-finite output")["step"].max()
        in_loss = cause.where == LOSS
        what = f"The output of {cause.where} ({cause.op})"
        if in_loss or cause.of_operator:
            what = f"Operator {cause.operator} {'of the loss' if in_loss else 'in ' + cause.where}"
        return [
            make_finding(
                "activation-overflow",
                f"{what} overflows float16{size}",
                cause.where,
                steps=(cause.step, int(last)),
                value=cause.value,
                limit=FP16.max_value,
                unit="largest input magnitude",
                remedy=remedies.loss_remedy(run, cause) if in_loss or cause.of_operator else None,
            )
        ]
    if (made := _overflow_of_inputs(run)) is not None:
        return [made]
    dropped = signals(run, "abandoned forward")
    dropped = dropped[dropped["dtype"] == "float16"]
    if len(dropped):
        return [_of_dropped_batches(run, dropped)]
    inner = signals(run, "inner overflow")
    inner = inner[inner["step"].isin(_with_finite_loss(run))]  # else it was not hidden
    if len(inner):
        return [_hidden_within(run, inner.iloc[0])]
    near = signals(run, "near overflow")
    if near.empty or any(f.where == LEARNING_RATE for f in loss_nonfinite(run)):
        return []
    row = near.iloc[int(near["value"].to_numpy().argmax())]
    name = str(row["name"]) or model_name(run)
    return [
        make_finding(
            "activation-overflow",
            f"The output of {name} comes within a factor of 2 of float16's largest value",
            name,
            severity="warning",
            steps=(int(near["step"].min()), int(near["step"].max())),
            value=float(row["value"]),
            limit=FP16.max_value,
            unit="largest magnitude",
        )
    ]


def _overflow_of_inputs(run: Run) -> Finding | None:
    """A product in the loop that overflows, where the model's input is the first that is not finite."""
    frame, outputs = signals(run, "input overflow"), signals(run, "non-finite output")
    first = first_cause(run, 0, int(outputs["step"].max())) if len(frame) and len(outputs) else None
    if first is None or first.where != INPUT_DATA:
        return None
    row = frame.iloc[0]
    return make_finding(
        "activation-overflow",
        f"Operator {row['op']} in {row['name']} overflows float16, and the model's input is not finite from step "
        f"{first.step:,} on: another model computes it in float16",
        str(row["name"]),
        steps=(first.step, int(outputs["step"].max())),
        value=float(row["value"]),
        limit=0.0,
        unit="infinite results",
        advice="The model whose outputs this one trains on, such as a frozen encoder, overflows float16, and no loss "
        "scale helps. Run it in bfloat16 or float32.",
    )


def _hidden_within(run: Run, row: "pd.Series[Any]") -> Finding:
    name, step = str(row["name"]) or model_name(run), int(float(str(row["step"])))
    return make_finding(
        "activation-overflow",
        f"Operator {row['op']} in {name} overflows float16, which nothing after it shows: a division by infinity is 0",
        name,
        severity="warning",
        steps=(step, step),
        value=float(str(row["value"])),
        limit=0.0,
        unit="infinite results",
        advice=f"Whatever is divided by the result of {row['op']} is lost, and no loss scale helps, because it is the "
        "forward pass that overflows. Compute it in float32.",
    )


def _of_dropped_batches(run: Run, dropped: pd.DataFrame) -> Finding:
    name = str(dropped["name"].iloc[0]) or model_name(run)
    times = f"{len(dropped):,} forward {'pass' if len(dropped) == 1 else 'passes'}"
    return make_finding(
        "activation-overflow",
        f"The output of {name} ({dropped['op'].iloc[0]}) is not finite in float16 in {times} without a backward: the "
        "loop drops these batches",
        name,
        steps=(int(dropped["step"].min()), int(dropped["step"].max())),
        value=float(len(dropped)),
        limit=0.0,
        unit="forward passes without backward",
    )


@rule(
    Entry(
        code="bf16-model-in-fp16",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=140,
        what="A model trained in bfloat16 runs in float16, which has a smaller range: its activations or weights "
        "overflow.",
        signal="Initial weights: those from a bfloat16 checkpoint have 8 significant bits even when stored in float32.",
        threshold="99 % of the nonzero matrix weights are exactly representable in bfloat16 (by chance 1 in 65,536 "
        "is), or a weight is above 65504, and autocast is float16. A warning until something overflows.",
        advice="bfloat16 reaches 3e38, float16 only 65504, so activations that were ordinary in bfloat16 become "
        "infinite. Train in bfloat16, as before.",
        snippet="with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
        frameworks=BF16,
        page="number-ranges",
    )
)
def bf16_model_in_fp16(run: Run) -> list[Finding]:
    """`bf16-model-in-fp16`: weights from a bfloat16 checkpoint, or beyond FP16's range at the start, under FP16."""
    if autocast_dtype(run) != "float16":
        return []
    model = run.head.model
    stored = [n for n, d in facts(model, "dtypes").items() if d == "bfloat16"]
    exact = model.get("bfloat16_exact_frac")
    largest = facts(model, "weight_absmax")
    size = largest.get("value")
    too_large = isinstance(size, int | float) and size > FP16.max_value
    made_in_bf16 = isinstance(exact, int | float) and exact >= MIN_BF16_EXACT_FRAC
    if not stored and not made_in_bf16 and not too_large:
        return []
    cause = _first_overflow(run)
    if too_large:
        where = str(largest.get("name"))
    else:
        where = cause.where if cause else stored[0] if stored else model_name(run)
    advice = None
    if too_large:
        title, value, limit, unit = "A weight does not fit float16", float(size or 0), FP16.max_value, "largest weight"
        advice = (
            "A weight above 65504 becomes infinite when autocast casts it to float16, as happens with models "
            "trained in bfloat16. Reduce it, or train in bfloat16."
        )
    else:
        title = "Weights trained in bfloat16 are now trained in float16"
        value, limit, unit = float(exact or 1.0), MIN_BF16_EXACT_FRAC, "share of weights exact in bfloat16"
    return [
        make_finding(
            "bf16-model-in-fp16",
            title + (f"; {cause.in_words()}" if cause else ""),
            where,
            severity="error" if cause or too_large else "warning",
            advice=advice,
            steps=(cause.step, cause.step) if cause else (0, 0),
            value=value,
            limit=limit,
            unit=unit,
        )
    ]


@rule(
    Entry(
        code="fully-masked-row",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=55,
        follows=("mask-constant-overflow",),
        what="A mask sets every score of a row to -inf, and the softmax of such a row is NaN.",
        signal="Rows of scores that are -inf throughout, before a softmax: in the first step, and in the graph of a "
        "loss that is not finite. Masks of -inf that leave one score in each row are sound.",
        threshold="One such row in a step whose outputs or loss are not finite. Rows whose NaN the model replaces do "
        "not count.",
        advice="This happens in any dtype: a sample that is all padding, or a padded token in front under a causal "
        "mask. Let such rows attend to one position, or set their result to zero; "
        "scaled_dot_product_attention does the latter.",
        snippet="empty = mask.all(-1, keepdim=True)   # True: masked\n"
        'weights = scores.masked_fill(mask & ~empty, float("-inf")).softmax(-1).masked_fill(empty, 0.0)',
        page="layer-detail",
    )
)
def fully_masked_row(run: Run) -> list[Finding]:
    """`fully-masked-row`: rows of scores that are -inf throughout, where they made outputs or loss non-finite."""
    rows = signals(run, "masked rows")
    for step in sorted({int(s) for s in rows["step"].dropna()}):
        cause = first_cause(run, 0, step)
        if cause is not None and cause.op == MASKED_ROWS:
            count = float(rows["value"][rows["step"] == cause.step].max())
            where = "the loss" if cause.where == LOSS else cause.where
            return [
                make_finding(
                    "fully-masked-row",
                    f"A mask sets every score to -inf in {formatting.plural(int(count), 'row')} of {where}, and the "
                    "softmax of such a row is NaN",
                    cause.where,
                    steps=(cause.step, cause.step),
                    value=count,
                    limit=0.0,
                    unit="rows",
                )
            ]
    return []


@rule(
    Entry(
        code="batchnorm-poisoned",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=190,
        follows=(
            "bf16-model-in-fp16",
            "activation-overflow",
            "fully-masked-row",
            "loss-nonfinite",
        ),
        what="Running statistics of a normalization layer contain NaN or infinity: training continues, but "
        "evaluation is broken.",
        signal="running_mean and running_var after each step (on a GPU after every tenth).",
        threshold="One non-finite value: a running average never recovers from it.",
        advice="A non-finite forward pass updated the statistics, and skipping the optimizer step does not undo "
        "that. Reset them, and where float16 overflowed, keep that layer's input in float32.",
        snippet="for module in model.modules():\n"
        "    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):\n"
        "        if not (module.running_mean.isfinite().all() and module.running_var.isfinite().all()):\n"
        "            module.reset_running_stats()",
        page="layer-detail",
    )
)
def batchnorm_poisoned(run: Run) -> list[Finding]:
    """`batchnorm-poisoned`: running statistics are not finite."""
    frame = signals(run, "statistics")
    if frame.empty:
        return []
    row = frame.iloc[0]
    at = int(row["step"])
    buffer, more = str(row["name"]), int(row["count"]) - 1
    module = buffer.rpartition(".")[0] or model_name(run)
    cause = _forward_cause_before(run, at)
    return [
        make_finding(
            "batchnorm-poisoned",
            (f"{buffer} and {more} more statistics are not finite" if more else f"{buffer} is not finite")
            + (f"; {cause.in_words()}" if cause else ""),
            module,
            steps=(at, at),
            value=float(row["count"]),
            limit=0.0,
            unit="statistics that are not finite",
            remedy=remedies.statistics_remedy(run, cause),
        )
    ]


def _forward_cause_before(run: Run, at: int) -> Cause | None:
    """The cause in forward of statistics that were found non-finite at step `at`. On a GPU they are checked
    every `STATISTICS_INTERVAL_STEPS`th step; a skipped step in between updates them too."""
    outputs = signals(run, "non-finite output")["step"]
    for step in sorted({int(s) for s in outputs[outputs.between(at - STATISTICS_INTERVAL_STEPS + 1, at)]}):
        cause = first_cause(run, 0, step)
        if cause is not None and cause.phase != "backward":
            return cause
    return None
