"""What another format or another loss scale would do, predicted from the histograms that a run recorded.

    what_if(run, formats=("fp16",), log2_scales=(0, 16))      # one row per tensor, kind, format and scale
    whole_model(what_if(run))                                 # the same, over all tensors of a kind

A gradient recorded at loss scale S is divided by S to get the true one, multiplied by 2^k, and rounded to the format
in thought. All of this is counting bins: a value with exponent e has exponent e + k at scale 2^k. It can only be known
for values that survived in the run itself, so predict from a run whose own gradients are healthy (or FP32 or BF16).

Two things besides a value's own size decide whether it is lost, and both are taken into account:

- Autocast rounds only some gradients to 16 bits; what stays in FP32 loses nothing (column `rounded`).
- A weight gradient is a sum of products of its channel's output gradients with inputs, so it is lost too where all of
  those are flushed. Where the run recorded it, each value is capped by its channel's largest output gradient.

It is a prediction. `Recorder.audit` measures; `predicted_and_audited` puts both side by side.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.histograms import TrueCounts, true_counts
from amp_core.analysis.numerics.rounded_gradients import Rounding
from amp_core.formats import FORMATS, Format
from amp_core.schema import KINDS, RunError
from amp_core.store.run import Run, check_run

GRADIENTS = ("weight_grad", "output_grad")
"""The kinds that a loss scale multiplies. Under FP16 autocast both are rounded to FP16: output gradients as they flow
back, weight gradients as they leave their matrix product."""

HEALTHY_SOURCE = 0.05
"""Up to this `source_underflow_frac` predictions of weight gradients agreed with audits to within 0.01 of all values;
above it to within some 0.2."""

SCALINGS = ("loss", "tensor")

_FRACTIONS = ("underflow_frac", "subnormal_frac", "overflow_frac")
_COLUMNS = ["name", "kind", "format", "log2_scale", "underflow_frac", "underflow_mass_frac", "subnormal_frac"]
_COLUMNS += ["overflow_frac", "nonzero", "mass", "rounded", "own_log2_scale", "source_underflow_frac"]


def what_if(
    run: Run,
    formats: Sequence[str] = ("fp16", "bf16"),
    log2_scales: Iterable[int] = range(-10, 41),
    kinds: Sequence[str] = GRADIENTS,
    step: int | None = None,
    scaling: str | None = None,
    pure: bool = False,
) -> pd.DataFrame:
    """Predicted losses of every tensor under each format and each scale 2^k.

    Args:
        formats: names from `amp_core.formats.FORMATS`, or one of them.
        log2_scales: whole numbers k.
        kinds: of `amp_core.schema.KINDS`; activations and weights are not multiplied by the loss scale, so for them
            only k = 0 is what training does.
        step: the sampled step nearest at or before this one; None takes all sampled steps together.
        scaling: `loss` multiplies every tensor by 2^k. `tensor` first brings each tensor's largest value just below
            the largest of the format by a power of two of its own (`own_log2_scale`), as FP8 training does; k counts
            from there, so that -2 leaves two bits of room. None takes what the format says (`Format.scaling`): `tensor`
            for FP8, `loss` for all others.
        pure: round every tensor, as with a model that is 16-bit altogether, and not only those that autocast rounds.

    Columns: name, kind, format, log2_scale; underflow_frac (values that become 0, over nonzero values);
    underflow_mass_frac (their share of the sum of magnitudes); subnormal_frac (values that become subnormal, over
    nonzero values); overflow_frac (values that become infinite or NaN, over nonzero values); for weighting, nonzero
    (values counted) and mass (sum of true magnitudes); rounded (whether it is rounded at all; if not, its fractions are
    0); own_log2_scale (0 with `loss`); source_underflow_frac (of a weight gradient: what underflows of the 16-bit
    output gradient that it is made from, estimated where that is hidden inside an operator; NaN for other kinds and
    with `tensor`). Where much of the source underflows, what is left of it is noise, and a weight gradient's own
    underflow can be told only roughly: see `HEALTHY_SOURCE`. Fractions run from 0 to 1. Raises `RunError` for a format,
    kind or scaling that is unknown, for a format that is scaled by block, and for a power that is no whole number.
    """
    check_run(run)
    chosen = [format_named(name) for name in _listed(formats)]
    kinds = _listed(kinds)
    if scaling is not None and scaling not in SCALINGS:
        raise RunError(f"scaling={scaling!r} is unknown; choose one of {', '.join(SCALINGS)}")
    for kind in kinds:
        if kind not in KINDS:
            raise RunError(f"kinds={kind!r} is unknown; choose from {', '.join(KINDS)}")
    scales = _whole(log2_scales)
    rounding = Rounding(run)
    outputs = true_counts(run, "output_grad", step)
    frames = []
    for kind in kinds:
        found = outputs if kind == "output_grad" else true_counts(run, kind, step)
        nonzero = found.counts.sum(axis=1)
        if not nonzero.any():
            continue
        names = np.asarray(found.names, dtype=object)
        rounded = np.full(len(names), True) if pure else rounding.of(kind, found.names)
        for form in chosen:
            per_tensor = (scaling or form.scaling.by) == "tensor"
            own = own_log2_scale(form, found.absmax) if per_tensor else np.zeros(len(names), dtype=np.int64)
            columns = {
                "name": np.repeat(names, len(scales)),
                "kind": kind,
                "format": form.name,
                "log2_scale": np.tile(scales, len(names)),
                **{c: v.ravel() for c, v in _fractions(form, found, scales, own, rounded).items()},
                "nonzero": np.repeat(np.rint(nonzero).astype(np.int64), len(scales)),
                "mass": np.repeat(found.magnitudes.sum(axis=1), len(scales)),
                "rounded": np.repeat(rounded, len(scales)),
                "own_log2_scale": np.repeat(own, len(scales)),
                "source_underflow_frac": _source(form, found, outputs, rounding, scales).ravel()
                if kind == "weight_grad" and not per_tensor
                else np.nan,
            }
            there = np.repeat(nonzero > 0, len(scales))
            frames.append(pd.DataFrame(columns)[there])
    if not frames:
        return pd.DataFrame(columns=_COLUMNS)
    return pd.concat(frames, ignore_index=True)[_COLUMNS]


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


def _listed(names: Sequence[str]) -> Sequence[str]:
    """One name is a list of one, and not one of letters."""
    return [names] if isinstance(names, str) else names


def _whole(log2_scales: Iterable[int]) -> np.ndarray:
    given = list(log2_scales) if isinstance(log2_scales, Iterable) else [log2_scales]
    for power in given:
        if not isinstance(power, int | float | np.number) or not float(power).is_integer():
            raise RunError(
                f"log2_scales={power!r} is no whole number; log2_scales=(0, 16) takes the scales 1 and 65536"
            )
    return np.array(given, dtype=np.int64)


def format_named(name: str) -> Format:
    """The format of that name. Raises `RunError` for an unknown one and for one that is scaled by block: a histogram
    does not tell which values share a block."""
    choices = [f.name for f in FORMATS.values() if not f.by_block]
    if name not in FORMATS:
        raise RunError(f"format={name!r} is unknown; choose one of {', '.join(choices)}")
    form = FORMATS[name]
    if form.by_block:
        raise RunError(
            f"format={name!r} has a scale per block of {form.scaling.block} values, and the run recorded histograms "
            f"of whole tensors, without blocks; choose one of {', '.join(choices)}"
        )
    return form


def own_log2_scale(form: Format, absmax: np.ndarray) -> np.ndarray:
    """For each tensor the power of two that brings its largest value to the top of the format, without overflow."""
    with np.errstate(divide="ignore"):
        power = np.floor(np.log2(form.max_value) - np.log2(absmax))
    return np.where(np.isfinite(power), power, 0).astype(np.int64)


def becomes(form: Format, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares (0–1) of the values with each exponent that become zero, subnormal, and too large in `form`."""
    # [u/2, u) rounds up to the smallest subnormal u; only the value u/2 itself goes to zero, ties being to even.
    zero = (exponents < form.min_subnormal_exponent - 1).astype(float)
    subnormal = ((exponents >= form.min_subnormal_exponent - 1) & (exponents < form.min_normal_exponent)).astype(float)
    top = 2.0**form.max_exponent
    over = np.where(exponents > form.max_exponent, 1.0, 0.0)
    over[exponents == form.max_exponent] = max(2 - form.overflow_threshold / top, 0.0)
    return zero, subnormal, over


