"""What the casts of an FP8, MXFP8 or NVFP4 training lost: the table `quantized`, by operand and over steps.

    cast_losses_by_operand(run)                  # one row per operand and product, over all sampled steps
    measured_and_predicted(run, bf16_run)        # the same, beside what a BF16 run with blocks predicts

Everything here was measured on the casts themselves, unlike `quantized.py`, which predicts.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.quantized import quantized
from amp_core.quantization import ELEMENTS, OPERANDS, RECIPES
from amp_core.store.run import Run

OPERAND = ["name", "kind", "product"]
LOSSES = ["underflow_frac", "underflow_mass_frac", "saturated_frac", "rel_error"]


def has_casts(run: Run) -> bool:
    """Whether the run recorded casts to 8 or 4 bits."""
    return bool(run.table("quantized").num_rows)


def casts(run: Run) -> pd.DataFrame:
    """The table `quantized` in order of steps, with `headroom`: the largest scaled magnitude over the element's largest
    value. 1 uses the whole range; above 1, values saturate. Null where operands have several scales."""
    frame = run.quantized.sort_values(["step", "rank"], kind="stable").reset_index(drop=True)
    top = frame["element"].map({name: element.max_value for name, element in ELEMENTS.items()}).astype(float)
    one = frame["scale"] == frame["scale_max"]
    return frame.assign(headroom=(frame["amax"] * frame["scale"] / top).where(one))


def cast_losses_by_operand(run: Run) -> pd.DataFrame:
    """One row per operand and product.

    Columns: name, kind, product (null: all), recipe, block, element, samples (sampled steps), amax and scale (of the
    last sample), scale_age (the largest), the losses averaged over samples, each sample alike: underflow_frac,
    underflow_mass_frac, saturated_frac, rel_error (root of the mean square).
    """
    frame = casts(run)
    frame = frame[frame["rank"] == frame["rank"].min()] if len(frame) else frame
    groups = frame.assign(rel_error=frame["rel_error"] ** 2).groupby(OPERAND, sort=False, dropna=False, as_index=False)
    last = dict.fromkeys(("recipe", "block", "element", "library", "amax", "scale", "scale_max"), "last")
    result = groups.agg({"step": "nunique", "scale_age": "max", **last, **dict.fromkeys(LOSSES, "mean")})
    result["rel_error"] = np.sqrt(result["rel_error"])
    return result.rename(columns={"step": "samples"})


@dataclass(frozen=True)
class Conversion:
    """Which of a model's linear layers were quantized, in the first sampled step that had any cast."""

    converted: int
    layers: int
    weight_frac: float | None
    """Share of the weights of all linear layers that the converted ones hold; None where sizes are not known."""
    left: pd.DataFrame
    """Layers that were not: name, op (its class), reason, weight_frac."""


REASONS = {
    "sizes": "a size is no multiple of 16",
    "not called": "its own forward is not called",
    "": "not converted",
}


def conversion(run: Run) -> Conversion | None:
    """The share of linear layers that were really converted; None for a run in which nothing was quantized."""
    events = run.events
    whole = events[(events["kind"] == "quantized layers") & (events["rank"] == events["rank"].min())]
    if whole.empty:
        return None
    first = whole.iloc[0]
    left = events[(events["kind"] == "not quantized") & (events["rank"] == first["rank"])]
    left = left.drop_duplicates("name").assign(
        reason=left["detail"].map(lambda detail: REASONS.get(detail, detail)), weight_frac=left["value"]
    )
    share = float(first["value"]) if first["value"] == first["value"] else None
    columns = ["name", "op", "detail", "reason", "weight_frac"]
    return Conversion(int(first["count"]), int(first["limit"]), share, left[columns].reset_index(drop=True))


def measured_and_predicted(run: Run, predicted_from: Run) -> pd.DataFrame:
    """One row per operand and product that both know: name, kind, product, recipe, and each of the losses as
    `measured_…` and `predicted_…`.

    The prediction is that of `what_if`, from another run with blocks, as a rule in BF16 and with the same model; both
    are averages over the sampled steps. Raises `RunError` if that run has no blocks.
    """
    measured = cast_losses_by_operand(run)
    measured = measured[measured["recipe"].isin(RECIPES)]
    recipes = [RECIPES[name] for name in dict.fromkeys(measured["recipe"])]
    products = [
        [product] if isinstance(product, str) else list(OPERANDS[kind])
        for kind, product in zip(measured["kind"], measured["product"], strict=True)
    ]
    spread = measured.assign(product=pd.Series(products, measured.index, dtype=object)).explode("product")
    predicted = quantized(predicted_from, recipes).rename(columns={"format": "recipe"})
    keys = [*OPERAND, "recipe"]
    both = spread[keys + LOSSES].merge(predicted[keys + LOSSES], on=keys, suffixes=("_m", "_p"))
    names = {f"{loss}_m": f"measured_{loss}" for loss in LOSSES} | {f"{loss}_p": f"predicted_{loss}" for loss in LOSSES}
    return both.rename(columns=names)
