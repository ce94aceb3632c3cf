"""Skipped steps: normal ones while a scaler calibrates its scale, costly ones, and those that nothing else explains.

The reason for the limits: the docstring of `torch.amp.GradScaler` ("skipping should occur rarely, once every few
hundred or thousand iterations").
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis import ScaleSummary, scale_summary, scale_trace, skip_episodes
from amp_core.analysis.numerics.loss_scale import CALIBRATION_STEPS
from amp_core.analysis.numerics.safe_window import INIT_SCALE
from amp_core.analysis.steps import scaler_enabled
from amp_core.findings import remedies
from amp_core.findings.model import LOSS_SCALING, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.scaler import scaler_state_not_restored
from amp_core.findings.rules.scaling import loss_nonfinite, scale_collapse
from amp_core.findings.rules.skips import branch_always_skipped, shared_backoff
from amp_core.findings.signals import call_orders, facts, signals, split_call
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_SKIP_FRAC = 0.02
"""A larger share of skipped steps after calibration costs training time."""
MAX_SHORT_INTERVAL = int(1 / MAX_SKIP_FRAC)
"""A growth interval of fewer steps costs more than `MAX_SKIP_FRAC` of them, if each growth costs one."""
MIN_SKIPS = 3
"""Fewest skipped steps after calibration that are reported: in a short run, one growth is a large share."""
MIN_DROPPED, MAX_DROPPED_FRAC = 10, 0.1
"""Batches that a loop drops itself: a guard against outliers drops fewer."""
MAX_GROWTH_RATIO = 8.0
"""A scaler's own growth factor is 2 by default; a scale that rose by more than this at once was set."""
DEFAULT_BACKOFF_FACTOR = 0.5
"""Of `torch.amp.GradScaler`."""
MAX_RESUMED_SKIPS = 8
"""Most halvings from the first scale of a resumed training, whose scale had been found before."""


@rule(
    Entry(
        code="calibration-skips",
        severity="info",
        family=LOSS_SCALING,
        order=520,
        follows=("optimizer-step-bypasses-scaler", "unscale-per-microbatch", "hidden-overflow"),
        what="The scaler skips steps while it searches for a loss scale, and once after a growth. That is normal as "
        "long as few steps are lost.",
        signal="Steps with non-finite gradients, and the scale before and after each.",
        threshold="Skips that start in the first 25 steps (from 2^16 to 1 takes 16), and later ones no more "
        "frequent than growths. A warning if growing the scale costs more than 2 % of the steps (PyTorch expects "
        "about one skip in several hundred), or if the initial scale needed more than 25 halvings, or 8 in a "
        "resumed training.",
        advice="As information, it needs no change: a GradScaler starts high, backs off at an overflow, and tries a "
        "larger scale after each growth interval. As a warning, every skip wastes a batch: use the default "
        "`growth_interval=2000` if the scale grows too often, and `init_scale=2.0**16` if it started too high.",
    )
)
def calibration_skips(run: Run) -> list[Finding]:
    """`calibration-skips`: steps were skipped, but only as a working scaler does: while it calibrates its scale in the
    first steps, or once after a growth. A warning if growing so often costs more than `MAX_SKIP_FRAC` of the steps, or
    if it took more than `CALIBRATION_STEPS` steps to lower the first scale. Silent if any skip has another reason."""
    episodes = skip_episodes(run)
    trace = scale_trace(run)
    if not len(episodes) or loss_nonfinite(run) or scale_collapse(run):
        return []
    after_start = episodes[episodes["first"] >= int(trace["step"].iloc[0]) + CALIBRATION_STEPS]
    summary = scale_summary(run)
    short = _outgrown(run, trace, after_start) and after_start["skips"].sum() <= summary.growths + 1
    if np.isnan(episodes["scale_after"].iloc[-1]) and not short:  # the run ends with skips
        alone = len(episodes) == 1 and int(episodes["skips"].iloc[0]) == len(trace)
        return [_still_skips(run, trace)] if alone else []
    if ((after_start["skips"] > 1).any() and not short) or (episodes["scale_after"] < 1).any():
        return []
    if len(after_start) > summary.growths + 1:  # each growth may cost one skip
        return []
    first, last = int(episodes["first"].iloc[0]), int(episodes["last"].iloc[-1])
    share = summary.settled_skips / max(1, summary.settled_steps)
    if len(after_start) > 1 and share > MAX_SKIP_FRAC:
        return [_grows_too_often(run, summary, (int(after_start["first"].iloc[0]), last))]
    start = episodes.iloc[0]
    resumed = facts(run.head.config, "resumed").get("optimizer") is True
    resumed = resumed and signals(run, "resumed").empty  # else the first skips are those of the run before
    limit = MAX_RESUMED_SKIPS if resumed else CALIBRATION_STEPS
    if start["skips"] > limit:
        return [_begins_too_high(run, start, limit, summary.attempts)]
    return [
        make_finding(
            "calibration-skips",
            _in_words(summary),
            "loss scale",
            steps=(first, last),
            value=float(summary.skips),
            unit="skipped steps",
            advice=(
                "GradScaler is designed this way: it starts high, backs off at an overflow, and tries a larger "
                "scale after each growth interval. Nothing needs to change."
            ),
        )
    ]


