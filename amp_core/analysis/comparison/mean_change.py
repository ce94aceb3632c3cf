"""Differences of means over steps from those of a baseline, each with the baseline's noise.

>>> mean_changes(run_values, [fp32_values])          # arrays of [tensor, step]
>>> update_changes([fp32, bf16])                     # name, baseline, value, change, noise, outside
>>> layer_error_changes([fp32, bf16], recipes)       # layer, format, and the same columns
"""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.parity import MIN_SEEDS, NOISE_STDS
from amp_core.analysis.numerics.layer_choice import worst_products
from amp_core.analysis.numerics.update_losses import update_losses_over_steps
from amp_core.quantization import Recipe
from amp_core.store.run import Run

MAX_STEPS = 8
"""Recorded steps whose block statistics are compared, evenly spread: each takes as long as a page of predictions."""
COLUMNS = ("baseline", "value", "change", "noise", "outside")


def mean_changes(own: np.ndarray, bases: Sequence[np.ndarray], axis: int = -1) -> dict[str, np.ndarray]:
    """How the means of `own` over its steps (along `axis`) differ from those of a baseline, `bases[0]`, and its repeats
    with other seeds.

    Returns baseline, value and change (value - baseline); noise: `NOISE_STDS` standard deviations of the baseline over
    seeds, or with fewer than `MIN_SEEDS` seeds as many standard errors of the difference of the two means over their
    steps, NaN with a single step; outside: whether the change exceeds the noise, or without noise, whether there is
    one. NaN stands for a step that was not recorded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means of rows without a value, spreads of a single one
        value, means = np.nanmean(own, axis=axis), [np.nanmean(base, axis=axis) for base in bases]
        if len(bases) >= MIN_SEEDS:
            baseline, noise = np.nanmean(means, axis=0), NOISE_STDS * np.nanstd(means, axis=0, ddof=1)
        else:
            baseline = means[0]
            squares = [np.nanvar(one, axis=axis, ddof=1) / np.isfinite(one).sum(axis=axis) for one in (bases[0], own)]
            noise = NOISE_STDS * np.sqrt(sum(squares))
    change = value - baseline
    outside = np.abs(change) > np.nan_to_num(noise)
    return dict(zip(COLUMNS, (baseline, value, change, noise, outside), strict=True))


def update_changes(runs: Sequence[Run], column: str = "lost_mass_frac") -> pd.DataFrame:
    """How a share of the updates (`lost_mass_frac`, `unchanged_frac` or `lost_decay_frac`) in the last of `runs`
    differs from that of the baseline: the first run, and its repeats with other seeds between them.

    One row per tensor that both compared, the largest change first: name, and the columns of `mean_changes` over the
    steps that both compared (shares 0–1). Empty if there are none.
    """
    return _changes([_update_shares(run, column) for run in runs], ["name"])


def layer_error_changes(runs: Sequence[Run], recipes: Sequence[Recipe]) -> pd.DataFrame:
    """How the predicted error of each linear layer's worst product in the last of `runs` differs from that of the
    baseline: the first run, and its repeats with other seeds between them.

    One row per layer and recipe that both recorded, the largest change first: layer, format (the recipe), and the
    columns of `mean_changes` over the steps that both recorded, of at most `MAX_STEPS` each (relative errors). Raises
    `RunError` as `quantized` does.
    """
    return _changes([_errors_by_step(run, recipes) for run in runs], ["layer", "format"])


def _update_shares(run: Run, column: str) -> pd.DataFrame:
    frame = update_losses_over_steps(run)
    return frame.pivot(index=["name"], columns="step", values=column)


def _errors_by_step(run: Run, recipes: Sequence[Recipe]) -> pd.DataFrame:
    recorded = sorted(run.blocks["step"].unique().tolist())
    places = np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), MAX_STEPS)).round().astype(int))
    parts = [
        worst_products(run, recipes, step)[["layer", "format", "rel_error"]].assign(step=step)
        for step in [recorded[i] for i in places] or [None]
    ]
    return pd.concat(parts).pivot(index=["layer", "format"], columns="step", values="rel_error")


def _changes(frames: Iterable[pd.DataFrame], names: list[str]) -> pd.DataFrame:
    """The changes of the rows and steps that the first and the last frame share."""
    *bases, own = frames
    rows = own.dropna(how="all").index.intersection(bases[0].dropna(how="all").index, sort=False)
    steps = own.columns.intersection(bases[0].columns)
    rows = rows if len(steps) else rows[:0]
    values = [frame.reindex(index=rows, columns=steps).to_numpy(dtype=float) for frame in (*bases, own)]
    frame = pd.DataFrame(mean_changes(values[-1], values[:-1]), index=rows).rename_axis(names).reset_index()
    order = frame["change"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)
