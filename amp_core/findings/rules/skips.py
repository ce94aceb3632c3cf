"""Rules on skipped steps: schedules that move during them, and the optimizers and branches that cause them."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.analysis import safe_window_over_time, sampled_steps, scale_summary, scale_trace, skip_episodes
from amp_core.analysis.numerics.loss_scale import CALIBRATION_STEPS
from amp_core.analysis.numerics.safe_window import SERVED_STEPS_FRAC, first_step
from amp_core.analysis.steps import attempts, scaler_enabled
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.underflow import evenly_spread
from amp_core.findings.signals import (
    CallOrders,
    by_framework,
    call_orders,
    mappings,
    optimizer_name,
    signals,
    split_call,
)
from amp_core.store.run import Run
from amp_core.text import formatting

MIN_MOVED_FRAC = 0.9
"""A schedule that moves at no less than this share of the steps counts as moving at each step."""
MIN_APART_RATIO = 4.0
"""The lowest scale that one loss needs, over the highest that another allows: two octaves are beyond the margin of
either."""
MUCH_LOWER_RATIO = 8.0
"""Gradients vary between steps by a small factor; a skip at a scale lower by this ratio has another reason."""


@rule(
    Entry(
        code="scheduler-steps-on-skip",
        severity="warning",
        family=TRAINING_LOOP,
        order=320,
        follows=("scale-collapse",),
        what="The learning-rate schedule advances on skipped steps, so it runs ahead of the weights.",
        signal="Scheduler calls, or changes of the learning rate, after skipped steps.",
        threshold="A per-step schedule that advanced on a skipped step (PyTorch warns about the same order of "
        "calls). Informational if the loop computes the learning rate from the step number, which is intended.",
        advice="Each skip uses up a step of warm-up or decay without updating a weight. Step the schedule only if "
        "the scale did not fall.",
        snippet="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\nif scaler.get_scale() >= "
        "before:   # not skipped\n    scheduler.step()",
        frameworks={
            "Accelerate": "scheduler = accelerator.prepare(scheduler)   # steps only where the optimizer did",
            "Lightning": "def configure_optimizers(self):\n"
            '    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}',
        },
    )
)
def scheduler_steps_on_skip(run: Run) -> list[Finding]:
    """`scheduler-steps-on-skip`: a schedule that moves with every step moved at skipped ones too."""
    trace = scale_trace(run)
    skipped = set(trace["step"][trace["skipped"]].tolist())
    if not skipped:
        return []
    moved = called = _scheduled(call_orders(run), trace["step"].to_numpy())
    if not moved:
        moved = _changed_rates(run)
    steps = [int(s) for s in trace["step"] if int(s) in moved]
    if not steps or sum(moved[s] for s in steps) < MIN_MOVED_FRAC * (len(steps) - len(skipped)):
        return []
    bad = [s for s in steps if s in skipped and moved[s]]
    if not bad:
        return []
    return [
        make_finding(
            "scheduler-steps-on-skip",
            f"The learning-rate schedule advanced on {formatting.plural(len(bad), 'skipped step')}",
            "scheduler.step" if called else "learning rate",
            # A rate that the loop computes from the number of the iteration is intended.
            severity=None if called else "info",
            steps=(bad[0], bad[-1]),
            value=float(len(bad)),
            limit=0.0,
            unit="schedule steps without an update",
        )
    ]


def _scheduled(every: CallOrders, steps: npt.NDArray[np.int64]) -> dict[int, bool]:
    """For each of `steps` whether the scheduler was called for it: after its optimizer's step, or before the next
    forward."""
    if not any("scheduler" in calls for _, _, calls in every):
        return {}
    moved, known = np.zeros(len(steps), dtype=bool), np.zeros(len(steps), dtype=bool)
    for first, last, calls in every:
        names = [split_call(c)[0] for c in calls]
        work = next((i for i, n in enumerate(names) if n in ("scale", "backward")), len(names))
        before, after = "scheduler" in names[:work], "scheduler" in names[work:]
        own = (steps >= first) & (steps <= last)
        one_before = (steps >= max(first, 1) - 1) & (steps <= last - 1)
        moved |= (own & after) | (one_before & before)
        known |= own | one_before
    return dict(zip(steps[known].tolist(), moved[known].tolist(), strict=True))


def _changed_rates(run: Run) -> dict[int, bool]:
    """Whether the schedule moved, from the learning rates: whether the rate of the next step differs."""
    frame = run.table("steps").select(["step", "rank", "optimizer", "lr"]).to_pandas()
    frame = frame[(frame["rank"] == 0) & (frame["optimizer"] == 0)]
    steps, rates = frame["step"].to_numpy(), frame["lr"].to_numpy(dtype=float)
    if len(steps) < 3 or not np.isfinite(rates).all() or (np.diff(rates) == 0).all():
        return {}
    return dict(zip(steps[:-1].tolist(), (np.diff(rates) != 0).tolist(), strict=True))


@rule(
    Entry(
        code="shared-backoff",
        severity="warning",
        family=TRAINING_LOOP,
        order=310,
        what="Several optimizers share one scaler, and one optimizer's overflows lower the scale for all of them, or "
        "keep it where the gradients of another underflow; or the scale is updated once per optimizer.",
        signal="Which optimizer's gradients were not finite, how many updates there are per iteration, and the loss "
        "scales that suit each optimizer's gradients.",
        threshold="After the first 25 steps, more skips of one optimizer alone than growths; or, in more than a "
        f"quarter of the sampled steps, losses scaled apart of which one needs {MIN_APART_RATIO:g} times the largest "
        "scale that suits the other, and has less; or an update after every optimizer (torch.amp examples: update "
        "once, after all optimizers), which is informational in Accelerate and Lightning loops, as both do this by "
        "design.",
        advice="`update()` combines the inf checks of all optimizers, so one of them decides the scale of the "
        "others. Call it once at the end of the iteration, or give optimizers with separate losses separate scalers.",
        snippet="scaler_a = torch.amp.GradScaler(device_type)\n"
        "scaler_b = torch.amp.GradScaler(device_type)\n"
        "scaler_a.scale(loss_a).backward()\n"
        "scaler_a.step(optimizer_a)\n"
        "scaler_a.update()\n"
        "scaler_b.scale(loss_b).backward()\n"
        "scaler_b.step(optimizer_b)\n"
        "scaler_b.update()",
    )
)
def shared_backoff(run: Run) -> list[Finding]:
    """`shared-backoff`: one of several optimizers with a shared scaler skips repeatedly, or each is followed by its own
    update."""
    frame = run.table("steps").select(["step", "rank", "optimizer"]).to_pandas()
    frame = frame[frame["rank"] == 0]
    count = int(frame["optimizer"].nunique())
    if not scaler_enabled(run) or run.head.config.get("scalers_in_turn"):
        return []
    if count < 2:
        return _lowered_elsewhere(run)
    skips, summary = partial_skips(run), scale_summary(run)
    index = int(skips["optimizer"].mode().iloc[0]) if len(skips) else 0
    skips = skips[skips["optimizer"] == index]
    if len(skips) > max(1, summary.growths):
        return [
            make_finding(
                "shared-backoff",
                f"Only {optimizer_name(run, index)} had non-finite gradients, at {len(skips):,} steps, and this "
                "lowered the loss scale for all",
                optimizer_name(run, index),
                steps=(int(skips["step"].iloc[0]), int(skips["step"].iloc[-1])),
                value=float(len(skips)),
                limit=float(max(1, summary.growths)),
                unit="steps that one optimizer skipped alone",
                advice="`update()` combines the inf checks of all optimizers, so one of them decides the scale of the "
                "others. Give optimizers with separate losses separate scalers.",
            )
        ]
    if apart := _scales_apart(run):
        return apart
    turns = frame.sort_values(["step", "optimizer"])["optimizer"].to_numpy()
    if len(turns) >= 4 * count and frame["step"].is_unique and (turns[count:] == turns[:-count]).all():
        return [
            make_finding(
                "shared-backoff",
                f"scaler.update is called after each of the {count} optimizers instead of once per iteration",
                "scaler.update",
                severity=by_framework(run, "lightning", "accelerate"),
                steps=(int(frame["step"].min()), int(frame["step"].max())),
                value=float(count),
                limit=1.0,
                unit="updates per iteration",
                remedy=_UPDATE_ONCE,
            )
        ]
    return []


_UPDATE_ONCE = Remedy(
    "The loss scale changes between the optimizers of one iteration, and its growth interval counts optimizers instead "
    "of iterations. Call `update()` once, after the last of them.",
    "scaler.step(optimizer_a)\nscaler.step(optimizer_b)\nscaler.update()",
)


def _lowered_elsewhere(run: Run) -> list[Finding]:
    """The scale fell where the run's only optimizer skipped no step: as in a run of a critic alone, whose scaler its
    generator uses too."""
    trace, summary = scale_trace(run), scale_summary(run)
    scales, skipped = trace["loss_scale"].to_numpy(dtype=float), trace["skipped"].to_numpy(dtype=bool)
    falls = trace["step"].to_numpy()[1:][(scales[1:] < scales[:-1]) & ~skipped[:-1]]
    if len(falls) <= max(1, summary.growths):
        return []
    name = optimizer_name(run, 0)
    return [
        make_finding(
            "shared-backoff",
            f"The loss scale fell {formatting.plural(len(falls), 'time')} after a step that {name} did not skip: "
            "gradients of another optimizer with the same scaler are not finite",
            "loss scale",
            steps=(int(falls[0]), int(falls[-1])),
            value=float(len(falls)),
            limit=float(max(1, summary.growths)),
            unit="times",
        )
    ]


def _scales_apart(run: Run) -> list[Finding]:
    """The gradients of one optimizer need a higher loss scale than those of another allow. Losses that are scaled
    apart may have scalers of their own; for one loss, no scaler helps."""
    if not any(calls.count("scale") > 1 for _, _, calls in call_orders(run)):
        return []
    since = first_step(run)
    steps = evenly_spread([s for s in sampled_steps(run, "weight_grad") if since is not None and s >= since])
    window = safe_window_over_time(run.thinned(steps)) if steps else pd.DataFrame()
    if window.empty:
        return []
    window = window.merge(attempts(run)[["step", "loss_scale", "skipped"]], on="step")
    window = window[~window["skipped"]]
    low = window["loss_scale"] < window["lowest"]
    apart = window[low & (window["lowest"] >= MIN_APART_RATIO * window["highest"])]
    if len(apart) <= (1 - SERVED_STEPS_FRAC) * len(window):
        return []
    row = apart.iloc[-1]
    needs, allows = (_optimizer_of(run, str(row[by])) for by in ("lowest_by", "highest_by"))
    if needs is None or allows is None or needs == allows:
        return []
    return [
        make_finding(
            "shared-backoff",
            f"No loss scale suits the gradients of both optimizers: those of {optimizer_name(run, needs)} need "
            f"{formatting.scale(row['lowest'])} ({row['lowest_by']}), those of {optimizer_name(run, allows)} overflow "
            f"above {formatting.scale(row['highest'])}",
            optimizer_name(run, needs),
            steps=(int(apart["step"].min()), int(apart["step"].max())),
            value=float(row["loss_scale"]),
            limit=float(row["lowest"]),
            unit="loss scale",
            advice="The scaler follows the larger gradients, and those of the other optimizer underflow. Give each "
            "optimizer its own scaler, or bring the losses to a similar size.",
        )
    ]


def _optimizer_of(run: Run, name: str) -> int | None:
    """The number of the optimizer that holds a parameter, or those of a module and its neighbours; None if unknown."""
    held = [settings.get("names") for settings in mappings(run.head.config, "optimizer_settings")]
    while name:
        found = {
            index
            for index, names in enumerate(held)
            if isinstance(names, list) and any(n == name or str(n).startswith(f"{name}.") for n in names)
        }
        if found:
            return found.pop() if len(found) == 1 else None
        name = name.rpartition(".")[0]
    return None


@rule(
    Entry(
        code="branch-always-skipped",
        severity="warning",
        family=TRAINING_LOOP,
        order=300,
        what="A rarely used branch of the model overflows every time, so it never learns.",
        signal=(
            "Skips grouped by the set of parameters that have gradients; without that, skips at scales at which "
            "other steps succeed."
        ),
        threshold="A branch that occurs 3 times or more, not only in the first 25 steps, and is skipped every time, "
        "while others are skipped less than 1 time in 10; or 3 or more single skips at an eighth of a scale at "
        "which 10 steps had succeeded.",
        advice="The branch's gradients are larger than the others', and the scale has grown back before it comes up "
        "again. Scale its loss down, clip its gradients, or give it its own scaler.",
        snippet="loss = main_loss + 0.1 * rare_loss",
    )
)
def branch_always_skipped(run: Run) -> list[Finding]:
    """`branch-always-skipped`: steps in which a rare branch of the model has gradients are always skipped; or single
    steps are, repeatedly, at scales at which others are made."""
    trace = attempts(run)
    if not trace["skipped"].any():
        return []
    branches = signals(run, "branch")
    branches = branches[branches["step"].notna() & (branches["rank"] == 0)]
    numbers = trace["step"].to_numpy()
    if len(branches):
        place = np.searchsorted(branches["step"].to_numpy(dtype=np.int64), numbers, side="right") - 1
        name = np.where(place >= 0, branches["name"].to_numpy(dtype=object)[np.maximum(place, 0)], "branch 0")
        by = (
            trace.assign(branch=name)
            .groupby("branch")
            .agg(sum=("skipped", "sum"), size=("step", "size"), last=("step", "max"))
        )
        settled = by["last"] >= numbers[0] + CALIBRATION_STEPS  # not only during calibration
        always = by[(by["sum"] == by["size"]) & (by["size"] >= 3) & settled]
        rest = by.drop(always.index)
        if len(always) and rest["size"].sum() and rest["sum"].sum() / rest["size"].sum() < 0.1:
            branch = str(always["size"].idxmax())
            details = branches[branches["name"] == branch]["detail"]  # the initial branch has none
            gained = (str(details.iloc[0]) if len(details) else "") or branch
            times = int(always["size"].max())
            at = numbers[name == branch]
            return [_branch(gained.split(", ")[0], times, at, f"{times:,} steps with gradients in {gained}")]
    return _repeated_single_skips(run, trace)


def _repeated_single_skips(run: Run, trace: pd.DataFrame) -> list[Finding]:
    """Single skips far below a scale at which ten steps were made before, without growth since the last skip."""
    episodes = skip_episodes(run)
    after_start = episodes[
        (episodes["first"] >= int(trace["step"].iloc[0]) + CALIBRATION_STEPS) & (episodes["skips"] == 1)
    ]
    clean: dict[float, int] = {}
    proven: set[float] = set()
    bad: list[int] = []
    before, grown = np.inf, False  # a scale that grew since the last skip may simply have grown too large
    singles = set(after_start["first"].tolist())
    broken = set(trace["step"][trace["has_loss"] & ~np.isfinite(trace["loss"])])  # not for the scale's sake
    columns = (trace[c].tolist() for c in ("step", "loss_scale", "skipped"))
    for step, scale, skipped in zip(*columns, strict=True):
        grown, before = grown or scale > before, scale
        if skipped:
            if step in singles - broken and not grown and any(scale * MUCH_LOWER_RATIO <= known for known in proven):
                bad.append(step)
            clean, grown = {}, False
        else:
            clean[scale] = clean.get(scale, 0) + 1
            if clean[scale] >= 10:
                proven.add(scale)
    if len(bad) < 3:
        return []
    tensors = episodes[episodes["first"].isin(bad)]["tensors"]
    where = str(tensors.mode().iloc[0]).split(", ")[0] if len(tensors) and tensors.iloc[0] else "loss"
    return [
        _branch(
            where, len(bad), np.array(bad), (f"{len(bad):,} single steps, at loss scales at which other steps succeed")
        )
    ]


def _branch(where: str, times: int, steps: "np.ndarray[tuple[int], np.dtype[np.int64]]", what: str) -> Finding:
    return make_finding(
        "branch-always-skipped",
        f"Skipped every time: {what}",
        where,
        steps=(int(steps[0]), int(steps[-1])),
        value=float(times),
        limit=0.0,
        unit="skipped steps",
    )


def partial_skips(run: Run) -> pd.DataFrame:
    """Steps after calibration that some optimizer skipped and another made: step, optimizer (the one that skipped)."""
    frame = run.table("steps").select(["step", "rank", "optimizer", "skipped"]).to_pandas()
    frame = frame[(frame["rank"] == 0) & (frame["step"] >= frame["step"].min() + CALIBRATION_STEPS)]
    by_step = frame.groupby("step")["skipped"]
    mixed = by_step.transform("any") & ~by_step.transform("all")
    partial: pd.DataFrame = frame[mixed & frame["skipped"]][["step", "optimizer"]]
    return partial
