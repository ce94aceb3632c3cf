"""Rules on the order of a loop's calls: clip, unscale, step, update, schedule, and the context of backward."""

import math

import numpy as np
import pandas as pd

from amp_core.analysis import scale_summary, scale_trace
from amp_core.analysis.steps import scaler_enabled
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import (
    CallOrders,
    call_orders,
    ending_error,
    last_step,
    optimizer_name,
    signals,
    split_call,
    step_range,
)
from amp_core.findings.snippets import LOOP
from amp_core.store.run import Run

_DOCS = "torch.amp, Automatic Mixed Precision examples"
FOLLOWS_BITS = 0.25
"""A norm moves with the loss scale if their changes agree within so many powers of two."""
MIN_SCALE_CHANGES = 4
"""Fewest changes of the scale for a statement that a norm follows them."""


@rule(
    Entry(
        code="clip-before-unscale",
        severity="warning",
        family=TRAINING_LOOP,
        order=240,
        what="Gradients are clipped while they are still multiplied by the loss scale, so the threshold is divided by "
        "it.",
        signal="The order of calls: a clip between backward and `unscale_`.",
        threshold=f"One such clip in a step ({_DOCS}: unscale_ before clipping).",
        advice="The threshold meets gradients that are thousands of times too large, so nearly every step is shrunk "
        "to almost nothing. Call `scaler.unscale_(optimizer)` before clipping.",
        snippet="scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
        "scaler.step(optimizer)\n"
        "scaler.update()",
        frameworks={
            "Accelerate": "accelerator.backward(loss)\n"
            "accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)   # unscales first",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True, max_grad_norm=1.0)',
            "Lightning": 'trainer = Trainer(precision="16-mixed", gradient_clip_val=1.0)',
        },
    )
)
def clip_before_unscale(run: Run) -> list[Finding]:
    """`clip-before-unscale`: a clip after a scaled backward and before `unscale_`."""
    if not scaler_enabled(run):
        return []
    bad = [(first, last) for first, last, calls in call_orders(run) if _clips_scaled(calls)]
    if not bad:
        return []
    scale = scale_summary(run).last
    return [
        make_finding(
            "clip-before-unscale",
            "Gradients are clipped before they are unscaled: the threshold is in effect divided by the loss scale",
            "clip_grad_norm_",
            steps=step_range(bad),
            value=scale,
            limit=1.0,
            unit="loss scale",
        )
    ]


def _clips_scaled(calls: list[str]) -> bool:
    scaled = False
    for name, _ in map(split_call, calls):
        if name in ("scale", "unscale_", "scaler.step"):
            scaled = name == "scale"
        elif name == "clip" and scaled:
            return True
    return False


