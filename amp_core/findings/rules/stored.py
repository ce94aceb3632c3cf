"""Rules on what is stored or added up in 16 bits: whole models, weights, losses, buffers."""

from collections import Counter

import numpy as np

from amp_core.findings.first_cause import stays_broken
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding
from amp_core.findings.registry import found, rule
from amp_core.findings.remedies import computes_in
from amp_core.findings.rules.errors import fp16_parameters
from amp_core.findings.rules.scaling import loss_nonfinite
from amp_core.findings.signals import autocast_dtype, facts, model_name, orders, signals
from amp_core.findings.snippets import BF16, LOOP
from amp_core.formats import narrowest_first
from amp_core.store.run import Run
from amp_core.text import formatting

UNMOVED = 0.5
"""Share of elements with a gradient that the step leaves alone from which on most of the update is lost."""
LOSSES = 10
"""Different losses from which on their number of bits tells of the dtype."""
WORDS = {str(f.dtype): f.mantissa_bits + 1 for f in narrowest_first() if f.autocast}
"""Significant bits, the hidden one included."""


@rule(
    Entry(
        code="lost-weight-updates",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=270,
        follows=("half-model",),
        what="Weights are stored in 16 bits and most updates are too small to change them.",
        signal="Elements that have a gradient and are the same after the step as before it.",
        threshold="Half of the elements or more. An update below half a unit in the last place is lost: 2^-9 of a "
        "bfloat16 weight, 2^-12 of a float16 one (Mixed Precision Training, section 3.1).",
        advice="The optimizer computes updates that rounding throws away, so learning stalls. Keep the weights in "
        "float32 and let autocast cast them, or use stochastic rounding.",
        snippet="model.float()\n"
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n"
        "    loss = loss_fn(model(x), y)",
        frameworks=BF16,
        page="layer-detail",
    )
)
def lost_weight_updates(run: Run) -> list[Finding]:
    """`lost-weight-updates`: most elements of a 16-bit weight are the same after the step, though they had a
    gradient."""
    frame = signals(run, "unmoved weights")
    frame = frame[frame["count"] > 0]
    if frame.empty:
        return []
    rest = frame[frame["value"] >= UNMOVED]
    if len(rest) * 2 < len(frame):
        return []
    row = rest.iloc[int(rest["value"].to_numpy().argmax())]
    return [
        found(
            "lost-weight-updates",
            f"{100 * float(row['value']):.0f} % of the elements of {row['name']} do not move: {row['dtype']} is "
            "too coarse",
            str(row["name"]),
            steps=(int(rest["step"].min()), int(rest["step"].max())),
            value=float(row["value"]),
            limit=UNMOVED,
            unit="share of elements",
        )
    ]


@rule(
    Entry(
        code="half-accumulation",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=280,
        what="A loss, a metric or gradients are added up in 16 bits: after a few hundred terms nothing is added any "
        "more.",
        signal="dtype of the loss that backward starts from, of buffers that grow, of gradients over several "
        "micro-batches; significant bits of the recorded loss.",
        threshold="10 or more different losses that are all exact in 8 (bfloat16) or 11 bits (float16), or any such "
        "dtype: a sum 256 (2048) times its term no longer moves. An error where the loss overflowed in it.",
        advice="The loss has two or three digits, and sums of it fewer. Compute and add up losses and metrics in "
        "float32.",
        snippet="loss = loss_fn(model(x).float(), y)\ntotal += loss.detach().double()",
        page="",
    )
)
def half_accumulation(run: Run) -> list[Finding]:
    """`half-accumulation`: losses, buffers or gradients of several micro-batches are added up in 16 bits."""
    loss, buffers = signals(run, "loss dtype"), signals(run, "half buffer")
    # Losses that are scaled or cast at once lose little: autocast on a CPU leaves some in 16 bits. Overflow is a loss.
    broke = [f for f in loss_nonfinite(run) if f.where == "loss"] if (loss["dtype"] == "float16").any() else []
    loss = loss[loss["detail"].ne("computed") | len(broke)]
    if len(loss):
        dtype = str(loss["dtype"].iloc[0])
        return [_accumulated("loss", dtype, f"The loss is computed in {dtype}", broken=len(broke) > 0)]
    if len(buffers):
        row = buffers.iloc[0]
        return [_accumulated(str(row["name"]), str(row["dtype"]), f"{row['name']} is added up in {row['dtype']}")]
    narrow = {n: str(d) for n, d in facts(run.head.model, "dtypes").items() if d in WORDS}
    several = any(calls.count("backward") > 1 for _, _, calls in orders(run))
    if narrow and several:
        name, dtype = next(iter(narrow.items()))
        return [_accumulated(name, dtype, f"Gradients of several micro-batches are added up in {dtype}")]
    told = _told_dtype(run) if computes_in(run) != "float32" else None
    return [_accumulated("loss", told, f"The recorded losses have no more bits than {told}")] if told else []


