"""Rules on operators that received two dtypes, and on recomputations in another dtype than forward's."""

import re

from amp_core.analysis.steps import autocast_dtype
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import ending_error, ending_steps, failing_module, model_name, signals
from amp_core.store.run import Run

_MIXED = re.compile(
    r"expected scalar type \w+ but found \w+"
    r"|to have the same dtype, but (got|found)"
    r"|must have the same dtype, but got"
    r"|Input type \(.*\) and (bias|weight) type \(.*\) should be the same"
    r"|expected .* to have the same dtype"
    r"|Found dtype \w+ but expected \w+"
    r"|expected dtype \w+ for .* but got dtype [\w:]+"
    r"|must have the same scalar type"
    r"|to have same dtypes?,? but"
    r"|input dtype \(.*\) does not match weight dtype"
    r"|to have the same type as tensor .* but type",
    re.IGNORECASE,
)
_WRITES = re.compile(
    r"Index put requires the source and destination dtypes match"
    r"|(index_add_|index_copy_|put_)\(\): self (\(\w+\) )?and source"
    r"|scatter\(\): Expected self\.dtype to be equal to src\.dtype"
    r"|masked_scatter: expected self and source to have same dtypes"
)
"""Writes into places of a tensor, which neither cast nor are cast by autocast."""
_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|Unsupported dtype (Half|BFloat16)")
_WRITING = Remedy(
    "An assignment by index, and scatter, take values of the destination's dtype alone, and autocast made these "
    "16-bit. Make the destination from the values, or cast them to its dtype.",
    "matched = torch.zeros(shape, dtype=values.dtype, device=values.device)\n"
    "matched[places] = values   # or values.to(matched.dtype)",
)
_NARROW_WORDS = re.compile(r"half|bfloat16|float16", re.IGNORECASE)
_RECOMPUTED = ("different metadata than during the forward pass", "Recomputed values for the following tensors")
OPTIMIZER_STEPS = ("_single_tensor_", "_multi_tensor_", "_fused_")
"""How torch names the functions that step weights."""


@rule(
    Entry(
        code="custom-function-dtype",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=30,
        what="An operator received float16 and float32 inputs together, usually in a custom autograd function, a layer "
        "that autocast does not handle or an assignment by index; or it has no kernel for 16 bits; or an optimizer, "
        "for weights that were cast since it made its state.",
        signal="The error that ended the run.",
        threshold="torch's error message: expected one scalar type but found another, or not implemented for one.",
        advice="Autocast casts the inputs of torch's own operators, not those of custom functions. Declare which "
        "dtype they take.",
        snippet="class MyFunction(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    @torch.amp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)\n"
        "    def forward(ctx, x): ...\n"
        "\n"
        "    @staticmethod\n"
        "    @torch.amp.custom_bwd(device_type=device_type)\n"
        "    def backward(ctx, grad): ...",
        page="",
    )
)
def custom_function_dtype(run: Run) -> list[Finding]:
    """`custom-function-dtype`: an operator got two dtypes, one of them 16-bit."""
    error = ending_error(run)
    match, write, absent = _MIXED.search(error), _WRITES.search(error), _NO_KERNEL.search(error)
    narrow = _NARROW_WORDS.search(error) or (write and autocast_dtype(run) in ("float16", "bfloat16"))
    if not (match or write or absent) or not narrow or _failed_in_recomputation(run):
        return []
    frame = signals(run, "failed in")
    function = str(frame["op"].iloc[-1]) if len(frame) else ""
    if write:
        where = failing_module(run) or function or model_name(run)
        return [_raised(run, f"Values of another dtype are written into a tensor: {error}", where, _WRITING)]
    if absent:
        return [_without_kernel(run, absent, function)]
    assert match is not None
    custom = function.rpartition(".")[0] if function.endswith((".forward", ".backward")) else ""
    if function.startswith(OPTIMIZER_STEPS):
        return [_cast_after_steps(run, match.group(0))]
    where = failing_module(run) or custom or model_name(run)
    return [_raised(run, f"An operator received two dtypes: {match.group(0)}", where, None)]


def _raised(run: Run, title: str, where: str, remedy: Remedy | None) -> Finding:
    return make_finding(
        "custom-function-dtype",
        title,
        where,
        steps=ending_steps(run),
        value=2.0,
        limit=1.0,
        unit="dtypes",
        remedy=remedy,
    )


def _without_kernel(run: Run, match: re.Match[str], function: str) -> Finding:
    dtype = "float16" if "Half" in match.group(0) else "bfloat16"
    where = failing_module(run) or function or model_name(run)
    remedy = Remedy(
        f"Autocast made the input of this operator {dtype}, for which torch has no kernel on this device. Run it in "
        "float32, with autocast off and its inputs cast.",
        "with torch.autocast(x.device.type, enabled=False):\n    y = operator(x.float())",
    )
    return _raised(run, f"An operator has no kernel for {dtype}: {ending_error(run)}", where, remedy)


def _cast_after_steps(run: Run, message: str) -> Finding:
    title = f"The weights have another dtype than the optimizer's state, which was made for them before: {message}"
    remedy = Remedy(
        "Something cast the model itself after the first steps, as a validation that calls `model.half()` or "
        "`pipeline.to(dtype)` does, and its weights are rounded since. Cast a copy, or run it under autocast.",
        "import copy\n\nwith torch.no_grad():\n    validate(copy.deepcopy(model).to(torch.bfloat16))",
    )
    return _raised(run, title, "optimizer.step", remedy)


def _failed_in_recomputation(run: Run) -> bool:
    """Whether a module failed while a custom autograd function recomputed it in backward."""
    return bool((signals(run, "failed in")["phase"] == "backward").any())


@rule(
    Entry(
        code="checkpoint-dtype-mismatch",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=360,
        what="Activation checkpointing recomputes a module in a different dtype than in the forward pass.",
        signal="dtypes of outputs in the forward pass and in the recomputation; the error of torch.utils.checkpoint, "
        "or of an operator in a module that a custom autograd function recomputes.",
        threshold="Any difference: the gradients then belong to a different function. An error if it ended the run.",
        advice="The recomputation runs under different autocast settings than the forward pass. Use torch's "
        "checkpoint, which preserves them, and open no other autocast region around backward.",
        snippet="from torch.utils.checkpoint import checkpoint\n\ny = checkpoint(block, x, use_reentrant=False)",
        page="",
    )
)
def checkpoint_dtype_mismatch(run: Run) -> list[Finding]:
    """`checkpoint-dtype-mismatch`: a recomputation has another dtype than forward."""
    frame = signals(run, "recomputed")
    error = ending_error(run)
    raised = any(message in error for message in _RECOMPUTED) and "dtype" in error
    raised = raised or (_failed_in_recomputation(run) and _MIXED.search(error) is not None)
    if not raised and frame.empty:
        return []
    row = frame.iloc[0] if len(frame) else None
    kinds = f"{row['detail']} in forward, {row['dtype']} when recomputed" if row is not None else "another dtype"
    return [
        make_finding(
            "checkpoint-dtype-mismatch",
            f"A checkpointed module changes its dtype when recomputed: {kinds}",
            str(row["name"]) if row is not None else failing_module(run) or model_name(run),
            severity="error" if raised else None,
            steps=(int(row["step"]), int(row["step"])) if row is not None else ending_steps(run),
            value=2.0,
            limit=1.0,
            unit="dtypes",
        )
    ]
