"""Remedies for non-finite numbers, by their cause and the precision of the run.

The guide's advice for a code is about float16. A run in FP32 or BF16, bad data and a divergence need other advice.
"""

import numpy as np

from amp_core.analysis import rank_scales, safe_window
from amp_core.analysis.steps import autocast_dtype, recipe, scaler_enabled
from amp_core.findings.first_cause import INPUT_DATA, ITS_BACKWARD, LEARNING_RATE, LOSS, MASKED_ROWS, Cause
from amp_core.findings.model import Remedy
from amp_core.findings.registry import GUIDE
from amp_core.findings.signals import facts, signals
from amp_core.findings.snippets import BF16, ISLAND, LOOP
from amp_core.schema import RunError
from amp_core.schema.event_kinds import BY_ZERO, NONFINITE_CONSTANT, OF_ZERO
from amp_core.store.run import Run

FP32_RANGE_DTYPES = ("float32", "bfloat16")
"""dtypes with FP32's range, up to 3.4e38."""
_FINITE_SAMPLES = """\
finite = x.isfinite().flatten(1).all(1)
x, y = x[finite], y[finite]"""
_FINITE_TARGETS = """\
finite = y.isfinite().reshape(len(y), -1).all(1)
x, y = x[finite], y[finite]"""
SLOWER = """\
for group in optimizer.param_groups:
    group["lr"] /= 10
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)   # before each step"""
_GUARDED = """\
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
if norm.isfinite():
    optimizer.step()"""
_BAD_WEIGHTS = """\
for name, parameter in model.named_parameters():
    if not parameter.isfinite().all():
        print(name)"""
_GUARDED_ASCENT = """\
norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
if norm.isfinite():
    for p in model.parameters():
        p.data.add_(p.grad, alpha=rho / norm.item())"""
_RESET = """\
for module in model.modules():
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        module.reset_running_stats()"""


_DERIVATIVE = Remedy(
    "The forward pass and the loss were finite, but the gradient of the loss with respect to the model's output was "
    "NaN: an operator after the last module has no derivative at that point, such as a root or norm at zero, or a "
    "division in a branch that `where` discards. Keep the operator's argument away from that point; neither "
    "precision nor loss scale fixes it.",
    "distance = (difference.square().sum(1) + 1e-12).sqrt()\n"
    "y = torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0)   # the inner `where` keeps log off zero",
)
UNSCALED_GUARD = Remedy(
    "If a norm of the gradients decides, it is still multiplied by the loss scale, so that the limit is thousands of "
    "times too low. Unscale the gradients first; the scaler skips those that overflowed without help.",
    "scaler.unscale_(optimizer)\n"
    "norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
    "if norm < limit:\n"
    "    scaler.step(optimizer)\n"
    "scaler.update()",
)


def new_scaler(run: Run, growth_interval: int | None = None) -> str:
    """The line that makes a GradScaler, with the first scale that suits the run; the default where that is unknown."""
    power = first_scale(run)
    init = f", init_scale=2.0**{16 if power is None else power}"
    interval = f", growth_interval={growth_interval}" if growth_interval else ""
    return f"scaler = torch.amp.GradScaler(device_type{init}{interval})"


def first_scale(run: Run) -> int | None:
    """log2 of the loss scale that `safe_window` recommends; None without gradients, or if no scale suits them all."""
    try:
        window = safe_window(run)
    except RunError:  # no gradients were recorded
        return None
    return int(np.log2(window.recommended)) if window.exists and window.recommended >= 1 else None


def compute_dtype(run: Run) -> str:
    """The narrowest dtype that the run computes in, `float16`, `bfloat16` or `float32`; empty if not known."""
    autocast, model, config = autocast_dtype(run), run.head.model, run.head.config
    stored = {*facts(model, "dtypes").values(), *facts(model, "frozen_dtypes").values()}
    for dtype, pure in (("float16", "fp16-pure"), ("bfloat16", "bf16-pure")):
        if autocast == dtype or dtype in stored or recipe(run) == pure:
            return dtype
    return "float32" if recipe(run) in ("fp32", "tf32") or "autocast_dtype" in config else ""


