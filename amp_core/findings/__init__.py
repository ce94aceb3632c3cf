"""What is wrong with a run, how one can tell, and what to do: rules from `Run` to a list of `Finding`.

    from amp_core import diagnose, load_run

    for finding in diagnose(load_run("runs/a")):
        print(finding.severity, finding.code, finding.where, finding.advice)

A rule is a function `Run -> list[Finding]` in `RULES`, one for each code; `GUIDE` says what the codes mean. A rule
fires only where the numbers leave no doubt; what it cannot know it does not say.
"""

from collections.abc import Callable
from dataclasses import replace

from amp_core.findings import (
    autocast,
    calibration,
    errors,
    hardware,
    loops,
    memory,
    pairs,
    ranges,
    ranks,
    recording,
    scaling,
    skips,
    stored,
)
from amp_core.findings.causes import DATA, RATE, Cause, first_cause
from amp_core.findings.guide import FAMILIES, GUIDE, Entry
from amp_core.findings.model import SEVERITIES, Finding, Severity
from amp_core.run import Run, check_run

__all__ = [
    "FAMILIES",
    "GUIDE",
    "RULES",
    "SEVERITIES",
    "Cause",
    "Entry",
    "Finding",
    "Severity",
    "diagnose",
    "first_cause",
]

RULES: tuple[Callable[[Run], list[Finding]], ...] = (
    recording.recording_incomplete,
    errors.fp16_parameters,
    errors.custom_function_dtype,
    errors.bce_banned,
    errors.mask_constant_overflow,
    errors.graphed_callable_cache,
    errors.no_gradients,
    errors.update_without_step,
    loops.unscale_per_microbatch,
    loops.missing_scaler_update,
    loops.optimizer_step_bypasses_scaler,
    ranks.rank_ended,
    scaling.rank_scale_desync,
    ranges.bf16_model_in_fp16,
    ranges.activation_overflow,
    ranges.eps_rounds_to_zero,
    ranges.optimizer_eps_rounds_to_zero,
    errors.half_model,
    ranges.batchnorm_poisoned,
    scaling.loss_nonfinite,
    scaling.scale_collapse,
    scaling.fp16_without_scaler,
    ranges.gradient_underflow,
    loops.clip_before_unscale,
    loops.scaled_gradient_penalty,
    autocast.autocast_cache_no_grad,
    stored.lost_weight_updates,
    stored.half_accumulation,
    pairs.amp_loss_gap,
    skips.branch_always_skipped,
    skips.shared_backoff,
    skips.scheduler_steps_on_skip,
    scaling.scale_unbounded,
    scaling.scaler_state_not_restored,
    scaling.scaler_with_bf16,
    errors.checkpoint_dtype_mismatch,
    autocast.backward_under_autocast,
    autocast.compile_autocast_mismatch,
    autocast.autocast_not_in_thread,
    autocast.autocast_inactive,
    loops.logged_scaled_values,
    loops.anomaly_mode_with_scaler,
    hardware.no_tensor_cores_on_device,
    hardware.kernels_off_tensor_cores,
    hardware.launch_bound,
    hardware.host_syncs,
    hardware.layout_transposes,
    hardware.unaligned_dims,
    hardware.tf32_baseline,
    memory.memory_not_lower,
    hardware.watch_overhead,
    calibration.calibration_skips,
)
"""All rules, one for each code, in order of harm among those of one severity: causes before what follows from them."""

FOLLOWS = {
    "activation-overflow": ("bf16-model-in-fp16",),
    "loss-nonfinite": (
        "bf16-model-in-fp16",
        "activation-overflow",
        "eps-rounds-to-zero",
        "mask-constant-overflow",
        "optimizer-eps-rounds-to-zero",
        "optimizer-step-bypasses-scaler",
        "unscale-per-microbatch",
        "half-model",
        "half-accumulation",
    ),
    "scale-collapse": (
        "bf16-model-in-fp16",
        "activation-overflow",
        "eps-rounds-to-zero",
        "mask-constant-overflow",
        "loss-nonfinite",
    ),
    "batchnorm-poisoned": ("bf16-model-in-fp16", "activation-overflow", "loss-nonfinite"),
    "amp-loss-gap": ("gradient-underflow", "fp16-without-scaler", "activation-overflow", "loss-nonfinite"),
    "scheduler-steps-on-skip": ("scale-collapse",),
    "lost-weight-updates": ("half-model",),
    "optimizer-eps-rounds-to-zero": ("half-model",),
    "autocast-inactive": ("autocast-not-in-thread",),
}
"""By code, the codes that it is a consequence of where both are found."""

ALIKE = {("loss-nonfinite", "half-accumulation")}
"""Of these only where both are found in one place: a loss in 16 bits may be healthy beside what broke it."""


def diagnose(run: Run, baseline: Run | None = None) -> list[Finding]:
    """What the rules find in `run`, the worst first and causes before what follows from them; empty where all is well.

    With `baseline`, a run of the same task in FP32, also what shows only beside it. Raises `RunError` for damaged
    tables.
    """
    check_run(run)
    if baseline is not None:
        check_run(baseline, "baseline")
    findings = [finding for rule in RULES for finding in rule(run)]
    if baseline is not None:
        findings += [finding for pair in pairs.PAIRED for finding in pair(run, baseline)]
    findings = [replace(f, follows=_follows(f, findings)) for f in findings]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), bool(f.follows)))


def _follows(finding: Finding, findings: list[Finding]) -> str:
    """Code of the finding that this one is a consequence of; empty where there is none."""
    own = finding.where in (DATA, RATE)  # no module is to blame, so no finding of one is its cause
    for code in FOLLOWS.get(finding.code, ()):
        places = {f.where for f in findings if f.code == code}
        if own and code != "loss-nonfinite":
            continue
        if places and ((finding.code, code) not in ALIKE or finding.where in places):
            return code
    return ""
