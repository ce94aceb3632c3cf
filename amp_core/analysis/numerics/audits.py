"""Audits: those of the run's own recipe, and all of them beside the predictions for the same step.

own_audits(run)                 # rows of `audits` that replayed the run's own recipe
predicted_and_audited(run)      # one row per audited step, loss scale and gradient
quantized_audits(run)           # audits in 8- and 4-bit recipes, with the predictions
"""

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.quantized import product_errors, quantized
from amp_core.analysis.numerics.ranges import sampled_steps
from amp_core.analysis.numerics.what_if import what_if
from amp_core.analysis.steps import attempts, recipe
from amp_core.formats import FORMATS
from amp_core.quantization import find_recipe, is_recipe
from amp_core.store.run import Run

_COLUMNS = ["step", "name", "loss_scale", "audited_frac", "predicted_frac", "audited_mass_frac", "predicted_mass_frac"]
_COLUMNS += ["rel_error", "at_best", "cosine", "nonfinite"]


def own_audits(run: Run) -> pd.DataFrame:
    """Rows of the run's audits that replayed its own recipe, at the loss scale in effect at their step.

    An audit may replay other recipes and loss scales too. One made after `scaler.update` has the loss scale of the
    following step, which counts if no audit has that of its own step.
    """
    audits = run.audits
    if audits.empty:
        return audits
    own = recipe(run)
    if own is not None:
        audits = audits[audits["precision"].isna() | (audits["precision"] == own)]
    else:
        audits = audits[~audits["precision"].map(is_recipe).astype(bool)]
    scales = attempts(run).set_index("step")["loss_scale"].fillna(1.0)
    present = audits["loss_scale"] == audits["step"].map(scales).fillna(1.0)
    no_own_scale = ~present.groupby(audits["step"]).transform("any").astype(bool)
    following = audits["loss_scale"] == audits["step"].map(scales.shift(-1))
    chosen: pd.DataFrame = audits[present | (no_own_scale & following)]
    return chosen


def predicted_and_audited(run: Run) -> pd.DataFrame:
    """Each row of the run's audits with the prediction for its step, in the format of the recipe audited.

    Columns: step, name, loss_scale; audited_frac and predicted_frac (underflow, over nonzero values);
    audited_mass_frac, predicted_mass_frac (the same by sum of magnitudes); rel_error and cosine against FP32; at_best
    (the smallest rel_error of that gradient at any scale audited at that step: the effect of rounding in forward,
    which no loss scale changes; NaN if only one scale was audited); nonfinite (elements). Predictions are NaN if
    the step was not sampled, or the recipe has no 16-bit format. Between two powers of two they are interpolated.
    """
    audits = run.audits
    if audits.empty:
        return pd.DataFrame({c: pd.Series(dtype=str if c == "name" else float) for c in _COLUMNS})
    frame = audits[["step", "name", "loss_scale", "rel_error", "cosine", "nonfinite"]].copy()
    frame["audited_frac"] = audits["lost"] / audits["nonzero"].where(audits["nonzero"] > 0)
    frame["audited_mass_frac"] = audits["lost_mass_frac"]
    frame["predicted_frac"] = frame["predicted_mass_frac"] = np.nan
    sampled = set(sampled_steps(run, "weight_grad"))
    for (step, precision), rows in audits.groupby(["step", "precision"], sort=False):
        form = str(precision).partition("-")[0]
        rows = rows[rows["loss_scale"] > 0]  # a scale that is halved at every step reaches 0
        if step in sampled and form in FORMATS and FORMATS[form].narrow and len(rows):
            pure = str(precision).endswith("-pure")
            frame.loc[rows.index, ["predicted_frac", "predicted_mass_frac"]] = _predicted(run, form, rows, pure)
    groups = frame.groupby(["step", "name"])
    several = groups["loss_scale"].transform("nunique") > 1
    frame["at_best"] = groups["rel_error"].transform("min").where(several)
    return frame[_COLUMNS].reset_index(drop=True)


def _predicted(run: Run, form: str, rows: pd.DataFrame, pure: bool) -> np.ndarray:
    """Predicted underflow of each row, by elements and by mass."""
    k = np.log2(rows["loss_scale"].to_numpy(dtype=float))
    low = np.floor(k).astype(int)
    scales = sorted({*low.tolist(), *(low + 1).tolist()})
    step = int(rows["step"].iloc[0])
    predictions = what_if(run, (form,), scales, kinds=("weight_grad",), step=step, pure=pure)
    predictions = predictions.set_index(["name", "log2_scale"])[["underflow_frac", "underflow_mass_frac"]]
    names = rows["name"]
    at_low = predictions.reindex(pd.MultiIndex.from_arrays([names, low])).to_numpy()
    at_high = predictions.reindex(pd.MultiIndex.from_arrays([names, low + 1])).to_numpy()
    share = (k - low)[:, None]
    values: np.ndarray = at_low * (1 - share) + at_high * share
    return values


def quantized_audits(run: Run) -> pd.DataFrame:
    """Audits in recipes of `amp_core.quantization`, of the weights of linear layers whose blocks were recorded.

    Columns: step, name, precision (the recipe), rel_error, cosine and loss_change as audited; predicted (the error of
    the weight gradient's own product, over all sampled steps; NaN if it was not recorded).
    """
    audits = run.audits
    audits = audits[audits["precision"].map(is_recipe).astype(bool) & audits["name"].str.endswith("weight")]
    columns = ["step", "name", "precision", "rel_error", "cosine", "loss_change"]
    if audits.empty or run.blocks.empty:
        return audits[columns].assign(predicted=np.nan)
    recipes = [find_recipe(name) for name in audits["precision"].unique()]
    operands = quantized(run, recipes, ("activation", "output_grad"))
    products = product_errors(operands).set_index(["name", "format", "product"])["rel_error"]
    layers = audits["name"].str.rpartition(".")[0]
    keys = pd.MultiIndex.from_arrays([layers, audits["precision"], ["weight_grad"] * len(audits)])
    frame = audits[columns].assign(predicted=products.reindex(keys).to_numpy())
    recorded = set(operands["name"])
    return frame[layers.isin(recorded)].reset_index(drop=True)
