"""What the first sentence says of the host of a trace without a device's work: a loader's workers, and of a device that
was not recorded, what keeps the host busy.

worker_sentence(run)     # "The start and the end of the loader's worker processes take 97.1 % of the trace: ..."
host_alone(run)          # ' On the host, loading data takes 41.0 % of the time.'
"""

import re

from amp_core.analysis.performance.first_calls import MOST_OF_FIRST_FRAC, all_first_calls
from amp_core.analysis.performance.kernels import numbers_of_import
from amp_core.findings.cpu_parts import CpuPart
from amp_core.findings.cpu_sentences import WARM_UP, first_call
from amp_core.findings.repeated_work import is_of_loop
from amp_core.findings.signals import facts
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, percent


def worker_part(run: Run) -> CpuPart | None:
    """The start and the end of the loader's workers, if that is most of a trace without a device's work; else None."""
    before_us, first_us, after_us, batches, share = numbers_of_import(
        run, "worker_times", "before_us", "first_us", "after_us", "batches", "frac"
    )
    if share < MIN_WORKERS_FRAC:
        return None
    several, all_us = batches > 1, before_us + first_us + after_us
    parts = [
        f"{number(us / 1e3, 'ms')} {what}"
        for us, what in (
            (before_us, "before the first batch is asked for"),
            (first_us, f"for the first{'' if several else ', and only,'} batch"),
            (after_us, "after the last one"),
        )
        if us >= MIN_PART_FRAC * all_us
    ]
    what = (
        f"the start and the end of the loader's worker processes take {percent(share)} of the trace: "
        f"{join_words(parts)}, and neither grows with the number of batches"
    )
    return CpuPart("loader-start", all_us, what, "data loading")


def worker_sentence(run: Run) -> str:
    """The same as a sentence of its own, with what to do; else empty."""
    if (part := worker_part(run)) is None:
        return ""
    return (
        f"{part.what[0].upper()}{part.what[1:]}. Take num_workers=0 for so few, or persistent_workers=True and one "
        "loader for all of them."
    )


MIN_WORKERS_FRAC, MIN_PART_FRAC = 0.5, 0.02
"""Share of the trace from which the workers' start and end come first, and that of a part of these to be told."""


def host_alone(run: Run) -> str:
    """Of a trace that lacks the device's work: what takes longest on the device by torch's events around operators, or
    on the host, with first calls, and what it reads back, as further sentences. Empty if nothing takes long."""
    longest = _longest_part(run)
    if longest == _METRICS:
        return longest
    is_known = longest and run.head.config.get("host_part") != "outside"  # stacks show which code it is
    place = "" if is_known else _longest_place(run, functions_alone=bool(longest))
    return f"{longest}{place}{_in_all(run, longest)}{_read_back(run)}"


def _longest_part(run: Run) -> str:
    """What takes longest, as a further sentence; empty if nothing takes long."""
    config = run.head.config
    if config.get("metric_ranges"):
        return _METRICS
    if isinstance(timed := config.get("timed_op"), str) and isinstance(
        share := config.get("timed_op_frac"), int | float
    ):
        return f" By torch's events around operators, {timed} takes {percent(share)} of their time on the device."
    name, share = config.get("host_op"), config.get("host_op_frac")
    if not isinstance(name, str) or not isinstance(share, int | float):
        return ""
    kind = str(config.get("host_part"))
    if kind == "outside" and worker_sentence(run):
        return ""
    if kind in ("any-op", "idle-device") and (in_first := first_call(run, name)):
        in_first += _other_first_calls(run, name)
        return f" On the host, {name} takes {percent(share)} of the time{in_first}{WARM_UP}."
    if kind in ("any-op", "idle-device") and (in_first := _cold_calls(run, name)):
        return f" On the host, {name} takes {percent(share)} of the time{in_first}{WARM_UP}."
    if kind in ("any-op", "idle-device") and is_of_loop(run, name):  # which is told
        return ""
    held_op, held_us = config.get("host_held_op"), config.get("host_held_us")
    if kind == "optimizer" and isinstance(held_op, str) and isinstance(held_us, int | float):
        held = f"{number(held_us / 1e3, 'ms')} of it in one call of {held_op}, which waits for the device"
        return f" On the host, the optimizer's steps take {percent(share)} of the time, {held}."
    if kind == "waiting" and isinstance(held_op, str) and isinstance(held_us, int | float):
        held = f"{number(held_us / 1e3, 'ms')} of it in one call of {held_op}, the rest"
        return (
            f" On the host, waiting for the device takes at least {percent(share)} of the time, {held} in reading "
            f"values ({name})."
        )
    what = _HOST_PARTS.get(kind, "{name} takes {share} of the time, and launches nothing.")
    if kind == "idle-device" and _DRAWS.match(name) and (run.ops["op"] == "aten::copy_").any():
        what = what.replace("nothing.", "nothing: what is copied to the device can be drawn there.")
    if config.get("loader"):
        what = what.replace("runtime runs for", "runtime runs, and no data is loaded, for")
    cause = _CAUSES.get(str(config.get("host_cause")), "launching, waiting for the device, or its first call")
    return f" On the host, {what.format(name=name, share=percent(share), cause=cause)}"


