"""Advice on the longer gaps of a device before late launches, by what the host does in them.

told_longer_gaps(run)     # 'In the longer gaps the host is longest in data.py(12): tokenize: move such work out ...'
"""

import re

import pandas as pd

from amp_core.analysis.performance.idle import longest_named
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.memory_savings import unfused_optimizer_rows
from amp_core.analysis.performance.training_part import takes_fused
from amp_core.findings.signals import facts
from amp_core.store.run import Run
from amp_core.text.formatting import number

MIN_OUTSIDE_FRAC = 0.5
"""Share of time in no operator in the longer gaps from which the host does something else there."""


def told_longer_gaps(run: Run) -> str:
    """What to do about longer gaps, as sentences; empty where operators launch late in them, which is shortened by what
    shortens launches."""
    return " ".join(filter(None, (_first_work(run), _longer(run) if _is_outside(run) else "")))


def _is_outside(run: Run) -> bool:
    """Whether the host is in no operator for most of the longer gaps: operators that launch late are shortened by what
    shortens launches."""
    windows = window_rows(run)
    return float(windows["host_outside_us"].fillna(0.0).sum()) >= MIN_OUTSIDE_FRAC * longer_us(windows)


def longer_us(windows: pd.DataFrame) -> float:
    """The time in longer gaps before late launches, microseconds."""
    us = {name: float(windows[name].fillna(0.0).sum()) for name in ("idle_us", *_OTHER_GAPS)}
    return max(0.0, us["idle_us"] - sum(us[name] for name in _OTHER_GAPS))


_OTHER_GAPS = (
    *("idle_data_us", "idle_sync_us", "idle_wait_us", "idle_latency_us", "idle_dispatch_us"),
    *("idle_filling_us", "idle_elsewhere_us"),
)
"""What of the idle time is in no longer gap before a late launch."""


def _first_work(run: Run) -> str:
    """How much of the longer gaps a warmed-up program would not have, as a sentence; empty if that is little."""
    windows = window_rows(run)
    per_ms = 1e3 * (float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))
    calls, calls_us = longest_named(windows, "longer_call")
    compile_us = float(windows["longer_compile_us"].fillna(0.0).sum())
    us, all_us = float(windows["longer_call_us"].fillna(0.0).sum()) + compile_us, longer_us(windows)
    if us < max(MIN_FIRST_WORK_FRAC * all_us, 1e-3):
        return ""
    parts = [calls] * (calls_us > 0) + ["Triton, which compiles and loads kernels"] * (compile_us > 0)
    return (
        f"Of the {number(all_us / per_ms, 'ms')} in longer gaps, {number(us / per_ms, 'ms')} are in "
        f"{' and in '.join(parts)}: memory that the allocator lacks, and first calls. Warm up in every size before "
        "recording; what remains of it then recurs."
    )


MIN_FIRST_WORK_FRAC = 0.2
"""Share of the longer gaps from which such work is told."""


def _longer(run: Run) -> str:
    """What to do about longer gaps, as sentences."""
    windows, rows = window_rows(run), kernel_rows(run)
    function, function_us = longest_named(windows, "longer_function")
    is_named = function_us >= MIN_NAMED_FRAC * longer_us(windows) > 0
    in_optimizer = float(windows["longer_optimizer_us"].fillna(0.0).sum()) >= MIN_OUTSIDE_FRAC * longer_us(windows)
    in_optimizer |= is_named and _OF_OPTIMIZERS.search(function) is not None
    if in_optimizer and not is_fused_optimizer(rows) and takes_fused(run):
        place = f"in {function}" if is_named else "in the optimizer's step"
        return f"In the longer gaps the host is longest {place}: the optimizer's fused=True leaves most of that out."
    if is_named and not _OF_TORCH.search(function):
        launches = float(windows["longer_function_launches"][windows["longer_function"] == function].fillna(0.0).sum())
        if function_us <= MAX_PER_LAUNCH_US * launches:
            return f"In the longer gaps the host is longest in {function}, {_LAUNCHES_ITSELF}"
        return (
            f"{_LONGER.replace('may do something else', f'is longest in {function}')}: move such work out of the loop."
        )
    if places := two_places(run):
        return f"{places} Neither graphs nor larger batches shorten that: move such work out of the loop."
    has_stacks = function or facts(run.head.environment, "profiler").get("with_stack")
    look = "a timeline shows its functions there" if has_stacks else "profile it with stacks"
    if function_us > 0 and not _OF_TORCH.search(function) and not _first_work(run):  # which is within functions
        steps = float(windows["steps"].fillna(0.0).sum()) or float(len(windows))
        look += f", the longest of which is {function}, {number(function_us / steps / 1e3, 'ms')}"
    return f"{_LONGER}: {look}; move such work out of the loop."


def two_places(run: Run) -> str:
    """The two places in which the host is for much of the longer gaps, as a sentence; empty where they hold little."""
    windows = window_rows(run)
    per_ms = 1e3 * (float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))
    us: dict[str, float] = {}
    for column in ("longer_place", "longer_second"):  # of several ranks, each may have them in another order
        for name, its_us in windows[windows[column] != ""].groupby(column)[f"{column}_us"].sum().items():
            us[str(name)] = us.get(str(name), 0.0) + float(its_us)
    own = [name for name in us if not _OF_TORCH.search(name)]
    longest = sorted(own, key=lambda name: -us[name])[:2]
    all_us, told_us = longer_us(windows), sum(us[name] for name in longest)
    if not longest or told_us < MIN_OF_TWO_FRAC * all_us or all_us <= 0:
        return ""
    parts = [f"{number(us[name] / per_ms, 'ms')} in {name}" for name in longest]
    wait_us = float(windows["longer_host_wait_us"].fillna(0.0).sum())
    waits = (
        f" {number(wait_us / per_ms, 'ms')} of that are collectives on the CPU, which wait for other ranks' hosts."
        if wait_us >= MIN_HOST_WAIT_FRAC * told_us
        else ""
    )
    return f"Of the {number(all_us / per_ms, 'ms')} in longer gaps, the host is {' and '.join(parts)}.{waits}"


MIN_OF_TWO_FRAC = 0.4
"""Share of the longer gaps in two places from which these are named."""
MIN_HOST_WAIT_FRAC = 0.1
"""Share of waiting for other hosts in the time of these places from which it is told."""


def is_fused_optimizer(rows: pd.DataFrame) -> bool:
    """Whether a fused optimizer runs, or none."""
    return bool(unfused_optimizer_rows(rows).empty or rows["op"].str.contains("_fused_", regex=False).any())


MIN_NAMED_FRAC = 0.2
"""Share of the longer gaps in one Python function from which it is named."""
_OF_OPTIMIZERS = re.compile(r"\boptim/\w+\.py\(")
"""Python functions of `torch.optim`."""
_OF_TORCH = re.compile(r"^<|\btorch/|\b(?:_dynamo|_inductor|_functorch|autograd|nn/modules|optim)/|\b_ops\.py\(")
"""Those of torch, which a loop calls in any case, and built-in ones."""
_LONGER = "In the longer gaps the host may do something else, which neither graphs nor larger batches shorten"
MAX_PER_LAUNCH_US = 100.0
"""Time of longer gaps in a Python function per launch in it up to which it is what launches these: preparation that a
launch follows takes longer."""
_LAUNCHES_ITSELF = "which launches kernels itself: a graph that holds it leaves its Python out."
