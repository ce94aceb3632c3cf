"""Rules on what is lost to rounding in updates: of weights, of weight decay, of averaged copies."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.update_losses import MIN_LOST_FRAC, update_losses
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.remedies import converted_remedy
from amp_core.findings.rules.stored import SIGNIFICANT_BITS
from amp_core.findings.signals import converted_at, is_second_moment, model_name, rounded_decays, signals
from amp_core.findings.snippets import BF16
from amp_core.formats import element_bytes
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_DECAY_ERROR = 1e-3
"""Relative difference within which two tensors move by the same share."""
MAX_NOISE_RATIO = 1e-6
"""Updates that are smaller than the largest of all parameters by more than this come from rounding: float32 rounds by
6e-8 of a value."""

MIN_HAND_STEPS = 2
"""Steps in which the program itself changes weights; a single one may belong to their initialisation."""
MAX_DECAY_SPREAD = 1.25
"""Weight decay is the same in all steps, or the same share of the learning rate, which a schedule may change between
the two. A normalization by the weights' own norm is neither."""
MAX_SPREAD_ALONE = 1.01
MIN_STEPS_ALONE = 3
"""The same where only one weight is multiplied by that number."""


@rule(
    Entry(
        code="lost-weight-updates",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=270,
        follows=("half-model",),
        what="Weights are stored in 16 bits, and most updates are too small to change them.",
        signal="Each update compared with the same step in float64, for weights of less than 32 bits.",
        threshold="Half of the mass of a tensor's updates or more, in most of the compared steps. An update below "
        "half a unit in the last place is lost: 2^-9 of a bfloat16 weight, 2^-12 of a float16 one (Mixed Precision "
        "Training, section 3.1).",
        advice="The optimizer computes updates that rounding discards, so learning stalls. Keep the weights in "
        "float32 and let autocast cast them, or use stochastic rounding or Kahan summation.",
        snippet="model.float()\n"
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n"
        "    loss = loss_fn(model(x), y)",
        frameworks=BF16,
        page="updates",
    )
)
def lost_weight_updates(run: Run) -> list[Finding]:
    """`lost-weight-updates`: most of what the optimizer wants to change in a 16-bit weight is rounded away."""
    losses = update_losses(run)
    losses = losses[losses["cure"] == ""]
    if losses.empty:
        return _unmoved_weights(run) or _lost_by_hand(run)
    others = _moved_by_noise(run) | _moved_by_decay(losses)
    lost = losses[(losses["lost_mass_frac"] >= MIN_LOST_FRAC) & ~losses["name"].isin(others)]
    if lost.empty:
        return _lost_by_hand(run)
    row = lost.iloc[int((lost["lost_mass_frac"] * lost["numel"]).to_numpy().argmax())]
    of = formatting.plural(len(losses), "tensor")
    at = converted_at(run, str(row["dtype"]))
    converted = f", to which the program converted them{at}," if at else ""
    return [
        make_finding(
            "lost-weight-updates",
            f"{formatting.percent(row['lost_mass_frac'])} of the updates of {row['name']} are lost, and half or more "
            f"in {len(lost):,} of {of}: {row['dtype']}{converted} is too coarse",
            str(row["name"]),
            steps=(int(lost["first"].min()), int(lost["last"].max())),
            value=float(row["lost_mass_frac"]),
            limit=MIN_LOST_FRAC,
            unit="share of the updates' mass",
            remedy=converted_remedy(str(row["dtype"])) if at else None,
        )
    ]


def _lost_by_hand(run: Run) -> list[Finding]:
    """The same of updates that the loop makes itself between steps: a pull towards other weights, noise, a merge."""
    frame = signals(run, "update by hand")
    frame = frame[frame["rank"] == frame["rank"].min()]
    if len(frame) < MIN_HAND_STEPS or frame["value"].median() < MIN_LOST_FRAC:
        return []
    row = frame.iloc[-1]
    lost = float(frame["value"].median())
    return [
        make_finding(
            "lost-weight-updates",
            f"{formatting.percent(lost)} of what the program itself adds to {row['name']} between steps is lost: "
            f"{row['dtype']} is too coarse",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=lost,
            limit=MIN_LOST_FRAC,
            unit="share of the updates' mass",
        )
    ]


