"""The sentence that comes first of an imported trace.

first_sentence(run)      # 'Largest possible saving: the GPU waits for data 51 % of the step (up to 619 of 1,211 ms).'
"""

import numpy as np

from amp_core.analysis.performance.host_copies import of_copies
from amp_core.analysis.performance.idle import longest_named
from amp_core.analysis.performance.idle_savings import LATE_LAUNCHES
from amp_core.analysis.performance.kernels import (
    holds_collectives_alone,
    kernel_rows,
    left_of_operators,
    mostly_misclocked,
    numbers_of_import,
    window_rows,
)
from amp_core.analysis.performance.matrix_kinds import multiplies
from amp_core.analysis.performance.saving import (
    MIN_KERNEL_US,
    MIN_SAVED_FRAC,
    CommunicationSaving,
    IdleSaving,
    LateRankSaving,
    ProductSaving,
    Saving,
    longest_name,
    step_share,
)
from amp_core.analysis.performance.savings import Savings, possible_savings
from amp_core.findings.cpu_parts import hosts_loading_part
from amp_core.findings.cpu_sentences import cpu_sentence, longest_frac
from amp_core.findings.few_rows import few_rows, in_8_bits
from amp_core.findings.gathered_matrices import gathered_matrices
from amp_core.findings.host_sentences import host_alone, worker_sentence
from amp_core.findings.left_out_sentences import MOST_FRAC, parts_left_out
from amp_core.findings.main_kernel import main_kernel_sentence
from amp_core.findings.main_parts import own_parts, parts_beside, without_saving
from amp_core.findings.no_saving_sentences import busy_frac, no_saving
from amp_core.findings.registry import GUIDE
from amp_core.findings.repeated_work import (
    MIN_LOOP_FIRST_FRAC,
    growing_sentence,
    loop_frac,
    loop_sentence,
    recomputed_sentence,
)
from amp_core.findings.signals import facts
from amp_core.findings.single_call_sentences import single_call_sentence
from amp_core.findings.step_sentences import (
    ahead_before,
    blocking_launches,
    captured_anew,
    few_long_steps,
    of_ranks,
    passes_sentence,
    profilers_part,
    slow_memory,
    uneven_device,
    uneven_steps,
)
from amp_core.hardware.kernel_names import OF_WARP
from amp_core.store.run import Run
from amp_core.text.formatting import duration, kernel_in_words, number, percent


def first_sentence(run: Run) -> str:
    """The largest possible saving in a trace, or that there is none; of a CPU, what takes longest; and what of the
    trace is left out, first if that is most of it and the host's doing. Empty for other runs."""
    single = single_call_sentence(run)
    before, after = parts_left_out(run, told="start" if single else "")
    if nothing := _nothing_to_judge(run):
        return " ".join((nothing, *before, *after))
    (uneven, us), savings = uneven_device(run), possible_savings(run)
    windows = window_rows(run)
    each_us = float(windows["wall_us"].sum()) / max(1, windows["rank"].nunique())  # `us` is of one rank
    largest = savings.ranked[0] if savings and savings.ranked else None
    # What is shorter with faster kernels is known only where these take equally long.
    is_main = largest is None or largest.code not in _IDLE or us >= each_us * largest.share
    is_loop = savings is None and loop_frac(run) >= min(MIN_LOOP_FIRST_FRAC, longest_frac(run) or np.inf)
    of_few_rows = few_rows(run, savings)
    nothing_else = of_few_rows and largest is None
    of_all = "" if nothing_else else _first_sentence(run)
    fewer_bits = "" if of_few_rows else in_8_bits(run, savings)
    # Blocks are told of other kernels too, or of the same one.
    main_kernel = "" if of_few_rows or " blocks " in of_all else main_kernel_sentence(run)
    main = (of_few_rows, growing_sentence(run), of_all, main_kernel, fewer_bits, _small(run))
    first = [text for text, comes_first in ((uneven, is_main), (loop_sentence(run), is_loop)) if comes_first]
    then = [text for text in (uneven, loop_sentence(run)) if text not in first]
    told = (slow_memory(run), worker_sentence(run), single, *before, few_long_steps(run), *first, *main, *then)
    again = (captured_anew(run), passes_sentence(run), recomputed_sentence(run), blocking_launches(run))
    figures = (*again, ahead_before(run), profilers_part(run), uneven_steps(run), of_ranks(run), _alone_held(run))
    in_all = _idle_in_all(run, savings, " ".join((*told, *figures)))
    return of_copies(run, " ".join(filter(None, (*told, in_all, *figures, *after))))


