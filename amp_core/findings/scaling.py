"""Rules on loss scaling and on the loss itself: the ones that are certain from steps and settings alone.

The codes and their reasons: PyTorch's notes on automatic mixed precision, "Gradient scaling", and the docstring of
`torch.amp.GradScaler` ("skipping should occur rarely, once every few hundred or thousand iterations").
"""

import math

import numpy as np

from amp_core.analysis import scale_summary, scale_trace, skip_episodes
from amp_core.findings.model import Finding
from amp_core.run import Run

CALIBRATION_STEPS = 25
"""Skips that begin within the first so many steps are a scaler finding its scale: from 2^16 down to 1 takes 16."""
OFTEN = 0.02
"""A larger share of skipped steps, after the first ones, costs training time: that is no calibration either."""
COLLAPSE_SKIPS = 5
"""So many skips in a row below a scale of 1 are no calibration."""


def loss_nonfinite(run: Run) -> list[Finding]:
    """`loss-nonfinite`: a recorded loss is NaN or infinite. A loss that was not recorded says nothing."""
    steps = run.table("steps").select(["step", "loss"]).drop_null()
    loss = steps.column("loss").to_numpy()
    bad = np.flatnonzero(~np.isfinite(loss))
    if not len(bad):
        return []
    numbers = steps.column("step").to_numpy()
    first, last = int(numbers[bad[0]]), int(numbers[bad[-1]])
    value = float(loss[bad[0]])
    word = "NaN" if math.isnan(value) else "infinite"
    return [
        Finding(
            code="loss-nonfinite",
            severity="error",
            title=f"The loss is {word} from step {first:,} on ({len(bad):,} of {len(loss):,} steps)",
            where="loss",
            steps=(first, last),
            value=float(len(bad)),
            limit=0.0,
            unit="steps",
            advice=(
                "Skipped steps are normal, a loss that is not finite never is: the forward pass itself overflowed or "
                "the data or learning rate broke it, and no loss scale can repair that. "
                "Find the first module whose output is not finite and run it in float32, or use bfloat16."
            ),
            snippet=(
                "def check(module, args, output):\n"
                "    if torch.is_tensor(output) and not output.isfinite().all():\n"
                "        raise FloatingPointError(f'{names[module]} gave a non-finite output')\n"
                "\n"
                "names = {module: name for name, module in model.named_modules()}\n"
                "for module in names:\n"
                "    module.register_forward_hook(check)"
            ),
        )
    ]


def scale_collapse(run: Run) -> list[Finding]:
    """`scale-collapse`: step after step is skipped while the loss scale falls below 1. An error where the run does not
    recover, a warning where it does."""
    episodes = skip_episodes(run)
    if not len(episodes):
        return []
    after = episodes["scale_after"].fillna(episodes["scale_before"] * 0.5 ** episodes["skips"])
    collapsed = episodes[(after < 1) & (episodes["skips"] >= COLLAPSE_SKIPS)]
    if not len(collapsed):
        return []
    worst = collapsed.iloc[int(collapsed["skips"].to_numpy().argmax())]
    first, last, skips = int(worst["first"]), int(worst["last"]), int(worst["skips"])
    lowest = float(after[collapsed.index].min())
    trace = scale_trace(run)
    lost = bool(trace["skipped"].iloc[-COLLAPSE_SKIPS:].all())
    named = str(worst["tensors"])
    return [
        Finding(
            code="scale-collapse",
            severity="error" if lost else "warning",
            title=f"{skips:,} steps in a row were skipped and the loss scale fell to {lowest:.3g}",
            where=named or "loss scale",
            steps=(first, last),
            value=lowest,
            limit=1.0,
            unit="loss scale",
            advice=(
                "A smaller loss scale no longer helps: gradients are not finite whatever they are multiplied by, so "
                "the overflow is in the forward pass, the data or the learning rate. "
                "Check that the loss is finite, keep the module where it overflows in float32, or use bfloat16."
            ),
            snippet=(
                "with torch.autocast(device_type, dtype=torch.bfloat16):   # the range of float32: no GradScaler\n"
                "    loss = loss_fn(model(x), y)\n"
                "loss.backward()\n"
                "optimizer.step()"
            ),
        )
    ]


