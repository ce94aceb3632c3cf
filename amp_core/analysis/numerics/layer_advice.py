"""Which format suits each layer, and which layers would need an island of FP32 (or BF16) in an FP16 model.

    >>> layer_advice(run)[["layer", "best_format", "island", "why"]]

One loss scale must suit all layers of an FP16 model. It is chosen so that the fewest layers are outside their
own safe window; those are the islands. In FP16 a value keeps 11 significant bits, in BF16 8, so a layer whose gradients
fit FP16 at that scale loses less there than in BF16.

FP8 is evaluated on the layer's output gradients, which FP8 training quantizes, as `what_if` does: a scale per tensor
brings the largest value to the format's largest (448 / amax). With m mantissa bits, values uniform over an octave are
rounded with a relative error of 2^-m / √28 = 0.19 · 2^-m; underflow adds to that (`scale_limits`).
"""

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.histograms import true_counts
from amp_core.analysis.numerics.rounded_gradients import Rounding
from amp_core.analysis.numerics.safe_window import MARGIN_BITS, MAX_ERROR, first_step
from amp_core.analysis.numerics.scale_limits import LOG2_SCALES, error_squares, limits
from amp_core.analysis.numerics.what_if import own_scales, what_if
from amp_core.formats import FORMATS
from amp_core.store.run import Run
from amp_core.text.formatting import raised

OCTAVE_ROUNDING_ERROR = 28**-0.5
"""Relative rounding error (2-norm) of values uniform over an octave, times 2^mantissa_bits: the mean square of an
error uniform over one unit is 1/12, that of the values 7/3."""

_COLUMNS = ["layer", "layer_class", "best_format", "island", "lowest_log2", "highest_log2", "underflow_frac"]
_COLUMNS += ["underflow_mass_frac", "fp8_format", "fp8_error", "fp8_underflow_frac", "why"]


def layer_advice(run: Run) -> pd.DataFrame:
    """One row per layer with gradients, in the model's order, over the steps of `safe_window`.

    Columns: layer; layer_class (empty if not recorded); best_format (`fp16`, `bf16`, or `fp32` where
    autocast leaves the layer in FP32); island (must be kept out of FP16); lowest_log2, highest_log2 (loss
    scales between which this layer alone is safe in FP16, NaN if there is no such bound); underflow_frac and
    underflow_mass_frac (0–1, of its worst weight gradient, in FP16 at the scale common to all layers); fp8_format,
    fp8_error and fp8_underflow_frac (the better FP8 format for its output gradients, the relative error there, and the
    share of values flushed to zero; null if none were recorded); why (in words). Empty for a run without gradients.
    """
    rounding = Rounding(run)
    tensor_limits = limits(run, FORMATS["fp16"], MAX_ERROR, since=first_step(run)).tensors
    names = {kind: list(dict.fromkeys(true_counts(run, kind).names)) for kind in ("weight_grad", "output_grad")}
    layers = rounding.in_order(rounding.owner(n) for n in (*names["weight_grad"], *names["output_grad"]))
    if not layers:
        return pd.DataFrame({c: pd.Series(dtype=bool if c == "island" else "str") for c in _COLUMNS})
    tensor_limits = tensor_limits.assign(layer=[rounding.owner(n) for n in tensor_limits["name"]])
    ends = tensor_limits.groupby("layer").agg(lowest_log2=("lowest_log2", "max"), highest_log2=("highest_log2", "min"))
    common = common_scale(ends["lowest_log2"].to_numpy(), ends["highest_log2"].to_numpy())
    frame = pd.DataFrame({"layer": layers, "layer_class": [rounding.layer_class(n) for n in layers]}).join(
        ends, "layer"
    )
    rounded = frame["layer"].isin(ends.index)
    fits = (frame["lowest_log2"] <= common) & (common <= frame["highest_log2"])
    frame["island"] = rounded & ~fits
    frame["best_format"] = np.where(~rounded, "fp32", np.where(fits, "fp16", "bf16"))
    underflow = what_if(run, ("fp16",), (common,), kinds=("weight_grad",))
    underflow = underflow.assign(layer=[rounding.owner(n) for n in underflow["name"]])
    worst = underflow.groupby("layer")[["underflow_frac", "underflow_mass_frac"]].max()
    frame = frame.join(worst, "layer").join(_fp8(run), "layer")
    columns = frame["best_format"], frame["island"], frame["lowest_log2"], frame["highest_log2"]
    frame["why"] = [_why(*row, common=common) for row in zip(*columns, strict=True)]
    known = frame[["lowest_log2", "highest_log2"]].astype(float)
    frame[["lowest_log2", "highest_log2"]] = known.where(np.isfinite(known))
    return frame[_COLUMNS].astype({"layer": "str", "layer_class": "str", "best_format": "str", "why": "str"})


