"""The rule on gradients that are unscaled, scaled, kept or cleared at the wrong time while they are accumulated."""

from typing import Any

import pandas as pd

from amp_core.analysis.steps import attempts
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import (
    CallOrders,
    call_orders,
    last_step,
    optimizer_name,
    signals,
    split_call,
    step_range,
)
from amp_core.findings.snippets import TORCH_EXAMPLES
from amp_core.store.run import Run


@rule(
    Entry(
        code="unscale-per-microbatch",
        severity="error",
        family=TRAINING_LOOP,
        order=90,
        what="With gradient accumulation, gradients are unscaled or the scale is updated before all micro-batches "
        "are accumulated, which mixes scaled and unscaled gradients. Or they are never cleared, so every step adds "
        "to all previous ones, or to the infinities of a skipped step.",
        signal="The order of calls: `scale` after `unscale_`, or several `unscale_` or `update` before one step. "
        "Also gradients that backward adds to although the optimizer has already stepped with them, and gradients that "
        "the loop's own code divides by the loss scale before the scaler does.",
        threshold=f"One such step ({TORCH_EXAMPLES}: unscale, step and update once per effective batch). Gradients "
        "kept in each of the first five steps, or cleared twice after several steps each; gradients that are not "
        "finite, kept in three steps in a row.",
        advice="Gradients added after `unscale_` are thousands of times larger than those already there, so the "
        "update is wrong. Call `unscale_`, `step` and `update` only after the last micro-batch.",
        snippet="for i, (x, y) in enumerate(batches):\n"
        "    with torch.autocast(device_type, dtype=torch.float16):\n"
        "        loss = loss_fn(model(x), y) / accumulate\n"
        "    scaler.scale(loss).backward()\n"
        "    if (i + 1) % accumulate == 0:\n"
        "        scaler.unscale_(optimizer)\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
        "        optimizer.zero_grad()",
        frameworks={
            "Accelerate": 'accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)\n'
            "with accelerator.accumulate(model):\n"
            "    accelerator.backward(loss)\n"
            "    optimizer.step()\n"
            "    optimizer.zero_grad()",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True, '
            "gradient_accumulation_steps=4)",
            "Lightning": 'trainer = Trainer(precision="16-mixed", accumulate_grad_batches=4)',
        },
    )
)
def unscale_per_microbatch(run: Run) -> list[Finding]:
    """`unscale-per-microbatch`: gradients of an optimizer accumulate after they were unscaled, or are unscaled twice;
    the scale is updated between the micro-batches of one step; or gradients are never cleared."""
    kept = signals(run, "kept gradients")
    if (kept["detail"] == "skipped").any():
        return [_not_cleared_after_skips(run, kept[kept["detail"] == "skipped"].iloc[0])]
    if not kept.empty:
        return [_not_cleared(run, int(kept["optimizer"].iloc[0]), now_and_then=kept["detail"].iloc[0] != "")]
    twice = signals(run, "unscaled twice")
    if not twice.empty:
        return [_unscaled_twice(run, int(twice["optimizer"].iloc[0]))]
    scaled = signals(run, "scaled twice")
    if not scaled.empty:
        return [_scaled_twice(int(scaled["step"].iloc[0]), last_step(run))]
    # Where scalers alternate, as in a GAN, `update` may be that of a scaler whose optimizer is not watched.
    every = [] if run.head.config.get("scalers_in_turn") else _orders_while_all_step(run)
    bad = [(first, last) for first, last, calls in every if _mixes_scaled(calls)]
    if not bad:
        return []
    return [
        make_finding(
            "unscale-per-microbatch",
            "unscale_ or update is called for every micro-batch, before all gradients of the step are accumulated",
            "unscale_",
            steps=step_range(bad),
            value=float(max(_max_calls(calls) for _, _, calls in every if _mixes_scaled(calls))),
            limit=1.0,
            unit="calls per optimizer step",
        )
    ]


def _scaled_twice(first: int, last: int | None) -> Finding:
    return make_finding(
        "unscale-per-microbatch",
        "The loss is multiplied by the loss scale twice, and its gradients are divided by it once",
        "scaler.scale",
        steps=(first, max(first, last or 0)),
        value=2.0,
        limit=1.0,
        unit="calls per loss",
        remedy=Remedy(
            "Gradients are thousands of times too large after unscaling, which clipping or Adam hides, and the loss "
            "scale has to fall to about its square root. Scale each loss once.",
            "scaler.scale(loss).backward()   # loss as the model's code returns it, not scaled there",
        ),
    )


