"""Rules on what is stored or accumulated in 16 bits: whole models, losses, buffers."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from amp_core.analysis.steps import autocast_dtype
from amp_core.findings.first_cause import stays_broken
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.remedies import compute_dtype, converted_remedy
from amp_core.findings.rules.errors import fp16_parameters
from amp_core.findings.rules.scaling import loss_nonfinite
from amp_core.findings.signals import (
    call_orders,
    converted_at,
    facts,
    has_fp32_masters,
    mappings,
    model_name,
    optimizer_name,
    rounded_decays,
    signals,
    split_call,
)
from amp_core.findings.snippets import BF16, LOOP
from amp_core.formats import narrowest_first
from amp_core.store.run import Run
from amp_core.text import formatting

MIN_RATE_WRITES = 20
"""Fewest writes of a learning rate that show that it cannot change."""
MIN_LOSSES = 10
"""Fewest different losses whose number of bits shows the dtype."""
_SUMS = """\
for p, total in zip(model.parameters(), sums):   # after each backward; the sums are float32
    total.add_(p.grad.float())
    p.grad = None"""
_SHARDED_SUMS = """\
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mp_policy=policy)   # sums of micro-batches have reduce_dtype"""
SIGNIFICANT_BITS = {str(f.dtype): f.mantissa_bits + 1 for f in narrowest_first() if f.autocast}
"""Significant bits of 16-bit dtypes, including the implicit one."""


@rule(
    Entry(
        code="half-accumulation",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=280,
        follows_in_place=("rounded-probabilities", "half-logits"),
        what="A loss, a metric or gradients are accumulated in 16 bits: after a few hundred terms the sum stops "
        "growing.",
        signal="dtype of the loss that backward starts from, of buffers that grow, and of gradients accumulated "
        "over micro-batches; significant bits of the recorded loss.",
        threshold="10 or more different losses that are all exactly representable in 8 (bfloat16) or 11 bits "
        "(float16), or any such dtype: a sum that is 256 (2048) times its terms stops changing. An error if the "
        "loss overflowed in it.",
        advice="The loss has two or three significant digits, and its sums have fewer. Compute and accumulate "
        "losses, metrics and gradients in float32.",
        snippet="loss = loss_fn(model(x).float(), y)\ntotal += loss.detach().double()",
        page="",
    )
)
def half_accumulation(run: Run) -> list[Finding]:
    """`half-accumulation`: losses, buffers or gradients of several micro-batches are accumulated in 16 bits."""
    loss, buffers = signals(run, "loss dtype"), signals(run, "half buffer")
    buffers = buffers[~buffers["name"].str.contains(r"(?:^|\.)running_[^.]*$")]  # half-statistics
    buffers = buffers[~buffers["name"].isin(rounded_decays(run)["name"])]  # average-stands-still
    # Losses that are scaled or cast at once lose little precision: autocast on a CPU leaves some in 16 bits.
    overflowed = [f for f in loss_nonfinite(run) if f.where == "loss"] if (loss["dtype"] == "float16").any() else []
    loss = loss[loss["detail"].ne("computed") | len(overflowed)]
    if len(loss):
        dtype = str(loss["dtype"].iloc[0])
        return [_accumulated("loss", dtype, f"The loss is computed in {dtype}", broken=len(overflowed) > 0)]
    if len(buffers):
        row = buffers.iloc[0]
        name, dtype = str(row["name"]), str(row["dtype"])
        subject = "A running sum of the loop" if name == "a running sum of the loop" else name
        return [_accumulated(name, dtype, f"{subject} is accumulated in {dtype}")]
    shared = facts(run.head.config, "communication")
    reduced = shared.get("reduce_dtype") or shared.get("param_dtype")
    own_sums = str(run.head.config.get("gradient_sums", ""))
    summed = shared.get("main_grad") or own_sums or (reduced if shared.get("unsynced") else None)
    if summed in SIGNIFICANT_BITS:
        return [
            _accumulated_gradients(run, "gradients", str(summed)),
        ]
    narrow = {n: str(d) for n, d in facts(run.head.model, "dtypes").items() if d in SIGNIFICANT_BITS}
    several = any(_accumulates(calls) for _, _, calls in call_orders(run)) and signals(run, "cleared by hand").empty
    settings = mappings(run.head.model, "precision_asked")
    wide = any(s.get("stage") == "accumulation" and s.get("dtype") not in SIGNIFICANT_BITS for s in settings)
    if narrow and several and not wide:
        name, dtype = next(iter(narrow.items()))
        return [_accumulated_gradients(run, name, dtype)]
    dtype_of_losses = _dtype_of_losses(run) if compute_dtype(run) != "float32" else None
    return (
        [_accumulated("loss", dtype_of_losses, f"The recorded losses have no more bits than {dtype_of_losses}")]
        if dtype_of_losses
        else []
    )


@rule(
    Entry(
        code="half-learning-rate",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=277,
        what="An optimizer holds its learning rate as a 16-bit tensor, and a schedule that changes it by little has no "
        "effect.",
        signal="dtype of `lr` in the first parameter group, how often it was written, and how often it changed.",
        threshold="20 writes without a change. Informational if it changed or was not written. Factors between 1 - 2⁻⁹ "
        "and 1 + 2⁻⁸ leave most bfloat16 numbers as they are; float16 has no numbers below 2⁻²⁴.",
        advice="Warm-up and decay change the rate by less than the distance of 16-bit numbers, and rounding undoes "
        "that each time. Keep the learning rate as a Python number or in float32.",
        snippet="for group in optimizer.param_groups:\n"
        '    group["lr"] = group["lr"].float()   # or a Python number, unless the optimizer is capturable',
        page="",
    )
)
def half_learning_rate(run: Run) -> list[Finding]:
    """`half-learning-rate`: a learning rate in 16 bits that stays the same although the loop writes to it."""
    frame = signals(run, "half rate").sort_values("value")
    if frame.empty:
        return []
    row = frame.iloc[0]
    written, changed, name = int(row["count"]), int(row["value"]), optimizer_name(run, int(row["optimizer"]))
    stands = changed == 0 and written >= MIN_RATE_WRITES
    writes = f" and stayed the same when it was written {written:,} times" if stands else ""
    return [
        make_finding(
            "half-learning-rate",
            f"The learning rate of {name} is a {row['dtype']} tensor{writes}",
            name,
            severity=None if stands else "info",
            value=float(changed),
            limit=float(written),
            unit="changes",
        )
    ]


