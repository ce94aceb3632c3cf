"""Rules on the order of a loop's calls: clip, unscale, step, update."""

from collections.abc import Sequence

from amp_core.analysis import scale_summary, scale_trace
from amp_core.analysis.numerics.clipping import clipped_while_scaled
from amp_core.analysis.steps import scaler_enabled
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.rules.accumulation import unscale_per_microbatch
from amp_core.findings.signals import (
    call_orders,
    ending_error,
    last_step,
    optimizer_name,
    signals,
    split_call,
    step_range,
)
from amp_core.findings.snippets import LOOP, TORCH_EXAMPLES
from amp_core.store.run import Run
from amp_core.text import formatting

CLIP_BY_VALUE = "clip_grad_value_"


@rule(
    Entry(
        code="clip-before-unscale",
        severity="warning",
        family=TRAINING_LOOP,
        order=240,
        what="Gradients are clipped while they are still scaled, which in effect divides the threshold by the loss "
        "scale.",
        signal="The order of calls: a clip between backward and `unscale_` of its optimizer, or the program's own "
        "division by the factor of its loss. Norms of gradients after "
        "backward and before `unscale_`. Norms or maxima of scaled gradients that are the same in every step.",
        threshold=f"One such clip in a step ({TORCH_EXAMPLES}: unscale_ before clipping). Or the same norm, within 1 "
        "%, in four of five steps; or the same norm or maximum in several tensors and steps; or norms that the loop "
        "reduced and that then vary at most a quarter as much over the first steps.",
        advice="The threshold is applied to gradients that are thousands of times too large, so nearly every step "
        "is shrunk to almost nothing. Call `scaler.unscale_(optimizer)` before clipping.",
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
        return _clips_own_scale(run)
    bad = [(first, last) for first, last, calls in call_orders(run) if reads_scaled(calls, "clip")]
    scale = scale_summary(run).last
    if bad:
        other = any(_clips_another(calls) for _, _, calls in call_orders(run))
        title = (
            "unscale_ is called for another optimizer than the one whose gradients are clipped"
            if other
            else ("Gradients are clipped before they are unscaled")
        )
        where, steps = _clip(run), step_range(bad)
    elif len(shrunk := signals(run, "clipped scaled")):
        called = any(split_call(call)[0] == "clip" for _, _, calls in call_orders(run) for call in calls)
        where, steps = _clip(run) if called else "gradients", (0, last_step(run) or 0)
        count = formatting.plural(int(shrunk["count"].iloc[0]), "tensor")
        title = f"The gradients of {count} are clipped before they are unscaled"
    else:
        own = clipped_while_scaled(run)
        if own is None:
            return []
        (what, steps), where = own, "gradients"
        title = f"Scaled gradients have {what} in every step: the loop clips them before unscaling"
    return [
        make_finding(
            "clip-before-unscale",
            f"{title}: the threshold is in effect divided by the loss scale",
            where,
            steps=steps,
            value=scale,
            limit=1.0,
            unit="loss scale",
            remedy=_by_value() if where == CLIP_BY_VALUE else None,
        )
    ]


def _clip(run: Run) -> str:
    """The function by which the loop clips."""
    return CLIP_BY_VALUE if len(signals(run, "clipped by value")) else "clip_grad_norm_"


def _by_value() -> Remedy:
    entry = GUIDE["clip-before-unscale"]
    norm = "clip_grad_norm_(model.parameters(), max_norm=1.0)"
    return Remedy(
        entry.advice,
        entry.snippet.replace(norm, "clip_grad_value_(model.parameters(), clip_value=1.0)"),
        entry.frameworks,
    )


def _clips_own_scale(run: Run) -> list[Finding]:
    """The same of a loop that scales its loss by a constant of its own."""
    frame = signals(run, "clipped scaled")
    frame = frame[frame["detail"] == "own scale"]
    if frame.empty:
        return []
    scale = float(frame["value"].iloc[0])
    return [
        make_finding(
            "clip-before-unscale",
            f"Gradients are clipped before the program divides them by its loss scale of {formatting.number(scale)}: "
            "the threshold is in effect divided by it",
            "clip_grad_norm_",
            steps=(0, last_step(run) or 0),
            value=scale,
            limit=1.0,
            unit="loss scale",
            advice="The threshold is applied to gradients that are still multiplied by the loss scale, so nearly every "
            "step is shrunk to almost nothing. Divide the gradients by the loss scale first, then clip them.",
        )
    ]


def reads_scaled(calls: list[str], what: str) -> bool:
    """Whether `what`, a clip or norm, reads gradients after a scaled backward and before they are unscaled."""
    scaled = False
    unscaled: set[int] = set()
    for call in calls:
        name, index = split_call(call)
        if name == "scale":
            scaled, unscaled = True, set()
        elif name in ("unscale_", "scaler.step"):
            unscaled.add(index)
        elif name == what and scaled and (index not in unscaled if _is_numbered(call) else not unscaled):
            return True
    return False


def _clips_another(calls: list[str]) -> bool:
    """Whether a clip follows an `unscale_` of another optimizer alone."""
    unscaled = {split_call(c)[1] for c in calls if split_call(c)[0] == "unscale_"}
    clipped = {split_call(c)[1] for c in calls if split_call(c)[0] == "clip" and _is_numbered(c)}
    return bool(unscaled) and bool(clipped - unscaled)


def _is_numbered(call: str) -> bool:
    return ":" in call


@rule(
    Entry(
        code="missing-scaler-update",
        severity="error",
        family=TRAINING_LOOP,
        order=100,
        what=(
            "`scaler.update()` is missing or only called occasionally: the next `unscale_` or `step` raises an error."
        ),
        signal="The error that ended the run, and the calls before it.",
        threshold="A second `unscale_` or `step` of one optimizer without an `update` between them "
        "(torch/amp/grad_scaler.py).",
        advice="The scaler still holds the state of the previous step, so the scale cannot change and the next call "
        "raises an error. Call `scaler.update()` once per iteration, even if the step was skipped.",
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
            "The scaler was not updated after a step, so the next step raised an error",
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
        what="`optimizer.step()` is called in addition to or instead of `scaler.step(optimizer)`: it applies "
        "gradients that are still scaled, or steps although they are not finite.",
        signal="Optimizer steps outside `scaler.step` in an iteration whose loss was scaled.",
        threshold=f"One such step ({TORCH_EXAMPLES}: scaler.step in place of optimizer.step).",
        advice="The update uses scaled gradients, and nothing protects the weights from infinities. Step only "
        "through `scaler.step(optimizer)`.",
        snippet=LOOP,
    )
)
def optimizer_step_bypasses_scaler(run: Run) -> list[Finding]:
    """`optimizer-step-bypasses-scaler`: an optimizer steps outside of `scaler.step` after its loss was scaled. An
    optimizer that never uses the scaler, beside others that do, may have an unscaled loss, unless backward reached it
    from scaled ones alone."""
    if not scaler_enabled(run):
        return []
    every = call_orders(run)
    through = {split_call(c)[1] for _, _, calls in every for c in calls if split_call(c)[0] == "scaler.step"}
    scaled = {int(i) for i in signals(run, "scaled step")["optimizer"]}
    bad, optimizers = [], set()
    for first, last, calls in every:
        bypassing = _stepped_with_scaled(calls)
        bypassing = {i for i in bypassing if i in through | scaled or not through}
        if bypassing:
            bad.append((first, last))
            optimizers |= bypassing
    if not bad:
        return []
    index = min(optimizers)
    return [
        make_finding(
            "optimizer-step-bypasses-scaler",
            f"{optimizer_name(run, index)} steps outside scaler.step although the loss was scaled",
            f"optimizer.step of {optimizer_name(run, index)}",
            steps=step_range(bad),
            value=float(sum(last - first + 1 for first, last in bad)),
            limit=0.0,
            unit="steps",
        )
    ]


def _stepped_with_scaled(calls: Sequence[str]) -> set[int]:
    """The optimizers whose `step` came after a backward of a scaled loss, in these calls of an iteration, without a
    `zero_grad` in between. A scaled loss is what the next backward is of."""
    losses, scaled, cleared, found = 0, False, set[int](), set[int]()
    for call in calls:
        name, index = split_call(call)
        if name == "scale":
            losses += 1
        elif name == "backward" and losses:
            losses, scaled, cleared = losses - 1, True, set()
        elif name == "zero_grad":
            cleared.add(index)
        elif name == "optimizer.step" and scaled and index not in cleared:
            found.add(index)
    return found
