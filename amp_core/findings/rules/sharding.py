"""Rules on FSDP's policies, DDP's hooks, requested FP32 master weights, and optimizer states."""

import re
from collections.abc import Mapping
from typing import Any

from amp_core.analysis.numerics.update_losses import update_losses
from amp_core.analysis.steps import autocast_dtype, whole_number
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding, Remedy, Severity
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.remedies import converted_remedy
from amp_core.findings.rules.stored import SIGNIFICANT_BITS
from amp_core.findings.signals import (
    converted_at,
    facts,
    has_fp32_masters,
    is_second_moment,
    model_name,
    rounded_decays,
    signals,
)
from amp_core.formats import FORMATS, Format
from amp_core.store.run import Run
from amp_core.text import formatting

MANY_SHARDS = 8
"""Processes from which an unrequested reduction in 16 bits is reported: FSDP2 reduces in `param_dtype` by
default."""
_NARROW_HOOK = re.compile(r"(bf16|bfloat16)|(fp16|float16)|half", re.IGNORECASE)
MEDIAN_MANTISSA = 1.5
"""A number of this mantissa or less keeps its value if it is multiplied by 1 - x, for an x of up to half a unit in the
last place of 1 over this. Half of all numbers have such a mantissa."""
MIN_VANISHED_FRAC = 0.01
"""Share of second moments that are zero beside a first moment that is not."""
_POLICY = """\
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)"""
_MASTERS = "model = model.float()   # before fully_shard, before the optimizer\n" + _POLICY
_MASTERS_IN_ONE_PROCESS = """\
model = model.float()   # before the optimizer
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
with torch.autocast(device_type, dtype=torch.bfloat16):
    loss = loss_fn(model(x), y)"""
_UNSHARDED_MASTERS = (
    "Mixed precision keeps weights in float32 and computes in 16 bits; here, updates below 2^-9 of a weight are lost. "
    "Load or cast the model in float32 before passing it to the optimizer, and let autocast cast it."
)
_WIRE = (
    "Each addition rounds to 8 significant bits in bfloat16, and to 11 in float16, where sums beyond 65,504 become "
    "infinite; more is lost the more processes there are. Reduce in float32"
)
_HOOK = Remedy(
    _WIRE + ", or keep the hook only where communication limits the speed.",
    "model = torch.nn.parallel.DistributedDataParallel(model)   # without register_comm_hook",
)
_WEIGHTS = Remedy(
    _WIRE + ": DDP reduces gradients in the dtype of the weights, so keep those in float32 and let autocast cast them.",
    "model = torch.nn.parallel.DistributedDataParallel(model.float())\n"
    "with torch.autocast(device_type, dtype=torch.bfloat16):\n"
    "    loss = loss_fn(model(x), y)",
)
_CALL = Remedy(
    _WIRE + ": copy each gradient to it first.",
    "gradient = p.grad.float()\n"
    "torch.distributed.all_reduce(gradient)\n"
    "p.grad.copy_(gradient / torch.distributed.get_world_size())",
)


@rule(
    Entry(
        code="half-reduction",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=286,
        what="Gradients are reduced across processes in 16 bits.",
        signal="reduce_dtype of FSDP's policy, DDP's communication hook, dtypes of the gradients of a DDP model, and "
        "of tensors of their size that the loop or the hook passes to `torch.distributed.all_reduce`.",
        threshold="A 16-bit reduce_dtype, compression hook or such tensor; with FSDP2's default, which is param_dtype, "
        "a warning from 8 processes on and informational below (torchtitan issues 700 and 2389, modalities 462).",
        advice="Each addition rounds to 8 significant bits in bfloat16, and to 11 in float16, and more small gradients "
        "are lost the more processes there are. Reduce in float32: it costs bandwidth, not memory.",
        snippet=_POLICY,
        frameworks={
            "Accelerate": "plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))",
        },
        page="precision-map",
    )
)
def half_reduction(run: Run) -> list[Finding]:
    """`half-reduction`: gradients are reduced in 16 bits between processes."""
    settings = facts(run.head.config, "communication")
    asked, default, hook = (settings.get(k) for k in ("reduce_dtype", "param_dtype", "hook"))
    shards = whole_number(run.head.config.get("shards")) or 1
    trained = facts(run.head.model, "dtypes")
    severity: Severity | None = None
    remedy: Remedy | None = None
    if asked in SIGNIFICANT_BITS:
        dtype, where, how = str(asked), "reduce_dtype", f"reduce_dtype is {asked}"
    elif isinstance(hook, str) and (named := _NARROW_HOOK.search(hook)):
        dtype = "bfloat16" if named[1] else "float16" if named[2] else "16 bits"
        where, how, remedy = hook, f"the communication hook is {hook}", _HOOK
    elif asked is None and default in SIGNIFICANT_BITS and shards > 1:
        dtype, where, how = str(default), "reduce_dtype", f"reduce_dtype is not set, and param_dtype is {default}"
        severity = None if shards >= MANY_SHARDS else "info"
    elif (reduced := settings.get("reduced")) in SIGNIFICANT_BITS:
        call = str(settings.get("reduced_by", "all_reduce"))
        dtype, where = str(reduced), str(hook or call)
        how, remedy = f"{call} is called with tensors in {reduced}", _HOOK if hook else _CALL
        severity = None if run.head.world_size > 1 else "info"  # one process adds nothing
    elif run.head.config.get("parallel") == "ddp" and trained and run.head.world_size > 1:
        where, dtype = next(iter(trained.items()))
        how, remedy = f"the DDP model's gradients are in {dtype}", _WEIGHTS
    else:
        return []
    return [
        make_finding(
            "half-reduction",
            f"Gradients are reduced in {dtype}: {how}",
            where,
            severity=severity,
            value=float(SIGNIFICANT_BITS.get(dtype, 0)),
            limit=24.0,
            unit="significant bits",
            remedy=remedy,
        )
    ]


