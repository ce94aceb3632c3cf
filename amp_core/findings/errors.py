"""Rules on errors that ended a run: recognised by torch's own words, placed by the module that was at work."""

import re
from collections import Counter

from amp_core import words
from amp_core.findings._found import found
from amp_core.findings._signals import (
    autocast_dtype,
    ended_by,
    facts,
    failed_in,
    last_step,
    listed,
    model_name,
    of,
    optimizer_name,
    signals,
)
from amp_core.findings.causes import stays_broken
from amp_core.findings.model import Finding
from amp_core.formats import FORMATS
from amp_core.run import Run

_UNSCALED_FP16 = "Attempting to unscale FP16 gradients"
_NO_CHECKS = ("No inf checks were recorded for this optimizer", "does not require grad and does not have a grad_fn")
_NO_STEP = "No inf checks were recorded prior to update"
_OVERFLOWING = re.compile(r"cannot be converted to type (at|c10)::(Half|BFloat16) without overflow")
_BCE = re.compile(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast")
_MIXED = re.compile(
    r"expected scalar type \w+ but found \w+"
    r"|to have the same dtype, but (got|found)"
    r"|must have the same dtype, but got"
    r"|Input type \(.*\) and (bias|weight) type \(.*\) should be the same"
    r"|expected .* to have the same dtype"
    r"|Found dtype \w+ but expected \w+",
    re.IGNORECASE,
)
_NARROW_WORDS = re.compile(r"half|bfloat16|float16", re.IGNORECASE)
_RECOMPUTED = ("different metadata than during the forward pass", "Recomputed values for the following tensors")
_GRAPHED = "make_graphed_callables does not support the autocast cach"


def _at(run: Run) -> tuple[int, int] | None:
    frame = signals(run, "failed in")
    step = frame["step"].dropna()
    last = int(step.iloc[-1]) if len(step) else last_step(run)
    return (last, last) if last is not None else None


def fp16_parameters(run: Run) -> list[Finding]:
    """`fp16-parameters`: parameters that train are float16 beside a scaler."""
    narrow = [n for n, dtype in facts(run.head.model, "dtypes").items() if dtype == "float16"]
    raised = _UNSCALED_FP16 in ended_by(run)
    scaler = run.head.config.get("scaler")
    scaled = isinstance(scaler, dict) and scaler.get("enabled") is True
    if not raised and not (narrow and scaled):
        return []
    title = "Gradients are float16"
    if narrow:
        title = f"{words.plural(len(narrow), 'trained parameter')} stored in float16"
    return [
        found(
            "fp16-parameters",
            title + (", and the scaler refused to unscale them" if raised else ""),
            narrow[0] if narrow else "parameters",
            steps=_at(run) if raised else None,
            value=float(len(narrow)),
            limit=0.0,
            unit="float16 parameters",
        )
    ]


def no_gradients(run: Run) -> list[Finding]:
    """`no-gradients`: no parameter of an optimizer had a gradient when it stepped."""
    raised = next((said for said in _NO_CHECKS if said in ended_by(run)), None)
    missing = signals(run, "missing gradients")
    none = missing[missing["count"] >= missing["limit"]]
    if raised is None and none.empty:
        return []
    settings = listed(run.head.config, "optimizer_settings")
    foreign = next(
        (i for i, s in enumerate(settings) if s.get("outside_model") and s["outside_model"] == s.get("parameters")),
        None,
    )
    index = 0
    if raised is not None and len(settings) > 1:
        calls = signals(run, "calls")["name"]
        last = str(calls.iloc[-1]).split()[-1] if len(calls) else ""
        index = of(last)[1]
    where = optimizer_name(run, index if foreign is None else foreign)
    why = " (they are not the model's)" if foreign is not None else ""
    if raised == _NO_CHECKS[1]:
        where, why = "loss", " (the loss depends on none)"
    at = _at(run) if raised else (int(none["step"].iloc[0]), int(none["step"].iloc[-1]))
    return [
        found(
            "no-gradients",
            f"None of the optimizer's parameters has a gradient{why}",
            where,
            steps=at,
            value=0.0,
            limit=1.0,
            unit="parameters with a gradient",
        )
    ]


def update_without_step(run: Run) -> list[Finding]:
    """`update-without-step`: the run ended because `scaler.update` was called and no optimizer had stepped since it was
    called before."""
    if _NO_STEP not in ended_by(run):
        return []
    stepped = last_step(run) is not None
    return [
        found(
            "update-without-step",
            "scaler.update was called twice for one step, which the scaler refused"
            if stepped
            else "scaler.update was called before any optimizer stepped, which the scaler refused",
            "scaler.update",
            steps=_at(run),
            value=2.0 if stepped else 1.0,
            limit=1.0 if stepped else 0.0,
            unit="updates per step",
        )
    ]


def mask_constant_overflow(run: Run) -> list[Finding]:
    """`mask-constant-overflow`: a constant that 16 bits cannot hold."""
    frame = signals(run, "constant overflow")
    raised = _OVERFLOWING.search(ended_by(run)) is not None
    if not raised and frame.empty:
        return []
    broken = raised or len(signals(run, "non-finite output")) > 0
    row = frame.iloc[0] if len(frame) else None
    name = failed_in(run) if raised else (str(row["name"]) if row is not None else "")
    value = float(row["value"]) if row is not None else None
    said = f"The constant {value:.3g}" if value is not None else "A constant"
    return [
        found(
            "mask-constant-overflow",
            f"{said} does not fit {row['dtype'] if row is not None else 'float16'}",
            name or model_name(run),
            severity="error" if broken else "warning",
            steps=_at(run) if raised else None,
            value=value,
            limit=float(row["limit"]) if row is not None else FORMATS["fp16"].max_value,
            unit="largest magnitude",
        )
    ]


def bce_banned(run: Run) -> list[Finding]:
    """`bce-banned`: `binary_cross_entropy` under autocast; refused on CUDA, allowed elsewhere."""
    frame = signals(run, "banned op")
    raised = _BCE.search(ended_by(run)) is not None
    if not raised and frame.empty:
        return []
    where = failed_in(run) if raised else str(frame["name"].iloc[0])
    said = "was refused under autocast" if raised else "runs under autocast, which CUDA refuses"
    return [
        found(
            "bce-banned",
            f"binary_cross_entropy {said}",
            where or "loss",
            severity="error" if raised else "warning",
            steps=_at(run) if raised else None,
            value=1.0,
            limit=0.0,
            unit="uses",
        )
    ]


def custom_function_dtype(run: Run) -> list[Finding]:
    """`custom-function-dtype`: an operator got two dtypes, one of them 16-bit."""
    said = ended_by(run)
    match = _MIXED.search(said)
    if match is None or not _NARROW_WORDS.search(said):
        return []
    frame = signals(run, "failed in")
    function = str(frame["op"].iloc[-1]) if len(frame) else ""
    custom = function.rpartition(".")[0] if function.endswith((".forward", ".backward")) else ""
    return [
        found(
            "custom-function-dtype",
            f"An operator got two dtypes: {match.group(0)}",
            failed_in(run) or custom or model_name(run),
            steps=_at(run),
            value=2.0,
            limit=1.0,
            unit="dtypes",
        )
    ]


def checkpoint_dtype_mismatch(run: Run) -> list[Finding]:
    """`checkpoint-dtype-mismatch`: a recomputation gave another dtype than forward."""
    frame = signals(run, "recomputed")
    said = ended_by(run)
    raised = any(known in said for known in _RECOMPUTED) and "dtype" in said
    if not raised and frame.empty:
        return []
    row = frame.iloc[0] if len(frame) else None
    kinds = f"{row['detail']} in forward, {row['dtype']} when computed again" if row is not None else "another dtype"
    return [
        found(
            "checkpoint-dtype-mismatch",
            f"A checkpointed module changes its dtype: {kinds}",
            str(row["name"]) if row is not None else failed_in(run) or model_name(run),
            severity="error" if raised else None,
            steps=(int(row["step"]), int(row["step"])) if row is not None else _at(run),
            value=2.0,
            limit=1.0,
            unit="dtypes",
        )
    ]


def graphed_callable_cache(run: Run) -> list[Finding]:
    """`graphed-callable-cache`: `make_graphed_callables` under autocast with its cache."""
    if _GRAPHED not in ended_by(run):
        return []
    return [
        found(
            "graphed-callable-cache",
            "make_graphed_callables was called under autocast with its weight cache",
            "torch.cuda.make_graphed_callables",
            steps=_at(run),
            value=1.0,
            limit=0.0,
            unit="calls",
        )
    ]


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
    more = f" and {words.plural(len(whole) - 1, 'more module')} were" if len(whole) > 1 else " was"
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
