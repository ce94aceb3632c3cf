"""What another format or another loss scale would do, predicted from the histograms that a run recorded.

    >>> what_if(run, formats=("fp16",), log2_scales=(0, 16))      # one row per tensor, kind, format and scale
    >>> safe_window(run)
    SafeWindow(format='fp16', lowest=0.25, highest=1048576.0, recommended=262144.0, ...)

A gradient recorded at loss scale S is divided by S to get the true one, multiplied by 2^k, and rounded to the format
in thought. All of this is counting bins: a value with exponent e has exponent e + k at scale 2^k. It can only be known
for values that survived in the run itself, so predict from a run whose own gradients are healthy (or FP32 or BF16).

It is a prediction. `Recorder.audit` measures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis.ranges import exponent_shares, kinds_present
from amp_core.formats import FORMATS, Format
from amp_core.run import Run
from amp_core.schema import RunError

GRADIENTS = ("weight_grad", "output_grad")
"""The kinds that a loss scale multiplies. Under FP16 autocast both are rounded to FP16: output gradients as they flow
back, weight gradients as they leave their matrix product."""

MEAN_IN_OCTAVE = 1.5
"""Mean of values spread evenly from 2^e to 2^(e+1), over 2^e."""

ERROR_LIMIT = 0.015
"""Relative rounding error (2-norm) up to which a gradient counts as kept. A cosine of 0.999 allows 0.045, for
cos = 1 / sqrt(1 + error²) when the error is at right angles to the gradient; a third of that is left for errors that
add up on the way back through the layers."""

MARGIN_BITS = 2
"""How far below the highest safe scale the recommended one lies: gradients vary from step to step by a few times."""


@dataclass(frozen=True)
class SafeWindow:
    """The loss scales at which no gradient of the run overflows and none loses more than `ERROR_LIMIT`."""

    format: str
    lowest: float
    """Below it, rounding in the subnormal range takes more than `ERROR_LIMIT` from at least one gradient."""
    highest: float
    """Above it, at least one gradient overflows."""
    recommended: float
    """To begin with: a power of two near the top, `MARGIN_BITS` below it where the window is wide enough."""
    lowest_by: str
    """The tensor that needs the scale to be at least `lowest`."""
    highest_by: str
    """The tensor that needs it to be at most `highest`."""

    @property
    def exists(self) -> bool:
        """Whether one scale serves all tensors; if not, another format or FP32 islands must."""
        return self.lowest <= self.highest


def what_if(
    run: Run,
    formats: Sequence[str] = ("fp16", "bf16"),
    log2_scales: Iterable[int] = range(-10, 41),
    kinds: Sequence[str] = GRADIENTS,
    step: int | None = None,
) -> pd.DataFrame:
    """Predicted losses of every tensor under each format and each loss scale 2^k.

    Columns: name, kind, format, log2_scale; underflow_frac (values that become 0, over nonzero values);
    underflow_mass_frac (their share of the sum of magnitudes); subnormal_frac (values that become subnormal, over
    nonzero values); overflow_frac (values that become infinite or NaN, over nonzero values); and, for weighting,
    nonzero (values counted) and mass (sum of true magnitudes). Fractions run from 0 to 1.

    `step` takes the sampled step nearest at or before it; None takes all sampled steps together. Raises `RunError`
    for an unknown format or kind.
    """
    chosen = [_format(name) for name in formats]
    scales = np.array(list(log2_scales), dtype=np.int64)
    frames = []
    for kind in kinds:
        names, low, counts = _counts(run, kind, step)
        if not names:
            continue
        exponents = low + np.arange(counts.shape[1])
        mass = counts * np.ldexp(MEAN_IN_OCTAVE, exponents)
        for form in chosen:
            zero, subnormal, over = _becomes(form, exponents[None, :] + scales[:, None])
            nonzero, total = counts.sum(axis=1), mass.sum(axis=1)
            frames.append(
                pd.DataFrame(
                    {
                        "name": np.repeat(np.asarray(names, dtype=object), len(scales)),
                        "kind": kind,
                        "format": form.name,
                        "log2_scale": np.tile(scales, len(names)),
                        "underflow_frac": (counts @ zero.T / nonzero[:, None]).ravel(),
                        "underflow_mass_frac": (mass @ zero.T / total[:, None]).ravel(),
                        "subnormal_frac": (counts @ subnormal.T / nonzero[:, None]).ravel(),
                        "overflow_frac": (counts @ over.T / nonzero[:, None]).ravel(),
                        "nonzero": np.repeat(nonzero.astype(np.int64), len(scales)),
                        "mass": np.repeat(total, len(scales)),
                    }
                )
            )
    columns = ["name", "kind", "format", "log2_scale", "underflow_frac", "underflow_mass_frac", "subnormal_frac"]
    if not frames:
        return pd.DataFrame(columns=[*columns, "overflow_frac", "nonzero", "mass"])
    return pd.concat(frames, ignore_index=True)


def whole_model(predictions: pd.DataFrame) -> pd.DataFrame:
    """The rows of `what_if` over all tensors of a kind: kind, format, log2_scale and the four fractions."""
    frame = predictions.assign(
        **{c: predictions[c] * predictions["nonzero"] for c in ("underflow_frac", "subnormal_frac", "overflow_frac")},
        underflow_mass_frac=predictions["underflow_mass_frac"] * predictions["mass"],
    )
    sums = frame.groupby(["kind", "format", "log2_scale"], sort=False, as_index=False)[
        ["underflow_frac", "underflow_mass_frac", "subnormal_frac", "overflow_frac", "nonzero", "mass"]
    ].sum()
    for column in ("underflow_frac", "subnormal_frac", "overflow_frac"):
        sums[column] /= sums["nonzero"]
    sums["underflow_mass_frac"] /= sums["mass"]
    return sums


def headroom_bits(run: Run, format: str = "fp16", kinds: Sequence[str] = GRADIENTS) -> pd.DataFrame:  # noqa: A002
    """How many times each tensor's largest value could still double as it was stored: name, kind, headroom_bits.

    log2(largest finite value of the format / absmax); the smallest over the sampled steps. Negative where it would
    not have fitted, -inf where it held an infinity.
    """
    form = _format(format)
    largest = _largest(run, kinds, stored=True)
    with np.errstate(divide="ignore"):
        largest["headroom_bits"] = np.log2(form.max_value / largest.pop("absmax"))
    return largest


def safe_window(run: Run, format: str = "fp16", step: int | None = None) -> SafeWindow:  # noqa: A002
    """The loss scales that serve every gradient of the run, for `format`.

    Upwards it ends where a largest magnitude reaches what rounds to infinity. Downwards it ends where the expected
    rounding error of a gradient passes `ERROR_LIMIT`: a value below the smallest normal is rounded to a multiple of
    the smallest subnormal u, which adds u²/12 to the square of the error on average, and a value below u/2 is lost
    whole. Raises `RunError` for an unknown format and for a run without gradients.
    """
    form = _format(format)
    largest = _largest(run, GRADIENTS, stored=False, step=step)
    largest = largest[largest["absmax"] > 0]
    if largest.empty:
        raise RunError(f"run={run.name!r} has no recorded gradients; record weight_grad and output_grad to predict")
    worst = largest.loc[largest["absmax"].idxmax()]
    highest = 2.0 ** np.floor(np.log2(np.nextafter(form.overflow_threshold / worst["absmax"], 0)))
    needed = []
    for kind in kinds_present(run):
        if kind in GRADIENTS:
            names, low, counts = _counts(run, kind, step)
            needed += list(zip(_lowest_log2(form, low, counts), names, strict=True))
    lowest_log2, lowest_by = max(needed)
    lowest = 2.0**lowest_log2
    recommended = max(min(lowest, highest), highest / 2**MARGIN_BITS)
    return SafeWindow(form.name, lowest, float(highest), float(recommended), lowest_by, str(worst["name"]))


def _lowest_log2(form: Format, low: int, counts: np.ndarray) -> np.ndarray:
    """For each tensor the smallest k such that at scale 2^k its relative rounding error keeps to `ERROR_LIMIT`."""
    scales = np.arange(-150, 151)
    exponents = low + np.arange(counts.shape[1])
    square = np.ldexp(7 / 3, 2 * exponents)  # mean of x² over an octave: 7/3 · 4^e
    zero, subnormal, _ = _becomes(form, exponents[None, :] + scales[:, None])
    grain = np.ldexp(1.0, 2 * (form.min_subnormal_exponent - scales)) / 12
    lost = zero @ (counts * square).T + grain[:, None] * (subnormal @ counts.T)
    error = np.sqrt(lost / (counts * square).sum(axis=1)[None, :])
    enough = error <= ERROR_LIMIT
    return scales[np.where(enough.any(axis=0), enough.argmax(axis=0), len(scales) - 1)]


def _becomes(form: Format, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares (0–1) of the values with each exponent that become zero, subnormal, and too large in `form`."""
    # [u/2, u) rounds up to the smallest subnormal u; only the value u/2 itself goes to zero, ties being to even.
    zero = (exponents < form.min_subnormal_exponent - 1).astype(float)
    subnormal = ((exponents >= form.min_subnormal_exponent - 1) & (exponents < form.min_normal_exponent)).astype(float)
    top = np.ldexp(1.0, form.max_exponent)
    over = np.where(exponents > form.max_exponent, 1.0, 0.0)
    over[exponents == form.max_exponent] = (2 * top - form.overflow_threshold) / top
    return zero, subnormal, over


