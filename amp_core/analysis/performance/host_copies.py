"""Copies between host and device in a trace: their direction, single values, and streams of their own.

>>> tiny_copies(run)     # per step, and their bytes on average
(64.0, 4.0)
"""

from amp_core.analysis.performance.kernels import kernel_rows, on_cpu, window_rows
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run

TO_HOST = r"DtoH|D2H|D2M|DeviceToHost"
"""In the names of copies to the host."""
MAX_TINY_BYTES, MIN_TINY_COPIES, MIN_TINY_FRAC = 64.0, 50.0, 0.1
"""Copies to the host of no more bytes read single values; from that many per step (or window) on, and that share of all
launches, they are a loop."""
MIN_OF_WAITS_FRAC, MAX_BETWEEN_VALUES = 0.8, 5.0
"""They are one, too, where so many of the host's waits are theirs, with few launches between two of them: an engine
reads a token after each pass."""


def tiny_copies(run: Run) -> tuple[float, float]:
    """How many copies to the host per step (or window) read single values, and their bytes on average; 0 for few."""
    rows, windows = kernel_rows(run, everything=True), window_rows(run)
    rows = rows[(rows["category"] == "memcpy") & rows["name"].str.contains(TO_HOST) & (rows["moved_bytes"] > 0)]
    rows = rows[rows["moved_bytes"] <= MAX_TINY_BYTES * rows["count"]]
    count = float(rows["count"].sum())
    per_step = count / max(1.0, float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))
    is_loop = count >= MIN_TINY_FRAC * float(windows["launches"].sum())
    few = bool((windows["launches_between_waits"].fillna(0.0) <= MAX_BETWEEN_VALUES).all())
    is_loop |= few and count >= MIN_OF_WAITS_FRAC * float(windows["idle_syncs"].fillna(0.0).sum()) > 0
    if per_step < MIN_TINY_COPIES or not is_loop:
        return 0.0, 0.0
    return per_step, float(rows["moved_bytes"].sum()) / count


def copies_on_own_streams(run: Run) -> bool:
    """Whether no kernel of a trace runs on a stream that copies."""
    rows = run.timeline
    copied = rows["category"] == "memcpy"
    return bool(copied.any() and not rows["stream"][copied].isin(rows["stream"][~copied]).any())


def of_copies(run: Run, text: str) -> str:
    """A text on a trace, which calls the device's work copies where it holds no kernel."""
    rows = kernel_rows(run, everything=True)
    if rows.empty or on_cpu(rows) or not rows["category"].isin(COPIES).all():
        return text
    return text.replace("first kernel", "first copy").replace("last kernel", "last copy")
