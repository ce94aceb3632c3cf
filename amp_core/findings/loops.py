"""Rules on the order of a loop's calls: clip, unscale, step, update, schedule, and what backward is called in."""

import math

import numpy as np
import pandas as pd

from amp_core.analysis import scale_summary, scale_trace
from amp_core.analysis._steps import scaler_enabled
from amp_core.findings._found import found
from amp_core.findings._signals import Orders, ended_by, last_step, of, optimizer_name, orders, signals, span
from amp_core.findings.model import Finding
from amp_core.run import Run

FOLLOWS_BITS = 0.25
"""A norm that moves with the scale does so within so many powers of two."""
ENOUGH_CHANGES = 4
"""Changes of the scale from which on a norm can be said to follow them."""


def clip_before_unscale(run: Run) -> list[Finding]:
    """`clip-before-unscale`: a clip after a scaled backward and before `unscale_`."""
    if not scaler_enabled(run):
        return []
    bad = [(first, last) for first, last, calls in orders(run) if _clips_scaled(calls)]
    if not bad:
        return []
    scale = scale_summary(run).last
    return [
        found(
            "clip-before-unscale",
            "Gradients are clipped before they are unscaled: the threshold is in effect divided by the loss scale",
            "clip_grad_norm_",
            steps=span(bad),
            value=scale,
            limit=1.0,
            unit="loss scale",
        )
    ]


def _clips_scaled(calls: list[str]) -> bool:
    scaled = False
    for name, _ in map(of, calls):
        if name in ("scale", "unscale_", "scaler.step"):
            scaled = name == "scale"
        elif name == "clip" and scaled:
            return True
    return False


def unscale_per_microbatch(run: Run) -> list[Finding]:
    """`unscale-per-microbatch`: gradients of one optimizer are added to after they were unscaled, or the scale is
    updated between the micro-batches of one step; or they are never cleared, and so are added to in every step."""
    kept = signals(run, "kept gradients")
    if not kept.empty:
        return [_never_cleared(run, int(kept["optimizer"].iloc[0]))]
    every = _while_all_step(run)
    bad = [(first, last) for first, last, calls in every if _mixes(calls)]
    if not bad:
        return []
    return [
        found(
            "unscale-per-microbatch",
            "unscale_ or update is called for each micro-batch, before all gradients of the step are in",
            "unscale_",
            steps=span(bad),
            value=float(max(_most(calls) for _, _, calls in every if _mixes(calls))),
            limit=1.0,
            unit="calls per optimizer step",
        )
    ]


def _while_all_step(run: Run) -> Orders:
    """The stretches that began before some optimizer made its last step: one that was replaced steps unseen after it,
    and what is called for it cannot be told from calls for the others."""
    frame = run.table("steps").select(["step", "optimizer"]).to_pandas()
    until = frame.groupby("optimizer")["step"].max().min()
    return [stretch for stretch in orders(run) if not stretch[0] > until]


def _never_cleared(run: Run, index: int) -> Finding:
    name, last = optimizer_name(run, index), last_step(run)
    return found(
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


def _mixes(calls: list[str]) -> bool:
    unscaled: set[int] = set()
    stepped: set[int] = set()
    scaled = False
    for name, index in map(of, calls):
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


def _most(calls: list[str]) -> int:
    return max(sum(of(c)[0] == name for c in calls) for name in ("unscale_", "update"))


def missing_scaler_update(run: Run) -> list[Finding]:
    """`missing-scaler-update`: the run ended because a step had no `update` after it."""
    said = ended_by(run)
    if "since the last update()" not in said and "being called after step()" not in said:
        return []
    if unscale_per_microbatch(run):
        return []
    step = scale_trace(run)["step"]
    at = int(step.iloc[-1]) if len(step) else 0
    return [
        found(
            "missing-scaler-update",
            "The scaler was not updated after a step, so it refused the next one",
            "scaler.update",
            steps=(at, at),
            value=0.0,
            limit=1.0,
            unit="updates per step",
        )
    ]


def optimizer_step_bypasses_scaler(run: Run) -> list[Finding]:
    """`optimizer-step-bypasses-scaler`: an optimizer steps outside of `scaler.step` after its loss was scaled. An
    optimizer that only ever steps by itself, beside others that the scaler steps, may have an unscaled loss."""
    if not scaler_enabled(run):
        return []
    every = orders(run)
    through = {of(c)[1] for _, _, calls in every for c in calls if of(c)[0] == "scaler.step"}
    bad, optimizers = [], set()
    for first, last, calls in every:
        if "scale" not in calls:
            continue
        beside = {of(c)[1] for c in calls if of(c)[0] == "optimizer.step"}
        beside = {i for i in beside if i in through or not through}
        if beside:
            bad.append((first, last))
            optimizers |= beside
    if not bad:
        return []
    index = min(optimizers)
    return [
        found(
            "optimizer-step-bypasses-scaler",
            f"{optimizer_name(run, index)} steps outside of scaler.step although the loss was scaled",
            f"optimizer.step of {optimizer_name(run, index)}",
            steps=span(bad),
            value=float(sum(last - first + 1 for first, last in bad)),
            limit=0.0,
            unit="steps",
        )
    ]


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
    if len(at) < ENOUGH_CHANGES or follows.mean() < 0.8:
        return []
    return [_logged("grad_norm", good["step"].iloc[at + 1], math.nan, "grad_norm jumps with the loss scale")]


def _logged(where: str, steps: "pd.Series[int]", value: float, title: str) -> Finding:
    return found(
        "logged-scaled-values",
        title[0].upper() + title[1:],
        where,
        steps=(int(steps.min()), int(steps.max())),
        value=value if math.isfinite(value) else None,
        limit=1.0,
        unit="times the true value",
    )


def anomaly_mode_with_scaler(run: Run) -> list[Finding]:
    """`anomaly-mode-with-scaler`: backward in anomaly mode with a scaler at work."""
    frame = signals(run, "anomaly mode")
    if frame.empty or not scaler_enabled(run):
        return []
    raised = "returned nan values in its" in ended_by(run)
    at = int(frame["step"].iloc[0])
    return [
        found(
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


def scaled_gradient_penalty(run: Run) -> list[Finding]:
    """`scaled-gradient-penalty`: gradients of a scaled loss were differentiated again, and nobody divided by the
    scale."""
    frame = signals(run, "create_graph")
    frame = frame[frame["value"] == 1.0]
    if frame.empty:
        return []
    at, scale = int(frame["step"].iloc[0]), scale_summary(run).first
    return [
        found(
            "scaled-gradient-penalty",
            "A gradient penalty uses gradients that are still multiplied by the loss scale",
            str(frame["name"].iloc[0]),
            steps=(at, at),
            value=scale,
            limit=1.0,
            unit="loss scale",
        )
    ]
