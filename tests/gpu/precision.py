"""Operators of a traced step are recorded with the dtypes that the device runs them in."""

from pathlib import Path

from amp_core import load_run
from amp_core.analysis import precision_map
from tests.gpu.checks import Place, Row


def traced(place: Place, run: Path, recipe: str) -> Row:
    """The traced step of a run of GPT: its linear layers in the recipe's format by the device's own list, each
    product of backward with its module, and LayerNorm according to the list.
    """
    ops = load_run(run).ops
    view = precision_map(load_run(run))
    products = ops[ops["flops"].notna()]
    linear = products[products["op"].isin(("aten::mm", "aten::addmm"))]
    ran = {"fp16": "float16", "bf16": "bfloat16"}.get(recipe, "float32")
    norms = ops[ops["op"] == "aten::native_layer_norm"]
    policies = set(norms["policy"].dropna())
    expected = set() if recipe == "fp32" else {"fp32" if place.cuda else "none"}
    elsewhere = ops["device"].str.partition(":")[0] != place.device.type
    wrong = {
        "linear layers in another dtype": int((linear["in_dtypes"] != ran).sum()),
        "products without a module": int(products["module"].isna().sum()),
        "policies of LayerNorm": len(policies ^ expected),
        # An optimizer that is not fused counts its steps in tensors on the CPU.
        "on another device": int((elsewhere & (ops["phase"] != "optimizer")).sum()),
        "phases missing": 3 - ops["phase"].nunique(),
    }
    mistakes = {name: count for name, count in wrong.items() if count}
    shares = ", ".join(f"{share:.1%} {name}" for name, share in view.matrix_frac.items())
    summary = f"{view.calls:,} operators, GEMM/conv {shares}, {int(view.casts['count'].sum()):,} casts"
    return Row(
        f"operators of a traced step, {recipe}",
        "dtypes, modules and policies are those of the device",
        f"{summary}; wrong: {mistakes}" if mistakes else summary,
        "FAIL" if mistakes else "pass",
        {"wrong": mistakes, "matrix": view.matrix_frac},
    )
