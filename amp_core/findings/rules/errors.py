"""Rules on errors that ended a run, recognised by torch's messages and located by the module that ran."""

import re

import pandas as pd

from amp_core.analysis.steps import attempts
from amp_core.findings.model import (
    LOSS_SCALING,
    RANGE_AND_PRECISION,
    SPEED_AND_MEMORY,
    TRAINING_LOOP,
    Entry,
    Finding,
    Remedy,
)
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import (
    call_orders,
    converted_at,
    ending_error,
    ending_steps,
    facts,
    failing_module,
    has_fp32_masters,
    last_step,
    mappings,
    model_name,
    optimizer_name,
    signals,
    split_call,
)
from amp_core.findings.snippets import LOOP
from amp_core.formats import FORMATS
from amp_core.store.run import Run
from amp_core.text import formatting

MIN_ZERO_STEPS = 5
"""Steps whose gradients all have to be zero."""
MIN_STEPS_WITHOUT = 3
"""Steps in which the same parameters have no gradient: all that are reported."""
_WRAPPED = Remedy(
    "A loss that is wrapped anew, as by `torch.tensor(loss, requires_grad=True)` or `loss.detach().requires_grad_()`, "
    "has no graph: backward runs, and no weight ever changes. Return the loss itself.",
    "loss = loss_fn(model(x), y)   # not torch.tensor(loss, requires_grad=True)\nloss.backward()",
)
_UNREACHED = Remedy(
    "These parameters stay as they are: the loss does not depend on them, or a detach, a `no_grad` or a conversion to "
    "numbers cuts the graph before it reaches them. If that is intended, leave them out of the optimizer.",
    "print([name for name, p in model.named_parameters() if p.requires_grad and p.grad is None])   # after backward",
)