def _accumulated(where: str, dtype: str, title: str, *, broken: bool = False) -> Finding:
    return found(
        "half-accumulation",
        title + (", which it does not fit" if broken else ""),
        where,
        severity="error" if broken else None,
        value=float(WORDS[dtype]),
        limit=24.0,
        unit="significant bits",
    )


def _told_dtype(run: Run) -> str | None:
    """The 16-bit dtype that holds every recorded loss exactly; None where FP32 was needed or too few were seen."""
    losses = np.unique(run.table("steps").column("loss").drop_null().to_numpy())
    losses = losses[np.isfinite(losses) & (losses != 0)]
    if len(losses) < LOSSES:
        return None
    mantissa = np.abs(np.frexp(losses)[0])
    for dtype, bits in WORDS.items():
        whole = mantissa * 2.0**bits
        if (whole == np.rint(whole)).all():
            return dtype
    return None


@rule(
    Entry(
        code="half-model",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=180,
        what="The model, or a part of it, was turned to float16 with `.half()`, and nothing is left in float32.",
        signal="dtypes of parameters, and whether a scaler or autocast is at work.",
        threshold="All parameters of a module and of what is in it in float16. An error where something was not "
        "finite that no skipped step kept off the weights.",
        advice="Weights, statistics and updates are then held in 11 bits, which autocast avoids. Keep float32 weights "
        "under autocast, and turn back to float32 or bfloat16 what must not overflow.",
        snippet="model.float()\nscaler = torch.amp.GradScaler(device_type)\n\n" + LOOP,
        frameworks=BF16,
        page="number-ranges",
    )
)
def half_model(run: Run) -> list[Finding]:
    """`half-model`: a whole model or a whole part of it in float16, with no scaler that would refuse it."""
    if fp16_parameters(run):
        return []
    model = run.head.model
    train = {n for n, d in facts(model, "dtypes").items() if d == "float16"}
    narrow = train | {n for n, d in facts(model, "frozen_dtypes").items() if d == "float16"}
    every = set(facts(model, "shapes")) or narrow
    if not narrow:
        return []
    whole = _whole_parts(every, narrow)
    if not whole:
        return []
    where = whole[0] or model_name(run)
    more = f" and {formatting.plural(len(whole) - 1, 'more module')} were" if len(whole) > 1 else " was"
    broken = stays_broken(run)
    casting = f", under {autocast_dtype(run)} autocast" if autocast_dtype(run) else ""
    return [
        found(
            "half-model",
            f"{where}{more} turned to float16: {len(narrow):,} of {len(every):,} parameters{casting}",
            where,
            severity="error" if broken and train else None,
            value=len(narrow) / len(every),
            limit=0.0,
            unit="share of parameters in float16",
        )
    ]


def _whole_parts(every: set[str], narrow: set[str]) -> list[str]:
    """The largest modules of whose parameters each is in `narrow`, those with the most parameters first; the model
    itself is the empty name."""
    held: Counter[str] = Counter()
    filled: Counter[str] = Counter()
    for name in every:
        for module in _around(name):
            held[module] += 1
            filled[module] += name in narrow
    whole = {module for module in held if held[module] == filled[module]}
    largest = [m for m in whole if m == "" or not whole.intersection(_around(m))]
    return sorted(largest, key=lambda m: (-held[m], m))


def _around(name: str) -> list[str]:
    """The modules that a parameter or module lies in: of `blocks.1.up` these are `blocks.1`, `blocks` and the model."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