def _cold_calls(run: Run, op: str) -> str:
    """That first calls of an operator take most of its time, with those of all operators, as part of a sentence; else
    empty."""
    us, of_us = numbers_of_import(run, "cold_calls", "us", "of_us")
    calls = facts(facts(run.head.config, "cold_calls"), "ops").get(op)
    op_us, count = calls if isinstance(calls, list | tuple) and len(calls) == 2 else (0.0, 0)
    share = run.head.config.get("host_op_frac")
    if not isinstance(share, int | float) or op_us < MOST_OF_FIRST_FRAC * share * of_us or not 0 < us <= of_us:
        return ""
    which = "first call" if count == 1 else f"first {count} calls"
    in_all = f"; first calls take {number(us / 1e3)} of {number(of_us / 1e3, 'ms')} in all" if us > op_us else ""
    return f", {number(op_us / 1e3, 'ms')} of it in its {which}{in_all}"


def _in_all(run: Run, longest: str) -> str:
    """What first calls of operators take, as a further sentence, where it is most of the time; else empty."""
    us, of_us = numbers_of_import(run, "cold_calls", "us", "of_us")
    if not MIN_COLD_FRAC * of_us <= us <= of_us or us == 0 or WARM_UP in longest:
        return ""
    return f" First calls of operators take {number(us / 1e3)} of {number(of_us / 1e3, 'ms')}{WARM_UP}."


MIN_COLD_FRAC = 0.5
"""Share of the time in first calls of operators from which they are told where another part is longest."""


def _longest_place(run: Run, *, functions_alone: bool) -> str:
    """The Python function, or else the operator, in which the host is the longest, as a further sentence, where that is
    much of a trace with launches; else empty."""
    us, of_us, launches = numbers_of_import(run, "unrecorded_host", "us", "of_us", "launches")
    known = facts(run.head.config, "unrecorded_host")
    name = str(known.get("name") or "")
    if functions_alone and known.get("is_function") is not True:
        return ""
    if not name or not MIN_PLACE_FRAC * of_us <= us <= of_us or us == 0:
        return ""
    launching = f", and makes {launches:,.0f} launches in it" if launches else ""
    return (
        f" The host is in {name} for {number(us / 1e3)} of {number(of_us / 1e3, 'ms')} ({percent(us / of_us)})"
        f"{launching}."
    )


def _read_back(run: Run) -> str:
    """What boolean masks take, and reading values back from the device, as further sentences; empty for little."""
    of_us, count, us, masks_us, lookups, lookups_us = numbers_of_import(
        run, "unrecorded_host", "of_us", "reads", "reads_us", "masks_us", "lookups", "lookups_us"
    )
    known = facts(run.head.config, "unrecorded_host")
    masks, told = known.get("masks"), ""
    if isinstance(masks, list) and masks and MIN_READS_FRAC * of_us <= masks_us <= of_us:
        waits = " and waits for the device" if known.get("waits") is True else ""
        calls = f"{lookups:,.0f} time{'s' if lookups != 1 else ''}"
        in_lookups = f"{number(lookups_us / 1e3, 'ms')} of it in aten::nonzero, which runs {calls}{waits}"
        told = (
            f" Boolean masks in {join_words([str(name) for name in masks])} take {number(masks_us / 1e3, 'ms')} "
            f"({percent(masks_us / of_us)}), {in_lookups}: compute the indices once, on the device."
        )
    op = str(known.get("read_op") or "")
    if op and MIN_READS_FRAC * of_us <= us <= of_us:
        times = f"{count:,.0f} time{'s' if count != 1 else ''}"
        told += f" The host reads back from the device {times}, for {number(us / 1e3, 'ms')} ({op})."
    return told


MIN_PLACE_FRAC, MIN_READS_FRAC = 0.2, 0.05
"""Shares of the time from which the longest place of the host is told, and reading back from the device."""
_METRICS = (
    " The profiler measured metrics, for which each kernel runs again, so the times of the host are those of the "
    "repetitions: record again without metrics."
)
_HOST_PARTS = {
    "data": "loading data takes {share} of the time.",
    "compiling": "torch.compile compiles for {share} of the time: profile after a warm-up.",
    "calls": "the most time, {share}, goes to calls into the device's runtime ({name}).",
    "outside": "neither an operator nor a call of the runtime runs for {share} of the time: Python or other code does.",
    "optimizer": "the optimizer's steps take {share} of the time.",
    "waiting": "reading values of the device, which waits for it, takes {share} of the time ({name}).",
    "backward": "for {share} of the time backward runs and none of its operators is in the trace: its threads were not "
    "recorded.",
    "range": "Python or other code in {name}, outside of operators, takes {share} of the time.",
    "any-op": "{name} takes {share} of the time: {cause}.",
}
"""By `HostPart.kind`; what remains is an operator that launches nothing."""
_DRAWS = re.compile(r"aten::(?:normal|uniform|random|randperm|randn?|bernoulli|exponential)_?$")
"""Operators that draw random numbers, each with a form for the device."""
_CAUSES = {"launching": "launching", "waiting": "launching, and waiting for the device"}
"""By `HostPart.cause`."""


def _other_first_calls(run: Run, op: str) -> str:
    """The first calls of other operators, as part of a sentence."""
    others = [calls for calls in all_first_calls(run) if calls.op != op][:MAX_FIRST_CALLS]
    of_each = [
        f"the {calls.which} of {calls.op} take{'s' * (calls.count == 1)} {number(calls.us / 1e3, 'ms')}"
        for calls in others
    ]
    return f"; {join_words(of_each)}" if of_each else ""


MAX_FIRST_CALLS = 3