def _idle_in_all(run: Run, savings: Savings | None, told: str) -> str:
    """How long a device is idle in all where nothing is to be saved, if that is much and not told; else empty."""
    device = str(run.head.config.get("device"))
    if savings is None or savings.capture_us or any(one.saved_us > 0 for one in savings.ranked):
        return ""
    idle_us = float(np.nan_to_num(savings.cost.us("gaps", "data")))
    share = step_share(idle_us, savings.cost)
    is_told = any(part in told for part in ("is busy for", "In all, the", f"idle for {share}", "nothing to judge"))
    if is_told or device.startswith("cpu") or idle_us < MIN_SAVED_FRAC * savings.cost.step_us:
        return ""
    return f"In all, the {'GPU' if device.startswith('cuda') else 'device'} is idle for {share} of the {savings.unit}."


def _alone_held(run: Run) -> str:
    """What a trace of collectives alone cannot tell; empty for others."""
    if not holds_collectives_alone(run):
        return ""
    return "The trace holds collectives alone: whether the GPU computes beside and between them is unknown."


MAX_NO_WORK_FRAC = 0.001
"""Share of a window with less device activity than which there is nothing to save on the device."""


def _nothing_to_judge(run: Run) -> str:
    """That a trace holds neither work of the device worth the name nor what the host does; else empty."""
    if mostly_misclocked(run):
        return _misclocked(run)
    if left := left_of_operators(run):
        return _sampled(run, left)
    windows = window_rows(run)
    if run.head.config.get("without_operators") is not True or windows.empty:
        return ""
    busy_us, wall_us = (float(windows[name].sum()) for name in ("busy_us", "wall_us"))
    if busy_us >= MAX_NO_WORK_FRAC * wall_us:
        return ""
    return (
        f"The trace holds practically no device activity, {number(busy_us / 1e3, 'ms')} of "
        f"{number(wall_us / 1e3, 'ms')}, and no operators, so there is nothing to judge: profile what the device "
        "works on, after a warm-up, and record ProfilerActivity.CPU too."
    )


def _untimed(run: Run) -> str:
    """That a device's work has no times, and which of device and host took longer; empty for others."""
    count, device_us, host_us = numbers_of_import(run, "untimed", "count", "device_us", "host_us")
    if not count:
        return ""
    told = (
        f"No kernel or copy of the device, {count:,.0f} in all, has a time in the trace (each takes 0 µs), so which of "
        "them takes long cannot be told: record again."
    )
    if not device_us:
        return told
    ahead = ": the host launches far ahead, and the device is the limit" if device_us >= MIN_AHEAD * host_us else ""
    return (
        f"{told} The ranges marked on the device last {number(device_us / 1e3, 'ms')}, the host's operators "
        f"{number(host_us / 1e3, 'ms')}{ahead}."
    )


MIN_AHEAD = 2.0
"""How many times as long as the host a device works before it is the limit, whatever it does."""


def _misclocked(run: Run) -> str:
    """What is known of a device's work whose times are none of the trace."""
    count, us, span_us, off_us, name_us = numbers_of_import(
        run, "misclocked", "count", "us", "span_us", "off_us", "name_us"
    )
    name = kernel_in_words(str(facts(run.head.config, "misclocked").get("name")))
    return (
        f"The start times of {count:,.0f} kernels and copies are invalid, {duration(off_us / 1e6)} or more away from "
        f"the host's, so neither idle time nor overlap can be told. They take {number(us / 1e3)} of the "
        f"{number(span_us / 1e3, 'ms')} that the host's events last, {number(name_us / 1e3, 'ms')} of it {name}."
    )


