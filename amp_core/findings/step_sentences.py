"""What the first sentence says of what its figures are of: of which steps and ranks, and without the profiler's work.

few_long_steps(run)   # 'Steps 4, 9 and 14, every 5 steps, take 390 to 410 ms, the median step 144 ms: 41.2 % of …'
uneven_steps(run)     # 'The steps differ: step 4 takes 397 ms, the median 144 ms; figures per step are means of all.'
of_ranks(run)         # 'Where no rank is named, figures are means over 8 ranks.'
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import is_trace, numbers_of_import, window_rows
from amp_core.analysis.performance.main_device import main_device, main_rank
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, ProductSaving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.late_steps import in_one_step
from amp_core.findings.signals import facts
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import is_amd
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number, percent

MIN_UNEVEN_RATIO = 1.5
"""A step that takes that many times as long as the median, or that part of it, differs."""
MIN_FIRST_RATIO = 2.5
"""The same of the first step, which begins on the host: where the host runs ahead by a step, it lasts two."""
MIN_STEPS = 3


def few_long_steps(run: Run) -> str:
    """A sentence on a few steps that take so much more than the others that they come first; empty for others."""
    ms = _step_ms(run, 2)
    if len(ms) == 2:
        return _of_two(ms)
    ms = _step_ms(run)
    _, longer = _apart(ms)
    in_one = in_one_step(run, ms, possible_savings(run)) if len(longer) == 1 else ""
    is_main = len(longer) and (in_one or _beyond_frac(ms, longer) >= MIN_FIRST_FRAC)
    return _of_longer(ms, longer, in_one) if is_main else ""


def uneven_steps(run: Run) -> str:
    """A sentence on the steps of a trace, of which at least one is far from the median; empty for others, and where
    `few_long_steps` tells of them."""
    ms = _step_ms(run)
    apart, longer = _apart(ms)
    if ms.empty or few_long_steps(run):
        return ""
    if apart.empty:
        longer = _somewhat_longer(run, ms)
        return _of_longer(ms, longer) if len(longer) else ""
    if len(longer) == len(apart) > 1 and _beyond_frac(ms, longer) >= MIN_SAVED_FRAC:
        return _of_longer(ms, longer)
    ratio = apart.clip(lower=1e-6) / float(ms.median())
    farthest = apart.index[int(np.abs(np.log(ratio.to_numpy())).argmax())]
    more = len(apart) - 1
    others = f", and {more} more {'step is' if more == 1 else 'steps are'} far from it" if more else ""
    return (
        f"The steps differ: step {farthest:.0f} takes {number(float(ms[farthest]), 'ms')}, the median "
        f"{number(float(ms.median()), 'ms')}{others}; figures per step are means of all."
    )


MIN_FIRST_FRAC = 0.4
"""Share of the time of all steps that a few take beyond the median from which they come first."""
MAX_FEW_FRAC = 1 / 3
"""Up to that share of the steps is a few of them."""
MAX_NAMED_STEPS = 4


def _of_two(ms: "pd.Series[float]") -> str:
    """That one of two steps takes far longer; else empty."""
    shorter, longer = float(ms.min()), float(ms.max())
    if longer < MIN_FIRST_RATIO * shorter:
        return ""
    share = percent((longer - shorter) / (longer + shorter))
    return (
        f"Of the two steps, step {ms.idxmax():.0f} takes {number(longer, 'ms')}, the other {number(shorter, 'ms')}: "
        f"{share} of the time is what one of them does alone, as a validation, a checkpoint or a set-up. Figures per "
        "step are means."
    )


def _step_ms(run: Run, least: int = MIN_STEPS) -> "pd.Series[float]":
    """The time of each step of a trace, the mean over its ranks in milliseconds; none for fewer steps."""
    if not is_trace(run):
        return pd.Series(dtype=float)
    frame = run.steps
    frame = frame[np.isfinite(frame["step_ms"].astype(float))]
    ms = frame.groupby("step")["step_ms"].mean()
    return ms if len(ms) >= least and float(ms.median()) > 0 else ms[:0]


def _apart(ms: "pd.Series[float]") -> "tuple[pd.Series[float], pd.Series[float]]":
    """The steps that are far from the median; and those of them that take longer, if they are a few."""
    least = np.where(np.arange(len(ms)) == 0, MIN_FIRST_RATIO, MIN_UNEVEN_RATIO)
    longer = ms[ms >= least * ms.median()]
    apart = ms[ms.index.isin(longer.index) | (ms * MIN_UNEVEN_RATIO <= ms.median())]
    return apart, longer if len(longer) <= max(1.0, MAX_FEW_FRAC * len(ms)) else longer[:0]


MIN_LONGER_RATIO, MIN_IDLE_FRAC = 1.25, 0.2
"""The same ratio of steps that take much of the time beyond the median together, and share of the time that a device is
idle from which its host does not run ahead, so that the first step is one of them."""


def _somewhat_longer(run: Run, ms: "pd.Series[float]") -> "pd.Series[float]":
    """A few steps that take somewhat longer, where that is much of the time; none for others."""
    windows, longer = window_rows(run), ms[ms >= MIN_LONGER_RATIO * ms.median()]
    if windows["idle_us"].sum() < MIN_IDLE_FRAC * windows["wall_us"].sum():
        longer = longer.drop(ms.index[0], errors="ignore")
    is_told = len(longer) and len(longer) <= max(1.0, MAX_FEW_FRAC * len(ms))
    return longer if is_told and _beyond_frac(ms, longer) >= MIN_SAVED_FRAC else longer[:0]


def _beyond_frac(ms: "pd.Series[float]", longer: "pd.Series[float]") -> float:
    """What these steps take beyond the median, as a share of the time of all."""
    return float((longer - ms.median()).sum() / ms.sum())


MIN_WARM_STEP = 2
"""From that number on a first recorded step comes after others, in which a program is warm."""


def _of_longer(ms: "pd.Series[float]", longer: "pd.Series[float]", in_one: str = "") -> str:
    """That a few steps take longer, which, and how regularly. `in_one`: of `in_one_step`."""
    steps = longer.index.to_numpy(dtype=np.int64)
    every = np.unique(np.diff(steps)) if len(steps) >= MIN_REGULAR else np.zeros(0)
    period = f", every {every[0]} steps" if len(every) == 1 and every[0] > 1 else ""
    names = [f"{step}" for step in steps.tolist()]
    if len(names) > MAX_NAMED_STEPS:
        names[MAX_NAMED_STEPS:] = [f"{len(names) - MAX_NAMED_STEPS} more"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    least, most = number(float(longer.min())), number(float(longer.max()), "ms")
    each = most if least == number(float(longer.max())) else f"{least} to {most}"
    one = len(longer) == 1
    setup = ""
    if one and steps[0] == ms.index[0]:
        is_warm = steps[0] >= MIN_WARM_STEP
        setup = "; the first step often sets things up, so profile after a warm-up"
        setup = "; it is the first one recorded, and a profiler may slow that" if is_warm else setup
    subject, verb, they = ("Step", "takes", "it takes") if one else ("Steps", "take", "they take")
    return (
        f"{subject} {listed}{f'{period},' if period else ''} {verb} {each}, the median step "
        f"{number(float(ms.median()), 'ms')}: {percent(_beyond_frac(ms, longer))} of the time is what {they} beyond "
        f"that{setup}.{in_one} Figures per step are means."
    )


MIN_REGULAR = 3
"""Steps from which equal distances between them are told."""


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


def uneven_device(run: Run) -> tuple[str, float]:
    """A sentence on a device that takes unequally long for the same kernels, and what they take beyond what is usual,
    in all and in microseconds; empty and 0 for others."""
    for entry, sentence in (("unequal_products", _unequal_sentence(run)), ("slow_device", _slow_device_sentence(run))):
        if sentence:
            return sentence, numbers_of_import(run, entry, "us")[0]
    return "", 0.0


def slow_memory(run: Run) -> str:
    """A sentence on a device whose long elementwise kernels all move far less than memory could; empty for others."""
    us, most_bytes, kernel_us = numbers_of_import(run, "elementwise_rate", "us", "most_bytes", "kernel_us")
    if us <= 0 or us < MIN_LONG_FRAC * kernel_us:
        return ""
    rates = dense_rates(profiled_gpu(run, str(run.head.config.get("device") or "")).name)
    gb_per_s = most_bytes / us / 1e3
    if gb_per_s >= MAX_OF_MEMORY_FRAC * (rates.gb_per_s if rates else LEAST_GB_PER_S):
        return ""
    of_sheet = f", {percent(gb_per_s / rates.gb_per_s)} of the data sheet's rate" if rates else ""
    return (
        f"The device is not at its speed: elementwise kernels of {number(us / 1e3, 'ms')} move "
        f"{number(gb_per_s, 'GB/s')} at most{of_sheet}. It is at idle clocks, throttled or shared, or its memory is "
        "overcommitted: check clocks, power and memory, and profile again after a warm-up."
    )


MIN_LONG_FRAC, MAX_OF_MEMORY_FRAC = 0.1, 0.1
"""Share of long elementwise kernels in the time of all kernels from which they tell the device's speed, and share of
the data sheet's rate of memory below which it is not at it."""
LEAST_GB_PER_S = 100.0
"""The rate of memory of the slowest GPUs, taken where the data sheet is not known."""