_UNSCALED_FP16 = "Attempting to unscale FP16 gradients"
_NO_CHECKS = ("No inf checks were recorded for this optimizer", "does not require grad and does not have a grad_fn")
_NO_STEP = "No inf checks were recorded prior to update"
_OVERFLOWING = re.compile(r"cannot be converted to type (at|c10)::(Half|BFloat16) without overflow")
_BCE = re.compile(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast")
_GRAPHED = "make_graphed_callables does not support the autocast cach"


@rule(
    Entry(
        code="fp16-parameters",
        severity="error",
        family=LOSS_SCALING,
        order=20,
        what="Trainable parameters are stored in float16 alongside a GradScaler, which refuses to unscale their "
        "gradients.",
        signal="dtypes of the parameters, and the error that ended the run.",
        threshold="One trainable float16 parameter, with a scaler (torch/amp/grad_scaler.py: “Attempting to unscale "
        "FP16 gradients”).",
        advice="Without scaling, float16 gradients would underflow, and small updates would not change float16 "
        "weights. Keep trainable parameters in float32 and let autocast cast them.",
        snippet="for parameter in model.parameters():\n"
        "    if parameter.requires_grad:\n"
        "        parameter.data = parameter.data.float()",
        frameworks={"Transformers Trainer": "model = AutoModel.from_pretrained(name, dtype=torch.float32)"},
        page="",
    )
)
def fp16_parameters(run: Run) -> list[Finding]:
    """`fp16-parameters`: parameters that train are float16 beside a scaler."""
    narrow = [n for n, dtype in facts(run.head.model, "dtypes").items() if dtype == "float16"]
    raised = _UNSCALED_FP16 in ending_error(run)
    scaler = run.head.config.get("scaler")
    scaled = isinstance(scaler, dict) and scaler.get("enabled") is True
    if not raised and not (narrow and scaled and not has_fp32_masters(run)):
        return []
    title = "Gradients are float16"
    if narrow:
        title = f"{formatting.plural(len(narrow), 'trainable parameter')} stored in float16"
        if at := converted_at(run, "float16"):
            title = f"{formatting.plural(len(narrow), 'trainable parameter')} converted to float16{at}"
    return [
        make_finding(
            "fp16-parameters",
            title + (", and the scaler refused to unscale them" if raised else ""),
            narrow[0] if narrow else "parameters",
            steps=ending_steps(run) if raised else None,
            value=float(len(narrow)),
            limit=0.0,
            unit="float16 parameters",
        )
    ]


@rule(
    Entry(
        code="no-gradients",
        severity="error",
        family=TRAINING_LOOP,
        order=70,
        what="An optimizer steps although none of its parameters has a gradient.",
        signal="The scaler's error, or a step without any gradient.",
        threshold="No parameter of the optimizer has a gradient (torch/amp/grad_scaler.py, “No inf checks were "
        "recorded”). Or parameters outside the model have none, while some of the model's are in no optimizer. "
        "Informational if some have none in any of the first steps.",
        advice="The loss does not depend on these parameters: it was detached, they are frozen, or they belong to a "
        "different model than the one that was called. Create the optimizer from the parameters that train.",
        snippet="optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)\n"
        "assert loss.requires_grad",
    )
)
def no_gradients(run: Run) -> list[Finding]:
    """`no-gradients`: no parameter of an optimizer had a gradient when it stepped."""
    raised = next((message for message in _NO_CHECKS if message in ending_error(run)), None)
    missing = signals(run, "missing gradients")
    none = missing[missing["count"] >= missing["limit"]]
    if raised is None and none.empty:
        return (
            _of_replaced_parameters(run, missing) or _cleared_before_the_step(run) or _of_some_parameters(run, missing)
        )
    settings = mappings(run.head.config, "optimizer_settings")
    foreign = next(
        (i for i, s in enumerate(settings) if s.get("outside_model") and s["outside_model"] == s.get("parameters")),
        None,
    )
    index = 0
    if raised is not None and len(settings) > 1:
        calls = signals(run, "calls")["name"]
        last = str(calls.iloc[-1]).split()[-1] if len(calls) else ""
        index = split_call(last)[1]
    where = optimizer_name(run, index if foreign is None else foreign)
    why = " (they do not belong to the model)" if foreign is not None else ""
    if raised == _NO_CHECKS[1]:
        where, why = "loss", " (the loss depends on none)"
    wrapped = len(signals(run, "leaf loss")) > 0
    if wrapped:
        where, why = "loss", ": backward starts from a new tensor, which is connected to nothing"
    at = ending_steps(run) if raised else (int(none["step"].iloc[0]), int(none["step"].iloc[-1]))
    return [
        make_finding(
            "no-gradients",
            f"None of the optimizer's parameters has a gradient{why}",
            where,
            steps=at,
            value=0.0,
            limit=1.0,
            unit="parameters with a gradient",
            remedy=_WRAPPED if wrapped else None,
        )
    ]


def _of_some_parameters(run: Run, missing: pd.DataFrame) -> list[Finding]:
    """`no-gradients` as an info where some parameters have no gradient in any of the first steps."""
    first = missing[missing["detail"] == ""]
    if len(first) < MIN_STEPS_WITHOUT:
        return []
    same = len(first.groupby(["name", "count", "limit"])) == 1
    explained = len(signals(run, "branch")) or signals(run, "graphless cast")["name"].isin(set(first["name"])).any()
    if not same or explained:
        return []
    row = first.iloc[0]
    of = formatting.plural(int(row["limit"]), "tensor")
    return [
        make_finding(
            "no-gradients",
            f"{int(row['count']):,} of the optimizer's {of} get no gradient",
            str(row["name"]),
            severity="info",
            steps=(int(first["step"].min()), int(first["step"].max())),
            value=float(row["limit"] - row["count"]),
            limit=float(row["limit"]),
            unit="parameters with a gradient",
            remedy=_UNREACHED,
        )
    ]


def _cleared_before_the_step(run: Run) -> list[Finding]:
    """`no-gradients` where the loop sets gradients to zero between backward and the optimizer's step."""
    if not any(_clears_before_step([split_call(c)[0] for c in calls]) for _, _, calls in call_orders(run)):
        return []
    norms = attempts(run)[["step", "grad_norm", "skipped"]]
    norms = norms[~norms["skipped"] & norms["grad_norm"].notna()]
    if len(norms) < MIN_ZERO_STEPS or (norms["grad_norm"] != 0).any():
        return []
    return [
        make_finding(
            "no-gradients",
            "All gradients are zero in every step: the loop clears them between backward and the optimizer's step",
            "zero_grad",
            steps=(int(norms["step"].iloc[0]), int(norms["step"].iloc[-1])),
            value=0.0,
            limit=1.0,
            unit="parameters with a gradient",
            remedy=Remedy(
                "The optimizer steps with zeros, so nothing is learned but weight decay. Clear gradients after the "
                "step, or before the forward pass.",
                "optimizer.zero_grad()\nscaler.scale(loss_fn(model(x), y)).backward()\nscaler.step(optimizer)\n"
                "scaler.update()",
            ),
        )
    ]


def _clears_before_step(calls: list[str]) -> bool:
    """Whether `zero_grad` is the last of the calls that change gradients before a step."""
    last = ""
    for name in calls:
        if name in ("scaler.step", "optimizer.step") and last == "zero_grad":
            return True
        last = name if name in ("backward", "zero_grad") else last
    return False


def _of_replaced_parameters(run: Run, missing: pd.DataFrame) -> list[Finding]:
    """`no-gradients` where a layer was replaced after the optimizer was made: the optimizer holds the old parameters,
    which have no gradient, and none holds the new ones."""
    untrained = run.head.config.get("without_optimizer")
    settings = mappings(run.head.config, "optimizer_settings")
    index = next((i for i, s in enumerate(settings) if s.get("outside_model")), None)
    unnamed = missing[missing["name"].str.startswith("parameter ")]
    if not untrained or index is None or unnamed.empty or has_fp32_masters(run):
        return []
    name, old = str(untrained[0]), int(settings[index]["outside_model"])
    return [
        make_finding(
            "no-gradients",
            f"{name} is in no optimizer, and {optimizer_name(run, index)} holds "
            f"{formatting.plural(old, 'parameter')} that the model does not use",
            name,
            steps=(int(unnamed["step"].iloc[0]), int(unnamed["step"].iloc[-1])),
            value=float(old),
            limit=0.0,
            unit="parameters of the optimizer that are not the model's",
            advice="The layer was replaced after the optimizer was made, so its weights never change. Make the "
            "optimizer once the model is complete.",
        )
    ]


@rule(
    Entry(
        code="update-without-step",
        severity="error",
        family=TRAINING_LOOP,
        order=80,
        what="`scaler.update()` is called twice for one step, or before any step, which raises an error.",
        signal="The error that ended the run.",
        threshold="An `update` without an `unscale_` or `step` since the previous one (torch/amp/grad_scaler.py, "
        "“No inf checks were recorded prior to update”).",
        advice="`update()` consumes the inf checks recorded since the last call, so a second call finds none. Call "
        "it once per iteration, after all optimizers have stepped.",
        snippet=LOOP,
        page="",
    )
)
def update_without_step(run: Run) -> list[Finding]:
    """`update-without-step`: the run ended because `scaler.update` was called and no optimizer had stepped since the
    last call."""
    if _NO_STEP not in ending_error(run):
        return []
    stepped = last_step(run) is not None
    return [
        make_finding(
            "update-without-step",
            "scaler.update was called twice for one step, which raised an error"
            if stepped
            else "scaler.update was called before any optimizer step, which raised an error",
            "scaler.update",
            steps=ending_steps(run),
            value=2.0 if stepped else 1.0,
            limit=1.0 if stepped else 0.0,
            unit="updates per step",
        )
    ]


@rule(
    Entry(
        code="mask-constant-overflow",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=50,
        what=(
            "A mask uses a constant such as -1e9, which float16 cannot represent: it raises an error or becomes -inf."
        ),
        signal="The error that ended the run; constants above 65504 in operators with a 16-bit result, in the first "
        "step.",
        threshold="Any finite constant above the largest value of its dtype. An error if it ended the run or "
        "produced non-finite values.",
        advice="A fully masked row is then all -inf, and its softmax is NaN. Use the smallest value of the dtype in "
        "use.",
        snippet="scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        page="layer-detail",
    )
)
def mask_constant_overflow(run: Run) -> list[Finding]:
    """`mask-constant-overflow`: a constant that 16 bits cannot hold."""
    frame = signals(run, "constant overflow")
    raised = _OVERFLOWING.search(ending_error(run)) is not None
    if not raised and frame.empty:
        return []
    broken = raised or len(signals(run, "non-finite output")) > 0
    row = frame.iloc[0] if len(frame) else None
    name = failing_module(run) if raised else (str(row["name"]) if row is not None else "")
    value = float(row["value"]) if row is not None else None
    constant = f"The constant {value:.3g}" if value is not None else "A constant"
    return [
        make_finding(
            "mask-constant-overflow",
            f"{constant} does not fit {row['dtype'] if row is not None else 'float16'}",
            name or model_name(run),
            severity="error" if broken else "warning",
            steps=ending_steps(run) if raised else None,
            value=value,
            limit=float(row["limit"]) if row is not None else FORMATS["fp16"].max_value,
            unit="largest magnitude",
        )
    ]


@rule(
    Entry(
        code="bce-banned",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=40,
        what="`binary_cross_entropy` is refused under autocast on CUDA: its gradient does not fit float16.",
        signal="The error that ended the run, or the operator running under autocast on another device.",
        threshold="Any use (torch/csrc/autocast_mode.h lists it as banned). A warning on devices that allow it.",
        advice="The loss needs the logarithm of a probability, which 16-bit rounding makes inaccurate near 0 and 1. "
        "Remove the sigmoid and use the loss that takes logits.",
        snippet="loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)",
        page="",
    )
)
def bce_banned(run: Run) -> list[Finding]:
    """`bce-banned`: `binary_cross_entropy` under autocast; refused on CUDA, allowed elsewhere."""
    frame = signals(run, "banned op")
    raised = _BCE.search(ending_error(run)) is not None
    if not raised and frame.empty:
        return []
    where = failing_module(run) if raised else str(frame["name"].iloc[0])
    outcome = (
        "was called under autocast, which raised an error"
        if raised
        else "runs under autocast, which raises an error on CUDA"
    )
    return [
        make_finding(
            "bce-banned",
            f"binary_cross_entropy {outcome}",
            where or "loss",
            severity="error" if raised else "warning",
            steps=ending_steps(run) if raised else None,
            value=1.0,
            limit=0.0,
            unit="uses",
        )
    ]


@rule(
    Entry(
        code="graphed-callable-cache",
        severity="error",
        family=SPEED_AND_MEMORY,
        order=60,
        what="`make_graphed_callables` raises an error under autocast with its weight cache.",
        signal="The error that ended the run.",
        threshold="torch's error message (torch/cuda/graphs.py).",
        advice="A captured graph cannot use cached weights that only live as long as an autocast region. Disable "
        "the cache for that region.",
        snippet="with torch.autocast('cuda', dtype=dtype, cache_enabled=False):\n"
        "    model = torch.cuda.make_graphed_callables(model, (x,))",
        page="",
    )
)
def graphed_callable_cache(run: Run) -> list[Finding]:
    """`graphed-callable-cache`: `make_graphed_callables` under autocast with its cache."""
    if _GRAPHED not in ending_error(run):
        return []
    return [
        make_finding(
            "graphed-callable-cache",
            "make_graphed_callables was called under autocast with its weight cache",
            "torch.cuda.make_graphed_callables",
            steps=ending_steps(run),
            value=1.0,
            limit=0.0,
            unit="calls",
        )
    ]
