"""Between which operators a host is in none while a device waits.

>>> longest_between(events, host, outside_operators(events, host, late))
('aten::reshape and aten::empty', 295000.0)
"""

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.link import Host
from amp_core.traces.loops import outermost_operators

NEW_TENSOR = "torch.tensor"
"""What is told instead of the operators of that function, which reads Python's values outside of them."""
_EMPTY, _TO, _AFTER = "aten::empty", "aten::to", ("aten::lift_fresh", "aten::detach_")
"""Its operators, in this order: it allocates a tensor, fills it, moves it, and hands it over (`lift_fresh` since
torch 1.12)."""


def longest_between(events: TraceEvents, host: Host, spans: times.Intervals) -> tuple[str | None, float]:
    """The two operators, one after the other, between which the longest of `spans` is, and how long, in microseconds;
    `NEW_TENSOR` for those that this function calls. `spans` are in no operator."""
    operators = outermost_operators(events, host)
    low, high = spans
    if len(operators) < 2 or not len(low):
        return None, 0.0
    name = np.asarray(events.spans.name)[operators]
    before = np.searchsorted(np.asarray(events.spans.start)[operators], low, side="right") - 1
    known = (before >= 0) & (before < len(operators) - 1)
    before, us = before[known], (high - low)[known]
    if not len(before):
        return None, 0.0
    empty, to, after = (np.isin(name, [n for n, text in enumerate(events.texts) if text in of])
                        for of in ((_EMPTY,), (_TO,), _AFTER))  # fmt: skip
    begins = np.zeros(len(name) + 1, dtype=bool)
    begins[:-3] = empty[:-2] & to[1:-1] & after[2:]
    in_new = begins[before + 1] | begins[before]
    pair = name[before].astype(np.int64) * len(events.texts) + name[before + 1]
    pairs, which = np.unique(np.where(in_new, -1, pair), return_inverse=True)
    sums = np.bincount(which, us)
    longest = int(pairs[sums.argmax()])
    if longest < 0:
        return NEW_TENSOR, float(sums.max())
    first, second = (events.texts[number] for number in divmod(longest, len(events.texts)))
    return f"{first} and {second}", float(sums.max())
