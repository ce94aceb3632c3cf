"""Data of charts over several recipes: the noise band of the baseline, and gradient agreement by layer.

>>> noise_band([fp32, fp32_seed1, fp32_seed2], x="step")  # step, low, middle, high
>>> gradient_agreement([run_bf16, run_fp16])  # run, precision, name, rel_error, cosine, lost_mass_frac, audits
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.loss_curves import loss_curves
from amp_core.analysis.comparison.parity import MIN_SEEDS, NOISE_STDS
from amp_core.analysis.comparison.repeats import repeats
from amp_core.analysis.numerics.audits import own_audits
from amp_core.analysis.run_labels import unique_labels
from amp_core.store.run import Run

_GRID_POINTS = 400


def first_runs(runs: Sequence[Run]) -> list[Run]:
    """The first run of each recipe, for charts with one bar per recipe."""
    return [runs[group.places[0]] for group in repeats(runs, unique_labels(runs))]


def noise_band(runs: Sequence[Run], x: Literal["step", "samples", "time_s"] = "step") -> pd.DataFrame:
    """The noise band of the first recipe over seeds: mean of its smoothed losses ± `NOISE_STDS` standard deviations.

    Columns: `x`, low, middle, high, over the common part of its repeats. Empty with fewer than `MIN_SEEDS` seeds.
    """
    columns = [x, "low", "middle", "high"]
    none = pd.DataFrame({c: pd.Series(dtype=float) for c in columns})
    if not runs:
        return none
    own = [runs[i] for i in repeats(runs, unique_labels(runs))[0].places]
    curves = [c.dropna(subset=["smooth"]) for _, c in loss_curves(own, x).groupby("run", sort=False)]
    if len(own) < MIN_SEEDS or len(curves) < len(own) or any(len(c) < 2 for c in curves):
        return none
    begin, end = max(float(c[x].min()) for c in curves), min(float(c[x].max()) for c in curves)
    grid = np.linspace(begin, end, _GRID_POINTS)
    smooth = np.array([np.interp(grid, c[x].to_numpy(dtype=float), c["smooth"].to_numpy()) for c in curves])
    middle, spread = smooth.mean(axis=0), NOISE_STDS * smooth.std(axis=0, ddof=1)
    return pd.DataFrame({x: grid, "low": middle - spread, "middle": middle, "high": middle + spread})


def gradient_agreement(runs: Sequence[Run]) -> pd.DataFrame:
    """How well each layer's gradient agrees with its FP32 replay, from audits; medians over audited steps.

    One row per run and tensor, in the model's order: run (label), precision (of the audit), name, rel_error (norm
    of the difference over that of FP32), cosine, lost_mass_frac, audits (how many). Replays in other recipes
    or at other loss scales than the run's own do not count. Empty if no run was audited.
    """
    parts = []
    for label, run in zip(unique_labels(runs), runs, strict=True):
        audits = own_audits(run)
        if audits.empty:
            continue
        by_name = audits.groupby("name", sort=False)
        part = by_name[["rel_error", "cosine", "lost_mass_frac"]].median()
        part["audits"] = by_name.size()
        part["precision"] = by_name["precision"].first()
        parts.append(part.reset_index().assign(run=label))
    columns = ["run", "precision", "name", "rel_error", "cosine", "lost_mass_frac", "audits"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
