"""Rules on number ranges: what overflows, underflows, rounds to zero or does not move."""

import numpy as np
import pandas as pd

from amp_core.analysis import class_shares, safe_window_over_time, sampled_steps, what_if
from amp_core.analysis._steps import attempts, scaler_enabled
from amp_core.analysis.window import SERVED, first_step
from amp_core.findings import remedies
from amp_core.findings._found import found
from amp_core.findings._signals import LOWERED, autocast_dtype, facts, listed, model_name, signals
from amp_core.findings.causes import RATE, Cause, first_cause, stretch_end
from amp_core.findings.model import Finding
from amp_core.findings.scaling import fp16_without_scaler, loss_nonfinite, scale_unbounded
from amp_core.formats import FORMATS
from amp_core.run import Run

FP16 = FORMATS["fp16"]
ZERO_FROM = FP16.min_subnormal / 2
"""What is at most half of the smallest subnormal rounds to 0 (ties go to the even neighbour)."""
STATISTICS_EVERY = 10
"""So many steps lie at most between two looks at running statistics."""
MOST_STEPS = 32
"""Sampled steps from which the share below the window is told: the share of a quarter, to within a few hundredths."""
GRAVE_MASS = 0.1
"""A tenth of a tensor's gradient mass lost is no rounding error any more."""
BORN_NARROW = 0.99
"""Share of nonzero FP32 weights that BF16 holds exactly from which on they come from BF16: of others 2^-16 are."""
WIDE_NORMS = ("LayerNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "RMSNorm", "LocalResponseNorm")
"""torch's own norms compute in FP32 inside, whatever dtype they are given, and so does their eps."""


def _overflow(run: Run) -> Cause | None:
    """The first module that turned finite input into a non-finite FP16 output, and so began a stretch of failing
    steps."""
    frame = signals(run, "non-finite output")
    frame = frame[(frame["dtype"] == "float16") & frame["detail"].isin(["", "input"]) & (frame["op"] != "loss")]
    done = -1
    for step in map(int, frame["step"].dropna()):
        if step <= done:
            continue
        done = stretch_end(run, step)
        cause = first_cause(run, 0, step)
        if cause is not None and cause.phase == "divergence":
            return None  # what overflows after it would have overflowed any format
        if cause is not None and (cause.phase, cause.dtype) == ("forward", "float16") and cause.where != "loss":
            return cause
    return None


def activation_overflow(run: Run) -> list[Finding]:
    """`activation-overflow`: FP16 outputs beyond 65504, or within a factor of 2 of it."""
    cause = _overflow(run)
    if cause is not None:
        size = f" from input of up to {cause.value:.3g}" if cause.value is not None else ""
        last = signals(run, "non-finite output")["step"].max()
        return [
            found(
                "activation-overflow",
                f"The output of {cause.where} ({cause.op}) overflows float16{size}",
                cause.where,
                steps=(cause.step, int(last)),
                value=cause.value,
                limit=FP16.max_value,
                unit="largest input magnitude",
            )
        ]
    near = signals(run, "near overflow")
    if near.empty or any(f.where == RATE for f in loss_nonfinite(run)):
        return []
    row = near.iloc[int(near["value"].to_numpy().argmax())]
    name = str(row["name"]) or model_name(run)
    return [
        found(
            "activation-overflow",
            f"The output of {name} comes within a factor of 2 of float16's largest number",
            name,
            severity="warning",
            steps=(int(near["step"].min()), int(near["step"].max())),
            value=float(row["value"]),
            limit=FP16.max_value,
            unit="largest magnitude",
        )
    ]


def bf16_model_in_fp16(run: Run) -> list[Finding]:
    """`bf16-model-in-fp16`: weights from a bfloat16 checkpoint, or beyond FP16's range at the start, under FP16."""
    if autocast_dtype(run) != "float16":
        return []
    model = run.head.model
    stored = [n for n, d in facts(model, "dtypes").items() if d == "bfloat16"]
    exact = model.get("bfloat16_exact_frac")
    largest = facts(model, "weight_absmax")
    size = largest.get("value")
    too_large = isinstance(size, int | float) and size > FP16.max_value
    born = isinstance(exact, int | float) and exact >= BORN_NARROW
    if not stored and not born and not too_large:
        return []
    cause = _overflow(run)
    if too_large:
        where = str(largest.get("name"))
    else:
        where = cause.where if cause else stored[0] if stored else model_name(run)
    advice = None
    if too_large:
        title, value, limit, unit = "A weight does not fit float16", float(size or 0), FP16.max_value, "largest weight"
        advice = (
            "A weight above 65504 becomes infinite when autocast casts it to float16, as happens with models made in "
            "bfloat16. Bring it down, or train in bfloat16."
        )
    else:
        title = "Weights made in bfloat16 are trained in float16"
        value, limit, unit = float(exact or 1.0), BORN_NARROW, "share of weights exact in bfloat16"
    return [
        found(
            "bf16-model-in-fp16",
            title + (f"; {cause.in_words()}" if cause else ""),
            where,
            severity="error" if cause or too_large else "warning",
            advice=advice,
            steps=(cause.step, cause.step) if cause else (0, 0),
            value=value,
            limit=limit,
            unit=unit,
        )
    ]


def gradient_underflow(run: Run) -> list[Finding]:
    """`gradient-underflow`: the scale in effect lies below the safe window at more than a quarter of the sampled steps
    of the run's second half; or the 16-bit gradient of a layer is zero throughout, which no histogram can show as lost.
    Silent without a scaler: that has a code of its own."""
    if autocast_dtype(run) != "float16" or not scaler_enabled(run) or fp16_without_scaler(run) or scale_unbounded(run):
        return []
    since = first_step(run)
    steps = _some([s for s in sampled_steps(run, "weight_grad") if since is not None and s >= since])
    if not steps:
        return []
    some = run.thinned(steps)
    if vanished := _vanished(some):
        return vanished
    window = safe_window_over_time(some)
    if window.empty:
        return []
    trace = attempts(run)[["step", "loss_scale", "skipped", "stands_for"]]
    if (trace["stands_for"] > 1).any():  # skips and changes of the scale are held: a step left out is as the one before
        window = pd.merge_asof(window, trace, on="step")
    else:
        window = window.merge(trace, on="step")
    window = window[~window["skipped"] & (window["lowest"] <= window["highest"])]
    if window.empty:
        return []
    below = window[window["loss_scale"] < window["lowest"]]
    if len(below) <= (1 - SERVED) * len(window):
        return []
    worst = below.iloc[int((below["lowest"] / below["loss_scale"]).to_numpy().argmax())]
    name, scale, lowest = str(worst["lowest_by"]), float(worst["loss_scale"]), float(worst["lowest"])
    mass = _mass_lost(run, name, scale, int(worst["step"]))
    lost = f", {100 * mass:.1f} % of its mass" if mass else ""
    return [
        found(
            "gradient-underflow",
            f"The gradient of {name} underflows at the loss scale {scale:.3g}{lost}: it needs {lowest:.3g}",
            name,
            severity="error" if mass is not None and mass >= GRAVE_MASS else None,
            steps=(int(below["step"].iloc[0]), int(below["step"].iloc[-1])),
            value=scale,
            limit=lowest,
            unit="loss scale",
        )
    ]


def _vanished(run: Run) -> list[Finding]:
    """Linear layers and convolutions to which only zeros come back in FP16, while others get gradients."""
    layers = facts(run.head.model, "layers")
    shares = class_shares(run, "output_grad")
    products = [any(kind in str(layers.get(name, "")) for kind in LOWERED) for name in shares["name"]]
    shares = shares[np.array(products, dtype=bool) & shares["dtype"].eq("float16").to_numpy()]
    gone = shares[shares["zero_frac"] == 1.0]
    if gone.empty or len(gone) == len(shares):
        return []
    name = str(gone["name"].iloc[0])  # gradients arrive from the last layer to the first: this one lost them
    steps = sampled_steps(run, "output_grad")
    return [
        found(
            "gradient-underflow",
            f"Every value of the float16 gradient that comes back to {name} is zero",
            name,
            steps=(steps[0], steps[-1]),
            value=1.0,
            limit=0.0,
            unit="share of zeros",
        )
    ]


def _some(steps: list[int]) -> list[int]:
    """At most `MOST_STEPS` of them, evenly spread."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).round().astype(int))
    return [steps[i] for i in places] if steps else []


def _mass_lost(run: Run, name: str, scale: float, step: int) -> float | None:
    """The predicted share of the gradient's mass that becomes zero; None where the tensor was not recorded."""
    log2 = int(np.floor(np.log2(scale))) if scale > 0 else 0
    frame = what_if(run, ("fp16",), (log2,), step=step)
    rows = frame[frame["name"] == name]
    return float(rows["underflow_mass_frac"].max()) if len(rows) else None


def eps_rounds_to_zero(run: Run) -> list[Finding]:
    """`eps-rounds-to-zero`: a constant that should keep a divisor off zero is zero in 16 bits."""
    frame = signals(run, "eps lost")
    broken = len(signals(run, "non-finite output", "non-finite")) > 0
    if len(frame):
        row = frame.iloc[0]
        name = str(row["name"]) or model_name(run)
        where, eps, more = name, float(row["value"]), f" ({row['op']} in {row['dtype']})"
    else:
        module = _half_module_with_small_eps(run)
        if module is None:
            return []
        where, eps, more = *module, " (its input and output are float16)"
    return [
        found(
            "eps-rounds-to-zero",
            f"The constant {eps:.3g} in {where} is zero in 16 bits{more}",
            where,
            severity="error" if broken else None,
            steps=(0, 0),
            value=eps,
            limit=ZERO_FROM,
            unit="constant",
        )
    ]


def _half_module_with_small_eps(run: Run) -> tuple[str, float] | None:
    """A module, none of torch's norms, whose parameters are float16 and whose eps is lost there."""
    model = run.head.model
    layers, dtypes = facts(model, "layers"), dict(facts(model, "dtypes")) | dict(facts(model, "frozen_dtypes"))
    for name, eps in facts(model, "eps").items():
        wide = any(kind in str(layers.get(name, "")) for kind in WIDE_NORMS)
        own = [d for n, d in dtypes.items() if n.rpartition(".")[0] == name]
        if isinstance(eps, float) and 0 < eps <= ZERO_FROM and not wide and "float16" in own:
            return name, eps
    return None


def optimizer_eps_rounds_to_zero(run: Run) -> list[Finding]:
    """`optimizer-eps-rounds-to-zero`: eps of an optimizer is zero in the dtype of its float16 parameters."""
    for settings in listed(run.head.config, "optimizer_settings"):
        eps, dtypes = settings.get("eps"), settings.get("dtypes")
        if isinstance(eps, float) and 0 < eps <= ZERO_FROM and isinstance(dtypes, list) and "float16" in dtypes:
            name = str(facts(settings, "first").get("float16") or "")
            return [
                found(
                    "optimizer-eps-rounds-to-zero",
                    f"{settings.get('class')}'s eps of {eps:.3g} is zero beside float16 parameters such as {name}",
                    f"{settings.get('class')} eps",
                    value=eps,
                    limit=ZERO_FROM,
                    unit="eps",
                )
            ]
    return []


def batchnorm_poisoned(run: Run) -> list[Finding]:
    """`batchnorm-poisoned`: running statistics are not finite."""
    frame = signals(run, "statistics")
    if frame.empty:
        return []
    row = frame.iloc[0]
    at = int(row["step"])
    buffer, more = str(row["name"]), int(row["count"]) - 1
    module = buffer.rpartition(".")[0] or model_name(run)
    cause = _forward_before(run, at)
    return [
        found(
            "batchnorm-poisoned",
            (f"{buffer} and {more} more statistics are not finite" if more else f"{buffer} is not finite")
            + (f"; {cause.in_words()}" if cause else ""),
            module,
            steps=(at, at),
            value=float(row["count"]),
            limit=0.0,
            unit="statistics that are not finite",
            remedy=remedies.of_statistics(run, cause),
        )
    ]


def _forward_before(run: Run, at: int) -> Cause | None:
    """What was not finite in forward when statistics that were seen at step `at` became so. On a GPU they are looked at
    every `STATISTICS_EVERY`th step; a step that was skipped in between did not keep them from what it held."""
    outputs = signals(run, "non-finite output")["step"]
    for step in sorted({int(s) for s in outputs[outputs.between(at - STATISTICS_EVERY + 1, at)]}):
        cause = first_cause(run, 0, step)
        if cause is not None and cause.phase != "backward":
            return cause
    return None