def _sampled(run: Run, left: float) -> str:
    """What is known of a trace of which that share of the operators is left."""
    rows, windows = kernel_rows(run), window_rows(run)
    name, steps = longest_name(rows, "name"), float(windows["steps"].fillna(0.0).sum())
    us = float(rows["total_us"][rows["name"] == name].sum()) / (steps or float(len(windows)))
    each = f"{number(us / 1e3, 'ms')} per {'step' if steps else 'profiled window'}"
    return (
        f"The file holds about {number(100 * left, digits=1)} % of the operators, and the launches and kernels of the "
        "others were removed with them: neither idle time nor overlap can be judged, so look at the file from which "
        f"they were removed. Of what is left, {kernel_in_words(name)} takes longest, {each}."
    )


def _small(run: Run) -> str:
    """What changes that save too little each would save together; empty if that is little too, or one saves enough."""
    savings = possible_savings(run)
    if savings is None or any(c.saved_us > 0 for c in savings.ranked) or len(savings.small) < 2:
        return ""
    if gathered_matrices(run, savings) is not None:  # without the copies, products are others
        return ""
    us = sum(c.saved_us for c in savings.small)
    if us < MIN_SAVED_FRAC * savings.cost.step_us:
        return ""
    largest = savings.small[0]
    return (
        f"Smaller savings add up to {percent(us / savings.cost.step_us)}; the largest: "
        f"{largest.in_sentence} ({largest.how_much(savings.unit)}).{_all_idle(savings, largest)}"
    )


def _first_sentence(run: Run) -> str:
    savings = possible_savings(run)
    if savings is None:
        if "launches_without_kernels" in run.head.config:
            if untimed := _untimed(run):
                return untimed
            missing = "kernel" if "timed_op" in run.head.config else "device activity"
            unknown = f"No {missing} was recorded, so the device's performance cannot be analysed."
            if (loading := hosts_loading_part(run)) is not None:
                alone = ", in the loop's own process" if run.head.config.get("loader") == "own process" else ""
                return f"{loading.what[0].upper()}{loading.what[1:]}{alone}. {unknown}"
            return f"{unknown}{host_alone(run)}"
        return cpu_sentence(run)
    if savings.capture_us:
        captures = run.head.config.get("captures")
        is_one = not isinstance(captures, int) or captures < 2
        several, whose = ("a graph", "the graph's") if is_one else (f"{captures:,} graphs", "their")
        return (
            f"The trace records the capture of {several}, {number(savings.capture_us / 1e3)} of "
            f"{number(savings.cost.step_us / 1e3, 'ms')} per {savings.unit}, and no launch of one: captured kernels do "
            f"not run, so the device's performance cannot be analysed. Profile {whose} replays."
        )
    if (largest := _largest(savings)) is not None:
        return _with_saving(run, savings, largest)
    if sentences := without_saving(run, savings):
        return sentences
    nothing = no_saving(run, savings, in_16_bits=bool(in_8_bits(run, savings)))
    return " ".join((nothing, *(part.sentence for part in own_parts(run, savings))))


def _largest(savings: Savings | None) -> Saving | None:
    """The largest saving, if there is one worth the name."""
    largest = savings.ranked[0] if savings is not None and savings.ranked else None
    return largest if largest is not None and largest.code in GUIDE and largest.saved_us > 0 else None


def _with_saving(run: Run, savings: Savings, largest: Saving) -> str:
    """The largest saving, with what comes before it and beside it."""
    first, then = parts_beside(run, savings, largest)
    is_start = not single_call_sentence(run) and _is_start(run, savings, largest)  # which tells the same
    hint = _idle_hint(run) if is_start else ""
    saving = "argest possible saving" + (" of known cause" if _is_larger_unsure(savings) else "")
    saving += " while the device waits" if _is_larger_behind(savings) else ""
    saving += " of late ranks" if _is_larger_of_hosts(savings) else ""
    saving += f": {largest.in_sentence} ({largest.how_much(savings.unit)})."
    if not any(part.is_saving for part in first):
        saving += _all_idle(savings, largest)
        saving += _late_beside(savings, largest) or _held(largest) or _next(savings)
        saving += "".join(f" {part.sentence}" for part in then)
    before = " ".join(part.sentence for part in first)
    return f"{before} Beside {first[-1].it}, the l{saving}{hint}" if first else f"L{saving}{hint}"


