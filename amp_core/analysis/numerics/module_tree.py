"""Fold the module tree at a depth, so that many tensors become few rows, and search names.

>>> folded_name("blocks.0.attn.qkv.weight", 2)
'blocks.0.*'
>>> fold_shares(exponent_shares(run, "output_grad"), 2)  # name, exponent, share, count
>>> fold_classes(class_shares(run, "output_grad"), 2)  # as class_shares, with `tensors`: how many are in a row
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

MAX_ROWS = 80
"""Most rows that are readable on a page; with more the tree is folded initially."""
MIN_ROWS = 8
"""A folded tree with fewer rows is unfolded by one level, unless that gives more than `MAX_UNFOLDED_ROWS`."""
MAX_UNFOLDED_ROWS = 400


def folded_name(name: str, depth: int) -> str:
    """The name's first `depth` parts, with `.*` for the rest."""
    parts = name.split(".")
    return name if len(parts) <= depth else ".".join([*parts[:depth], "*"])


def deepest(names: Iterable[str]) -> int:
    """The number of parts of the longest path: at this depth nothing is folded."""
    return max((name.count(".") + 1 for name in names), default=1)


def readable_depth(names: Sequence[str], max_rows: int = MAX_ROWS) -> int:
    """The greatest depth with at most `max_rows` rows, or one more if those are fewer than `MIN_ROWS`;
    1 if even that gives more."""
    rows = {depth: len({folded_name(name, depth) for name in names}) for depth in range(1, deepest(names) + 1)}
    depth = max((depth for depth, number in rows.items() if number <= max_rows), default=1)
    return (
        depth + 1
        if rows.get(depth, 0) < MIN_ROWS and rows.get(depth + 1, MAX_UNFOLDED_ROWS + 1) <= MAX_UNFOLDED_ROWS
        else depth
    )


def matching_names(names: Iterable[str], query: str) -> list[str]:
    """Names that contain every word of `query`, in any case; all names for an empty query."""
    words = query.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)]


def fold_shares(shares: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`exponent_shares` with the tensors below each module at `depth` summed."""
    folded = shares.assign(name=[folded_name(str(name), depth) for name in shares["name"]])
    counts = folded.groupby(["name", "exponent"], sort=False)["count"].sum().reset_index()
    counts["share"] = counts["count"] / counts.groupby("name", sort=False)["count"].transform("sum")
    return counts[["name", "exponent", "share", "count"]]


def fold_classes(classes: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`class_shares` with the tensors below each module at `depth` combined, each weighted by its elements; dtype
    is `mixed` where they differ; `tensors` counts them."""
    fractions = [column for column in classes.columns if column.endswith("_frac")]
    frame = classes.assign(name=[folded_name(str(name), depth) for name in classes["name"]], tensors=1)
    finite = frame[["zero_frac", "subnormal_frac", "normal_frac"]].sum(axis=1) * frame["counted"]
    frame = frame.assign(finite=finite, squares=frame["rms"] ** 2 * finite)
    frame[fractions] = frame[fractions].mul(frame["counted"], axis=0)
    rows = frame.groupby("name", sort=False)
    summed = [*fractions, "counted", "numel", "tensors", "squares", "finite"]
    totals = rows[summed].sum(min_count=1)
    totals[fractions] = totals[fractions].div(totals["counted"].where(totals["counted"] > 0), axis=0)
    totals["rms"] = np.sqrt(totals["squares"] / totals["finite"].where(totals["finite"] > 0))
    totals["dtype"] = rows["dtype"].agg(lambda dtypes: dtypes.iloc[0] if dtypes.nunique() == 1 else "mixed")
    totals["absmax"] = rows["absmax"].max()
    totals["exp_low"], totals["exp_high"] = rows["exp_low"].min(), rows["exp_high"].max()
    return totals.reset_index()[[*classes.columns, "tensors"]]
