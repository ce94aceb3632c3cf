"""Predict the effect of another format or loss scale from the histograms that a run recorded.

    what_if(run, formats=("fp16",), log2_scales=(0, 16))      # one row per tensor, kind, format and scale
    whole_model(what_if(run))                                 # the same, over all tensors of a kind

A gradient recorded at loss scale S is divided by S to get the true one, multiplied by 2^k, and rounded to the format.
This only counts bins: a value with exponent e has exponent e + k at scale 2^k. Values that underflowed in the run
itself are unknown, so predict from a run whose own gradients are healthy (or FP32 or BF16).

Besides its size, two things decide whether a value underflows:

- Autocast rounds only some gradients to 16 bits; the others do not underflow (column `rounded`).
- A weight gradient is a sum of products of its channel's output gradients with inputs, so it becomes 0 too if all of
  those are flushed. If the run recorded it, each value is capped by its channel's largest output gradient.

FP8 formats are scaled tensor by tensor, as training scales them. `formats` may also name recipes of
`amp_core.quantization` (`mxfp8-e4m3`, `nvfp4`, …): they are predicted from the blocks of a run that recorded them, and
their rows have further columns; see `quantized`.

It is a prediction. `Recorder.audit` measures; `predicted_and_audited` compares both.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.histograms import TrueCounts, true_counts
from amp_core.analysis.numerics.quantized import quantized
from amp_core.analysis.numerics.rounded_gradients import Rounding
from amp_core.formats import FORMATS, Format
from amp_core.quantization import OPERANDS, RECIPES, find_recipe, is_recipe
from amp_core.schema import KINDS, RunError
from amp_core.store.run import Run, check_run

GRADIENTS = ("weight_grad", "output_grad")
"""The kinds that a loss scale multiplies. Under FP16 autocast both are rounded to FP16: output gradients as they flow
back, weight gradients as they leave their matrix product."""

MAX_SOURCE_UNDERFLOW_FRAC = 0.05
"""Up to this `source_underflow_frac` predictions of weight gradients agreed with audits to within 0.01 of all values;
above it to within about 0.2."""

SCALINGS = ("loss", "tensor", "tensor-pow2")

_FRACTIONS = ("underflow_frac", "subnormal_frac", "overflow_frac")
_COLUMNS = ["name", "kind", "format", "log2_scale", "underflow_frac", "underflow_mass_frac", "subnormal_frac"]
_COLUMNS += ["overflow_frac", "nonzero", "mass", "rounded", "own_log2_scale", "source_underflow_frac", "own_scale"]
_COLUMNS += ["scaling"]
_OF_RECIPES = ["product", "saturated_frac", "rel_error", "rel_error_db"]


def what_if(
    run: Run,
    formats: Sequence[str] = ("fp16", "bf16"),
    log2_scales: Iterable[int] = range(-10, 41),
    kinds: Sequence[str] | None = None,
    step: int | None = None,
    scaling: str | None = None,
    pure: bool = False,
) -> pd.DataFrame:
    """Predicted underflow and overflow of every tensor in each format at each scale 2^k.

    Args:
        formats: names from `amp_core.formats.FORMATS` or `amp_core.quantization.RECIPES`, or one of them.
        log2_scales: whole numbers k. Recipes scale by what they find, so that they have k = 0 alone.
        kinds: of `amp_core.schema.KINDS`; activations and weights are not multiplied by the loss scale, so for them
            only k = 0 occurs in training. None takes the gradients, and for recipes all operands of linear layers.
        step: the last sampled step at or before this one; None combines all sampled steps.
        scaling: `loss` multiplies every tensor by 2^k. `tensor` first multiplies each tensor by `own_scale`, the
            format's largest value over the tensor's (448 / amax in E4M3), as torchao and Transformer Engine do;
            `tensor-pow2` rounds that down to a power of two. k counts from there, so that -2 leaves a margin of two
            bits. None takes the format's own (`Format.scaling`): `tensor` for FP8, `loss` for all others.
        pure: round every tensor, as in a purely 16-bit model, and not only those that autocast rounds.

    Columns: name, kind, format, log2_scale; underflow_frac (values that become 0, over nonzero values);
    underflow_mass_frac (their share of the sum of magnitudes); subnormal_frac (values that become subnormal, over
    nonzero values); overflow_frac (values that become infinite or NaN, over nonzero values); for weighting, nonzero
    (values counted) and mass (sum of true magnitudes); rounded (whether it is rounded at all; if not, its fractions are
    0); own_scale (1 with `loss`), and own_log2_scale, which is rounded down; scaling; source_underflow_frac (of a
    weight gradient: the underflow of the 16-bit output gradient that it is computed from, estimated if that is hidden
    inside an operator; NaN for other kinds and without `loss`). If much of the source underflows, the rest of it is
    noise, and a weight gradient's own underflow is only a rough estimate: see `MAX_SOURCE_UNDERFLOW_FRAC`. Rows of
    recipes have product, saturated_frac, rel_error and rel_error_db too, and scaling in words (`quantized`). Fractions
    are 0–1. Raises `RunError` for a format, kind or scaling that is unknown, for a recipe whose blocks were not
    recorded, and for a power that is not a whole number.
    """
    check_run(run)
    names = _as_list(formats)
    recipes = [find_recipe(name) for name in names if name not in FORMATS and is_recipe(name)]
    chosen = [find_format(name) for name in names if name in FORMATS or not is_recipe(name)]
    operands = tuple(OPERANDS) if kinds is None else _as_list(kinds)
    kinds = GRADIENTS if kinds is None else _as_list(kinds)
    if scaling is not None and scaling not in SCALINGS:
        raise RunError(f"scaling={scaling!r} is unknown; choose one of {', '.join(SCALINGS)}")
    for kind in kinds:
        if kind not in KINDS:
            raise RunError(f"kinds={kind!r} is unknown; choose from {', '.join(KINDS)}")
    scales = _whole_numbers(log2_scales)
    rounding = Rounding(run)
    outputs = true_counts(run, "output_grad", step)
    frames = []
    for kind in kinds:
        histograms = outputs if kind == "output_grad" else true_counts(run, kind, step)
        nonzero = histograms.counts.sum(axis=1)
        if not nonzero.any():
            continue
        tensors = np.asarray(histograms.names, dtype=object)
        rounded = np.full(len(tensors), True) if pure else rounding.is_rounded(kind, histograms.names)
        for form in chosen:
            scaled = scaling or form.scaling.by
            per_tensor = scaled != "loss"
            own = own_scales(form, histograms.absmax, scaled)
            columns = {
                "name": np.repeat(tensors, len(scales)),
                "kind": kind,
                "format": form.name,
                "log2_scale": np.tile(scales, len(tensors)),
                **{c: v.ravel() for c, v in _fractions(form, histograms, scales, own, rounded).items()},
                "nonzero": np.repeat(np.rint(nonzero).astype(np.int64), len(scales)),
                "mass": np.repeat(histograms.magnitudes.sum(axis=1), len(scales)),
                "rounded": np.repeat(rounded, len(scales)),
                "own_log2_scale": np.repeat(np.floor(np.log2(own)).astype(np.int64), len(scales)),
                "own_scale": np.repeat(own, len(scales)),
                "scaling": scaled,
                "source_underflow_frac": _source(form, histograms, outputs, rounding, scales).ravel()
                if kind == "weight_grad" and not per_tensor
                else np.nan,
            }
            nonempty = np.repeat(nonzero > 0, len(scales))
            frames.append(pd.DataFrame(columns)[nonempty])
    if recipes:
        frames.append(quantized(run, recipes, operands, step).assign(log2_scale=0, rounded=True))
    shown = [*_COLUMNS, *(_OF_RECIPES if recipes else ())]
    if not frames:
        return pd.DataFrame(columns=shown)
    return pd.concat(frames, ignore_index=True).reindex(columns=shown)


def whole_model(predictions: pd.DataFrame) -> pd.DataFrame:
    """The rows of `what_if` over all tensors of a kind: kind, format, log2_scale, the four fractions, nonzero, mass."""
    frame = predictions.assign(
        **{c: predictions[c] * predictions["nonzero"] for c in _FRACTIONS},
        underflow_mass_frac=predictions["underflow_mass_frac"] * predictions["mass"],
    )
    sums = frame.groupby(["kind", "format", "log2_scale"], sort=False, as_index=False)[
        [*_FRACTIONS, "underflow_mass_frac", "nonzero", "mass"]
    ].sum()
    for column in _FRACTIONS:
        sums[column] /= sums["nonzero"]
    sums["underflow_mass_frac"] /= sums["mass"]
    return sums


def _as_list(names: Sequence[str]) -> Sequence[str]:
    """A single name becomes a list of one."""
    return [names] if isinstance(names, str) else names


def _whole_numbers(log2_scales: Iterable[int]) -> np.ndarray:
    given = list(log2_scales) if isinstance(log2_scales, Iterable) else [log2_scales]
    for power in given:
        if not isinstance(power, int | float | np.number) or not float(power).is_integer():
            raise RunError(
                f"log2_scales={power!r} is not a whole number; log2_scales=(0, 16) gives the scales 1 and 65536"
            )
    return np.array(given, dtype=np.int64)


def find_format(name: str) -> Format:
    """The format called `name`. Raises `RunError` for an unknown one and for one that is scaled by block: a histogram
    does not show which values share a block."""
    choices = [f.name for f in FORMATS.values() if not f.by_block]
    if name not in FORMATS and not is_recipe(name):
        raise RunError(f"format={name!r} is unknown; choose one of {', '.join([*choices, *RECIPES])}")
    if name not in FORMATS:
        raise RunError(f"format={name!r} is a recipe with its own scales; choose one of {', '.join(choices)}")
    form = FORMATS[name]
    if form.by_block:
        raise RunError(
            f"format={name!r} has a scale per block of {form.scaling.block} values, but the run recorded histograms "
            f"of whole tensors, without blocks; choose one of {', '.join(choices)}"
        )
    return form


def own_scales(form: Format, absmax: np.ndarray, scaling: str) -> np.ndarray:
    """By what each tensor is multiplied before it is stored in the format; see `scaling` of `what_if`."""
    if scaling == "loss":
        return np.ones(len(absmax))
    if scaling == "tensor-pow2":
        powers: np.ndarray = np.exp2(own_log2_scale(form, absmax).astype(float))
        return powers
    with np.errstate(divide="ignore", over="ignore"):
        scales = form.max_value / absmax
    usable: np.ndarray = np.where((absmax > 0) & np.isfinite(scales) & (scales > 0), scales, 1.0)
    return usable


def own_log2_scale(form: Format, absmax: np.ndarray) -> np.ndarray:
    """For each tensor the power of two that brings its largest value to the top of the format, without overflow."""
    with np.errstate(divide="ignore"):
        power = np.floor(np.log2(form.max_value) - np.log2(absmax))
    return np.where(np.isfinite(power), power, 0).astype(np.int64)


def class_shares_by_exponent(form: Format, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares (0–1) of the values with each exponent that become zero, become subnormal, and overflow in `form`."""
    # [u/2, u) rounds up to the smallest subnormal u; only u/2 itself becomes zero, since ties go to even.
    zero = (exponents < form.min_subnormal_exponent - 1).astype(float)
    subnormal = ((exponents >= form.min_subnormal_exponent - 1) & (exponents < form.min_normal_exponent)).astype(float)
    top = 2.0**form.max_exponent
    over = np.where(exponents > form.max_exponent, 1.0, 0.0)
    over[exponents == form.max_exponent] = max(2 - form.overflow_threshold / top, 0.0)
    return zero, subnormal, over