def _is_start(run: Run, savings: Savings, largest: Saving) -> bool:
    """Whether a trace with little work of the device looks like the start of a program, or an idle server."""
    trains = savings.trains and busy_frac(savings) >= MAX_STARTING_FRAC
    repeats = run.head.config.get("equal_passes")
    is_loop = isinstance(repeats, int) and repeats >= MIN_REPEATS
    if savings.unit == "step" or trains or is_loop or holds_collectives_alone(run) or passes_sentence(run):
        return False
    # Short gaps all along are those of a loop.
    of_trace = 1 - _left_out_frac(run) if largest.code == "launch-bound" else 1.0
    if largest.code == "launch-bound" and of_trace >= MOST_FRAC:
        return False
    return busy_frac(savings) * of_trace < MOSTLY_IDLE_FRAC


MIN_REPEATS = 3
"""Equal passes from which a trace is one of a loop, and not of the start of a program."""
_IDLE = ("launch-bound", "host-bound", "host-syncs", "kernel-wait", "waiting-for-data")
MIN_OTHER_IDLE_FRAC = 0.03
"""Share of the step that a device is idle for other causes than the largest saving's, from which all of it is told."""


def _all_idle(savings: Savings, largest: Saving) -> str:
    """How long the device is idle in all, where that is of several causes; else empty."""
    device = next((one for one in ("the GPU", "the device") if f"{one} " in f"{largest.in_sentence} "), "")
    idle_us = float(np.nan_to_num(savings.cost.us("gaps", "data")))
    others_us = idle_us - (largest.saved_us - largest.lead_us)
    if largest.code not in _IDLE or not device or others_us < MIN_OTHER_IDLE_FRAC * savings.cost.step_us:
        return ""
    share = step_share(idle_us, savings.cost)
    return f" In all, {device} is idle for {share} of the {savings.unit}."


MIN_NEXT_RATIO, MIN_NEXT_FRAC = 0.4, 0.1
"""The second largest saving is told with the largest from that share of it and of the step on."""


_OF_VALUES = {"launch-bound", "host-syncs", "copies"}
"""Savings that are one where values are copied to the host one by one."""
_OF_HOST = {*LATE_LAUNCHES, "host-syncs"}
"""Savings of time in which the device waits for its host, of which one may contain another."""


def _is_larger_unsure(savings: Savings) -> bool:
    """Whether a saving that is not sure is larger than the first one."""
    return any(one.saved_us > savings.ranked[0].saved_us and not one.is_sure for one in savings.ranked)


def _is_larger_behind(savings: Savings) -> bool:
    """Whether kernels save more than the first one, but not before the device no longer waits."""
    return any(one.saved_us > savings.ranked[0].saved_us and one.waits_for_idle for one in savings.ranked)


def _is_larger_of_hosts(savings: Savings) -> bool:
    """Whether the second saving is that of the launches of all ranks, and larger than that of the late ones."""
    if len(savings.ranked) < 2:
        return False
    first, second = savings.ranked[:2]
    of_all_hosts = isinstance(first, LateRankSaving) and first.is_of_all_hosts
    return of_all_hosts and second.code in LATE_LAUNCHES and second.saved_us > first.saved_us