def _moved_by_noise(run: Run) -> set[str]:
    """Parameters whose updates are rounding noise, such as those of a bias before a BatchNorm: their gradient is 0 but
    for its rounding."""
    rms = run.updates.groupby("name")["update_rms"].median()
    return set(rms.index[rms < MAX_NOISE_RATIO * rms.max()])


def _moved_by_decay(losses: pd.DataFrame) -> set[str]:
    """Parameters without a gradient, such as those of an expert that gets no tokens: weight decay alone moves them, all
    by the same share of the weights, the least of all tensors."""
    ratio = losses["update_ratio"]
    least = (ratio <= (1 + MAX_DECAY_ERROR) * ratio.min()) & (losses["lost_decay_frac"] >= MIN_LOST_FRAC)
    return set(losses["name"][least]) if 2 <= least.sum() < len(losses) else set()


def _unmoved_weights(run: Run) -> list[Finding]:
    """The same from elements that a step left as they were, where steps are not repeated: of an optimizer of the
    program's own, and in runs of earlier versions."""
    frame = signals(run, "unmoved weights")
    frame = frame[frame["count"] > 0]
    rest = frame[frame["value"] >= MIN_LOST_FRAC]
    if frame.empty or len(rest) * 2 < len(frame):
        return []
    row = rest.iloc[int(rest["value"].to_numpy().argmax())]
    return [
        make_finding(
            "lost-weight-updates",
            f"{formatting.percent(row['value'])} of the elements of {row['name']} never change: {row['dtype']} is "
            "too coarse",
            str(row["name"]),
            steps=(int(rest["step"].min()), int(rest["step"].max())),
            value=float(row["value"]),
            limit=MIN_LOST_FRAC,
            unit="share of elements",
        )
    ]


@rule(
    Entry(
        code="lost-weight-decay",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=272,
        follows=("lost-weight-updates",),
        what="Weight decay is too small to change 16-bit weights, so it has no effect.",
        signal="The weights after each step compared with those after the same step without weight decay; operators "
        "by which the loop itself, or an optimizer of its own, shrinks 16-bit weights, repeated in float64.",
        threshold="Half of the weight decay or more, in most of the compared steps. Decoupled weight decay "
        "multiplies by 1 - lr · λ, which rounds to 1 in bfloat16 if lr · λ is below 2^-9 (torchao issue 1124, "
        "DeepSpeed issue 7700).",
        advice="Training behaves as if weight decay were 0. Keep the weights in float32, use an optimizer that "
        "computes the whole step in float32 with stochastic rounding, or apply n times the decay on every n-th step.",
        snippet="model.float()\n"
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n"
        "    loss = loss_fn(model(x), y)",
        frameworks=BF16,
        page="updates",
    )
)
def lost_weight_decay(run: Run) -> list[Finding]:
    """`lost-weight-decay`: weight decay of 16-bit weights that rounding discards."""
    losses = update_losses(run)
    narrow = losses["dtype"].map(_narrow).astype(bool)
    losses = losses[(losses["cure"] == "") & losses["lost_decay_frac"].notna() & narrow]
    lost = losses[losses["lost_decay_frac"] >= MIN_LOST_FRAC]
    # Where updates are large against the decay, single tensors lose some by chance.
    if losses.empty or lost["numel"].sum() * 2 < losses["numel"].sum():
        return _lost_decay_by_hand(run)
    row = lost.iloc[int((lost["lost_decay_frac"] * lost["numel"]).to_numpy().argmax())]
    return [
        make_finding(
            "lost-weight-decay",
            f"{formatting.percent(row['lost_decay_frac'])} of the weight decay of {row['name']} is lost, and half or "
            f"more in {len(lost):,} of {formatting.plural(len(losses), 'tensor')}",
            str(row["name"]),
            steps=(int(lost["first"].min()), int(lost["last"].max())),
            value=float(row["lost_decay_frac"]),
            limit=MIN_LOST_FRAC,
            unit="share of weight decay",
        )
    ]


