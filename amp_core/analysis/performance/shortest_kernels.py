"""Which kernels take no longer than it takes to start one: as short as the shortest of a trace, whatever they do.

>>> rows[is_shortest(rows)]["count"].sum()
810.0
"""

import numpy as np
import pandas as pd

SHORTEST_QUANTILE, MAX_OVER_SHORTEST_RATIO = 0.05, 1.3
"""The shortest kernels are told by that quantile of their mean times, and are those up to so many times as long."""
MAX_STARTING_US = 6.0
"""A longer kernel does more than start: in a graph on an AMD GPU the shortest take 4 to 5 µs, launched alone on an
NVIDIA one 1 to 2 µs."""
MIN_SHORTEST, MIN_SHORTEST_NAMES = 100, 10
"""Launches, and names of kernels among them, from which as short ones are no kernels on tensors of one size."""


def is_shortest(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `kernels` have kernels that take as long on average as the shortest do, where many of unlike kinds
    share that length: more or fewer bytes make them no longer or shorter. Where few do, none."""
    mean_us, floor_us = _mean_us(rows), _floor_us(rows)
    shortest = mean_us <= MAX_OVER_SHORTEST_RATIO * floor_us
    of_many = rows["count"][shortest].sum() >= MIN_SHORTEST and rows["name"][shortest].nunique() >= MIN_SHORTEST_NAMES
    return shortest & bool(of_many and floor_us <= MAX_STARTING_US)


def shortest_us(rows: pd.DataFrame) -> float:
    """What the shortest kernels take, microseconds, which no other undercuts; 0 where even these do more than start."""
    floor_us = _floor_us(rows)
    return floor_us if floor_us <= MAX_STARTING_US else 0.0


def _mean_us(rows: pd.DataFrame) -> "pd.Series[float]":
    return rows["total_us"] / rows["count"].clip(lower=1.0)


def _floor_us(rows: pd.DataFrame) -> float:
    """The mean time of the shortest kernels, microseconds; infinite without any."""
    ordered = rows.assign(mean_us=_mean_us(rows)).sort_values("mean_us")
    counts = ordered["count"].cumsum()
    at = int(np.searchsorted(counts.to_numpy(), SHORTEST_QUANTILE * float(ordered["count"].sum())))
    return float(ordered["mean_us"].iloc[at]) if len(ordered) else np.inf