def _orders_while_all_step(run: Run) -> CallOrders:
    """The stretches that began before any optimizer made its last step: an optimizer that replaces it is not watched,
    and its calls cannot be separated from those of the others."""
    frame = run.table("steps").select(["step", "optimizer"]).to_pandas()
    until = frame.groupby("optimizer")["step"].max().min()
    return [stretch for stretch in call_orders(run) if not stretch[0] > until]


def _not_cleared_after_skips(run: Run, row: "pd.Series[Any]") -> Finding:
    name, last = optimizer_name(run, int(row["optimizer"])), last_step(run)
    first = max(0, int(row["step"]) - int(row["count"]))
    skipped = attempts(run)
    return make_finding(
        "unscale-per-microbatch",
        f"After a skipped step, the gradients of {name} are not cleared: backward adds to infinities",
        f"zero_grad of {name}",
        steps=(first, max(first, last or 0)),
        value=float(skipped["step"][skipped["skipped"] & (skipped["step"] >= first)].nunique()),
        limit=0.0,
        unit="skipped steps",
        remedy=Remedy(
            "Infinities of one skipped step stay in the gradients, so the scaler skips every step after it, and the "
            "loss scale falls without end. Call `zero_grad` after each `scaler.step`, also where it was skipped.",
            "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()   # not only if the scale stayed",
        ),
    )


def _not_cleared(run: Run, index: int, *, now_and_then: bool) -> Finding:
    name, last = optimizer_name(run, index), last_step(run)
    if now_and_then or any("zero_grad" in map(_name, calls) for _, _, calls in call_orders(run)):
        title = f"{name} steps after every micro-batch, but gradients are cleared only after several steps"
        where = f"step of {name}"
        advice = (
            "The gradients of the first micro-batch are applied in every step until they are cleared, and with a "
            "loss scale, unscaled gradients mix with scaled ones. Step once, after the last micro-batch."
        )
    else:
        title = f"Gradients of {name} are never cleared: every backward adds to those of all previous steps"
        where = f"zero_grad of {name}"
        advice = (
            "Each update contains all gradients since the start, and with a loss scale a mix of scaled and unscaled "
            "ones. Call `zero_grad` after each optimizer step."
        )
    return make_finding(
        "unscale-per-microbatch",
        title,
        where,
        steps=(0, last) if last is not None else None,
        value=0.0,
        limit=1.0,
        unit="times cleared per step",
        advice=advice,
    )


def _unscaled_twice(run: Run, index: int) -> Finding:
    return make_finding(
        "unscale-per-microbatch",
        f"The loop divides the gradients of {optimizer_name(run, index)} by the loss scale, and so does the scaler",
        "gradients",
        steps=(0, last_step(run) or 0),
        value=2.0,
        limit=1.0,
        unit="times unscaled per step",
        advice=(
            "Gradients that are unscaled twice are thousands of times too small; with gradient accumulation, they also "
            "mix with scaled ones. Leave the division to `scaler.unscale_` or `scaler.step`, once per step."
        ),
    )


def _name(call: str) -> str:
    return split_call(call)[0]


def _mixes_scaled(calls: list[str]) -> bool:
    """Whether gradients of one scale are added to those of another. An update that `zero_grad` follows is of an
    optimizer that the run does not have: what its loss left in these gradients is cleared."""
    unscaled: set[int] = set()
    stepped: set[int] = set()
    scaled = updated = False
    for name, index in map(split_call, calls):
        if updated and name in ("scale", "scaler.step", "optimizer.step"):
            return True
        if name == "zero_grad":
            scaled = updated = False
            unscaled.discard(index)
        elif name == "scale":
            if unscaled - stepped:
                return True
            scaled = True
        elif name == "unscale_":
            if index in unscaled and index not in stepped:
                return True
            unscaled.add(index)
        elif name in ("scaler.step", "optimizer.step"):
            stepped.add(index)
        elif name == "update" and scaled and not stepped:
            updated = True
    return updated


def _max_calls(calls: list[str]) -> int:
    return max(sum(split_call(c)[0] == name for c in calls) for name in ("unscale_", "update"))
