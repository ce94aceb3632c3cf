"""Predictions from recorded counts compared with audits of the same batch: `python -m tests.benchmarks.predictions
[MODEL …]`.

For each model, recorded in FP16 and in FP32: the worst difference between the predicted and the audited share of lost
elements over all weight matrices and the scales 2^-4 … 2^16, both where the source was healthy and overall; and the
safe window compared with audits at every power of two, which give the scales at which all cosines are at least 0.999
and nothing is infinite. `tests/analysis/numerics/test_predictions.py` asserts the bounds of these numbers.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from amp_core.analysis import predicted_and_audited, safe_window, what_if
from amp_core.analysis.numerics.safe_window import MIN_COSINE
from amp_core.analysis.numerics.what_if import MAX_SOURCE_UNDERFLOW_FRAC
from tests.analysis.numerics.test_predictions import MODELS, STEPS, audited_at, matrices, recorded

TRIED = [2.0**k for k in range(-10, 31)]


def row(name: str, precision: str, folder: Path) -> str:
    """One line of the table."""
    run, last = recorded(folder / "run", name, precision)
    beside = predicted_and_audited(run)
    source = what_if(run, ("fp16",), range(-4, 17), kinds=("weight_grad",), step=STEPS - 1)
    source = source.set_index(["name", "log2_scale"])["source_underflow_frac"]
    keys = pd.MultiIndex.from_arrays([beside["name"], np.log2(beside["loss_scale"]).astype(int)])
    healthy = source.reindex(keys).to_numpy() <= MAX_SOURCE_UNDERFLOW_FRAC
    judged = (matrices(run, beside["name"]) & beside["audited_frac"].notna()).to_numpy()
    error = (beside["predicted_frac"] - beside["audited_frac"]).abs().to_numpy()
    window = safe_window(run)
    good = [scale for scale, rows in audited_at(folder / "audits", last, TRIED).items() if passes(run, rows)]
    lowest, highest = (f"2^{int(np.log2(s))}" for s in (window.lowest, window.highest))
    audited = f"2^{int(np.log2(min(good)))} to 2^{int(np.log2(max(good)))}" if good else "none"
    share = (judged & healthy).sum() / judged.sum()
    return (
        f"| {name} | {precision} | {error[judged & healthy].max():.4f} | {share:.0%} | {error[judged].max():.4f} "
        f"| {lowest} to {highest} | {audited} |"
    )


def passes(run, rows: pd.DataFrame) -> bool:
    """Whether every weight matrix kept its direction, and nothing overflowed."""
    judged = rows[matrices(run, rows["name"]) & (rows["nonzero"] > 0)]
    return bool((rows["nonfinite"] == 0).all() and judged["cosine"].min() >= MIN_COSINE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help=", ".join(MODELS))
    torch.set_num_threads(1)
    print(
        "| model | recorded in | worst error, healthy source | share of that | worst error | window | audited limits |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in parser.parse_args().models:
        for recipe in ("fp16", "fp32"):
            with tempfile.TemporaryDirectory() as made:
                print(row(model, recipe, Path(made)), flush=True)