def common_scale(lowest: np.ndarray, highest: np.ndarray) -> int:
    """log2 of the loss scale at which the most layers are safe, `MARGIN_BITS` below overflow if that costs none.

    Among scales at which equally many are safe, the highest; 0 without layers.
    """
    if not len(lowest):
        return 0
    scales = LOG2_SCALES[:, None]
    safe = ((lowest <= scales) & (scales <= highest)).sum(axis=1)
    with_margin = ((lowest <= scales) & (scales <= highest - MARGIN_BITS)).sum(axis=1)
    best = np.lexsort((LOG2_SCALES, with_margin, safe))[-1]
    return int(LOG2_SCALES[best])


def _fp8(run: Run) -> pd.DataFrame:
    """The better FP8 format and its error for each module with output gradients."""
    histograms = true_counts(run, "output_grad")
    nonzero = np.flatnonzero(histograms.counts.sum(axis=1) > 0)
    errors, flushed = [], []
    formats = [f for f in FORMATS.values() if f.kernel_precision == "fp8" and not f.by_block]
    kind = ("output_grad",)
    for form in formats:
        predicted = what_if(run, (form.name,), (0,), kind, pure=True).set_index("name")["underflow_frac"]
        flushed.append(predicted.reindex([histograms.names[i] for i in nonzero]).to_numpy())
        power = np.log2(own_scales(form, histograms.absmax, "tensor"))
        place = np.clip(np.floor(power).astype(int) - LOG2_SCALES[0], 0, len(LOG2_SCALES) - 2)
        part, squares, rows = power - np.floor(power), error_squares(form, histograms), np.arange(len(place))
        range_error = (1 - part) * squares[rows, place] + part * squares[rows, place + 1]  # the scale lies between two
        errors.append(np.sqrt(range_error + (OCTAVE_ROUNDING_ERROR * form.epsilon) ** 2)[nonzero])
    better = np.argmin(errors, axis=0)
    frame = pd.DataFrame({"layer": [histograms.names[i] for i in nonzero], "fp8_error": np.min(errors, axis=0)})
    frame["fp8_format"] = pd.Series([formats[i].name for i in better], dtype="str")
    frame["fp8_underflow_frac"] = np.choose(better, flushed) if len(nonzero) else np.zeros(0)
    return frame.set_index("layer")


def _why(best_format: str, island: bool, lowest: float, highest: float, common: int) -> str:
    """The advice on one layer in words; missing bounds are infinite or NaN."""
    if best_format == "fp32":
        return "autocast leaves it in FP32"
    low = f"at least 2^{lowest:.0f}" if np.isfinite(lowest) else ""
    high = f"at most 2^{highest:.0f}" if np.isfinite(highest) else ""
    needs = " and ".join(part for part in (low, high) if part) or "any scale"
    if island:
        text = f"needs {needs}, but 2^{common} suits the most layers: keep it in BF16, or in FP32 with autocast off"
    else:
        text = f"safe in FP16 at 2^{common}, the scale that suits the most layers; on its own it needs {needs}"
    return raised(text)
