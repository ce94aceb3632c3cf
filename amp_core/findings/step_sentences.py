"""What the first sentence says of what its figures are of: of which steps and ranks, and without the profiler's work.

uneven_steps(run)     # 'The steps differ: step 4 takes 397 ms, the median 144 ms; figures per step are means.'
of_ranks(run)         # 'Where no rank is named, figures are means over 8 ranks.'
"""

import numpy as np

from amp_core.analysis.performance.kernels import (
    is_trace,
    main_device,
    main_rank,
    numbers_of_import,
    window_rows,
)
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC
from amp_core.findings.signals import facts
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number, percent

MIN_UNEVEN_RATIO = 1.5
"""A step that takes that many times as long as the median, or that part of it, differs."""
MIN_FIRST_RATIO = 2.5
"""The same of the first step, which begins on the host: where the host runs ahead by a step, it lasts two."""
MIN_ALONE_RATIO = 3.0
"""One step that takes that many times as long as all others together is what the trace tells of."""
MIN_STEPS = 3


def uneven_steps(run: Run) -> str:
    """A sentence on the steps of a trace, of which at least one is far from the median; empty for others."""
    if not is_trace(run):
        return ""
    frame = run.steps
    frame = frame[np.isfinite(frame["step_ms"].astype(float))]
    ms = frame.groupby("step")["step_ms"].mean()
    median = float(ms.median()) if len(ms) >= MIN_STEPS else 0.0
    if median <= 0:
        return ""
    least = np.where(np.arange(len(ms)) == 0, MIN_FIRST_RATIO, MIN_UNEVEN_RATIO)
    apart = ms[(ms >= least * median) | (ms * MIN_UNEVEN_RATIO <= median)]
    if apart.empty:
        return ""
    longest, rest_ms = ms.idxmax(), float(ms.sum() - ms.max())
    if float(ms.max()) >= MIN_ALONE_RATIO * rest_ms:
        return (
            f"Step {longest:.0f} alone takes {number(float(ms.max()), 'ms')}, and the median step "
            f"{number(median, 'ms')}, so most of the profiled time is that one step's; figures per step are means."
        )
    farthest = (np.log(apart.clip(lower=1e-6) / median)).abs().idxmax()
    more = len(apart) - 1
    others = f", and {more} more {'differs' if more == 1 else 'differ'}" if more else ""
    return (
        f"The steps differ: step {farthest:.0f} takes {number(float(ms[farthest]), 'ms')}, the median "
        f"{number(median, 'ms')}{others}; figures per step are means."
    )


def captured_anew(run: Run) -> str:
    """A sentence on the calls of compiled code in which graphs are captured again; empty if that takes little."""
    captured, others, us, others_us = numbers_of_import(
        run, "captured_calls", "captured", "others", "captured_us", "others_us"
    )
    if captured < 1 or us < MIN_CAPTURED_FRAC * float(window_rows(run)["wall_us"].sum()):
        return ""
    rest = f", and the others {number(others_us / 1e3 / others, 'ms')} each" if others else ""
    return (
        f"Graphs are captured anew in {captured} of {captured + others} calls of compiled code, which take "
        f"{number(us / 1e3, 'ms')}{rest}."
    )


def unequal_sentence(run: Run) -> str:
    """A sentence on products that take unequally long though kernel and sizes are equal; empty where few do."""
    count, us, kernel_us, longest_us, usual_us = numbers_of_import(
        run, "unequal_products", "count", "us", "kernel_us", "longest_us", "usual_us"
    )
    if count < 1 or us <= 0:
        return ""
    kernel = kernel_in_words(str(facts(run.head.config, "unequal_products").get("kernel")))
    windows = window_rows(run)
    held_us, wall_us = (float(windows[name].fillna(0.0).sum()) for name in ("idle_late_start_us", "wall_us"))
    why = "the device is shared, throttled, or not warm yet"
    if held_us >= MIN_HELD_FRAC * wall_us:
        why = (
            f"for another {number(held_us / 1e3, 'ms')} ({percent(held_us / wall_us)} of the time) queued work does "
            "not start, so the device is shared: another process takes it in turn"
        )
    return (
        f"Equal products take unequally long: {number(us / 1e3)} of the {number(kernel_us / 1e3, 'ms')} of kernels are "
        f"what {count:,.0f} launches take beyond the fastest quarter of the same kernel and sizes, one of {kernel} "
        f"{number(longest_us / 1e3)} instead of {number(usual_us / 1e3, 'ms')}: {why}."
    )