def _counts(run: Run, kind: str, step: int | None) -> tuple[list[str], int, np.ndarray]:
    """Names, lowest exponent, and a matrix of counts by name and true exponent."""
    shares = exponent_shares(run, kind, step, true_exponents=True)
    if shares.empty:
        return [], 0, np.zeros((0, 1))
    codes, names = pd.factorize(shares["name"])
    low, high = int(shares["exponent"].min()), int(shares["exponent"].max())
    counts = np.zeros((len(names), high - low + 1))
    counts[codes, shares["exponent"].to_numpy() - low] = shares["count"].to_numpy()
    return [str(n) for n in names], low, counts


def _largest(run: Run, kinds: Sequence[str], stored: bool, step: int | None = None) -> pd.DataFrame:
    """Per tensor and kind the largest magnitude of any sampled step; with the loss scale (`stored`) or without."""
    table = run.table("tensors")
    columns = ["step", "name", "kind", "dtype", "loss_scale", "inf", "nan", "absmax"]
    frame = table.filter(pc.field("kind").isin(list(kinds))).select(columns).to_pandas()
    if step is not None:
        nearest = frame.loc[frame["step"] <= step, "step"].max()
        frame = frame[frame["step"] == nearest]
    burst = (frame["inf"] > 0) | (frame["nan"] > 0)
    # What overflowed was at least as large as what its format cannot hold; of its true size nothing more is known.
    limits = frame["dtype"].map({f.dtype: f.overflow_threshold for f in FORMATS.values() if f.dtype})
    sixteen_bit = burst & (limits < 1e30)
    frame.loc[sixteen_bit, "absmax"] = np.maximum(frame["absmax"], limits)[sixteen_bit]
    frame = frame[~burst | sixteen_bit]
    if not stored:
        frame["absmax"] /= frame["loss_scale"]
    return frame.groupby(["name", "kind"], sort=False, as_index=False)["absmax"].max()


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise RunError(f"format={name!r} is unknown; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]
