"""Steps that a scaler skips while it finds its scale: the rule tells what is as it should be from what costs too much.

The reason for the limits: the docstring of `torch.amp.GradScaler` ("skipping should occur rarely, once every few
hundred or thousand iterations").
"""

from dataclasses import replace

import numpy as np

from amp_core.analysis import scale_summary, scale_trace, skip_episodes
from amp_core.findings.model import LOSS_SCALING, Entry, Finding
from amp_core.findings.registry import found, rule
from amp_core.findings.rules.scaler import CALIBRATION_STEPS
from amp_core.findings.rules.scaling import loss_nonfinite
from amp_core.store.run import Run

OFTEN = 0.02
"""A larger share of skipped steps, after the first ones, costs training time: that is no calibration either."""


@rule(
    Entry(
        code="calibration-skips",
        severity="info",
        family=LOSS_SCALING,
        order=520,
        what="The scaler skips steps while it finds its scale, and once after a growth. That is its way of working, "
        "as long as it costs few steps.",
        signal="Steps whose gradients were not finite, with the scale before and after.",
        threshold="Skips that begin in the first 25 steps (from 2^16 to 1 takes 16), later ones no more than growths. "
        "A warning where growing costs more than 2 % of the steps, as PyTorch expects one skip in some hundreds, or "
        "where the first scale took more than 25 halvings.",
        advice="An info needs no change: a GradScaler starts high, backs off at an overflow, and tries a larger scale "
        "after each growth interval. A warning costs a batch at each skip: use the default `growth_interval=2000` "
        "where the scale grows too often, and `init_scale=2.0**16` where it began too high.",
    )
)
def calibration_skips(run: Run) -> list[Finding]:
    """`calibration-skips`: steps were skipped, but only as a working scaler skips them: while it finds its scale in the
    first steps, or once after a growth. A warning where growing so often costs more than `OFTEN` of the steps, or where
    the first scale was more than `CALIBRATION_STEPS` halvings too high. Silent where any skip was of another sort."""
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
    if episodes["skips"].iloc[0] > CALIBRATION_STEPS:
        start = episodes.iloc[0]
        return [_begins_too_high(int(start["skips"]), summary.attempts, (first, int(start["last"])))]
    was = "was" if summary.skips == 1 else "were"
    return [
        found(
            "calibration-skips",
            f"{summary.skips:,} of {summary.attempts:,} steps {was} skipped while the loss scale was being found",
            "loss scale",
            steps=(first, last),
            value=float(summary.skips),
            unit="skipped steps",
            advice=(
                "This is how a GradScaler works: it starts high, backs off at an overflow, and tries a larger scale "
                "after each growth interval. Nothing needs to change."
            ),
        )
    ]


def _grows_too_often(run: Run, share: float, steps: tuple[int, int]) -> Finding:
    scaler = run.head.config.get("scaler")
    interval = scaler.get("growth_interval") if isinstance(scaler, dict) else None
    every = f"every {interval} clean steps" if interval else "after few clean steps"
    finding = found(
        "calibration-skips",
        f"One step in {1 / share:.0f} is thrown away because the loss scale grows too often",
        "loss scale",
        severity="warning",
        steps=steps,
        value=share,
        limit=OFTEN,
        unit="share of steps",
        advice=(
            f"The scale doubles {every}, overflows, and halves again: each time a batch is computed for nothing. "
            "A healthy scaler skips one step in some hundreds; the default interval is 2000."
        ),
    )
    return replace(finding, snippet="scaler = torch.amp.GradScaler(device_type, growth_interval=2000)")


def _begins_too_high(skips: int, attempts: int, steps: tuple[int, int]) -> Finding:
    finding = found(
        "calibration-skips",
        f"The loss scale began 2^{skips} times too high: {skips:,} of {attempts:,} steps were skipped until it fitted",
        "loss scale",
        severity="warning",
        steps=steps,
        value=float(skips),
        limit=float(CALIBRATION_STEPS),
        unit="skipped steps",
        advice=(
            "Each skipped step halves the scale and computes a batch for nothing. Begin with the usual 2^16: a scaler "
            "finds its scale in a few steps from there."
        ),
    )
    return replace(finding, snippet="scaler = torch.amp.GradScaler(device_type, init_scale=2.0**16)", frameworks={})
