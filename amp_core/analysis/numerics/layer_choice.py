"""Which linear layers can run in 8 or 4 bits, and which stay in BF16, from the blocks that a run recorded.

    errors = layer_errors(run, [RECIPES["nvfp4"]])      # one row per layer and recipe, the most harmful first
    choice = choose(errors, RECIPES["nvfp4"], limit=0.15)
    choice.stay, choice.flops_frac                      # (('head',), 0.93)
    print(code_for("torchao", choice))                  # in layer_choice_code

A layer's error in a recipe is that of the worst of its three products (see `quantized.product_errors`); the limit is
on it. Layers are ordered by `harm`: the predicted change of a batch's loss if this layer alone is quantized, to first
order. Rounding errors are independent of the values, so the change has a mean near 0 and the variance
(‖∂loss/∂input‖ · rms of the input's errors)² + (‖∂loss/∂weight‖ · rms of the weight's errors)². The gradients are those
of the second half of the training: the early ones are larger, and in other layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.quantized import product_errors, quantized
from amp_core.quantization import OPERANDS, Recipe
from amp_core.schema import RunError
from amp_core.store.run import Run

LIMIT = 0.15
"""Default limit of the relative error of a product. NVFP4 gives bell-shaped operands 0.13, and MXFP8 0.04; layers above
it have outliers that ordinary ones lack."""

COLUMNS = ["layer", "format", "rel_error", "rel_error_db", "product", "operand", "tensor", "harm", "rank", "flops"]
COLUMNS += ["flops_frac"]


def layer_errors(run: Run, recipes: Sequence[Recipe]) -> pd.DataFrame:
    """One row per linear layer and recipe, over all sampled steps; by recipe and then by harm, the most harmful first.

    Columns: layer (the module), format (the recipe); rel_error and rel_error_db of its worst product; product
    (`forward`, `input_grad`, `weight_grad`), operand (`weight`, `activation`, `output_grad`) and tensor (its name in
    the run): that product and the worse of its two operands; harm, and rank by it (1: the most harmful); flops of the
    three products of a call, or of the traced step, and flops_frac of all such (0–1; NaN in a run that did not record
    sizes). Layers of which no product was recorded are left out. Raises `RunError` as `quantized` does.
    """
    operands, products = _products(run, recipes)
    if operands.empty:
        return pd.DataFrame(columns=COLUMNS)
    worst = _worst(products)
    sides = operands.loc[operands.groupby(["layer", "format", "product"], sort=False)["rel_error"].idxmax()]
    sides = sides.rename(columns={"kind": "operand", "name": "tensor"})
    frame = worst.merge(sides[["layer", "format", "product", "operand", "tensor"]], on=["layer", "format", "product"])
    sizes = _sizes(run, operands)
    forward = operands[operands["product"] == "forward"].set_index(["layer", "format", "kind"])["rel_error"]
    changes = [
        forward.reindex(pd.MultiIndex.from_frame(frame[["layer", "format"]].assign(kind=kind))).to_numpy()
        * sizes[effect].reindex(frame["layer"]).to_numpy()
        for kind, effect in (("activation", "input_effect"), ("weight", "weight_effect"))
    ]
    frame["harm"] = np.hypot(*changes)
    flops, total = _traced_flops(run, sizes["flops"])
    frame["flops"] = flops.reindex(frame["layer"]).to_numpy()
    frame["flops_frac"] = frame["flops"] / total
    frame["rank"] = frame.groupby("format")["harm"].rank(ascending=False, method="first").astype("Int64")
    order = {recipe.name: i for i, recipe in enumerate(recipes)}
    frame = frame.sort_values(["format", "rank"], key=lambda c: c.map(order) if c.name == "format" else c)
    return frame[COLUMNS].reset_index(drop=True)


def worst_products(run: Run, recipes: Sequence[Recipe], step: int | None = None) -> pd.DataFrame:
    """The worst product of each linear layer in each recipe over all sampled steps, or at `step`: layer, product,
    format, rel_error, rel_error_db. Raises `RunError` as `quantized` does."""
    return _worst(_products(run, recipes, step)[1])


def _products(run: Run, recipes: Sequence[Recipe], step: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The operands of each linear layer, and the errors of their products."""
    operands = _by_layer(run, quantized(run, recipes, step=step))
    of_layer = operands["layer"].where(operands["kind"] != "weight", operands["layer"] + ".weight")
    return operands, product_errors(operands.assign(name=of_layer))


def _worst(products: pd.DataFrame) -> pd.DataFrame:
    worst = products.loc[products.groupby(["name", "format"], sort=False)["rel_error"].idxmax()]
    return worst.rename(columns={"name": "layer"})


def by_layer(errors: pd.DataFrame) -> pd.DataFrame:
    """`layer_errors` with one row per layer, in the order of their highest harm among recipes, and per recipe the
    column of its `rel_error_db`."""
    wide = errors.pivot(index="layer", columns="format", values="rel_error_db")
    order = errors.groupby("layer", sort=False)["rank"].min().sort_values(kind="stable").index
    return wide.reindex(order)[list(dict.fromkeys(errors["format"]))]


@dataclass(frozen=True)
class Choice:
    """Which layers go to a recipe under a limit."""

    recipe: Recipe
    limit: float
    """Of the relative error of a product."""
    go: tuple[str, ...]
    """Layers whose products all stay below the limit."""
    stay: tuple[str, ...]
    """Layers that stay in BF16, the most harmful first."""
    flops_frac: float
    """Share (0–1) of GEMM FLOPs that go to the recipe; NaN if not recorded."""


