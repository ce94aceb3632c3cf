"""Idle time of a device in the windows of a trace by its cause, and what their columns of names say of it.

>>> Idle(run, windows, rows, basis).sync_us
1250.0
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from amp_core.analysis.performance.host_copies import tiny_copies
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Basis
from amp_core.store.run import Run
from amp_core.text.formatting import number


@dataclass(frozen=True)
class Idle:
    """Windows of a device, and what their columns add up to per step; times in microseconds."""

    run: Run
    windows: pd.DataFrame
    rows: pd.DataFrame
    basis: Basis

    def us(self, *columns: str) -> float:
        """The sum of these columns per step; 0 for what is not known."""
        return sum(self.basis.each_us(self.windows[name].fillna(0.0)) for name in columns)

    @property
    def gaps_us(self) -> float:
        """Idle time without that of loading data."""
        return float(np.nan_to_num(self.basis.cost.us("gaps")))

    @cached_property
    def of_copies(self) -> "BesideCopies":
        """Idle time that is told with the copies."""
        return beside_copies(self.windows, self.basis)

    @property
    def sync_us(self) -> float:
        """Idle time after the host waited for the device, in other than copies that are told themselves; 0 where it
        waits for each kernel, which is told of its launches."""
        if self.launches_block:
            return 0.0
        return min(self.gaps_us, max(0.0, self.us("idle_sync_us") - self.of_copies.sync_us))

    @property
    def wait_us(self) -> float:
        """Idle time with work launched."""
        return min(self.gaps_us - self.sync_us, self.us("idle_wait_us"))

    @property
    def before_us(self) -> float:
        """Time before the first kernel of a step."""
        return self.us("lead_us")

    @property
    def launches_block(self) -> bool:
        """Whether each launch of a kernel returns only when the kernel has ended."""
        return self.run.head.config.get("launch_blocking") is True

    @property
    def knows_launches(self) -> bool:
        """Whether the trace has launches, which tell why a device is idle."""
        return not self.windows[["idle_sync_us", "idle_wait_us", "idle_dispatch_us"]].isna().all(axis=None)


@dataclass(frozen=True)
class BesideCopies:
    """Idle time per step (or window) right beside copies from and to memory that is not pinned, microseconds."""

    late_us: float = 0.0
    """Because the host launches too late."""
    sync_us: float = 0.0
    """After the host waited for such a copy."""


def beside_copies(windows: pd.DataFrame, basis: Basis) -> BesideCopies:
    """The idle time beside copies, where it is most of the time in which the host launches too late or waited for such
    copies, and the copies are told themselves: it is told with them. None of it for others."""
    us, sync_us, lead_us, data_us, *others = (
        basis.each_us(windows[name].fillna(0.0))
        for name in ("idle_copy_us", "idle_copy_sync_us", "lead_us", "lead_data_us", "idle_sync_us", "idle_wait_us",
                     "idle_latency_us", "idle_filling_us", "idle_elsewhere_us")
    )  # fmt: skip
    late_us = max(0.0, float(np.nan_to_num(basis.cost.us("gaps"))) - sum(others)) + lead_us - data_us
    are_told = basis.is_long(np.nan_to_num(basis.cost.us("copy")))
    is_most = us + sync_us >= MIN_BESIDE_COPIES_FRAC * (late_us + sync_us)
    return BesideCopies(us, sync_us) if are_told and is_most else BesideCopies()


MIN_BESIDE_COPIES_FRAC = 0.5
"""Share of the time in which the host launches too late, or waited for such copies, that is beside copies from which it
is that of the copies."""


def alone_loading_us(windows: pd.DataFrame) -> float:
    """Time in which a device only communicates while its own host stays in a call, as in a first launch of a kernel:
    without the communication it would be idle."""
    return float(windows["alone_loading_us"].fillna(0.0).sum())


def copies_of_values(run: Run) -> str:
    """That values are copied to the host one by one, as part of a sentence; else empty."""
    tiny, tiny_bytes = tiny_copies(run)
    size = f"{tiny_bytes:.0f} byte{'s' if tiny_bytes >= 1.5 else ''}"
    return f", with {tiny:,.0f} copies of {size} on average to the host" if tiny else ""


def longest_of(windows: pd.DataFrame, column: str, basis: Basis, part: str = "of it") -> tuple[str, str]:
    """The value of a column of names with most of its time, and that as part of a sentence; empty if it is not much of
    the step. `part`: of which time it is."""
    name, us = longest_named(windows, column)
    if us / basis.steps < MIN_SAVED_FRAC * basis.cost.step_us:
        return "", ""
    return name, f", {number(us / basis.steps / 1e3, 'ms')} {part} in {name}"


def longest_named(windows: pd.DataFrame, column: str) -> tuple[str, float]:
    """The value of a column of names with most of its time in all of the windows, and that time in microseconds; empty
    and 0 where nothing is named."""
    us = windows[windows[column] != ""].groupby(column)[f"{column}_us"].sum()
    return (str(us.idxmax()), float(us.max())) if len(us) else ("", 0.0)
