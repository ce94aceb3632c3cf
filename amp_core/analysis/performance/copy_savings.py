"""What copies and fills would save: hidden, at the rate of their link, or in fewer bytes.

>>> copies_saving(run, rows, windows, basis, communicates=False).what
'The GPU only copies and fills for 34 % of the step; Memcpy DtoH (Device -> Pageable) moves 400 MiB at 5.12 GB/s'
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.host_copies import copies_on_own_streams
from amp_core.analysis.performance.idle import beside_copies
from amp_core.analysis.performance.kernels import kernel_rows, numbers_of_import
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.saving import Basis, Saving, longest_name, others
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.text.formatting import number, size


def copies_saving(run: Run, rows: pd.DataFrame, windows: pd.DataFrame, basis: Basis, *, communicates: bool) -> Saving:
    """The saving of copies and fills in a trace with these `kernel_rows` and windows. `communicates`: whether its
    devices also communicate."""
    copies_us = float(np.nan_to_num(basis.cost.us("copy")))
    everything = of_main(run, kernel_rows(run, everything=True))
    copying = everything[everything["category"].isin(COPIES)]
    of_copies = beside_copies(windows, basis)
    idle_beside = of_copies.late_us + of_copies.sync_us
    lead_us = basis.each_us(windows["lead_us"].fillna(0.0) - windows["lead_data_us"].fillna(0.0))
    idle_us = max(0.0, idle_beside - lead_us)
    around = f"; right before and after, it is idle for {number(idle_beside / 1e3, 'ms')}" if idle_beside else ""
    only = "copies and fills without computing" if communicates else "only copies and fills"  # and may communicate
    return Saving(
        "copies",
        _shorter(run, copies_us, copying, _computing_us(rows, basis), basis) + idle_us,
        basis.cost.step_us,
        f"The GPU {only} for {basis.taken(copies_us)}{_moved(run, copying, basis)}{around}",
        longest_name(copying, "name") or "copies",
        others=others(copying, "name"),
    )


def _computing_us(rows: pd.DataFrame, basis: Basis) -> float:
    """How long the kernels that compute take per step."""
    return basis.each_us(rows["total_us"][~rows["category"].isin([*COPIES, "communication"])])


def _shorter(run: Run, us: float, copying: pd.DataFrame, computing_us: float, basis: Basis) -> float:
    """What copies of so many microseconds per step save at most. Those from pinned memory on streams of their own run
    beside all else already, so that fewer bytes are what is left to save, and no more than what outlasts the others.
    Others are as fast as the link to the host at most, and hidden by what is computed alone."""
    slow_us, moved, best, next_us = numbers_of_import(run, "peer_links", "us", "bytes", "best_gb_per_s", "next_us")
    if slow_us > float(copying["total_us"].sum()) / 2:
        return max(0.0, min(us, (slow_us - max(next_us, moved / (1e3 * best))) / basis.steps))
    name = longest_name(copying, "name")
    if "Pinned" not in name or not copies_on_own_streams(run):
        return max(0.0, us - max(0.0, _least_us(run, copying, basis) - computing_us))
    others_us = basis.each_us(copying["total_us"][copying["name"] != name])
    return max(0.0, min(us * NARROWED_FRAC, us - others_us))


def _least_us(run: Run, copying: pd.DataFrame, basis: Basis) -> float:
    """How long copies between host and device take per step at the rate of the link between them, or the highest one
    that they reach; of both directions, which have a lane each, the longer."""
    directions = copying["name"].str.extract(_DIRECTION, expand=False)
    known = copying[directions.notna() & (copying["moved_bytes"] > 0) & (copying["total_us"] > 0)]
    if known.empty:
        return 0.0
    per_us = max(1e3 * _link_gb_per_s(run), float((known["moved_bytes"] / known["total_us"]).max()))
    return float(known.groupby(directions[known.index])["moved_bytes"].sum().max()) / per_us / basis.steps


def _link_gb_per_s(run: Run) -> float:
    """What the link between host and GPU transfers at most in one direction, by the GPU's generation. Large chips are
    also sold with faster links than PCIe: those of their generation are not known by it."""
    capability = profiled_gpu(run, str(run.head.config.get("device") or "")).capability
    is_graphics = capability is not None and capability[1] != 0
    if capability is None or not (is_graphics or capability[0] == 8):
        return LINK_GB_PER_S
    return LINK_GB_PER_S / (4 if capability[0] < 8 else 2 if capability[0] == 8 else 1)


_DIRECTION = "(HtoD|DtoH|HostToDevice|DeviceToHost)"
"""In the names of copies between host and device."""
LINK_GB_PER_S = 60.0
"""What 16 lanes of PCIe 5.0 transfer in one direction, without the packets' heads (64 GB/s in all); those of 4.0, for
compute capability 8, half of it, and those of 3.0, before, a quarter."""
NARROWED_FRAC = 0.75
"""Of the bytes of 32-bit numbers, what 8 bits leave out."""


def _moved(run: Run, copying: pd.DataFrame, basis: Basis) -> str:
    """How many bytes the longest kind of copy or fill moves and at which rate, as part of a sentence, or how slow a
    link between devices is; empty where that is not known."""
    us, rate, best = numbers_of_import(run, "peer_links", "us", "gb_per_s", "best_gb_per_s")
    source, to, best_to = numbers_of_import(run, "peer_links", "source", "to", "best_to")
    if us > float(copying["total_us"].sum()) / 2:
        return (
            f"; device {source} to {to} takes {number(us / 1e3 / basis.steps, 'ms')} of it at {number(rate, 'GB/s')}, "
            f"where {source} to {best_to} reaches {number(best, 'GB/s')}"
        )
    name = longest_name(copying, "name")
    rows = copying[(copying["name"] == name) & (copying["moved_bytes"] > 0)]
    us, moved = float(rows["total_us"].sum()), float(rows["moved_bytes"].sum())
    if us < MIN_KNOWN_FRAC * float(copying["total_us"][copying["name"] == name].sum()) or us <= 0:
        return ""
    return f"; {name} moves {size(moved / basis.steps)} at {number(moved / us / 1e3, 'GB/s')}"


MIN_KNOWN_FRAC = 0.9
"""Share of the time of copies of a kind whose bytes are known from which their rate is told."""
