"""What rounding takes from the updates of each parameter, over a whole run.

>>> update_losses(run)[["name", "lost_mass_frac", "still_since"]]
"""

import pandas as pd

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


def _still_since(rows: pd.DataFrame) -> int | None:
    rows = rows.sort_values("step")
    moving = (rows["lost_mass_frac"] < MIN_LOST_FRAC) | (rows["cure"] != "")
    since = rows["step"][~moving[::-1].cummax()[::-1]]
    return int(since.iloc[0]) if len(since) else None