def _in_words(summary: ScaleSummary) -> str:
    """The skipped steps, with those of calibration apart from those that followed a growth of the scale."""
    early, later = summary.calibration_skips, summary.settled_skips
    were = "was" if (early or later) == 1 else "were"
    grown = f"{later:,} of {summary.settled_steps:,} steps after calibration"
    if not early:
        return f"{grown} {were} skipped after the loss scale grew"
    in_calibration = (
        f"{early:,} of {summary.attempts:,} steps {were} skipped while the scaler calibrated the loss scale"
    )
    return f"{in_calibration}{_from_initial(summary)}" + (f"; {grown} after it grew" if later else "")


def _from_initial(summary: ScaleSummary) -> str:
    """That `init_scale` caused the skips of calibration; empty if it is not above the default."""
    first = summary.first or 0.0
    return f" from init_scale = {formatting.scale(first)}" if first > INIT_SCALE else ""


def _growth_interval(run: Run) -> int | None:
    scaler = run.head.config.get("scaler")
    interval = scaler.get("growth_interval") if isinstance(scaler, dict) else None
    return interval if isinstance(interval, int) else None


def _outgrown(run: Run, trace: pd.DataFrame, episodes: pd.DataFrame) -> bool:
    """Whether the scaler grows its scale so soon that it outgrows gradients, now and then those of two steps in a row:
    most skips come in the step after a growth."""
    interval = _growth_interval(run)
    grown = trace["step"][trace["loss_scale"].diff() > 0]
    return interval is not None and interval < MAX_SHORT_INTERVAL and episodes["first"].isin(grown).mean() > 0.5


def _grows_too_often(run: Run, summary: ScaleSummary, steps: tuple[int, int]) -> Finding:
    interval = _growth_interval(run)
    every = f"after {formatting.plural(interval, 'clean step')}" if interval else "after only a few clean steps"
    early = summary.calibration_skips
    start = _from_initial(summary)
    more = f"; {early:,} more while it fell{start}" if start and early else ""
    finding = make_finding(
        "calibration-skips",
        f"{summary.settled_skips:,} of {summary.settled_steps:,} steps after calibration were skipped because the loss "
        f"scale grows too often{more}",
        "loss scale",
        severity="warning",
        steps=steps,
        value=summary.settled_skips / summary.settled_steps,
        limit=MAX_SKIP_FRAC,
        unit="share of steps",
        advice=(
            f"The scale doubles {every}, overflows, and halves again, so each doubling wastes a batch. A healthy "
            "scaler skips about one step in several hundred; the default growth interval is 2000."
            + (f" init_scale alone caused the {early:,} skips in calibration." if more else "")
        ),
    )
    return replace(finding, snippet=remedies.new_scaler(run, growth_interval=2000), frameworks={})