MIN_HELD_FRAC = 0.1
"""Share of the time in which queued work does not start from which a device is taken to be shared."""


def slow_device_sentence(run: Run) -> str:
    """A sentence on steps of the same kernels that take unequally long on the device; empty where they do not."""
    us, of_us, least_us, most_us = numbers_of_import(run, "slow_device", "us", "of_us", "least_us", "most_us")
    if us <= 0 or unequal_sentence(run):
        return ""
    ranks = window_rows(run)["rank"]
    of_rank = f" of rank {ranks.min():.0f}" if ranks.nunique() > 1 else ""
    return (
        f"The same kernels{of_rank} take {number(least_us / 1e3)} to {number(most_us / 1e3, 'ms')} per step, "
        f"{number(us / 1e3)} of {number(of_us / 1e3, 'ms')} beyond the pace of the fastest quarter of the steps: the "
        "device is throttled by its temperature or power limit, or shared."
    )


def passes_sentence(run: Run) -> str:
    """A sentence on equal launches without step markers of which the first ones take most of the time; else empty."""
    count, launches, first_us, others_us = numbers_of_import(
        run, "passes", "count", "launches", "first_us", "others_us"
    )
    if count < 2 or first_us <= 0:
        return ""
    each = number(others_us / 1e3, "ms")
    later = f"the second {each}" if count == 2 else f"a later one {each} on average"
    return (
        f"The same {launches:,.0f} launches run {count:,.0f} times, as passes or layers: the first time takes "
        f"{number(first_us / 1e3, 'ms')}, with what is set up, and {later}."
    )


MIN_CAPTURED_FRAC = 0.2
"""Share of the profiled time from which such calls are told."""


def of_ranks(run: Run) -> str:
    """That figures are means over ranks or devices, or those of the one that does nearly all; empty for one device."""
    if not is_trace(run):
        return ""
    windows, main, device = window_rows(run), main_rank(run), main_device(run)
    if main is not None:
        others_us = float(windows["wall_us"][windows["rank"] != main].max())
        return (
            f"Figures are those of rank {main}, which has nearly all of the profiled time: the windows of the others "
            f"take {number(others_us / 1e3, 'ms')} at most."
        )
    if device is not None:
        others_us = float(windows[windows["device"] != device].groupby("device")["busy_us"].sum().max())
        return (
            f"Figures are those of {device}, which does nearly all of the work: the other devices of the process work "
            f"for {number(others_us / 1e3, 'ms')} at most."
        )
    ranks = windows["rank"].nunique()
    if ranks > 1:
        return f"Where no rank is named, figures are means over {ranks} ranks."
    devices = windows["device"].nunique()
    return f"Figures are means over the {devices} devices of one process." if devices > 1 else ""


def profilers_part(run: Run) -> str:
    """A sentence on idle time in which the profiler does work of its own, which is part of no saving; empty for
    little."""
    windows = window_rows(run) if is_trace(run) else run.windows[:0]
    if windows.empty:
        return ""
    us, wall_us = float(windows["idle_profiling_us"].fillna(0.0).sum()), float(windows["wall_us"].sum())
    if us < MIN_SAVED_FRAC * wall_us:
        return ""
    return f"The profiler's own work takes {percent(us / wall_us)} of the profiled time, and is part of no saving."