@rule(
    Entry(
        code="missing-fp32-masters",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=268,
        what="Mixed precision was requested, but the weights that the optimizer updates are in bfloat16.",
        signal=(
            "FSDP's param_dtype, autocast or the framework's precision setting, and the dtypes of trainable parameters."
        ),
        threshold="One such parameter, without a remedy such as stochastic rounding (accelerate issue 3979, "
        "LlamaFactory issue 9769).",
        advice="Mixed precision keeps weights in float32 and computes in 16 bits; here, updates below 2^-9 of a "
        "weight are lost. Load or cast the model in float32 before sharding it or passing it to the optimizer.",
        snippet=_MASTERS,
        frameworks={
            "Transformers Trainer": "model = AutoModel.from_pretrained(name, dtype=torch.float32)   # bf16=True casts",
            "Accelerate": "model = model.float()\nmodel, optimizer = accelerator.prepare(model, optimizer)",
        },
        page="precision-map",
    )
)
def missing_fp32_masters(run: Run) -> list[Finding]:
    """`missing-fp32-masters`: trained weights in bfloat16 where FSDP's policy, autocast or the framework was set to
    mixed precision."""
    names = [n for n, d in facts(run.head.model, "dtypes").items() if d == "bfloat16"]
    settings = facts(run.head.config, "communication")
    if not names or has_fp32_masters(run) or (update_losses(run)["cure"] != "").any():
        return []
    if settings.get("param_dtype") in SIGNIFICANT_BITS:
        asked = f"FSDP's param_dtype is {settings['param_dtype']}"
    elif run.head.config.get("requested_precision") in ("bf16", "fp16"):
        asked = f"{run.head.config['requested_precision']} was requested"
    elif autocast_dtype(run) == "bfloat16":
        asked = "autocast is on"
    else:
        return []
    at = converted_at(run, "bfloat16")
    stored = f"were converted to bfloat16{at}" if at else "are in bfloat16"
    remedy = converted_remedy("bfloat16") if at else None
    if remedy is None and settings.get("param_dtype") is None:
        frameworks = GUIDE["missing-fp32-masters"].frameworks
        remedy = Remedy(_UNSHARDED_MASTERS, _MASTERS_IN_ONE_PROCESS, frameworks)
    return [
        make_finding(
            "missing-fp32-masters",
            f"{asked[0].upper()}{asked[1:]}, but the weights themselves {stored}: there are no float32 master weights",
            names[0],
            value=float(len(names)),
            limit=0.0,
            unit="trainable parameters in bfloat16",
            remedy=remedy,
        )
    ]


@rule(
    Entry(
        code="half-output-policy",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=279,
        what="FSDP casts the model's output to 16 bits, and the loss is computed from it in 16 bits.",
        signal="output_dtype of FSDP's policy, and the dtype in which the loss is computed.",
        threshold="A 16-bit output_dtype and a 16-bit loss (torchtitan issue 2389).",
        advice="The loss, and the gradients that start from it, have two or three significant digits. Set "
        "output_dtype to float32 on the outermost module, or cast the output before the loss.",
        snippet="policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)\n"
        "fully_shard(model, mp_policy=policy)   # the outermost module",
        page="precision-map",
    )
)
def half_output_policy(run: Run) -> list[Finding]:
    """`half-output-policy`: FSDP's output_dtype makes the loss 16 bits."""
    dtype = facts(run.head.config, "communication").get("output_dtype")
    loss = signals(run, "loss dtype", "narrow classes")
    if dtype not in SIGNIFICANT_BITS or loss.empty:
        return []
    return [
        make_finding(
            "half-output-policy",
            f"FSDP casts the output of {model_name(run)} to {dtype}, and the loss is computed in {dtype}",
            "output_dtype",
            value=float(SIGNIFICANT_BITS[str(dtype)]),
            limit=24.0,
            unit="significant bits",
        )
    ]


