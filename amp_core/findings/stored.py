"""Rules on what is stored or added up in 16 bits: weights, losses, buffers."""

import numpy as np

from amp_core.findings._found import found
from amp_core.findings._signals import facts, orders, signals
from amp_core.findings.model import Finding
from amp_core.findings.remedies import computes_in
from amp_core.findings.scaling import loss_nonfinite
from amp_core.formats import narrowest_first
from amp_core.run import Run

UNMOVED = 0.5
"""Share of elements with a gradient that the step leaves alone from which on most of the update is lost."""
LOSSES = 10
"""Different losses from which on their number of bits tells of the dtype."""
WORDS = {str(f.dtype): f.mantissa_bits + 1 for f in narrowest_first() if f.autocast}
"""Significant bits, the hidden one included."""


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
