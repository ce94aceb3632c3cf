"""Casts of an FP8, MXFP8 or NVFP4 training as measured: scales, losses, and the layers that were converted."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis.numerics.casts import (
    OPERAND,
    cast_losses_by_operand,
    casts,
    conversion,
    has_casts,
    measured_and_predicted,
)
from amp_core.quantization import RECIPES
from pages.parts import loaders, tables, words

KINDS = {"weight": "weight", "activation": "input", "output_grad": "output gradient"}
_NAME = {
    "name": st.column_config.TextColumn("Layer or weight", pinned=True, width=220),
    "kind": st.column_config.TextColumn("Operand", width=110),
    "product": st.column_config.TextColumn("Product", width=100, help="Empty: the same in all products"),
    "recipe": st.column_config.TextColumn("Recipe", width=130),
}
LOSSES = _NAME | {
    "underflow_frac": tables.share("Underflow", help_="Nonzero values that became 0"),
    "saturated_frac": tables.share("Saturated", help_="Nonzero values beyond what the scale holds"),
    "rel_error": tables.measured("Relative error", width=90, help_="Root of squared error over squared values"),
    "samples": tables.count("Samples", width=70),
}
SCALES = _NAME | {
    "first": tables.measured("First", width=90),
    "last": tables.measured("Last", width=90),
    "lowest": tables.measured("Lowest", width=90),
    "highest": tables.measured("Highest", width=90),
    "amax": tables.measured("amax", width=90, help_="Largest magnitude at the last sample"),
    "scale_age": tables.count("Age", width=60, help_="Most steps since the amax behind a scale was measured"),
}
BESIDE = _NAME | {
    "predicted_rel_error": tables.measured("Predicted error", width=110),
    "measured_rel_error": tables.measured("Measured error", width=110),
    "predicted_underflow_frac": tables.share("Predicted underflow"),
    "measured_underflow_frac": tables.share("Measured underflow"),
}


def losses(run: Run) -> None:
    """What the casts lost, by operand; nothing for a run without casts."""
    if not has_casts(run):
        return
    st.header("Casts to 8 and 4 bits", anchor=False)
    st.markdown(sentence(run))
    _table(loaders.analysed(cast_losses_by_operand, run), LOSSES, "Measured losses of casts by operand.")


def scales(run: Run) -> None:
    """The scales of the casts over the run; nothing for a run without casts."""
    if not has_casts(run):
        return
    st.header("Scales of the quantized tensors", anchor=False)
    st.caption(
        "A run in 8 or 4 bits multiplies each tensor by scales of its own before it rounds, not the loss by one."
    )
    _table(loaders.analysed(scale_spans, run), SCALES, "Scales of casts by operand.")


def beside_prediction(run: Run) -> None:
    """Measured losses beside what the blocks of the same run predict; nothing without both."""
    if not has_casts(run) or run.blocks.empty:
        return
    both = loaders.analysed(measured_and_predicted, run, run)
    if both.empty:
        return
    st.header("Predicted and measured casts", anchor=False)
    _table(both, BESIDE, "Predicted and measured losses of casts by operand.")


def sentence(run: Run) -> str:
    """Which layers are quantized, in words."""
    seen = loaders.analysed(conversion, run)
    if seen is None:
        return "Measured on the casts of sampled steps."
    share = f", which hold {words.percent(seen.weight_frac)} of their weights" if seen.weight_frac is not None else ""
    left = ", ".join(words.escape(name) for name in seen.left["name"].head(3))
    more = len(seen.left) - 3
    others = f" and {more:,} more" if more > 0 else ""
    kept = f" Not quantized: {left}{others}." if left else ""
    return f"{seen.converted:,} of {words.plural(seen.layers, 'linear layer')} are quantized{share}.{kept}"


def scale_spans(run: Run) -> pd.DataFrame:
    """One row per operand: first and last scale, the lowest and highest, the last amax and the largest age."""
    frame = casts(run)
    frame = frame[(frame["rank"] == frame["rank"].min()) & frame["scale"].notna()]
    groups = frame.groupby(OPERAND, sort=False, dropna=False, as_index=False)
    spans: pd.DataFrame = groups.agg(
        recipe=("recipe", "last"),
        first=("scale", "first"),
        last=("scale", "last"),
        lowest=("scale", "min"),
        highest=("scale_max", "max"),
        amax=("amax", "last"),
        scale_age=("scale_age", "max"),
    )
    return spans


def _table(frame: pd.DataFrame, columns: Mapping[str, Any], alt: str) -> None:
    labels = frame["recipe"].map(lambda name: RECIPES[name].label if name in RECIPES else None)
    shown = frame.assign(recipe=labels, kind=frame["kind"].map(KINDS))
    if "product" in shown:
        shown["product"] = shown["product"].str.replace("_", " ")
    tables.show(shown, column_config=columns, column_order=list(tables.known(shown, columns)), alt=alt)