def _accumulates(calls: Sequence[str]) -> bool:
    """Whether two backward passes follow each other without clearing gradients in between, as SAM does."""
    since_cleared = 0
    for name, _ in map(split_call, calls):
        since_cleared = 0 if name == "zero_grad" else since_cleared + (name == "backward")
        if since_cleared > 1:
            return True
    return False


def _accumulated_gradients(run: Run, where: str, dtype: str) -> Finding:
    bits = SIGNIFICANT_BITS[dtype]
    sharded = facts(run.head.config, "communication").get("param_dtype") is not None
    remedy = Remedy(
        f"Each addition rounds the sum to {bits} significant bits, and drops a micro-batch whose gradient is below "
        f"2^-{bits + 1} of it. "
        + (
            "Reduce in float32, and the sums that FSDP keeps between micro-batches are float32 too."
            if sharded
            else "Accumulate in float32: keep the weights and so their gradients in float32, or add into buffers of "
            "your own."
        ),
        _SHARDED_SUMS if sharded else _SUMS,
    )
    title = f"Gradients of several micro-batches are accumulated in {dtype}"
    return _accumulated(where, dtype, title, remedy=remedy)


def _accumulated(where: str, dtype: str, title: str, *, broken: bool = False, remedy: Remedy | None = None) -> Finding:
    return make_finding(
        "half-accumulation",
        title + (", which it overflows" if broken else ""),
        where,
        severity="error" if broken else None,
        value=float(SIGNIFICANT_BITS[dtype]),
        limit=24.0,
        unit="significant bits",
        remedy=remedy,
    )


def _dtype_of_losses(run: Run) -> str | None:
    """The 16-bit dtype that represents every recorded loss exactly; None if FP32 is needed or there are too few."""
    losses = np.unique(run.table("steps").column("loss").drop_null().to_numpy())
    losses = losses[np.isfinite(losses) & (losses != 0)]
    if len(losses) < MIN_LOSSES:
        return None
    mantissa = np.abs(np.frexp(losses)[0])
    for dtype, bits in SIGNIFICANT_BITS.items():
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
        what=(
            "The model, or part of it, was converted to float16 with `.half()`, and nothing in it remains in float32."
        ),
        signal="dtypes of parameters, and whether a scaler or autocast is active.",
        threshold="All parameters of a module and its submodules in float16. An error if something was not finite "
        "and no skipped step protected the weights.",
        advice="Weights, statistics and updates then have 11 significant bits, which autocast avoids. Keep float32 "
        "weights under autocast, and convert parts that must not overflow back to float32 or bfloat16.",
        snippet="model.float()\nscaler = torch.amp.GradScaler(device_type)\n\n" + LOOP,
        frameworks=BF16,
        page="number-ranges",
    )
)
def half_model(run: Run) -> list[Finding]:
    """`half-model`: a model, or a module with all its parameters, in float16, without a scaler that would refuse it."""
    if fp16_parameters(run) or has_fp32_masters(run):
        return []
    model = run.head.model
    train = {n for n, d in facts(model, "dtypes").items() if d == "float16"}
    frozen = {n for n, d in facts(model, "frozen_dtypes").items() if d == "float16"}
    narrow = train | _trained_through(run, frozen)
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
        make_finding(
            "half-model",
            f"{where}{more} converted to float16{converted_at(run, 'float16')}: {len(narrow):,} of {len(every):,} "
            f"parameters{casting}",
            where,
            severity="error" if broken and train else None,
            value=len(narrow) / len(every),
            limit=0.0,
            unit="share of parameters in float16",
            remedy=converted_remedy("float16") if converted_at(run, "float16") else None,
        )
    ]


def _trained_through(run: Run, frozen: set[str]) -> set[str]:
    """Those of these parameters through whose modules gradients flow; a teacher has none. All if that is not known.
    None under float16 autocast, which would cast them to float16 anyway: the frozen base of LoRA."""
    if not frozen or autocast_dtype(run) == "float16":
        return set()
    table = run.table("tensors").select(["name", "kind"])
    table = table.filter(pc.equal(table.column("kind"), "output_grad"))
    seen = set(pc.unique(table.column("name")).to_pylist())
    return {n for n in frozen if not seen or not seen.isdisjoint(_parents(n)[:-1])}


def _whole_parts(every: set[str], narrow: set[str]) -> list[str]:
    """The largest modules whose parameters are all in `narrow`, those with the most parameters first; the model
    itself is the empty name."""
    held: Counter[str] = Counter()
    filled: Counter[str] = Counter()
    for name in every:
        for module in _parents(name):
            held[module] += 1
            filled[module] += name in narrow
    whole = {module for module in held if held[module] == filled[module]}
    largest = [m for m in whole if m == "" or not whole.intersection(_parents(m))]
    return sorted(largest, key=lambda m: (-held[m], m))


def _parents(name: str) -> list[str]:
    """The modules that contain a parameter or module: for `blocks.1.up` these are `blocks.1`, `blocks` and the
    model."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
