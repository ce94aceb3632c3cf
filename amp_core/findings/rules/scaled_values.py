"""Rules on values that are used although still multiplied by the loss scale, or not yet: logged ones, a gradient
penalty, a term of the loss."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis import scale_summary, scale_trace
from amp_core.analysis.steps import attempts, scaler_enabled
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.loops import reads_scaled
from amp_core.findings.signals import call_orders, last_step, optimizer_name, signals, split_call, step_range
from amp_core.findings.snippets import TORCH_EXAMPLES
from amp_core.store.run import Run
from amp_core.text import formatting

FOLLOWS_BITS = 0.25
"""A norm moves with the loss scale if their changes agree within this many powers of two."""
_METRIC = Remedy(
    "The loss seems to double whenever the loss scale grows, so that the scheduler lowers the learning rate of a "
    "training that improves. Give it the loss from before `scaler.scale`, better still that of held-out data.",
    "scaler.scale(loss).backward()\nscheduler.step(loss.item())   # not the scaled loss",
)
MAX_RATIO_ERROR = 0.01
MIN_METRICS = 3
"""Fewest metrics of a scheduler that are compared: one may be so large by chance."""
MIN_SCALE_CHANGES = 4
"""Fewest changes of the scale for a statement that a norm follows them."""


@rule(
    Entry(
        code="logged-scaled-values",
        severity="warning",
        family=TRAINING_LOOP,
        order=410,
        what="A logged loss or gradient norm is still multiplied by the loss scale, and jumps with it.",
        signal="Logged values and the metrics of ReduceLROnPlateau compared with measured losses, jumps of the logged "
        "norm when the scale changes, and calls of `clip_grad_norm_` that clip nothing.",
        threshold="The ratio of logged to measured value is within 1 % of the loss scale; without a measurement, "
        "the norm follows four of five scale changes to within a factor of 1.2. Or 3 metrics of a scheduler, and all "
        "of them, are the loss times its scale. Or one call with an infinite threshold before gradients are unscaled, "
        "in a loop that never asks for the scale to divide by it.",
        advice="The curve shows the loss scale rather than the model: it doubles at each growth. Log the loss "
        "before `scaler.scale`, and norms after `scaler.unscale_`.",
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
            _logged(
                names[0],
                frame["step"],
                float(frame["value"].iloc[0]),
                (f"{' and '.join(names)} is logged while still scaled"),
            )
        ]
    scheduled = _scheduled_scaled(run)
    if len(scheduled):
        title = "ReduceLROnPlateau judges the training by a loss that is still scaled"
        return [_logged("ReduceLROnPlateau", scheduled["step"], float(scheduled["ratio"].iloc[0]), title, _METRIC)]
    read = [(first, last) for first, last, calls in call_orders(run) if reads_scaled(calls, "norm")]
    if read and scaler_enabled(run) and not any("get_scale" in calls for _, _, calls in call_orders(run)):
        title = "The norm of all gradients is taken while they are still scaled"
        return [_logged("clip_grad_norm_", pd.Series(step_range(read)), scale_summary(run).last or math.nan, title)]
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


def _scheduled_scaled(run: Run) -> pd.DataFrame:
    """The metrics that are the last loss, or the mean of those since the last metric, times the loss scale: `step`, and
    the `ratio` to the true value. None unless all metrics are."""
    metrics, steps = signals(run, "scheduled metric"), attempts(run)
    found: list[tuple[int, float]] = []
    since = -1
    for step, metric in zip(metrics["step"].astype(int), metrics["value"].astype(float), strict=True):
        rows = steps[steps["step"].between(since + 1, step) & steps["loss"].notna() & (steps["loss_scale"] >= 2)]
        since = step
        for part in (rows.tail(1), rows):
            true, scaled = part["loss"].mean(), (part["loss"] * part["loss_scale"]).mean()
            if len(part) and true and abs(metric / scaled - 1) < MAX_RATIO_ERROR:
                found.append((step, metric / true))
                break
    every = len(metrics) >= MIN_METRICS and len(found) == len(metrics)
    return pd.DataFrame(found if every else [], columns=["step", "ratio"])


def _logged(where: str, steps: "pd.Series[int]", value: float, title: str, remedy: Remedy | None = None) -> Finding:
    return make_finding(
        "logged-scaled-values",
        title[0].upper() + title[1:],
        where,
        steps=(int(steps.min()), int(steps.max())),
        value=value if math.isfinite(value) else None,
        limit=1.0,
        unit="times the true value",
        remedy=remedy,
    )


@rule(
    Entry(
        code="scaled-gradient-penalty",
        severity="warning",
        family=TRAINING_LOOP,
        order=250,
        what="A gradient penalty is computed from gradients that are still scaled, or an input is moved along them.",
        signal="`torch.autograd.grad(…, create_graph=True)` of a scaled loss, and whether `get_scale` was called "
        "afterwards. What the model is given after the gradient of an input was computed.",
        threshold=f"`get_scale` was not called before backward ({TORCH_EXAMPLES}, gradient penalty), nor before the "
        "next forward, whose input differs by a multiple of the gradient that is larger than the input.",
        advice="The penalty is too large by a factor of the loss scale, or of its square. Divide the gradients by "
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
        return [_input_step(row) for row in signals(run, "input step").head(1).to_dict("records")]
    at, scale = int(frame["step"].iloc[0]), scale_summary(run).first
    return [
        make_finding(
            "scaled-gradient-penalty",
            "A gradient penalty uses gradients that are still scaled",
            str(frame["name"].iloc[0]),
            steps=(at, at),
            value=scale,
            limit=1.0,
            unit="loss scale",
        )
    ]


def _input_step(row: Mapping[Any, Any]) -> Finding:
    step, ratio = int(row["step"]), float(row["value"])
    size = f"{formatting.number(ratio)} times as large as the input" if ratio == ratio else "of an input of zeros"
    return make_finding(
        "scaled-gradient-penalty",
        f"The model's input is moved along its gradient, which is still scaled: the step is {size}",
        "torch.autograd.grad",
        steps=(step, step),
        value=ratio,
        limit=float(row["limit"]),
        unit="size of the step over that of the input",
        remedy=Remedy(
            "The step is too large by the factor of the loss scale, so the model trains on inputs that have nothing to "
            "do with the data. Divide the gradient by `scaler.get_scale()` before it moves the input.",
            "(g,) = torch.autograd.grad(scaler.scale(loss), x)\nx = (x + size * g / scaler.get_scale()).detach()",
        ),
    )


@rule(
    Entry(
        code="unscaled-loss-term",
        severity="warning",
        family=TRAINING_LOOP,
        order=252,
        what="A loss term is not multiplied by the loss scale, but its gradients are divided by it.",
        signal="The graph of each backward, from its roots to the parameters whose optimizer steps through the scaler. "
        "Gradients as backward left them, and before they are unscaled.",
        threshold="One path without the loss scale, in a step that does not call `get_scale` (torch.amp, gradient "
        "scaling with several losses: scale each of them). Or, in each of the first steps, an addition to scaled "
        "gradients that is at most 16 times as large as unscaled ones.",
        advice="After unscaling, this term has 1 / scale of its intended weight, so an auxiliary loss or penalty "
        "has no effect. Add the terms first and scale their sum, or scale each loss before its backward.",
        snippet="with torch.autocast(device_type, dtype=torch.float16):\n"
        "    loss = main_loss + 0.1 * auxiliary_loss\n"
        "scaler.scale(loss).backward()",
    )
)
def unscaled_loss_term(run: Run) -> list[Finding]:
    """`unscaled-loss-term`: a backward reaches parameters on a path that no scaler multiplied, and their optimizer
    steps through the scaler."""
    if not scaler_enabled(run):
        return []
    frame = signals(run, "unscaled backward")
    if frame.empty:
        return _added_unscaled(run)
    through = {split_call(c)[1] for _, _, calls in call_orders(run) for c in calls if split_call(c)[0] == "scaler.step"}
    frame = frame[frame["optimizer"].isin(through)]
    if frame.empty:
        return []
    row = frame.iloc[0]
    name = optimizer_name(run, int(row["optimizer"]))
    return [
        make_finding(
            "unscaled-loss-term",
            f"A loss reaches the parameters of {name} unscaled, but scaler.step divides its gradients by the loss "
            "scale",
            str(row["name"]),
            steps=(int(row["step"]), int(row["step"])),
            value=scale_summary(run).first,
            limit=1.0,
            unit="loss scale",
        )
    ]


def _added_unscaled(run: Run) -> list[Finding]:
    """The loop added noise, weight decay or the like to gradients before they were unscaled."""
    frame = signals(run, "added unscaled")
    if frame.empty:
        return []
    tensors = formatting.plural(int(frame["count"].iloc[0]), "gradient")
    return [
        make_finding(
            "unscaled-loss-term",
            f"The loop adds something unscaled to scaled gradients (measured on {tensors}), which unscaling then "
            "divides by the loss scale",
            "gradients",
            steps=(0, last_step(run) or 0),
            value=scale_summary(run).first,
            limit=1.0,
            unit="loss scale",
            remedy=Remedy(
                "After unscaling, what is added, such as noise or weight decay, has 1 / scale of its intended size, so "
                "it has no effect. Add it after `scaler.unscale_(optimizer)`.",
                "scaler.scale(loss).backward()\n"
                "scaler.unscale_(optimizer)\n"
                "for p in model.parameters():\n"
                "    p.grad.add_(noise_std * torch.randn_like(p.grad))\n"
                "scaler.step(optimizer)\n"
                "scaler.update()",
            ),
        )
    ]


@rule(
    Entry(
        code="hidden-overflow",
        severity="error",
        family=TRAINING_LOOP,
        order=115,
        what="The loop replaces infinities and NaN in scaled gradients, so the scaler does not see the overflow.",
        signal="Norms of gradients as backward left them, and before `unscale_` or `scaler.step`, in the first steps.",
        threshold="One step in which they are not finite before, and finite but not all zero after.",
        advice="The scaler skips no step and never lowers the loss scale; the optimizer steps with the largest finite "
        "numbers in place of infinities. Leave scaled gradients as they are: `scaler.step` skips such a step, and "
        "`scaler.update` halves the scale.",
        snippet="scaler.scale(loss).backward()\n"
        "scaler.step(optimizer)     # without torch.nan_to_num before it\n"
        "scaler.update()",
    )
)
def hidden_overflow(run: Run) -> list[Finding]:
    """`hidden-overflow`: the loop made gradients finite that were not, before the scaler checked them."""
    frame = signals(run, "made finite")
    if frame.empty or not scaler_enabled(run):
        return []
    steps, compared = int(frame["count"].max()), int(frame["limit"].iloc[0])
    name = optimizer_name(run, int(frame["optimizer"].iloc[0]))
    return [
        make_finding(
            "hidden-overflow",
            f"Infinite or NaN gradients of {name} are replaced before the scaler checks them, in "
            + (
                f"each of the first {compared} steps" if steps == compared else f"{steps} of the first {compared} steps"
            ),
            "gradients",
            steps=(0, compared - 1),
            value=float(steps),
            limit=0.0,
            unit="steps",
        )
    ]