def loss_remedy(run: Run, cause: Cause | None) -> Remedy | None:
    """The remedy for a non-finite loss; None if the guide's advice fits."""
    if cause is None:
        return _remedy_without_cause(run)
    if cause.where == INPUT_DATA:
        return Remedy(
            "The model's input was not finite, which neither precision nor loss scale fixes. Find the samples with "
            "NaN or infinity, and repair or drop them before they reach the model.",
            _FINITE_SAMPLES,
        )
    if cause.where == LEARNING_RATE:
        exonerates = "" if _updates_are_wrong(run) else ", so the number format is not the cause"
        return Remedy(
            f"The training diverged: the loss grew while every value was still finite{exonerates}. "
            + ("" if exonerates else "First mend what is found of the ranks or the optimizer's moments. ")
            + "Lower the learning rate, add warm-up, or clip the gradients.",
            SLOWER,
        )
    if cause.phase == "backward" and cause.where == LOSS:
        return _DERIVATIVE
    if cause.phase == "backward":
        return _gradient_remedy(run)
    if cause.op == MASKED_ROWS:
        entry = GUIDE["fully-masked-row"]
        return Remedy(entry.advice, entry.snippet)
    if cause.op == "its weights" and (signals(run, "weights broken within step")["step"] == cause.step).any():
        return Remedy(
            f"The weights of {cause.where} were finite in an earlier forward of the same step: the program's own code "
            "changed them since, before any optimizer step, as the ascent of sharpness-aware minimization does with "
            "gradients that overflowed. Leave that change out where the gradients are not finite; a scaler protects "
            "its own steps only.",
            _GUARDED_ASCENT,
        )
    if cause.op == "its weights":
        return Remedy(
            f"The weights of {cause.where} were already non-finite before the module ran: either the checkpoint "
            "contained them, or an update produced them, for example by dividing by an eps that rounds to zero. "
            "Check the checkpoint, the optimizer, and any code that updates weights outside of it.",
            _BAD_WEIGHTS,
        )
    if cause.of_constant:
        return _constant_remedy(cause)
    if cause.where == LOSS:
        return _loss_function_remedy(run, cause)
    if cause.of_operator:
        return _operator_remedy(run, cause)
    if cause.dtype == "float16":
        return Remedy(
            "The forward pass overflowed float16, whose largest value is 65504, and no loss scale fixes that. Run "
            f"{cause.where} in float32, reduce its inputs or weights, or use bfloat16.",
            ISLAND,
            BF16,
        )
    given = signals(run, "narrow input")
    if cause.phase == "forward" and (given["step"] == cause.step).any():
        dtype = str(given["dtype"].iloc[0])
        return Remedy(
            f"The model is given {dtype} values, in which numbers near 1 are 1 and small differences are 0, and "
            f"{cause.where} makes a non-finite value of them, as a logarithm of 1 - p or a division does. Pass "
            "float32, and let autocast cast what may be cast.",
            "batch = {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}",
        )
    is_rounded = len(signals(run, "rounded probabilities")) > 0
    if cause.phase == "forward" and (autocast_dtype(run) == "float16" or is_rounded):
        return Remedy(
            f"{cause.where} returns float32, but autocast computes parts of it in {autocast_dtype(run)}: exponentials "
            "above 65504 overflow float16, and a probability near 1 is 1 in 16 bits, whose logarithm of 1 - p is "
            f"infinite. Compute {cause.where} in float32; if that changes nothing, look for a division by zero, a root "
            "of a negative value, or weights that grew too large.",
            ISLAND,
        )
    return Remedy(
        f"{cause.where} produced a non-finite value, although its dtype holds values up to 3.4e38, so precision is "
        "not the cause. Look for a division by zero, a logarithm or root of a non-positive value, an exponential, "
        "or weights that grew too large.",
        GUIDE["loss-nonfinite"].snippet,
    )


def _updates_are_wrong(run: Run) -> bool:
    """Whether ranks step apart, or second moments are zero where gradients are not: then the rate is not all."""
    vanished = signals(run, "second moments")["value"].max() > 0
    return bool(vanished) or (run.head.world_size > 1 and not rank_scales(run).empty)


def scale_remedy(run: Run, cause: Cause | None, *, recovers: bool = False) -> Remedy | None:
    """The remedy for a collapsed loss scale; None if the guide's advice fits. `recovers`: steps at the lower scale are
    not skipped."""
    if recovers and (cause is None or (cause.phase == "backward" and cause.where != LOSS)):
        return Remedy(
            "Gradients fit float16 at the lower scale: the loss is too large, as a sum over many terms is, and not "
            "the forward pass. Divide the loss by what it is summed over, or lower `init_scale`.",
            "loss = loss_fn(model(x), y).mean()   # not .sum()",
        )
    if cause is not None and (cause.phase != "backward" or cause.where == LOSS):
        return loss_remedy(run, cause)
    if cause is not None and cause.op == ITS_BACKWARD:
        return Remedy(
            f"The forward pass and the gradient that {cause.where} receives are finite, and its backward makes NaN of "
            "them at any loss scale: it divides infinities or zeros, such as an exponential above 65504. Compute it in "
            "float32, or write its derivative without them.",
            "class Activation(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    @torch.amp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)\n"
            "    def forward(ctx, x): ...\n"
            "\n"
            "    @staticmethod\n"
            "    @torch.amp.custom_bwd(device_type=device_type)\n"
            "    def backward(ctx, grad): ...",
        )
    if compute_dtype(run) not in FP32_RANGE_DTYPES:
        return None
    return Remedy(
        "Gradients up to 3.4e38 fit in this run, so no loss scale helps: either an operator has an infinite "
        "derivative, such as a root or norm at zero, or the training diverges. Look for it in the module named "
        "above, and turn the GradScaler off.",
        "scaler = torch.amp.GradScaler(device_type, enabled=False)",
    )