def _fractions(
    form: Format, found: TrueCounts, scales: np.ndarray, own: np.ndarray, rounded: np.ndarray
) -> dict[str, np.ndarray]:
    """The four fractions, each [tensors, scales]; tensors with the same scale of their own are taken together."""
    nonzero = np.maximum(found.counts.sum(axis=1), 1e-300)
    total = np.maximum(found.magnitudes.sum(axis=1), 1e-300)
    names = ("underflow_frac", "underflow_mass_frac", "subnormal_frac", "overflow_frac")
    result = {c: np.zeros((len(nonzero), len(scales))) for c in names}
    for shift in np.unique(own):
        some = rounded & (own == shift)
        zero, subnormal, over = becomes(form, found.exponents[None, :] + scales[:, None] + shift)
        lost = found.capped[some] @ zero.T
        known = found.absmax[some, None] > 0
        with np.errstate(divide="ignore"):
            fits = np.log2(found.absmax[some, None]) + scales + shift < np.log2(form.overflow_threshold)
        result["underflow_frac"][some] = lost / nonzero[some, None]
        result["underflow_mass_frac"][some] = _mass_of_smallest(found, np.flatnonzero(some), lost) / total[some, None]
        result["subnormal_frac"][some] = found.capped[some] @ subnormal.T / nonzero[some, None]
        result["overflow_frac"][some] = np.where(known & fits, 0.0, found.counts[some] @ over.T / nonzero[some, None])
    return result