def _next(savings: Savings) -> str:
    """The second largest saving as a sentence, if it is about as large; else empty. That of gathered matrices is told
    as a part of its own."""
    first, *rest = savings.ranked
    second = next((one for one in rest if not (isinstance(one, ProductSaving) and one.gathered_us)), None)
    if second is None:
        return ""
    of_values = any(isinstance(one, IdleSaving) and one.copies_values for one in (first, second))
    if of_values and {first.code, second.code} <= _OF_VALUES:
        return ""  # one copy ends both
    idle_us = float(np.nan_to_num(savings.cost.us("gaps")))
    if {first.code, second.code} <= _OF_HOST and first.saved_us + second.saved_us > idle_us + second.lead_us:
        return ""  # without the first, part of the second is hidden
    if second.saved_us > first.saved_us and not second.is_sure:
        return f" {second.what}."
    if second.rank_us < MIN_NEXT_RATIO * first.rank_us or second.share < MIN_NEXT_FRAC or not second.is_sure:
        return ""
    if _is_larger_of_hosts(savings):
        how_much = second.how_much(savings.unit)
        return f" What shortens the launches of all ranks saves more: {second.in_sentence} ({how_much})."
    if isinstance(first, LateRankSaving):  # what makes them late
        return f" {second.what}."
    return f" The next: {second.in_sentence} ({second.how_much(savings.unit)})."


def _held(largest: Saving) -> str:
    """That the GPUs of late ranks do not start queued work, for how long; empty for others."""
    if not isinstance(largest, LateRankSaving) or largest.held_ranks != largest.late_ranks:
        return ""
    idle = largest.here.split(";")[0]
    return f" {idle[:1].upper()}{idle[1:]}."


def _late_beside(savings: Savings, largest: Saving) -> str:
    """The waiting for late ranks, where the ranks are idle for longer by their own hosts; else empty."""
    waiting = savings.reported("exposed-communication", Saving)
    is_told = isinstance(waiting, CommunicationSaving) and waiting.of_hosts_us > 0
    if waiting is None or largest.code not in _IDLE or not (is_told or savings.of_late_ranks):
        return ""
    return f" Beside that, {waiting.in_sentence}."


MOSTLY_IDLE_FRAC, MAX_STARTING_FRAC = 0.1, 0.01
"""A window without steps with less work than the first share is hardly one of training; with less than the second it
shows first calls, also where backward runs."""


def _left_out_frac(run: Run) -> float:
    """The share of a trace that is in no window, and the host's."""
    listed = run.head.config.get("left_out")
    parts = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
    fracs = [part.get("frac") for part in parts if part.get("kind") in ("start", "wait", "end")]
    return float(sum(frac for frac in fracs if isinstance(frac, int | float)))


MIN_OF_IDLE_FRAC = 0.5
"""Share of the idle time from which one operator or function that the host is in accounts for it."""


def _idle_hint(run: Run) -> str:
    """What to say of a window without steps and with little work of the device. What it looks like is told where
    neither an operator nor a function accounts for the idle time."""
    windows = window_rows(run)
    idle_us = float(windows[["idle_us", "lead_us"]].fillna(0.0).to_numpy().sum())
    calls_us = float(windows["host_call_us"].fillna(0.0).sum())
    named_us = max(longest_named(windows, column)[1] for column in ("host_op", "host_function"))
    accounted = named_us >= max(MIN_OF_IDLE_FRAC * idle_us, 2 * calls_us)
    like = "" if accounted else ", like the start of a program or an idle server"
    no_model = "" if _has_model(run) else " No product of matrices runs: the model may not be in the trace."
    return (
        f" The trace has no step markers and little device activity{like}: call prof.step() and profile after a "
        f"warm-up.{no_model}"
    )


def _has_model(run: Run) -> bool:
    """Whether products, modules, backward or a program's own kernels run."""
    rows = kernel_rows(run)
    if multiplies(rows) or bool((rows["module"] != "").any() or (rows["phase"] == "backward").any()):
        return True
    own_us = float(rows["total_us"][rows["name"].str.contains(OF_WARP)].sum())
    return own_us >= MIN_OWN_FRAC * max(float(rows["total_us"].sum()), MIN_KERNEL_US)


MIN_OWN_FRAC = 0.5
"""Share of the kernel time in kernels that a program writes itself, as in NVIDIA's Warp, from which these are what it
does."""


def may_lack_model(run: Run) -> bool:
    """Whether the first sentence says that the model may not be in the trace: then no advice about it fits."""
    savings = possible_savings(run)
    largest = _largest(savings)
    return savings is not None and largest is not None and _is_start(run, savings, largest) and not _has_model(run)
