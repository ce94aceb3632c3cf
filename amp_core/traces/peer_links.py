"""Copies between devices whose links are not equally fast.

>>> peer_links({(0, 1): (4e8, 4520.0), (0, 2): (4e8, 53250.0)})
PeerLinks(source=0, to=2, us=53250.0, bytes=400000000.0, gb_per_s=7.51, best_to=1, best_gb_per_s=88.5, …)
"""

from collections.abc import Mapping
from dataclasses import dataclass

MIN_RATE_RATIO = 3.0
"""Rate of the fastest pair of devices over that of the pair that takes longest from which the link is what is slow."""


@dataclass(frozen=True)
class PeerLinks:
    """The pair of devices whose copies take longest, and the fastest pair from the same device."""

    source: int
    to: int
    us: float
    bytes: float
    gb_per_s: float
    best_to: int
    best_gb_per_s: float
    next_us: float
    """What the pair takes that takes longest but for this one: beside it, nothing ends before that."""


def peer_links(copies: Mapping[tuple[int, int], tuple[float, float]]) -> PeerLinks | None:
    """The slow link among copies, given as bytes and microseconds by the numbers of both devices; None where all are
    about as fast, or only one is used."""
    rates = {pair: moved / us / 1e3 for pair, (moved, us) in copies.items() if us > 0 and moved > 0}
    if len(rates) < 2:
        return None
    source, to = slowest = max(rates, key=lambda pair: copies[pair][1])
    best = max((pair for pair in rates if pair[0] == source), key=lambda pair: rates[pair])
    if rates[best] < MIN_RATE_RATIO * rates[slowest]:
        return None
    moved, us = copies[slowest]
    next_us = max(took for pair, (_, took) in copies.items() if pair != slowest)
    return PeerLinks(source, to, us, moved, rates[slowest], best[1], rates[best], next_us)