@rule(
    Entry(
        code="overwritten-masters",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=269,
        what="FP32 weights are overwritten between steps with values that were rounded to 16 bits: their own, or those "
        "of an average of them.",
        signal="Each FP32 weight that an optimizer updates, after a step and before the next one, in turn.",
        threshold="Once: all elements of a weight that were not exactly representable in 16 bits are rounded to it. "
        "FP32 masters then hold what 16-bit weights hold, and updates below half a unit in the last place are lost "
        "(Mixed Precision Training, section 3.1). Or in three steps, not in each: other values that are all exactly "
        "representable in 16 bits.",
        advice="The masters gain nothing, since rounding discards what a step adds to them. Copy masters to the model "
        "and never back, and evaluate, average or save in 16 bits on a copy of the model.",
        snippet="optimizer.step()   # on the masters\n"
        "for master, p in zip(masters, model.parameters()):\n"
        "    p.data.copy_(master)",
        page="updates",
    )
)
def overwritten_masters(run: Run) -> list[Finding]:
    """`overwritten-masters`: FP32 weights that the loop rounds to 16 bits between steps."""
    frame = signals(run, "overwritten weights")
    if frame.empty:
        return []
    frame = frame[frame["rank"] == frame["rank"].min()]
    row = frame.iloc[-1]
    count, compared = int(row["count"]), int(row["limit"])
    if row["detail"] == "others":
        return [_overwritten_by_others(row.to_dict())]
    often = "each step" if count == compared else f"{count:,} of {formatting.plural(compared, 'compared step')}"
    known = count * 2 > compared and pd.notna(row["value"])
    lost = f", which loses {formatting.percent(row['value'])} of the updates" if known else ""
    return [
        make_finding(
            "overwritten-masters",
            f"Before {often}, FP32 weights were overwritten with their values rounded to {row['dtype']}{lost}",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=float(count),
            limit=0.0,
            unit="steps",
        )
    ]


def _overwritten_by_others(row: Mapping[Any, Any]) -> Finding:
    count, compared = int(row["count"]), int(row["limit"])
    return make_finding(
        "overwritten-masters",
        f"Before {count:,} of {formatting.plural(compared, 'compared step')}, FP32 weights were overwritten with "
        f"values of another copy, which is kept in {row['dtype']}",
        str(row["name"]),
        steps=(0, int(row["step"])),
        value=float(count),
        limit=0.0,
        unit="steps",
        remedy=Remedy(
            f"A copy in {row['dtype']} rounds away what the steps since the last time have added, to itself and to the "
            "weights. Keep slow, averaged or earlier weights that are copied back in float32.",
            "slow = [p.detach().clone() for p in model.parameters()]   # float32, as the weights",
        ),
    )


