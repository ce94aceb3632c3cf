"""Rules on the order of a loop's calls: clip, unscale, step, update."""

from amp_core.analysis import scale_summary, scale_trace
from amp_core.analysis.numerics.clipping import clipped_while_scaled
from amp_core.analysis.steps import scaler_enabled
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
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
from amp_core.findings.snippets import LOOP, TORCH_EXAMPLES
from amp_core.store.run import Run
from amp_core.text import formatting


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
        where, steps = "clip_grad_norm_", step_range(bad)
    elif len(shrunk := signals(run, "clipped scaled")):
        called = any("clip" in map(_name, calls) for _, _, calls in call_orders(run))
        where, steps = "clip_grad_norm_" if called else "gradients", (0, last_step(run) or 0)
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
        )
    ]


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
        code="unscale-per-microbatch",
        severity="error",
        family=TRAINING_LOOP,
        order=90,
        what="With gradient accumulation, gradients are unscaled or the scale is updated before all micro-batches "
        "are accumulated, which mixes scaled and unscaled gradients. Or they are never cleared, so every step adds "
        "to all previous ones.",
        signal="The order of calls: `scale` after `unscale_`, or several `unscale_` or `update` before one step. "
        "Also gradients that backward adds to although the optimizer has already stepped with them, and gradients that "
        "the loop's own code divides by the loss scale before the scaler does.",
        threshold=f"One such step ({TORCH_EXAMPLES}: unscale, step and update once per effective batch). Gradients "
        "kept in each of the first five steps, or cleared twice after several steps each.",
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
        if "scale" not in calls:
            continue
        bypassing = {split_call(c)[1] for c in calls if split_call(c)[0] == "optimizer.step"}
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