@rule(
    Entry(
        code="unscale-per-microbatch",
        severity="error",
        family=TRAINING_LOOP,
        order=90,
        what="With gradient accumulation, gradients are unscaled or the scale updated before all micro-batches are "
        "in: scaled and unscaled gradients are mixed. Or they are never cleared, and every step adds to all before "
        "it.",
        signal="The order of calls: `scale` after `unscale_`, or several `unscale_` or `update`, before one step. And "
        "gradients that are still as the optimizer's step left them when backward adds to them.",
        threshold=f"One such step ({_DOCS}: unscale, step and update once per effective batch). Gradients that were "
        "kept in each of the first five steps.",
        advice="What is added after `unscale_` is thousands of times larger than what was there, so the update is "
        "wrong. Call `unscale_`, `step` and `update` only after the last micro-batch.",
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
    """`unscale-per-microbatch`: gradients of an optimizer accumulate after they were unscaled, or the scale is
    updated between the micro-batches of one step; or they are never cleared, and accumulate in every step."""
    kept = signals(run, "kept gradients")
    if not kept.empty:
        return [_never_cleared(run, int(kept["optimizer"].iloc[0]))]
    every = _orders_while_all_step(run)
    bad = [(first, last) for first, last, calls in every if _mixes_scaled(calls)]
    if not bad:
        return []
    return [
        make_finding(
            "unscale-per-microbatch",
            "unscale_ or update is called for each micro-batch, before all gradients of the step are in",
            "unscale_",
            steps=step_range(bad),
            value=float(max(_max_calls(calls) for _, _, calls in every if _mixes_scaled(calls))),
            limit=1.0,
            unit="calls per optimizer step",
        )
    ]


def _orders_while_all_step(run: Run) -> CallOrders:
    """The stretches that began before any optimizer made its last step: an optimizer that replaces it is not watched,
    and its calls cannot be separated from those of the others."""
    frame = run.table("steps").select(["step", "optimizer"]).to_pandas()
    until = frame.groupby("optimizer")["step"].max().min()
    return [stretch for stretch in call_orders(run) if not stretch[0] > until]


def _never_cleared(run: Run, index: int) -> Finding:
    name, last = optimizer_name(run, index), last_step(run)
    return make_finding(
        "unscale-per-microbatch",
        f"Gradients of {name} are never cleared: each backward adds to those of all steps before",
        f"zero_grad of {name}",
        steps=(0, last) if last is not None else None,
        value=0.0,
        limit=1.0,
        unit="times cleared per step",
        advice="Each update is made of all gradients since the start, under a loss scale of scaled and unscaled ones. "
        "Call `zero_grad` after each step of the optimizer.",
    )


def _mixes_scaled(calls: list[str]) -> bool:
    unscaled: set[int] = set()
    stepped: set[int] = set()
    scaled = False
    for name, index in map(split_call, calls):
        if name == "scale":
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
            return True
    return False


def _max_calls(calls: list[str]) -> int:
    return max(sum(split_call(c)[0] == name for c in calls) for name in ("unscale_", "update"))


@rule(
    Entry(
        code="missing-scaler-update",
        severity="error",
        family=TRAINING_LOOP,
        order=100,
        what="`scaler.update()` is left out, or only called sometimes: the next `unscale_` or `step` raises an error.",
        signal="The error that ended the run, and the calls before it.",
        threshold="A second `unscale_` or `step` of one optimizer without an `update` between them "
        "(torch/amp/grad_scaler.py).",
        advice="The scaler still holds the state of the previous step, so the scale cannot change and the next call is "
        "refused. Call `scaler.update()` once per iteration, even if the step was skipped.",
        snippet=LOOP,
    )
)
def missing_scaler_update(run: Run) -> list[Finding]:
    """`missing-scaler-update`: the run ended because a step had no `update` after it."""
    error = ending_error(run)
    if "since the last update()" not in error and "being called after step()" not in error:
        return []
    if unscale_per_microbatch(run):
        return []
    step = scale_trace(run)["step"]
    at = int(step.iloc[-1]) if len(step) else 0
    return [
        make_finding(
            "missing-scaler-update",
            "The scaler was not updated after a step, so it refused the next one",
            "scaler.update",
            steps=(at, at),
            value=0.0,
            limit=1.0,
            unit="updates per step",
        )
    ]


@rule(
    Entry(
        code="optimizer-step-bypasses-scaler",
        severity="error",
        family=TRAINING_LOOP,
        order=110,
        what="`optimizer.step()` is called beside or in place of `scaler.step(optimizer)`: it uses gradients that are "
        "still scaled, or steps although they are not finite.",
        signal="Optimizer steps outside of `scaler.step` in an iteration in which the loss was scaled.",
        threshold=f"One such step ({_DOCS}: scaler.step in place of optimizer.step).",
        advice="The update uses gradients multiplied by the loss scale, and nothing protects the weights from "
        "infinities. Step only through `scaler.step(optimizer)`.",
        snippet=LOOP,
    )
)
def optimizer_step_bypasses_scaler(run: Run) -> list[Finding]:
    """`optimizer-step-bypasses-scaler`: an optimizer steps outside of `scaler.step` after its loss was scaled. An
    optimizer that never uses the scaler, beside others that do, may have an unscaled loss."""
    if not scaler_enabled(run):
        return []
    every = call_orders(run)
    through = {split_call(c)[1] for _, _, calls in every for c in calls if split_call(c)[0] == "scaler.step"}
    bad, optimizers = [], set()
    for first, last, calls in every:
        if "scale" not in calls:
            continue
        bypassing = {split_call(c)[1] for c in calls if split_call(c)[0] == "optimizer.step"}
        bypassing = {i for i in bypassing if i in through or not through}
        if bypassing:
            bad.append((first, last))
            optimizers |= bypassing
    if not bad:
        return []
    index = min(optimizers)
    return [
        make_finding(
            "optimizer-step-bypasses-scaler",
            f"{optimizer_name(run, index)} steps outside of scaler.step although the loss was scaled",
            f"optimizer.step of {optimizer_name(run, index)}",
            steps=step_range(bad),
            value=float(sum(last - first + 1 for first, last in bad)),
            limit=0.0,
            unit="steps",
        )
    ]


@rule(
    Entry(
        code="logged-scaled-values",
        severity="warning",
        family=TRAINING_LOOP,
        order=410,
        what="A logged loss or gradient norm is still multiplied by the loss scale, and jumps with it.",
        signal="Logged values compared with measured ones, and jumps of the logged norm at changes of the scale.",
        threshold="Logged over true within 1 % of the scale; without a measurement, four of five changes of the scale "
        "followed by the norm within a factor of 2^0.25.",
        advice="The curve shows the loss scale, not the model: it doubles at each growth. Log the loss before "
        "`scaler.scale` and norms after `scaler.unscale_`.",
        snippet="scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n"
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
        "rec.log(loss=loss, grad_norm=norm)",
    )
)
def logged_scaled_values(run: Run) -> list[Finding]:
    """`logged-scaled-values`: a logged value is the true one times the loss scale, or a logged norm moves with it."""
    frame = signals(run, "logged scaled")
    if len(frame):
        names = sorted(set(frame["name"]))
        return [
            _logged(names[0], frame["step"], float(frame["value"].iloc[0]), f"{' and '.join(names)} is logged scaled")
        ]
    trace = scale_trace(run)
    good = trace[~trace["skipped"]]
    if len(good) < 2 or not scaler_enabled(run):
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        scale, norm = (np.log2(good[c].to_numpy(dtype=float)) for c in ("loss_scale", "grad_norm"))
        change, moved = np.diff(scale), np.diff(norm)
    at = np.flatnonzero((change != 0) & np.isfinite(moved) & np.isfinite(change))
    follows = np.abs(moved[at] - change[at]) <= FOLLOWS_BITS
    if len(at) < MIN_SCALE_CHANGES or follows.mean() < 0.8:
        return []
    return [_logged("grad_norm", good["step"].iloc[at + 1], math.nan, "grad_norm jumps with the loss scale")]


def _logged(where: str, steps: "pd.Series[int]", value: float, title: str) -> Finding:
    return make_finding(
        "logged-scaled-values",
        title[0].upper() + title[1:],
        where,
        steps=(int(steps.min()), int(steps.max())),
        value=value if math.isfinite(value) else None,
        limit=1.0,
        unit="times the true value",
    )


@rule(
    Entry(
        code="anomaly-mode-with-scaler",
        severity="warning",
        family=TRAINING_LOOP,
        order=420,
        what="Anomaly mode is on with a scaler: overflow that the scaler would have skipped ends the run, and every "
        "step is slow.",
        signal="Anomaly mode at backward; the error that it raised.",
        threshold="Both at once. An error where it ended the run.",
        advice="Scaled gradients overflow now and then by design, and anomaly mode treats that as an error. Turn it "
        "off, or use it only for a few steps, once the scale has settled.",
        snippet="torch.autograd.set_detect_anomaly(False)",
        frameworks={"Lightning": "trainer = Trainer(detect_anomaly=False)"},
    )
)
def anomaly_mode_with_scaler(run: Run) -> list[Finding]:
    """`anomaly-mode-with-scaler`: backward in anomaly mode with an active scaler."""
    frame = signals(run, "anomaly mode")
    if frame.empty or not scaler_enabled(run):
        return []
    raised = "returned nan values in its" in ending_error(run)
    at = int(frame["step"].iloc[0])
    return [
        make_finding(
            "anomaly-mode-with-scaler",
            "Anomaly mode is on with a GradScaler" + (", and ended the run" if raised else ""),
            "torch.autograd.set_detect_anomaly",
            severity="error" if raised else None,
            steps=(at, at),
            value=1.0,
            limit=0.0,
            unit="backward passes",
        )
    ]


@rule(
    Entry(
        code="scaled-gradient-penalty",
        severity="warning",
        family=TRAINING_LOOP,
        order=250,
        what="A gradient penalty is computed from gradients that are still multiplied by the loss scale.",
        signal="`torch.autograd.grad(…, create_graph=True)` of a scaled loss, and whether `get_scale` was called "
        "after it.",
        threshold=f"`get_scale` was not called before backward ({_DOCS}, gradient penalty).",
        advice="The penalty is too large by the loss scale, or by its square. Divide the gradients by "
        "`scaler.get_scale()` before taking their norm.",
        snippet="scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)\n"
        "grads = [g / scaler.get_scale() for g in scaled]\n"
        "with torch.autocast(device_type, dtype=torch.float16):\n"
        "    loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()\n"
        "scaler.scale(loss).backward()",
    )
)
def scaled_gradient_penalty(run: Run) -> list[Finding]:
    """`scaled-gradient-penalty`: gradients of a scaled loss were differentiated again without dividing by the
    scale."""
    frame = signals(run, "create_graph")
    frame = frame[frame["value"] == 1.0]
    if frame.empty:
        return []
    at, scale = int(frame["step"].iloc[0]), scale_summary(run).first
    return [
        make_finding(
            "scaled-gradient-penalty",
            "A gradient penalty uses gradients that are still multiplied by the loss scale",
            str(frame["name"].iloc[0]),
            steps=(at, at),
            value=scale,
            limit=1.0,
            unit="loss scale",
        )
    ]
