"""Steps that a scaler skips while it calibrates its scale: the rule separates normal skips from costly ones.

The reason for the limits: the docstring of `torch.amp.GradScaler` ("skipping should occur rarely, once every few
hundred or thousand iterations").
"""

from dataclasses import replace

import numpy as np

from amp_core.analysis import scale_summary, scale_trace, skip_episodes
from amp_core.findings.model import LOSS_SCALING, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.scaler import CALIBRATION_STEPS
from amp_core.findings.rules.scaling import loss_nonfinite
from amp_core.store.run import Run

MAX_SKIP_FRAC = 0.02
"""A larger share of skipped steps after calibration costs training time."""


@rule(
    Entry(
        code="calibration-skips",
        severity="info",
        family=LOSS_SCALING,
        order=520,
        what="The scaler skips steps while it finds its scale, and once after a growth. That is normal "
        "as long as it costs few steps.",
        signal="Steps whose gradients were not finite, with the scale before and after.",
        threshold="Skips that begin in the first 25 steps (from 2^16 to 1 takes 16), later ones no more than growths. "
        "A warning if growing costs more than 2 % of the steps, as PyTorch expects one skip in some hundreds, or "
        "if the first scale took more than 25 halvings.",
        advice="An info needs no change: a GradScaler starts high, backs off at an overflow, and tries a larger scale "
        "after each growth interval. A warning costs a batch at each skip: use the default `growth_interval=2000` "
        "where the scale grows too often, and `init_scale=2.0**16` where it began too high.",
    )
)
def calibration_skips(run: Run) -> list[Finding]:
    """`calibration-skips`: steps were skipped, but only as a working scaler does: while it calibrates its scale in the
    first steps, or once after a growth. A warning if growing so often costs more than `MAX_SKIP_FRAC` of the steps, or
    if the first scale was more than `CALIBRATION_STEPS` halvings too high. Silent if any skip has another reason."""
    episodes = skip_episodes(run)
    trace = scale_trace(run)
    if not len(episodes) or np.isnan(episodes["scale_after"].iloc[-1]):  # none, or the run ends with skips
        return []
    if loss_nonfinite(run):
        return []
    after_start = episodes[episodes["first"] >= int(trace["step"].iloc[0]) + CALIBRATION_STEPS]
    if (after_start["skips"] > 1).any() or (episodes["scale_after"] < 1).any():
        return []
    summary = scale_summary(run)
    if len(after_start) > summary.growths + 1:  # each growth may cost one skip
        return []
    first, last = int(episodes["first"].iloc[0]), int(episodes["last"].iloc[-1])
    share = len(after_start) / summary.attempts
    if len(after_start) > 1 and share > MAX_SKIP_FRAC:
        return [_grows_too_often(run, share, (int(after_start["first"].iloc[0]), last))]
    if episodes["skips"].iloc[0] > CALIBRATION_STEPS:
        start = episodes.iloc[0]
        return [_begins_too_high(int(start["skips"]), summary.attempts, (first, int(start["last"])))]
    was = "was" if summary.skips == 1 else "were"
    return [
        make_finding(
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
    finding = make_finding(
        "calibration-skips",
        f"One step in {1 / share:.0f} is skipped because the loss scale grows too often",
        "loss scale",
        severity="warning",
        steps=steps,
        value=share,
        limit=MAX_SKIP_FRAC,
        unit="share of steps",
        advice=(
            f"The scale doubles {every}, overflows, and halves again: each time a batch is wasted. "
            "A healthy scaler skips one step in some hundreds; the default interval is 2000."
        ),
    )
    return replace(finding, snippet="scaler = torch.amp.GradScaler(device_type, growth_interval=2000)")


def _begins_too_high(skips: int, attempts: int, steps: tuple[int, int]) -> Finding:
    finding = make_finding(
        "calibration-skips",
        f"The loss scale began 2^{skips} times too high: {skips:,} of {attempts:,} steps were skipped until it fitted",
        "loss scale",
        severity="warning",
        steps=steps,
        value=float(skips),
        limit=float(CALIBRATION_STEPS),
        unit="skipped steps",
        advice=(
            "Each skipped step halves the scale and wastes a batch. Begin with the usual 2^16: a scaler "
            "finds its scale in a few steps from there."
        ),
    )
    return replace(finding, snippet="scaler = torch.amp.GradScaler(device_type, init_scale=2.0**16)", frameworks={})