def converted_remedy(dtype: str) -> Remedy:
    """The remedy for weights that the program converted to `dtype` while it trains."""
    method = "half" if dtype == "float16" else "bfloat16"
    return Remedy(
        f"`model.{method}()` converts the model itself, so training continues with weights in {dtype}, whose small "
        "updates are lost. Convert a copy, such as the state dict that is saved.",
        f"state = {{name: value.{method}() for name, value in model.state_dict().items()}}   # the model stays\n"
        "torch.save(state, path)",
    )


def statistics_remedy(run: Run, cause: Cause | None) -> Remedy | None:
    """The remedy for non-finite running statistics; None if the guide's advice fits."""
    if cause is not None and cause.where == INPUT_DATA:
        return Remedy(
            "Non-finite input entered the running statistics, which never recover from it. Repair or drop such "
            "samples before they reach the model, and reset the statistics.",
            f"{_FINITE_SAMPLES}\n\n{_RESET}",
        )
    if cause is not None and cause.where == LEARNING_RATE:
        return Remedy(
            "The training diverged until non-finite values entered the running statistics; the number format is not "
            "the cause. Lower the learning rate or clip the gradients, and reset the statistics.",
            f"{SLOWER}\n\n{_RESET}",
        )
    if cause is None and compute_dtype(run) not in FP32_RANGE_DTYPES:
        return None
    if cause is not None and cause.dtype == "float16" and cause.op != "its weights":
        return None
    return Remedy(
        "The layer's input was not finite, and a running average never recovers from that. Find the source, in the "
        "data or in an earlier module, and reset the statistics.",
        _RESET,
    )


def _gradient_remedy(run: Run) -> Remedy:
    if compute_dtype(run) != "float16":
        return Remedy(
            "Non-finite gradients were applied to the weights: an operator has an infinite derivative, such as a "
            "root or norm at zero, or the gradient overflowed. Keep the operator away from that point, clip the "
            "gradients, and skip updates whose gradient norm is not finite.",
            _GUARDED,
        )
    if scaler_enabled(run):
        return Remedy(
            "Gradients overflowed float16 in backward and were still applied, bypassing the GradScaler that would "
            "have skipped the step. Step only through `scaler.step(optimizer)`.",
            LOOP,
        )
    entry = GUIDE["fp16-without-scaler"]
    return Remedy(
        "Gradients overflowed float16 in backward and were applied, because no GradScaler is there to skip the "
        "step. Add one, or use bfloat16.",
        entry.snippet,
        entry.frameworks,
    )


def _constant_remedy(cause: Cause) -> Remedy:
    """For a target, or another number without a gradient, that is not finite itself."""
    what = cause.op.removeprefix(NONFINITE_CONSTANT)
    if what.startswith("constant"):
        what += ", such as a target,"
    if cause.dtype == "float16":
        return Remedy(
            f"The model's output is finite, and the {what} is not: its other values are float16's, whose largest is "
            "65504, so it was stored or cast in float16. Keep it in float32, and scale it to values near 1.",
            "targets = (targets.float() - mean) / std   # from the float32 data, not from what was cast to float16",
        )
    if cause.value is None:
        return Remedy(
            f"The model's output is finite, and the {what} is not: it came so from the data, or was cast to float16 on "
            "the way, whose largest value is 65504. Keep it in float32, scale it to values near 1, and drop samples in "
            "which it holds NaN or infinity.",
            _FINITE_TARGETS,
        )
    return Remedy(
        f"The model's output is finite, and the {what} is not: it came so from the data or from the code that made it, "
        "so precision is not the cause. Find samples whose targets or weights hold NaN or infinity, and repair or drop "
        "them.",
        _FINITE_TARGETS,
    )