def _source(
    form: Format, weights: TrueCounts, outputs: TrueCounts, rounding: Rounding, scales: np.ndarray
) -> np.ndarray:
    """[tensors, scales] what underflows of the output gradients that weight gradients are made from."""
    rows = {name: i for i, name in enumerate(outputs.names)}
    zero = becomes(form, outputs.exponents[None, :] + scales[:, None])[0]
    of_output = outputs.counts @ zero.T / np.maximum(outputs.counts.sum(axis=1), 1e-300)[:, None]
    hidden = rounding.hidden_octaves(weights.names, dict(zip(outputs.names, outputs.numel, strict=True)))
    result = np.zeros((len(weights.names), len(scales)))
    for i in np.flatnonzero(hidden >= 0):
        smaller = becomes(form, weights.exponents[None, :] + scales[:, None] - hidden[i])[0]
        result[i] = smaller @ weights.counts[i] / max(weights.counts[i].sum(), 1e-300)
    for i in np.flatnonzero(hidden < 0):
        found = [of_output[rows[source]] for source in rounding.sources(weights.names[i]) if source in rows]
        if found:
            result[i] = np.max(found, axis=0)
    return result


def _mass_of_smallest(found: TrueCounts, rows: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Sum of magnitudes of the smallest `lost` [rows, scales] values of each row: the least that is lost with them."""
    below = np.zeros((len(rows), found.counts.shape[1] + 1))
    mass = np.zeros_like(below)
    np.cumsum(found.counts[rows], axis=1, out=below[:, 1:])
    np.cumsum(found.magnitudes[rows], axis=1, out=mass[:, 1:])
    return np.array([np.interp(n, b, m) for n, b, m in zip(lost, below, mass, strict=True)]).reshape(lost.shape)
