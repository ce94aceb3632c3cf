"""A step's work with a share of its matrix products in 8 or 4 bits.

>>> quantized_work(work, "nvfp4", 0.8)["low_frac"].max()
0.8
"""

import pandas as pd

BITS = {"fp8": 8, "nvfp4": 4}
"""Recipes in 8 and 4 bits that are forecast, and the bits of their elements. MXFP8 has the peaks of FP8."""
INPUTS_FRAC = 2 / 3
"""Share of a product's bytes that are its inputs: two matrices of three."""


def quantized_work(work: pd.DataFrame, recipe: str, frac: float) -> pd.DataFrame:
    """`work` under autocast with `frac` (0–1) of the operations of its 16-bit products in the recipe's bits.

    Adds the column `low_frac`, and for each product the quantization of its inputs: operators of their own, which read
    16 bits and write fewer. A compiler may fuse them with what comes before, so this is the slow way.
    """
    product = (work["flops"] > 0) & work["narrow"].astype(bool)
    narrower = BITS[recipe] / 16
    result = work.assign(low_frac=product * frac)
    inputs = work["bytes"] * INPUTS_FRAC * frac
    result["bytes"] = work["bytes"] - (inputs * (1 - narrower)).where(product, 0.0)
    casts = result[product].assign(op="quantize", flops=0.0, narrow=False, low_frac=0.0)
    if "kind" in work:
        casts = casts.assign(kind="copy", transposed=0.0, sm_us=0.0)
    casts["bytes"] = inputs[product] * (1 + narrower)
    casts["count"] = casts["count"] * 2 * frac
    return pd.concat([result, casts], ignore_index=True)
