"""Rules on values too small for FP16: gradients that underflow, and constants that round to zero."""

import numpy as np
import pandas as pd

from amp_core.analysis import class_shares, safe_window_over_time, sampled_steps, what_if
from amp_core.analysis.numerics.safe_window import INIT_SCALE, SERVED_STEPS_FRAC, first_step
from amp_core.analysis.steps import attempts, autocast_dtype, scaler_enabled, whole_number
from amp_core.findings.model import LOSS_SCALING, RANGE_AND_PRECISION, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.remedies import first_scale, new_scaler
from amp_core.findings.rules.scaler import fp16_without_scaler
from amp_core.findings.rules.scaling import scale_unbounded
from amp_core.findings.signals import GEMM_LAYERS, facts, mappings, model_name, signals
from amp_core.formats import FORMATS
from amp_core.store.run import Run
from amp_core.text import formatting

FP16 = FORMATS["fp16"]
FLUSH_THRESHOLD = FP16.flush_threshold
"""Magnitudes up to it round to 0."""
MAX_STEPS = 32
"""Most sampled steps for the share below the window: enough for a quarter to within a few hundredths."""
MIN_ERROR_MASS_FRAC = 0.1
"""A finding is an error if at least this share of a tensor's gradient mass underflows."""
FP32_UNIT = 2.0**-24
"""Relative rounding error of FP32. A gradient that is smaller beside the largest one of its kind, as that of attention
to one key, consists of rounding errors."""
WIDE_NORMS = ("LayerNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "RMSNorm", "LocalResponseNorm")
"""torch's own norms compute in FP32 whatever the dtype of their input, including their eps."""
GROWTH_INTERVAL = 500
"""A quarter of GradScaler's default: the scale rises sooner."""


def _scaler_in_frameworks(power: int) -> dict[str, str]:
    """A GradScaler that starts at 2^`power`, in frameworks that make their own."""
    start = f"init_scale=2.0**{power}, growth_interval={GROWTH_INTERVAL}"
    return {
        "Accelerate": f"scaling = GradScalerKwargs({start})\n"
        'accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])',
        "Transformers Trainer": 'args = TrainingArguments(output_dir="out", bf16=True)',
        "Lightning": f'scaler = torch.amp.GradScaler("cuda", {start})\n'
        'trainer = Trainer(plugins=[MixedPrecision("16-mixed", "cuda", scaler)])',
    }


@rule(
    Entry(
        code="gradient-underflow",
        severity="warning",
        family=LOSS_SCALING,
        order=230,
        follows=("shared-backoff", "scale-collapse"),
        what="At the current loss scale, float16 rounding removes more of the gradients than training tolerates.",
        signal="Histograms of output and weight gradients, and the loss scale in effect when they were recorded.",
        threshold="A relative error of a matrix's gradient above 0.0085 at more than a quarter of the sampled "
        "steps: the lower end of the safe window, which keeps the cosine to FP32 above 0.999; an info while a scale of "
        "2^16 or more had no time to grow. Or a layer whose "
        "gradient is all zeros, and not in float32. An error if 10 % of a tensor's mass is lost.",
        advice="Part of the gradient is rounded to zero or to a few bits before it reaches the weights. Start with "
        "a higher loss scale or let it grow sooner, or use bfloat16.",
        snippet=f"scaler = torch.amp.GradScaler(device_type, init_scale=2.0**16, growth_interval={GROWTH_INTERVAL})",
        frameworks=_scaler_in_frameworks(16),
        page="loss-scale",
    )
)
def gradient_underflow(run: Run) -> list[Finding]:
    """`gradient-underflow`: the scale in effect lies below the safe window at more than a quarter of the sampled steps
    of the run's second half; or the 16-bit gradient of a layer is all zeros, which histograms do not show as underflow.
    Silent without a scaler: that has its own code."""
    if autocast_dtype(run) != "float16" or not scaler_enabled(run) or fp16_without_scaler(run) or scale_unbounded(run):
        return []
    since = first_step(run)
    steps = evenly_spread([s for s in sampled_steps(run, "weight_grad") if since is not None and s >= since])
    if not steps:
        return []
    thinned_run = run.thinned(steps)
    if vanished := _vanished(thinned_run):
        return vanished
    window = safe_window_over_time(thinned_run)
    if window.empty:
        return []
    window = window.merge(attempts(run)[["step", "loss_scale", "skipped"]], on="step")
    window = window[~window["skipped"] & (window["lowest"] <= window["highest"])]
    if window.empty:
        return []
    below = _without_noise(thinned_run, window[window["loss_scale"] < window["lowest"]])
    if len(below) <= (1 - SERVED_STEPS_FRAC) * len(window):
        return []
    worst = below.iloc[int((below["lowest"] / below["loss_scale"]).to_numpy().argmax())]
    name, scale, lowest = str(worst["lowest_by"]), float(worst["loss_scale"]), float(worst["lowest"])
    mass = _mass_lost(run, name, scale, int(worst["step"]))
    lost_mass = f", {100 * mass:.1f} % of its mass" if mass else ""
    is_error = mass is not None and mass >= MIN_ERROR_MASS_FRAC
    grows = bool((below["loss_scale"] >= INIT_SCALE).all()) and not _growth_was_due(run)
    return [
        make_finding(
            "gradient-underflow",
            f"The gradient of {name} underflows at loss scale {formatting.scale(scale)}{lost_mass}: it needs "
            f"{formatting.scale(lowest)}",
            name,
            severity="error" if is_error else "info" if grows else None,
            steps=(int(below["step"].iloc[0]), int(below["step"].iloc[-1])),
            value=scale,
            limit=lowest,
            unit="loss scale",
            remedy=_higher_scale(run, scale),
        )
    ]


def _without_noise(run: Run, below: pd.DataFrame) -> pd.DataFrame:
    """Those of the steps `below` the window whose lowest tensor is larger than rounding errors of the others."""
    largest = run.tensors().groupby(["step", "kind", "name"])["absmax"].max()
    keep = []
    for step, name in zip(below["step"], below["lowest_by"], strict=True):
        sizes = largest[step].unstack("kind")
        keep.append(bool((sizes.loc[name] > FP32_UNIT * sizes.max()).any()))
    return below[np.array(keep, dtype=bool)]


def _growth_was_due(run: Run) -> bool:
    """Whether the scaler had as many clean steps in a row as its scale takes to grow."""
    scaler = run.head.config.get("scaler")
    interval = whole_number(scaler.get("growth_interval")) if isinstance(scaler, dict) else None
    in_a_row = attempts(run)["growth_tracker"].max()
    return interval is None or not in_a_row + 1 < interval


def _higher_scale(run: Run, scale: float) -> Remedy:
    """The loss scale that `safe_window` recommends for the run; BF16 if it recommends none above `scale`, at which
    gradients underflowed."""
    power = first_scale(run)
    if power is None or 2.0**power <= scale:
        return _bfloat16("no higher loss scale suits all gradients of this run")
    return Remedy(
        "Part of the gradient is rounded to zero or to a few bits before it reaches the weights. Start with a loss "
        f"scale of 2^{power}, as recommended for this run, and let it grow sooner, or use bfloat16.",
        new_scaler(run, growth_interval=GROWTH_INTERVAL),
        _scaler_in_frameworks(power),
    )


def _bfloat16(why: str) -> Remedy:
    entry = GUIDE["scale-collapse"]
    return Remedy(
        f"Part of the gradient is rounded to zero or to a few bits before it reaches the weights, and {why}. Use "
        "bfloat16, which needs none.",
        entry.snippet,
        entry.frameworks,
    )


def _vanished(run: Run) -> list[Finding]:
    """Linear layers and convolutions whose FP16 output gradients are all zeros, and in FP32 would not be."""
    layers = facts(run.head.model, "layers")
    shares = class_shares(run, "output_grad")
    products = [any(kind in str(layers.get(name, "")) for kind in GEMM_LAYERS) for name in shares["name"]]
    shares = shares[np.array(products, dtype=bool) & shares["dtype"].eq("float16").to_numpy()]
    gone = shares[shares["zero_frac"].eq(1.0) & shares["name"].isin(signals(run, "vanished gradient")["name"])]
    if gone.empty:
        return []
    name = str(gone["name"].iloc[0])  # gradients arrive from the last layer to the first: this is the first with zeros
    steps = sampled_steps(run, "output_grad")
    return [
        make_finding(
            "gradient-underflow",
            f"All values of the float16 gradient that flows back to {name} are zero",
            name,
            steps=(steps[0], steps[-1]),
            value=1.0,
            limit=0.0,
            unit="share of zeros",
            remedy=_bfloat16("zeros do not show which loss scale would keep it"),
        )
    ]


def evenly_spread(steps: list[int]) -> list[int]:
    """At most `MAX_STEPS` of them, evenly spread."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).round().astype(int))
    return [steps[i] for i in places] if steps else []


def _mass_lost(run: Run, name: str, scale: float, step: int) -> float | None:
    """The predicted share of the gradient's mass that underflows; None if the tensor was not recorded."""
    log2 = int(np.floor(np.log2(scale))) if scale > 0 else 0
    frame = what_if(run, ("fp16",), (log2,), step=step)
    rows = frame[frame["name"] == name]
    return float(rows["underflow_mass_frac"].max()) if len(rows) else None


_STATES_IN_FP32 = Remedy(
    "Squares of gradients below 2.4e-4 are zero in float16, and the constant does not keep the update from dividing by "
    "them. Cast gradients to float32 before they are squared, and keep the optimizer's averages in float32.",
    "grad = p.grad.float()\nstate['square'].lerp_(grad.square(), 1 - beta2)   # a float32 tensor",
)


@rule(
    Entry(
        code="eps-rounds-to-zero",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=160,
        what="A small constant that keeps a divisor, root or logarithm away from zero, or a factor such as the weight "
        "of a loss, is itself zero in float16.",
        signal="Constants in additions and lower bounds with a 16-bit result, and factors, in the first step, between "
        "the first steps and in the first evaluations; `eps` of modules that compute in float16.",
        threshold="A constant of at most 2^-25, half of the smallest float16 number: it rounds to 0. A factor that a "
        "cast makes zero, or whose product is all zeros. An error if something was not finite.",
        advice="Where the other operand is zero, this divides by zero and produces NaN. Run this operation in "
        "float32, or use a constant of 1e-4 or more.",
        snippet="with torch.autocast(x.device.type, enabled=False):\n"
        "    x = x.float()\n"
        "    y = x / (x.norm(dim=-1, keepdim=True) + 1e-6)",
        page="number-ranges",
    )
)
def eps_rounds_to_zero(run: Run) -> list[Finding]:
    """`eps-rounds-to-zero`: a constant that keeps a divisor from being zero is zero in 16 bits."""
    frame = signals(run, "eps lost")
    broken = len(signals(run, "non-finite output", "non-finite")) > 0
    if len(frame):
        row = frame.iloc[0]
        name = str(row["name"]) or model_name(run)
        where, eps, more = name, float(row["value"]), f" ({row['op']} in {row['dtype']})"
    else:
        module = _half_module_with_small_eps(run)
        if module is None:
            return _lost_factor(run)
        where, eps, more = *module, " (its input and output are float16)"
    return [
        make_finding(
            "eps-rounds-to-zero",
            f"The constant {eps:.3g} in {where} is zero in 16 bits{more}",
            where,
            severity="error" if broken else None,
            steps=(0, 0),
            value=eps,
            limit=FLUSH_THRESHOLD,
            unit="constant",
            remedy=_STATES_IN_FP32 if where.startswith("optimizer.step") else None,
        )
    ]


def _lost_factor(run: Run) -> list[Finding]:
    frame = signals(run, "lost factor")
    if not len(frame):
        return []
    row = frame.iloc[0]
    where = str(row["name"]) or model_name(run)
    return [
        make_finding(
            "eps-rounds-to-zero",
            f"A factor in {where} leaves nothing in {row['dtype']} ({row['op']})",
            where,
            steps=(int(row["step"]),) * 2,
            value=float(row["value"]),
            limit=0.0,
            unit="factors that are zero",
            remedy=Remedy(
                "The factor, or its product, is smaller than half of the smallest number of that dtype, so what it "
                "weighs is left out. Multiply in float32.",
                "with torch.autocast(loss.device.type, enabled=False):\n    loss = loss + 1e-9 * penalty.float()",
            ),
        )
    ]


def _half_module_with_small_eps(run: Run) -> tuple[str, float] | None:
    """A module with float16 parameters, other than torch's norms, whose eps is zero in float16."""
    model = run.head.model
    layers, dtypes = facts(model, "layers"), dict(facts(model, "dtypes")) | dict(facts(model, "frozen_dtypes"))
    for name, eps in facts(model, "eps").items():
        wide = any(kind in str(layers.get(name, "")) for kind in WIDE_NORMS)
        own = [d for n, d in dtypes.items() if n.rpartition(".")[0] == name]
        if isinstance(eps, float) and 0 < eps <= FLUSH_THRESHOLD and not wide and "float16" in own:
            return name, eps
    return None


@rule(
    Entry(
        code="optimizer-eps-rounds-to-zero",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=170,
        follows=("half-model",),
        what=(
            "The optimizer's eps is zero in the dtype of its float16 parameters, so an update becomes 0/0 or very "
            "large."
        ),
        signal="eps of the optimizer and dtypes of its parameters.",
        threshold="At most 2^-25 with float16 parameters: half of the smallest float16 number rounds to 0.",
        advice="Where a second moment is zero, which soon happens in float16, the update divides by zero. Keep "
        "float32 weights under autocast, or set the optimizer's eps to 1e-4.",
        snippet="model.float()                                   # float32 weights; autocast casts them\noptimizer = "
        "torch.optim.AdamW(model.parameters(), eps=1e-8)",
        page="",
    )
)
def optimizer_eps_rounds_to_zero(run: Run) -> list[Finding]:
    """`optimizer-eps-rounds-to-zero`: eps of an optimizer is zero in the dtype of its float16 parameters."""
    for settings in mappings(run.head.config, "optimizer_settings"):
        eps, dtypes = settings.get("eps"), settings.get("dtypes")
        if isinstance(eps, float) and 0 < eps <= FLUSH_THRESHOLD and isinstance(dtypes, list) and "float16" in dtypes:
            name = str(facts(settings, "first").get("float16") or "")
            return [
                make_finding(
                    "optimizer-eps-rounds-to-zero",
                    f"{settings.get('class')}'s eps of {eps:.3g} is zero in the dtype of "
                    f"float16 parameters such as {name}",
                    f"{settings.get('class')} eps",
                    value=eps,
                    limit=FLUSH_THRESHOLD,
                    unit="eps",
                )
            ]
    return []