def _unequal_sentence(run: Run) -> str:
    """A sentence on products that take unequally long though kernel and sizes are equal; empty where few do."""
    count, us, kernel_us, longest_us, usual_us = numbers_of_import(
        run, "unequal_products", "count", "us", "kernel_us", "longest_us", "usual_us"
    )
    if count < 1 or us <= 0:
        return ""
    found = facts(run.head.config, "unequal_products")
    kernel = kernel_in_words(str(found.get("kernel")))
    windows = window_rows(run)
    held_us, wall_us = (float(windows[name].fillna(0.0).sum()) for name in ("idle_late_start_us", "wall_us"))
    why = "the device is shared or throttled"
    if found.get("slow_first", True):  # which older imports do not tell
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


def _slow_device_sentence(run: Run) -> str:
    """A sentence on steps of the same kernels that take unequally long on the device; empty where they do not."""
    us, of_us, least_us, most_us = numbers_of_import(run, "slow_device", "us", "of_us", "least_us", "most_us")
    if us <= 0:
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


MIN_QUEUED_FRAC = 0.25
"""Share of a step that the host is ahead of its device as the recording begins from which that is told."""
_LATE = ("launch-bound", "host-bound")


def ahead_before(run: Run) -> str:
    """That the host was far ahead of a device that now waits for it, when the recording began; else empty."""
    savings, queued_us = possible_savings(run), run.head.config.get("queued_us")
    if savings is None or not savings.ranked or savings.ranked[0].code not in _LATE or not savings.cost.steps:
        return ""
    if not isinstance(queued_us, int | float) or queued_us < MIN_QUEUED_FRAC * savings.cost.step_us:
        return ""
    windows = window_rows(run)
    calls_us, idle_us = (float(windows[name].fillna(0.0).sum()) for name in ("host_call_us", "idle_us"))
    if calls_us > idle_us / 2:  # calls that allocate or load take long without a profiler, too
        return ""
    products = savings.of("fp32-products", ProductSaving)
    full, ahead = products.unlimited if products is not None else None, ""
    if full is not None and full.share >= MIN_SAVED_FRAC:
        ahead = f": if the host is ahead there, {full.in_sentence} ({full.how_much(savings.unit)})"
    return (
        f"When the recording began, {number(queued_us / 1e3, 'ms')} of launched work were still queued: the host was "
        f"ahead then, so recording may be what makes it late. Time the step without the profiler first{ahead}."
    )


def blocking_launches(run: Run) -> str:
    """That each launch returns only when its kernel has ended, and what to do, as a sentence; empty for others."""
    if run.head.config.get("launch_blocking") is not True:
        return ""
    device = str(run.head.config.get("device"))
    setting = "AMD_SERIALIZE_KERNEL=3" if is_amd(profiled_gpu(run, device).name) else "CUDA_LAUNCH_BLOCKING=1"
    setting = f"with {setting} or " if device.startswith("cuda") else ""
    return (
        f"Each launch returns only when its kernel has ended, as {setting}in a debugger, so the host is never ahead of "
        "the device: switch that off, and profile again."
    )


def profilers_part(run: Run) -> str:
    """A sentence on idle time in which the profiler does work of its own, which is part of no saving; empty for
    little."""
    windows = window_rows(run) if is_trace(run) else run.windows[:0]
    if windows.empty:
        return ""
    us, wall_us = float(windows["idle_profiling_us"].fillna(0.0).sum()), float(windows["wall_us"].sum())
    if not us >= MIN_SAVED_FRAC * wall_us > 0:
        return ""
    return f"The profiler's own work takes {percent(us / wall_us)} of the profiled time, and is part of no saving."