@rule(
    Entry(
        code="vanishing-second-moments",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=276,
        follows=("missing-fp32-masters",),
        what="An optimizer stores second moments in 16 bits, be it between two steps, or in int8, where they vanish or "
        "stop changing; or they come from a checkpoint that did.",
        signal="dtype of the second moments after the first and third step, whether 16 bits hold all of them before "
        "one, the share of zeros, and beta2; the share of zeros after the optimizer's state was loaded.",
        threshold="1 - beta2 is below half a unit in the last place of at least half of all numbers, 2^-8 / 1.5 in "
        "bfloat16 (the default beta2 gives 0.001), or 1 % of the second moments are zero where the first moment is "
        "not (bitsandbytes issue 1973).",
        advice="A second moment that stops changing keeps the step size of the first steps, and where it is zero "
        "the update divides by eps alone. Keep optimizer states in float32, or lower beta2 to 0.95.",
        snippet="optimizer = torch.optim.AdamW(model.float().parameters(), lr=lr)   # states in float32",
        page="layer-detail",
    )
)
def vanishing_second_moments(run: Run) -> list[Finding]:
    """`vanishing-second-moments`: second moments in 16 bits that cannot follow the squares of gradients."""
    if (update_losses(run)["cure"] != "").any():
        return []
    moments = signals(run, "second moments")
    for row in moments.to_dict("records") if len(moments) else []:
        if row["detail"] == "restored":
            if row["value"] >= MIN_VANISHED_FRAC:
                return [_vanished_in_checkpoint(row)]
            continue
        form = next((f for f in FORMATS.values() if f.dtype == row["dtype"]), None)  # None of an integer
        smallest = 2.0 ** -(form.mantissa_bits + 1) / MEDIAN_MANTISSA if form is not None else 0.0
        stands_still = row["limit"] == row["limit"] and row["limit"] is not None and row["limit"] < smallest
        numbers = _numbers(row["limit"], form) if stands_still and form is not None else ""
        if not stands_still and row["value"] < MIN_VANISHED_FRAC:
            continue
        what = (
            f"1 - beta2 = {row['limit']:.3g} is below half a unit in the last place of {numbers}"
            if stands_still
            else f"{100 * row['value']:.0f} % are zero although the gradient is not"
        )
        return [
            make_finding(
                "vanishing-second-moments",
                f"Second moments are stored in {row['dtype']}: {what}",
                str(row["name"]) or "optimizer",
                steps=(int(row["step"]), int(row["step"])),
                value=float(row["limit"] if stands_still else row["value"]),
                limit=smallest if stands_still else MIN_VANISHED_FRAC,
                unit="1 - beta2" if stands_still else "share of second moments",
            )
        ]
    decays = rounded_decays(run)
    if decays.empty:
        return []
    for row in decays[decays["detail"].map(is_second_moment).astype(bool)].tail(1).to_dict("records"):
        return [
            make_finding(
                "vanishing-second-moments",
                f"Second moments are stored in {row['dtype']}: 1 - beta2 = {row['limit']:.3g} is below half a unit in "
                "the last place",
                str(row["name"]) or "optimizer",
                steps=(int(decays["step"].min()), int(decays["step"].max())),
                value=float(row["limit"]),
                limit=2.0 ** -(SIGNIFICANT_BITS[str(row["dtype"])] + 1),
                unit="1 - beta2",
            )
        ]
    return []


def _numbers(decay: float, form: Format) -> str:
    """Whether that is so for all numbers, or for those of a small mantissa: at least half of them."""
    return "any number" if decay < 2.0 ** -(form.mantissa_bits + 2) else "most numbers"


def _vanished_in_checkpoint(row: Mapping[Any, Any]) -> Finding:
    share, step = float(row["value"]), int(row["step"])
    return make_finding(
        "vanishing-second-moments",
        f"{formatting.percent(share)} of the second moments that were loaded into the optimizer are zero although the "
        "first moments are not",
        str(row["name"]) or "optimizer",
        steps=(step, step),
        value=share,
        limit=MIN_VANISHED_FRAC,
        unit="share of second moments",
        remedy=Remedy(
            "The checkpoint held them in float16, where they underflow below 6e-8, and the first updates after it are "
            "many times too large. Save the optimizer's state in float32, as `state_dict` returns it.",
            'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)',
        ),
    )
