"""Many tensors as few rows: the module tree folded at a depth, and names searched.

>>> folded_name("blocks.0.attn.qkv.weight", 2)
'blocks.0.*'
>>> fold_shares(exponent_shares(run, "output_grad"), 2)  # name, exponent, share, count
>>> fold_classes(class_shares(run, "output_grad"), 2)  # as class_shares, with `tensors`: how many are in a row
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

FEW = 80
"""So many rows can be read on one page; with more the tree is folded at first."""
TOO_FEW = 8
"""With fewer rows than this a folded tree tells nothing: it is unfolded once more, if `MANY` do not exceed it."""
MANY = 400


def folded_name(name: str, depth: int) -> str:
    """The name's first `depth` parts, with `.*` for what they leave out."""
    parts = name.split(".")
    return name if len(parts) <= depth else ".".join([*parts[:depth], "*"])


def deepest(names: Iterable[str]) -> int:
    """The number of parts of the longest path: at this depth nothing is folded."""
    return max((name.count(".") + 1 for name in names), default=1)


def readable_depth(names: Sequence[str], most: int = FEW) -> int:
    """The greatest depth at which at most `most` rows are left, or one more where those would be too few to tell
    anything; 1 where even that gives more."""
    rows = {depth: len({folded_name(name, depth) for name in names}) for depth in range(1, deepest(names) + 1)}
    depth = max((depth for depth, number in rows.items() if number <= most), default=1)
    return depth + 1 if rows.get(depth, 0) < TOO_FEW and rows.get(depth + 1, MANY + 1) <= MANY else depth


def matching(names: Iterable[str], asked: str) -> list[str]:
    """Names in which every word of `asked` occurs, in any case; all where nothing is asked."""
    words = asked.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)]


def fold_shares(shares: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`exponent_shares` with the tensors below each module at `depth` added up."""
    folded = shares.assign(name=[folded_name(str(name), depth) for name in shares["name"]])
    counts = folded.groupby(["name", "exponent"], sort=False)["count"].sum().reset_index()
    counts["share"] = counts["count"] / counts.groupby("name", sort=False)["count"].transform("sum")
    return counts[["name", "exponent", "share", "count"]]


def fold_classes(classes: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`class_shares` with the tensors below each module at `depth` taken together, each weighed by its elements; dtype
    is `mixed` where they differ; `tensors` counts them."""
    fractions = [column for column in classes.columns if column.endswith("_frac")]
    frame = classes.assign(name=[folded_name(str(name), depth) for name in classes["name"]], tensors=1)
    finite = frame[["zero_frac", "subnormal_frac", "normal_frac"]].sum(axis=1) * frame["counted"]
    frame = frame.assign(finite=finite, squares=frame["rms"] ** 2 * finite)
    frame[fractions] = frame[fractions].mul(frame["counted"], axis=0)
    rows = frame.groupby("name", sort=False)
    summed = [*fractions, "counted", "numel", "tensors", "squares", "finite"]
    together = rows[summed].sum(min_count=1)
    together[fractions] = together[fractions].div(together["counted"].where(together["counted"] > 0), axis=0)
    together["rms"] = np.sqrt(together["squares"] / together["finite"].where(together["finite"] > 0))
    together["dtype"] = rows["dtype"].agg(lambda dtypes: dtypes.iloc[0] if dtypes.nunique() == 1 else "mixed")
    together["absmax"] = rows["absmax"].max()
    together["exp_low"], together["exp_high"] = rows["exp_low"].min(), rows["exp_high"].max()
    return together.reset_index()[[*classes.columns, "tensors"]]