def _begins_too_high(run: Run, start: "pd.Series[Any]", limit: int, attempts: int) -> Finding:
    skips, ratio = int(start["skips"]), float(start["scale_before"] / start["scale_after"])
    return _too_high(
        run,
        f"The initial loss scale was {formatting.scale(ratio)} times too high: {skips:,} of {attempts:,} steps were "
        "skipped until it came down",
        skips,
        limit,
        (int(start["first"]), int(start["last"])),
    )


def _still_skips(run: Run, trace: pd.DataFrame) -> Finding:
    """All steps of the run were skipped: as information as long as a scaler's usual search may take that many."""
    scales = trace["loss_scale"]
    before, after = (formatting.scale(float(scale)) for scale in (scales.iloc[0], scales.iloc[-1]))
    fell = f"it fell from {before} to {after} only" if before != after else f"it stayed at {after}"
    return _too_high(
        run,
        f"All {len(trace):,} steps were skipped, because the gradients overflow at this loss scale: {fell}",
        len(trace),
        CALIBRATION_STEPS,
        (int(trace["step"].iloc[0]), int(trace["step"].iloc[-1])),
    )


def _too_high(run: Run, title: str, skips: int, limit: int, steps: tuple[int, int]) -> Finding:
    scaler = run.head.config.get("scaler")
    backoff = scaler.get("backoff_factor") if isinstance(scaler, dict) else None
    halves = backoff is None or backoff == DEFAULT_BACKOFF_FACTOR
    lowers = "halves the scale" if halves else f"lowers the scale by the factor {formatting.number(backoff)} alone"
    instead = "" if halves else f", and leave `backoff_factor` at {DEFAULT_BACKOFF_FACTOR}"
    finding = make_finding(
        "calibration-skips",
        title,
        "loss scale",
        severity="warning" if skips > limit else None,
        steps=steps,
        value=float(skips),
        limit=float(limit),
        unit="skipped steps",
        advice=(
            f"Each skipped step {lowers} and wastes a batch. Lower `init_scale`{instead}; if the scale was restored, "
            "check that its checkpoint belongs to this training."
        ),
    )
    return replace(finding, snippet=remedies.new_scaler(run), frameworks={})


@rule(
    Entry(
        code="frequent-skips",
        severity="warning",
        family=LOSS_SCALING,
        order=325,
        what="Steps keep being skipped after the loss scale was calibrated, and no other rule explains why.",
        signal="Skipped steps after the first 25, and the scale before each; gradients that the loop clears without a "
        "step.",
        threshold="3 or more, and more than 2 % of these steps: PyTorch expects about one skip in several hundred "
        "steps. Or 10 batches, and a tenth of all, that a loop which never unscales drops itself.",
        advice="Each skipped step wastes a batch; look for what these batches have in common, such as outliers in "
        "the data, a loss term that spikes, or a loss scale that the program sets itself. Clip or drop outliers, "
        "leave the scale to the scaler, or use bfloat16.",
        snippet="before = scaler.get_scale()\n"
        "scaler.step(optimizer)\n"
        "scaler.update()\n"
        "if scaler.get_scale() < before:\n"
        "    print('skipped', step, loss.item(), x.abs().max().item())",
    )
)
def frequent_skips(run: Run) -> list[Finding]:
    """`frequent-skips`: more than `MAX_SKIP_FRAC` of the steps after calibration were skipped, for a reason that no
    other rule names."""
    if dropped := _dropped_by_loop(run):
        return dropped
    trace, episodes = scale_trace(run), skip_episodes(run)
    if trace.empty or episodes.empty:
        return []
    settled = int(trace["step"].iloc[0]) + CALIBRATION_STEPS
    later = episodes[episodes["first"] >= settled]
    for fresh in scaler_state_not_restored(run):  # which calibrates anew
        later = later[~later["first"].between(*(fresh.steps or (0, -1)))]
    skips, steps = int(later["skips"].sum()), int((trace["step"] >= settled).sum())
    if skips < MIN_SKIPS or skips <= MAX_SKIP_FRAC * steps:
        return []
    others = (loss_nonfinite, scale_collapse, branch_always_skipped, shared_backoff, calibration_skips)
    if any(finding.severity != "info" for other in others for finding in other(run)):
        return []
    first, last = int(later["first"].iloc[0]), int(later["last"].iloc[-1])
    tensors = later["tensors"][later["tensors"].ne("")]
    where = str(tensors.mode().iloc[0]).split(", ")[0] if len(tensors) else "loss scale"
    raised = _raised(trace, first)
    return [
        make_finding(
            "frequent-skips",
            f"{skips:,} of {steps:,} steps after calibration were skipped{raised}",
            "loss scale" if raised else where,
            steps=(first, last),
            value=skips / steps,
            limit=MAX_SKIP_FRAC,
            unit="share of steps",
        )
    ]