def calibration_skips(run: Run) -> list[Finding]:
    """`calibration-skips`: steps were skipped, but only as a working scaler skips them: while it finds its scale in the
    first steps, or once after a growth. A warning where growing so often costs more than `OFTEN` of the steps. Silent
    where any skip was of another sort."""
    episodes = skip_episodes(run)
    trace = scale_trace(run)
    if not len(episodes) or np.isnan(episodes["scale_after"].iloc[-1]):  # none, or the run ends amid skips
        return []
    if loss_nonfinite(run):
        return []
    after_start = episodes[episodes["first"] >= int(trace["step"].iloc[0]) + CALIBRATION_STEPS]
    if (after_start["skips"] > 1).any() or (episodes["scale_after"] < 1).any():
        return []
    summary = scale_summary(run)
    if len(after_start) > summary.growths + 1:  # each growth tries a scale that may prove too large, once
        return []
    first, last = int(episodes["first"].iloc[0]), int(episodes["last"].iloc[-1])
    share = len(after_start) / summary.attempts
    if len(after_start) > 1 and share > OFTEN:
        return [_grows_too_often(run, share, (int(after_start["first"].iloc[0]), last))]
    return [
        Finding(
            code="calibration-skips",
            severity="info",
            title=f"{summary.skips:,} of {summary.attempts:,} steps were skipped while the loss scale was being found",
            where="loss scale",
            steps=(first, last),
            value=float(summary.skips),
            limit=None,
            unit="skipped steps",
            advice=(
                "This is how a GradScaler works: it starts high, backs off at an overflow, and tries a larger scale "
                "after each growth interval. Nothing needs to change."
            ),
            snippet="",
        )
    ]


def _grows_too_often(run: Run, share: float, steps: tuple[int, int]) -> Finding:
    scaler = run.head.config.get("scaler")
    interval = scaler.get("growth_interval") if isinstance(scaler, dict) else None
    every = f"every {interval} clean steps" if interval else "after few clean steps"
    return Finding(
        code="calibration-skips",
        severity="warning",
        title=f"One step in {1 / share:.0f} is thrown away because the loss scale grows too often",
        where="loss scale",
        steps=steps,
        value=share,
        limit=OFTEN,
        unit="share of steps",
        advice=(
            f"The scale doubles {every}, overflows, and halves again: each time a batch is computed for nothing. "
            "A healthy scaler skips one step in some hundreds; the default interval is 2000."
        ),
        snippet="scaler = torch.amp.GradScaler(device_type, growth_interval=2000)",
    )


def fp16_without_scaler(run: Run) -> list[Finding]:
    """`fp16-without-scaler`: the forward pass ran in float16 autocast and no GradScaler was at work, or one whose loss
    scale was 1 all the time, which does nothing."""
    summary = scale_summary(run)
    if run.head.config.get("autocast_dtype") != "float16" and run.head.config.get("precision") != "fp16-unscaled":
        return []
    if not summary.attempts or (summary.has_scaler and summary.highest != 1.0):
        return []
    said = "with a loss scale of 1, which lifts nothing" if summary.has_scaler else "without a loss scale"
    return [
        Finding(
            code="fp16-without-scaler",
            severity="error",
            title=f"Training in float16 {said}",
            where="GradScaler",
            steps=None,
            value=1.0,
            limit=None,
            unit="loss scale",
            advice=(
                "Gradients smaller than 2^-25 become zero in float16, silently, and those below 2^-14 lose bits: a "
                "GradScaler lifts them above that before backward. "
                "Add one with its usual first scale of 2^16, or use bfloat16, which needs none."
            ),
            snippet=(
                "scaler = torch.amp.GradScaler(device_type)\n"
                "\n"
                "with torch.autocast(device_type, dtype=torch.float16):\n"
                "    loss = loss_fn(model(x), y)\n"
                "scaler.scale(loss).backward()\n"
                "scaler.step(optimizer)\n"
                "scaler.update()\n"
                "optimizer.zero_grad()"
            ),
        )
    ]


def scaler_with_bf16(run: Run) -> list[Finding]:
    """`scaler-with-bf16`: a GradScaler was at work although autocast used bfloat16."""
    config = run.head.config
    dtype = config.get("autocast_dtype")
    if dtype != "bfloat16" and not (dtype is None and config.get("precision") == "bf16"):
        return []
    summary = scale_summary(run)
    if not summary.has_scaler or not summary.attempts:
        return []
    return [
        Finding(
            code="scaler-with-bf16",
            severity="warning",
            title=f"A GradScaler runs with bfloat16, which needs none ({summary.skips:,} steps skipped)",
            where="GradScaler",
            steps=None,
            value=float(summary.skips),
            limit=0.0,
            unit="skipped steps",
            advice=(
                "bfloat16 has the range of float32, so scaling saves no gradient, while the scaler still checks every "
                "gradient and may skip steps as its scale grows. Turn it off; the rest of the loop can stay."
            ),
            snippet="scaler = torch.amp.GradScaler(device_type, enabled=False)",
        )
    ]