def _operator_remedy(run: Run, cause: Cause) -> Remedy:
    """For an operator of a module that made a non-finite value of finite ones."""
    if cause.op.endswith((OF_ZERO, BY_ZERO)) and (rounded := _of_rounded_zero(run, cause)) is not None:
        return rounded
    operator = f"Operator {cause.operator} in {cause.where}"
    if cause.op.endswith((OF_ZERO, BY_ZERO)):
        return Remedy(
            f"{operator} is outside of its domain, and precision is not the cause: its argument is 0 in float32 too. "
            "Keep it away from 0, by an eps or a clamp.",
            "y = torch.log(x.clamp(min=1e-6))",
        )
    if cause.dtype == "float16":
        return Remedy(
            f"{operator} overflows float16, whose largest value is 65504, and no loss scale fixes that. Compute it in "
            "float32, reduce its inputs, such as by their maximum before an exponential, or use bfloat16.",
            ISLAND,
            BF16,
        )
    return Remedy(
        f"{operator} made a non-finite value of finite ones, although {cause.dtype} holds values up to 3.4e38, so "
        "precision is not the cause. Look for a root of a negative value, an exponential of a large one, or inputs "
        "that grew without bound.",
        GUIDE["loss-nonfinite"].snippet,
    )


def _of_rounded_zero(run: Run, cause: Cause) -> Remedy | None:
    """For a logarithm of 0, or a division by it, where the 0 may come from rounding to 16 bits."""
    dtype = cause.dtype if cause.dtype != "float32" else autocast_dtype(run)
    if dtype not in ("float16", "bfloat16"):
        return None
    subject = "The loss" if cause.where == LOSS else cause.where
    if cause.op.endswith(BY_ZERO) or not cause.operator.startswith("log"):
        small = "whatever is below 3e-8 is 0 there, and " if dtype == "float16" else ""
        return Remedy(
            f"{subject} divides by a number that is 0 in {dtype}: {small}a difference of two numbers is 0 once both "
            "are rounded to the same. Compute the divisor in float32, with an eps that float32 holds.",
            "y = x.float() / (divisor.float() + 1e-6)",
        )
    small = "whatever is below 3e-8 becomes 0 there, such as a probability of an unlikely class, and " if (
        dtype == "float16"
    ) else ""  # fmt: skip
    return Remedy(
        f"{subject} takes the logarithm of a number that is 0 in {dtype}: {small}a probability near 1 becomes 1, so "
        "that 1 - p is 0. Take log_softmax or logsigmoid of the scores, in float32.",
        "log_p = torch.nn.functional.log_softmax(logits.float(), -1)   # in place of softmax(-1).log()",
    )


def _loss_function_remedy(run: Run, cause: Cause) -> Remedy:
    if cause.op.endswith((OF_ZERO, BY_ZERO)) and (rounded := _of_rounded_zero(run, cause)) is not None:
        return rounded
    if "ctc_loss" in cause.op:
        return Remedy(
            "CTC gives an infinite loss for a transcript that is longer than its input, or nearly so where labels "
            "repeat, which neither precision nor loss scale fixes. Drop such samples, or downsample the input less; "
            "`zero_infinity` leaves them out of the gradient.",
            "fits = output_lengths >= target_lengths\nloss = torch.nn.CTCLoss(zero_infinity=True)(log_probs, targets, "
            "output_lengths, target_lengths)",
        )
    operator = f", in its operator {cause.op}" if cause.op else ""
    if cause.dtype == "float16":
        return Remedy(
            f"Every module's output was finite, but the loss, computed in float16, overflowed{operator}: the largest "
            "float16 value is 65504, and sums over many elements, or logits times a learned scale, exceed it. Compute "
            "the loss in float32.",
            "loss = loss_fn(model(x).float(), y.float())",
        )
    return Remedy(
        f"Every module's output was finite, so the loss function itself produced the non-finite value{operator}: a "
        "logarithm of zero, a division by zero, or the square or exponential of too large a value. Keep its arguments "
        "inside their domain, or use a loss that takes logits.",
        "loss = torch.nn.functional.cross_entropy(logits, y)   # in place of the logarithm of a softmax",
    )


def _remedy_without_cause(run: Run) -> Remedy | None:
    if compute_dtype(run) not in FP32_RANGE_DTYPES:
        return None
    return Remedy(
        "Values up to 3.4e38 fit in this run, so the cause is the data, the learning rate or an operation outside "
        "its domain. Check that the input is finite, lower the learning rate, and find the first module with a "
        "non-finite output.",
        GUIDE["loss-nonfinite"].snippet,
    )