@rule(
    Entry(
        code="uncopied-masters",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=75,
        what="The optimizer steps FP32 masters that are never copied to the weights of the model, which do not change.",
        signal="Elements of the model's weights at the start and later, beside those of the FP32 tensors that an "
        "optimizer steps in their place.",
        threshold="A weight that is still the same, bit for bit, after 16 steps or at the end of a shorter run, "
        "although it has gradients, and whose master rounds to other values for 5 % of its elements.",
        advice="The model trains nothing: every gradient is that of the first weights. Copy the masters to the model "
        "after each optimizer step, in place.",
        snippet="optimizer.step()   # on the masters\n"
        "with torch.no_grad():\n"
        "    for master, p in zip(masters, model.parameters()):\n"
        "        p.copy_(master)",
        page="updates",
    )
)
def uncopied_masters(run: Run) -> list[Finding]:
    """`uncopied-masters`: weights that stay as they are while an optimizer steps FP32 copies of them."""
    frame = signals(run, "uncopied masters")
    frame = frame[frame["rank"] == frame["rank"].min()]
    if frame.empty or not frame["count"].iloc[-1]:
        return []
    row = frame.iloc[-1]
    count, compared = int(row["count"]), int(row["limit"])
    which = "The model's weights are" if count == compared else f"{count:,} of {compared:,} weights are"
    return [
        make_finding(
            "uncopied-masters",
            f"{which} as they were at the start: the optimizer steps FP32 masters that are not copied back",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(row["step"])),
            value=float(count),
            limit=0.0,
            unit="unchanged weights",
        )
    ]


def _lost_decay_by_hand(run: Run) -> list[Finding]:
    """The same of weight decay outside of the optimizer's own."""
    frame = signals(run, "decay by hand")
    frame = frame[frame["rank"] == frame["rank"].min()]
    rates = run.steps.drop_duplicates("step").set_index("step")["lr"].reindex(frame["step"]).to_numpy()
    by_rate = frame["limit"] / np.where(rates > 0, rates, np.nan)
    alone = (frame["count"] == 1).any()  # one weight may be normalized by its own norm
    spread, steps = (MAX_SPREAD_ALONE, MIN_STEPS_ALONE) if alone else (MAX_DECAY_SPREAD, MIN_HAND_STEPS)
    if len(frame) < steps or min(_spread(frame["limit"]), _spread(by_rate)) > spread:
        return []
    lost, row = float(frame["value"].median()), frame.iloc[-1]
    if lost < MIN_LOST_FRAC:
        return []
    how = (
        f"adds to the gradient of {row['name']} is lost: {row['limit']:.2g} of a weight is below half a unit in the "
        f"last place of its {row['dtype']} gradient"
        if row["detail"] == "gradients"
        else f"applies to {row['name']} is lost: a factor of 1 - {row['limit']:.2g} rounds to 1 in {row['dtype']}"
    )
    return [
        make_finding(
            "lost-weight-decay",
            f"{formatting.percent(lost)} of the weight decay that the program itself {how}",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=lost,
            limit=MIN_LOST_FRAC,
            unit="share of weight decay",
        )
    ]


def _spread(values: "pd.Series[float]") -> float:
    """The largest over the smallest; infinite if one is unknown."""
    return float(values.max() / values.min()) if values.notna().all() else np.inf


def _narrow(dtype: str) -> bool:
    size = element_bytes(dtype)
    return size is not None and size < 4


