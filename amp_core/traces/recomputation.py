"""What a trace shows of activation checkpointing: the forward pass that backward computes anew.

>>> recomputation(events, host, linked, launch_windows(windows, linked))
Recomputation(count=24, us=571000.0, frac=0.17)
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import EVALUATE, Host, Ints

_OF_FORWARD = re.compile(
    r"aten::(?:linear|conv[123]d|scaled_dot_product_attention|layer_norm|group_norm|batch_norm|rms_norm|embedding)$"
)
"""Operators that modules call in forward, and that no node of autograd calls: these call the operators within them."""
MIN_KINDS = 2
"""Kinds of such operators within nodes from which it is a forward pass, and no function of the program's own."""
MIN_FRAC = 0.05
"""That share of the time of other work from which it is kept."""


@dataclass(frozen=True)
class Recomputation:
    """Forward operators within backward."""

    count: int
    """Nodes of autograd that compute a part of forward first."""
    us: float
    """The time of that, in kernels, or in a CPU's operators; microseconds, of what was launched in the windows."""
    frac: float
    """Its share of the time of all such work but collectives, which wait for other ranks."""


def recomputation(events: TraceEvents, host: Host, linked: LinkedWork, window: Ints) -> Recomputation | None:
    """The recomputation of a trace; None where it takes little or there is none. `window`: by work, the window in which
    it was launched; -1 outside of all and before the trace, which has no operators to tell what it recomputes."""
    forward = np.array([_OF_FORWARD.match(text) is not None for text in events.texts], dtype=bool)
    if not len(linked) or not forward.any():
        return None
    nodes = np.array([text.startswith(EVALUATE) for text in events.texts], dtype=bool)
    spans = events.spans
    name, start, end = (np.asarray(column) for column in (spans.name, spans.start, spans.end))
    is_node = nodes[name]
    candidates = np.flatnonzero(forward[name] & (np.asarray(spans.kind) == OP))
    node = _node_around(host, is_node, candidates)
    candidates, node = candidates[node >= 0], node[node >= 0]
    if len(np.unique(name[candidates])) < MIN_KINDS:
        return None
    # Between the first and the last of them within a node lies the forward pass alone.
    begins, ends = np.full(len(spans), np.inf), np.full(len(spans), -np.inf)
    np.minimum.at(begins, node, start[candidates])
    np.maximum.at(ends, node, end[candidates])
    counts = window >= 0
    if len(events.work):
        kinds = [classify_kernel(text).category for text in events.texts]
        counts &= np.array([kind not in (*COPIES, "communication") for kind in kinds], dtype=bool)[linked.name]
    known = counts & (linked.op >= 0)
    op = linked.op[known]
    around = _node_around(host, is_node, op)
    inside = (around >= 0) & (start[op] >= begins[around]) & (start[op] < ends[around])
    us = float(linked.own_us[known][inside].sum())
    frac = us / max(float(linked.own_us[counts].sum()), 1e-3)
    return Recomputation(len(np.unique(around[inside])), us, frac) if frac >= MIN_FRAC else None


def _node_around(host: Host, is_node: npt.NDArray[np.bool_], spans: Ints) -> Ints:
    """For each span the innermost node of autograd around it; -1 without one."""
    around = host.parent[spans].astype(np.int64)
    found = np.full(len(spans), -1, dtype=np.int64)
    for _ in range(64):  # operators nest less deeply
        known = around >= 0
        if not known.any():
            break
        hit = known & is_node[np.maximum(around, 0)]
        found[hit] = around[hit]
        around = np.where(known & ~hit, host.parent[np.maximum(around, 0)], -1)
    return found