def _dropped_by_loop(run: Run) -> list[Finding]:
    """`frequent-skips` where the loop itself clears scaled gradients without a step, now and then. The first pass of
    sharpness-aware training, and what the loss of a generator leaves in its critic, are cleared regularly."""
    orders = call_orders(run) if scaler_enabled(run) else []
    names = [(first, last, [split_call(c)[0] for c in calls]) for first, last, calls in orders]
    if not names or any("unscale_" in calls or "get_scale" in calls for _, _, calls in names):
        return []
    dropped = [(first, last, _cleared_unused(calls), calls.count("backward")) for first, last, calls in names]
    count = sum(n * (last - first + 1) for first, last, n, _ in dropped)
    every = sum(n * (last - first + 1) for first, last, _, n in dropped)
    if count < MIN_DROPPED or count <= MAX_DROPPED_FRAC * every or _regular(dropped):
        return []
    at = [(first, last) for first, last, n, _ in dropped if n]
    return [
        make_finding(
            "frequent-skips",
            f"The loop dropped {count:,} of {every:,} batches: it cleared their gradients, which are scaled, without "
            "a step",
            "gradients",
            steps=(at[0][0], at[-1][1]),
            value=count / every,
            limit=MAX_DROPPED_FRAC,
            unit="share of batches",
            remedy=remedies.UNSCALED_GUARD,
        )
    ]


def _cleared_unused(calls: Sequence[str]) -> int:
    """How many backward passes of scaled losses were followed by `zero_grad` before any use of their gradients, in the
    calls of a step. An update of the scale ends a step of an optimizer that the run does not have."""
    unused = pending = losses = 0
    for call in calls:
        if call == "scale":
            losses += 1
        elif call == "backward" and losses:
            pending, losses = pending + 1, losses - 1
        elif call == "zero_grad":
            unused, pending = unused + pending, 0
        elif call in ("scaler.step", "optimizer.step", "clip", "update"):
            pending = 0
    return unused


def _regular(dropped: Sequence[tuple[int, int, int, int]]) -> bool:
    """Whether steps in which gradients were cleared unused, by stretches of steps, come at equal intervals."""
    counts = {n for _, _, n, _ in dropped if n}
    steps = [step for first, last, n, _ in dropped if n for step in range(first, last + 1)]
    return len(counts) == 1 and len(set(np.diff(steps).tolist())) <= 1


def _raised(trace: pd.DataFrame, step: int) -> str:
    """That the scale rose by more than a growth before `step`: the program set or restored it. Empty if it did not."""
    scales = trace[trace["step"] <= step]["loss_scale"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = scales[1:] / scales[:-1]
    at = int(np.nanargmax(ratios)) if len(ratios) and np.isfinite(ratios).any() else -1
    if at < 0 or not ratios[at] > MAX_GROWTH_RATIO:
        return ""
    before, after = (formatting.number(s) for s in scales[at : at + 2])
    when = int(trace["step"].iloc[at + 1])
    return f", because the program raised the loss scale from {before} to {after} at step {when:,}"