def _counts_of_class(low: np.ndarray, high: np.ndarray, up: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many values are of a class, if the part `up` of each octave comes to the octave above."""
    result: np.ndarray = (1 - up) * (counts @ low.T) + up * (counts @ high.T)
    return result


def _fractions(
    form: Format, histograms: TrueCounts, scales: np.ndarray, own: np.ndarray, rounded: np.ndarray
) -> dict[str, np.ndarray]:
    """The four fractions, each [tensors, scales], together for tensors whose own scales have the same power of two."""
    nonzero = np.maximum(histograms.counts.sum(axis=1), 1e-300)
    total = np.maximum(histograms.magnitudes.sum(axis=1), 1e-300)
    names = ("underflow_frac", "underflow_mass_frac", "subnormal_frac", "overflow_frac")
    result = {c: np.zeros((len(nonzero), len(scales))) for c in names}
    shifts = np.floor(np.log2(own)).astype(np.int64)
    # Times a scale of 2^k · m, of the values evenly spread over an octave those from 2 / m on come to the octave above.
    above = 2 - 2 / (own / np.exp2(shifts.astype(float)))
    for shift in np.unique(shifts):
        selected = rounded & (shifts == shift)
        exponents = histograms.exponents[None, :] + scales[:, None] + shift
        up = above[selected, None]
        here, next_octave = class_shares_by_exponent(form, exponents), class_shares_by_exponent(form, exponents + 1)
        zero, subnormal, over = (
            functools.partial(_counts_of_class, low, high, up) for low, high in zip(here, next_octave, strict=True)
        )
        flushed = zero(histograms.capped[selected])
        known = histograms.absmax[selected, None] > 0
        with np.errstate(divide="ignore"):
            largest = np.log2(histograms.absmax[selected, None]) + np.log2(own[selected, None]) + scales
        fits = largest < np.log2(form.overflow_threshold)
        result["underflow_frac"][selected] = flushed / nonzero[selected, None]
        result["underflow_mass_frac"][selected] = (
            _mass_of_smallest(histograms, np.flatnonzero(selected), flushed) / total[selected, None]
        )
        result["subnormal_frac"][selected] = subnormal(histograms.capped[selected]) / nonzero[selected, None]
        result["overflow_frac"][selected] = np.where(
            known & fits, 0.0, over(histograms.counts[selected]) / nonzero[selected, None]
        )
    return result


def _source(
    form: Format, weights: TrueCounts, outputs: TrueCounts, rounding: Rounding, scales: np.ndarray
) -> np.ndarray:
    """[tensors, scales] underflow of the output gradients that weight gradients are computed from."""
    rows = {name: i for i, name in enumerate(outputs.names)}
    zero = class_shares_by_exponent(form, outputs.exponents[None, :] + scales[:, None])[0]
    of_output = outputs.counts @ zero.T / np.maximum(outputs.counts.sum(axis=1), 1e-300)[:, None]
    hidden = rounding.hidden_octaves(weights.names, dict(zip(outputs.names, outputs.numel, strict=True)))
    result = np.zeros((len(weights.names), len(scales)))
    for i in np.flatnonzero(hidden >= 0):
        smaller = class_shares_by_exponent(form, weights.exponents[None, :] + scales[:, None] - hidden[i])[0]
        result[i] = smaller @ weights.counts[i] / max(weights.counts[i].sum(), 1e-300)
    for i in np.flatnonzero(hidden < 0):
        of_sources = [of_output[rows[source]] for source in rounding.sources(weights.names[i]) if source in rows]
        if of_sources:
            result[i] = np.max(of_sources, axis=0)
    return result


def _mass_of_smallest(histograms: TrueCounts, rows: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Sum of magnitudes of the smallest `lost` [rows, scales] values of each row: a lower bound of the lost mass."""
    below = np.zeros((len(rows), histograms.counts.shape[1] + 1))
    mass = np.zeros_like(below)
    np.cumsum(histograms.counts[rows], axis=1, out=below[:, 1:])
    np.cumsum(histograms.magnitudes[rows], axis=1, out=mass[:, 1:])
    return np.array([np.interp(n, b, m) for n, b, m in zip(lost, below, mass, strict=True)]).reshape(lost.shape)