@rule(
    Entry(
        code="average-stands-still",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=274,
        what="An average (of weights, of gradients in an optimizer's state, or a recurrent state) is kept in 16 bits "
        "and no longer follows them.",
        signal="Elements of the average before and after a step, and their distance from the weights; 16-bit tensors "
        "that the loop, or an optimizer of its own, multiplies by a number that rounds to 1; factors of a module "
        "that are 1 in 16 bits, or hardly less, and multiply 64 times in the first step.",
        threshold="Half or more of the elements that differ from their weight stay unchanged. An average moves by "
        "(1 - decay) of the distance: with a decay of 0.999, less than half a unit in the last place of bfloat16 as "
        "soon as it is within a factor of 2 of the weight (OneTrainer issues 996 and 1005).",
        advice="The average stays at the values of the first steps, so what is evaluated or saved from it is not "
        "the trained model. Keep averages in float32, and cast a copy where 16 bits are needed.",
        snippet="ema = AveragedModel(model.float(), multi_avg_fn=get_ema_multi_avg_fn(0.999))",
        page="updates",
    )
)
def average_stands_still(run: Run) -> list[Finding]:
    """`average-stands-still`: an EMA or SWA copy in 16 bits whose elements no longer move."""
    frame: pd.DataFrame = run.averages
    frame = frame[frame["unchanged_frac"].notna()]
    if frame.empty:
        return _without_decay(run)
    frame = frame[frame["step"] > frame["step"].min()] if frame["step"].nunique() > 1 else frame  # it begins as a copy
    still = frame.groupby("name")["unchanged_frac"].median()
    sizes = frame.groupby("name")["elements"].max().fillna(1.0)  # not every program that writes runs gives them
    still = still[still >= MIN_LOST_FRAC]
    if still.empty or sizes[still.index].sum() * 2 < sizes.sum():
        return _without_decay(run)
    name = str((still * sizes[still.index]).idxmax())
    rows = frame[frame["name"].isin(still.index)]
    dtype = rows["dtype"].iloc[-1]
    return [
        make_finding(
            "average-stands-still",
            f"{formatting.percent(still[name])} of the average of {name} no longer changes, half or more in "
            f"{len(still):,} of {formatting.plural(len(sizes), 'tensor')}: {dtype} is too coarse",
            name,
            steps=(int(rows["step"].min()), int(rows["step"].max())),
            value=float(still[name]),
            limit=MIN_LOST_FRAC,
            unit="share of elements",
        )
    ]


def _without_decay(run: Run) -> list[Finding]:
    """The same of averages whose decay rounds to 1: they forget nothing, and stop growing."""
    frame = rounded_decays(run)
    frame = frame[~frame["detail"].map(is_second_moment).astype(bool)]
    if frame.empty:
        return _without_forgetting(run)
    row = frame.iloc[-1]
    state = f"{row['detail']} of " if row["detail"] else ""
    what = f"{state}{row['name']}" if row["name"] else "An average that the loop keeps"
    return [
        make_finding(
            "average-stands-still",
            f"{what} is multiplied by 1 - {row['limit']:.2g}, which rounds to 1 in {row['dtype']}",
            str(row["name"] or row["detail"] or "averages"),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=float(row["limit"]),
            limit=2.0 ** -(SIGNIFICANT_BITS[str(row["dtype"])] + 1),
            unit="1 - decay",
        )
    ]


def _without_forgetting(run: Run) -> list[Finding]:
    """The same of a recurrent state, whose decays are 1 in 16 bits."""
    frame = signals(run, "rounded factors")
    if frame.empty:
        states = signals(run, "slow state")
        return [_rounded_state(run, states.iloc[0].to_dict())] if len(states) else []
    row = frame.iloc[int(frame["value"].to_numpy().argmax())]
    name = str(row["name"]) or model_name(run)
    return [
        make_finding(
            "average-stands-still",
            f"{formatting.percent(float(row['value']))} of the decays in {name} round to 1 in {row['dtype']}: its "
            "state forgets nothing",
            name,
            steps=(int(row["step"]), int(row["step"])),
            value=float(row["value"]),
            limit=float(row["limit"]),
            unit="share of decays",
            advice="A decay within 2^-9 of 1 becomes 1 in bfloat16, so the state adds up all earlier inputs. Compute "
            "the decays, and the state that they multiply, in float32.",
        )
    ]


def _rounded_state(run: Run, row: Mapping[Any, Any]) -> Finding:
    """A recurrent state that is multiplied by a constant."""
    name, step = str(row["name"]) or model_name(run), int(row["step"])
    return make_finding(
        "average-stands-still",
        f"{name} multiplies its state by 1 - {row['value']:.2g} in {row['dtype']}, which rounds that decay by a "
        "quarter or more",
        name,
        steps=(step, step),
        value=float(row["value"]),
        limit=float(row["limit"]),
        unit="1 - decay",
        advice="The state forgets too much or nothing, and loses inputs that are small beside it. Keep the state in "
        "float32, and cast the result.",
    )
