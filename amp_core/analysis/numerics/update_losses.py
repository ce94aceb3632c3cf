"""What is lost to rounding in the updates of each parameter, over a whole run.

>>> update_losses(run)[["name", "lost_mass_frac", "still_since"]]
>>> update_summary([run_bf16, run_fp32_masters])[["run", "cure", "lost_mass_frac"]]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.downsample import merged_steps
from amp_core.analysis.run_labels import unique_labels
from amp_core.store.run import Run

MIN_LOST_FRAC = 0.5
"""Share of the updates' mass, of weight decay or of an average's moves from which most of it is lost."""

COLUMNS = {
    "name": "str",
    "optimizer": "int64",
    "dtype": "str",
    "cure": "str",
    "steps": "int64",
    "first": "int64",
    "last": "int64",
    "numel": "int64",
    "lost_mass_frac": "float64",
    "unchanged_frac": "float64",
    "lost_decay_frac": "float64",
    "update_ratio": "float64",
    "still_since": "Int64",
}


def update_losses(run: Run) -> pd.DataFrame:
    """One row per parameter and optimizer, those that lose most first: medians over the compared steps.

    `steps`, `first` and `last` are the compared steps; `update_ratio` is the root mean square of the update over that
    of the weight. `still_since` is the first compared step from which on at least half of the updates' mass was lost in
    each; null where nothing is lost, or where a cure is at work: then what is lost is rounding noise.
    """
    return run.cached_frame(["updates"], _update_losses)


def _update_losses(run: Run) -> pd.DataFrame:
    frame = run.updates
    frame = frame[frame["lost_mass_frac"].notna()]
    if frame.empty:
        return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in COLUMNS.items()})
    frame = frame.assign(
        cure=frame["cure"].fillna(""),
        update_ratio=frame["update_rms"] / frame["weight_rms"].where(frame["weight_rms"] > 0),
    )
    grouped = frame.groupby(["name", "optimizer"], sort=False)
    losses = grouped.agg(
        dtype=("dtype", "last"),
        cure=("cure", "last"),
        steps=("step", "nunique"),
        first=("step", "min"),
        last=("step", "max"),
        numel=("numel", "last"),
        lost_mass_frac=("lost_mass_frac", "median"),
        unchanged_frac=("unchanged_frac", "median"),
        lost_decay_frac=("lost_decay_frac", "median"),
        update_ratio=("update_ratio", "median"),
    ).reset_index()
    still = pd.DataFrame(
        [(*key, _still_since(rows)) for key, rows in grouped], columns=["name", "optimizer", "still_since"]
    )
    losses = losses.merge(still.astype({"still_since": "Int64"}), on=["name", "optimizer"])
    return losses.sort_values("lost_mass_frac", ascending=False, ignore_index=True, kind="stable")[list(COLUMNS)]


def update_losses_over_steps(run: Run, max_steps: int = 200) -> pd.DataFrame:
    """One row per parameter and compared step, in recorded order, over all ranks and optimizers: name; step,
    until (the first and the last compared step that the row covers); lost_mass_frac, unchanged_frac, lost_decay_frac.

    With more than `max_steps` compared steps, neighbouring ones are merged by the maximum of each share.
    """
    frame = run.updates
    columns = ["lost_mass_frac", "unchanged_frac", "lost_decay_frac"]
    frame = frame[frame["lost_mass_frac"].notna()]
    frame = frame.assign(**merged_steps(frame["step"], max_steps))
    return frame.groupby(["name", "step", "until"], sort=False)[columns].max().reset_index()


def average_losses(run: Run) -> pd.DataFrame:
    """One row per averaged 16-bit copy of a parameter (EMA, SWA), those with most unchanged elements first: name,
    dtype, decay, steps, unchanged_frac, lost_mass_frac (medians over the compared steps)."""
    frame = run.averages
    frame = frame[frame["unchanged_frac"].notna()]
    losses = frame.groupby("name", sort=False).agg(
        dtype=("dtype", "last"),
        decay=("decay", "median"),
        steps=("step", "nunique"),
        unchanged_frac=("unchanged_frac", "median"),
        lost_mass_frac=("lost_mass_frac", "median"),
    )
    return losses.reset_index().sort_values("unchanged_frac", ascending=False, ignore_index=True, kind="stable")


def update_summary(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run: run (label), dtype (of the weights), cure, tensors (that were compared), still (of these, the
    ones that lose at least half of their updates without a cure), still_since (first step of the first of them),
    lost_mass_frac, unchanged_frac, lost_decay_frac (means over all weights: of tensors by their elements).

    Of a run whose updates were not compared, the dtype of most of its tensors alone is known.
    """
    rows = [{"run": label, **_summary(run)} for label, run in zip(unique_labels(runs), runs, strict=True)]
    return pd.DataFrame(rows).astype({"still_since": "Int64"})


def _summary(run: Run) -> dict[str, Any]:
    losses = update_losses(run)
    if losses.empty:
        by_dtype = run.head.model.get("tensors_by_dtype") or {}
        unknown = dict.fromkeys(("lost_mass_frac", "unchanged_frac", "lost_decay_frac"), np.nan)
        dtype = max(by_dtype, key=by_dtype.__getitem__, default="")
        return {"dtype": dtype, "cure": "", "tensors": 0, "still": 0, "still_since": None, **unknown}
    still = losses[losses["still_since"].notna()]
    return {
        "dtype": ", ".join(losses["dtype"].unique()),
        "cure": ", ".join(cure for cure in losses["cure"].unique() if cure),
        "tensors": len(losses),
        "still": len(still),
        "still_since": still["still_since"].min() if len(still) else None,
        **{name: _mean(losses, name) for name in ("lost_mass_frac", "unchanged_frac", "lost_decay_frac")},
    }


def _mean(losses: pd.DataFrame, column: str) -> float:
    known = losses[losses[column].notna()]
    return float(np.average(known[column], weights=known["numel"])) if len(known) else np.nan


def _still_since(rows: pd.DataFrame) -> int | None:
    rows = rows.sort_values("step")
    moving = (rows["lost_mass_frac"] < MIN_LOST_FRAC) | (rows["cure"] != "")
    since = rows["step"][~moving[::-1].cummax()[::-1]]
    return int(since.iloc[0]) if len(since) else None
