"""Work of a device, tied to what launched it: one entry per kernel, copy or fill. On a CPU, one per operator.

    >>> tied = tie(kept, host)
    >>> tied.op[i], tied.phase[i], tied.launched_us[i]

A kernel names the call that launched it (`correlation`), and the call happened inside an operator. A captured graph is
launched by one call, which all its kernels name. Kernels that name no call in the trace, as on some versions of ROCm,
are tied to the operator whose `External id` they carry; otherwise only their time is known.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.collect import OP, Kept
from amp_core.traces.link import NOWHERE, Floats, Host, Ints
from amp_core.traces.phases import phases


@dataclass
class Tied:
    """Arrays of one length. -1 is none; `op` and `top` number spans, `module` is an index into `Host.modules`."""

    name: Ints
    start_us: Floats
    end_us: Floats
    own_us: Floats
    """Time of its own: of a kernel all of it, of an operator what no operator inside it took."""
    launched_us: Floats
    device: Ints
    """-1 is the CPU."""
    op: Ints
    top: Ints
    module: Ints
    phase: Ints

    def __len__(self) -> int:
        return len(self.name)


def tie(kept: Kept, host: Host) -> Tied:
    """Work of the devices, or operators of the CPU where there is none."""
    return _tie_work(kept, host) if len(kept.work) else _tie_operators(kept, host)


def _tie_work(kept: Kept, host: Host) -> Tied:
    work, calls = kept.work, kept.calls
    call = _matching(np.asarray(work.correlation), np.asarray(calls.correlation))
    known = call >= 0
    start = np.asarray(work.start)
    op, module, region = (np.full(len(work), fill) for fill in (-1, -1, 0))
    launched = start.copy()
    if len(calls):
        op[known] = host.op_of_call[call[known]]
        module[known] = host.module_of_call[call[known]]
        region[known] = host.region_of_call[call[known]]
        launched[known] = np.asarray(calls.start)[call[known]]
    external = np.asarray(work.external)
    # Some versions write the correlation there as well, and it would name any operator.
    by_id = ~known & (external >= 0) & (external != np.asarray(work.correlation))
    if by_id.any():
        is_op = np.asarray(kept.spans.sort) == OP
        found = _matching(external[by_id], np.where(is_op, np.asarray(kept.spans.external), -1))
        where = np.flatnonzero(by_id)[found >= 0]
        span = found[found >= 0]
        op[where], module[where], region[where] = span, host.module_of_span[span], host.region_of_span[span]
        launched[where] = np.asarray(kept.spans.start)[span]
    # Of what was launched before the trace began nothing is known; its own time would tell the phase of other work.
    phase = phases(host, region, launched)
    phase[~known & (op < 0)] = NOWHERE
    return Tied(
        name=np.asarray(work.name),
        start_us=start,
        end_us=np.asarray(work.end),
        own_us=np.asarray(work.end) - start,
        launched_us=launched,
        device=np.asarray(work.device),
        op=op,
        top=_top(host, op),
        module=module,
        phase=phase,
    )


def _tie_operators(kept: Kept, host: Host) -> Tied:
    spans = kept.spans
    ops = np.flatnonzero(np.asarray(spans.sort) == OP).astype(np.int32)
    start, end = np.asarray(spans.start)[ops], np.asarray(spans.end)[ops]
    parent = host.parent[ops]
    inner = np.bincount(parent[parent >= 0], (end - start)[parent >= 0], minlength=len(spans))[ops]
    own = np.maximum(end - start - inner - host.watched_us[ops], 0.0)
    return Tied(
        name=np.asarray(spans.name)[ops],
        start_us=start,
        end_us=end,
        own_us=own,
        launched_us=start,
        device=np.full(len(ops), -1, np.int32),
        op=ops,
        top=_top(host, ops),
        module=host.module_of_span[ops],
        phase=phases(host, host.region_of_span[ops], start),
    )


def _top(host: Host, op: Ints) -> Ints:
    """The outermost operator around each, or itself."""
    if not len(host.top_of_span):
        return op
    top = np.where(op >= 0, host.top_of_span[op], -1)
    return np.where(top >= 0, top, op)


def _matching(keys: Ints, among: Ints) -> Ints:
    """The first place in `among` of each key; -1 where it is not there, and for -1."""
    if not len(among):
        return np.full(len(keys), -1)
    order = np.argsort(among, kind="stable")
    at = np.minimum(np.searchsorted(among[order], keys), len(among) - 1)
    found = order[at]
    return np.where((keys >= 0) & (among[found] == keys), found, -1)