def choose(errors: pd.DataFrame, recipe: Recipe, limit: float = LIMIT) -> Choice:
    """The layers that can go to a recipe, from `layer_errors`."""
    rows = errors[errors["format"] == recipe.name]
    goes = rows["rel_error"] <= limit
    share = float(rows.loc[goes, "flops_frac"].sum(min_count=1)) if goes.any() else 0.0
    return Choice(recipe, limit, tuple(rows.loc[goes, "layer"]), tuple(rows.loc[~goes, "layer"]), share)


def parse_limit(text: str) -> float:
    """A limit as typed: a relative error such as `0.1`, or `20dB`, which is the same. Raises `RunError`."""
    number = text.strip().lower()
    by_db = number.endswith("db")
    try:
        value = float(number.removesuffix("db"))
    except ValueError:
        value = math.nan
    limit = 10 ** (-value / 20) if by_db and math.isfinite(value) else value
    if not 0 < limit < math.inf or (by_db and value <= 0):
        raise RunError(
            f"limit={text!r} is not a valid error; give a relative error above 0, such as 0.1, or decibels: 20dB"
        )
    return limit


def in_db(error: float) -> float:
    """A relative error in dB: the larger, the better."""
    return -20 * math.log10(error) if error > 0 else math.inf


def _by_layer(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Operands with their `layer`; a weight that several layers share once for each."""
    modules = set(rows.loc[rows["kind"] != "weight", "name"])
    owners: dict[str, list[str]] = {}
    tied = run.head.model.get("tied")
    for alias, name in tied.items() if isinstance(tied, dict) else ():
        owners.setdefault(str(name), []).append(str(alias))

    def layers(name: str, kind: str) -> list[str]:
        if kind != "weight":
            return [name]
        of_name = [parameter.rpartition(".")[0] for parameter in (name, *owners.get(name, ()))]
        return [layer for layer in of_name if layer in modules] or of_name[:1]

    layers_of_rows = [layers(name, kind) for name, kind in zip(rows["name"], rows["kind"], strict=True)]
    return rows.assign(layer=pd.Series(layers_of_rows, index=rows.index, dtype=object)).explode(
        "layer", ignore_index=True
    )


def _sizes(run: Run, operands: pd.DataFrame) -> pd.DataFrame:
    """By layer, of a sampled step on average: `flops` of its three products; and `input_effect` and `weight_effect`, by
    how much the loss changes if its input or weight has a relative error of 1, independent of the values."""
    measured = run.blocks.drop_duplicates(["step", "name", "kind"]).astype({"numel": float})
    loss_scales = (
        run.steps.drop_duplicates("step").set_index("step")["loss_scale"].reindex(measured["step"]).fillna(1.0)
    )
    scaled = measured["kind"] == "output_grad"
    measured["sq_sum"] /= np.where(scaled, loss_scales.to_numpy() ** 2, 1.0)
    means = measured.groupby(["name", "kind"])[["numel", "nonzero", "sq_sum"]].mean()
    first = operands.drop_duplicates(["layer", "kind"])
    of_operand = means.reindex(pd.MultiIndex.from_frame(first[["name", "kind"]])).reset_index(drop=True)
    of_operand[["layer", "kind"]] = first[["layer", "kind"]].to_numpy()
    kinds = list(OPERANDS)
    numel, nonzero, squares = (
        of_operand.pivot(index="layer", columns="kind", values=column).reindex(columns=kinds)
        for column in ("numel", "nonzero", "sq_sum")
    )
    # numel are T·K, K·N and T·N, so the root of their product is T·K·N.
    flops = 3 * 2 * np.sqrt(numel.prod(axis=1, skipna=False))
    counted = numel.fillna(nonzero)
    inputs = np.sqrt(counted["activation"] * counted["weight"] / counted["output_grad"])
    weights = first[first["kind"] == "weight"].set_index("layer")["name"].reindex(counted.index)
    output_grads = _gradient_norms(run, "output_grad").reindex(counted.index)
    output_grads = output_grads.fillna(np.sqrt(squares["output_grad"]))  # as recorded with the blocks
    # Each element of the input's gradient is a sum over outputs; its norm is that of independent terms.
    rms = np.sqrt(squares / counted)
    input_grads = output_grads * np.sqrt(inputs) * rms["weight"]
    weight_grads = _gradient_norms(run, "weight_grad").reindex(weights).set_axis(weights.index)
    weight_grads = weight_grads.fillna(output_grads * np.sqrt(inputs) * rms["activation"])
    return pd.DataFrame(
        {
            "flops": flops,
            "input_effect": input_grads * rms["activation"],
            "weight_effect": weight_grads * rms["weight"],
        }
    )


def _gradient_norms(run: Run, kind: str) -> pd.Series:
    """Norm of each gradient by name, without the loss scale: root mean square over the sampled steps of the second half
    of the training, or over all where that has none."""
    steps = run.steps["step"]
    rows = run.tensors(kind=kind, steps=(steps.max() / 2, steps.max())) if len(steps) else run.tensors(kind=kind)
    rows = rows if len(rows) else run.tensors(kind=kind)
    squares = (rows["rms"] / rows["loss_scale"]) ** 2 * rows["numel"]
    norms: pd.Series = squares.groupby(rows["name"]).mean() ** 0.5
    return norms


def _traced_flops(run: Run, flops: pd.Series) -> tuple[pd.Series, float]:
    """FLOPs by layer and of all GEMMs: of a traced step, which has attention and convolutions too, if the run has one
    and it shows these layers; else of the linear layers."""
    ops = run.ops
    if len(ops) and ops["flops"].notna().any():
        traced = ops[ops["step"] == ops["step"].min()]
        by_module = traced.groupby("module")["flops"].sum()
        if set(flops.index) <= set(by_module[by_module > 0].index):
            return by_module, float(traced["flops"].sum())
    return flops, float(flops.sum(skipna=False))
