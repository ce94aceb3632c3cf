"""What the first sentence says of the parts of a trace that are in no window.

parts_left_out(run)     # ([], ['10.6 ms of the trace (66.4 %) come after the last kernel and are left out, ...'])
"""

from collections.abc import Mapping
from typing import Any

from amp_core.analysis.performance.kernels import is_trace, window_rows
from amp_core.analysis.performance.late_launches import unknown_host
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number, percent

MOST_FRAC = 0.5
"""Share of the trace from which a part that the host takes comes before the largest saving in the rest."""
_OF_THE_DEVICE = {
    "queued": "the device does what was launched before the trace began",
    "unrecorded": "nothing launched in the trace runs: the device does earlier work, or the profiler starts",
}
_OF_THE_HOST = {
    "start": "before the first device activity",
    "wait": "before the first work that is launched in it",
    "first-steps": "before the first whole step, with the first iteration,",
    "end": "after the last kernel",
    "last-steps": "after the last whole step",
}
"""Where a part lies, by `amp_core.traces.left_out.PartLeftOut.kind`."""


def parts_left_out(run: Run, told: str = "") -> tuple[list[str], list[str]]:
    """Sentences on the parts that come before the largest saving, and on the others. `told`: the kind of a part that is
    told otherwise."""
    first: list[str] = []
    last: list[str] = []
    listed = run.head.config.get("left_out") if is_trace(run) else None
    unknown = unknown_host(run)
    if is_trace(run) and (missing := _missing_kernels(run.head.config)):
        first.append(missing)
    if is_trace(run) and (lost := _lost_tail(run.head.config)):
        first.append(lost)
    parts = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
    in_two = any(part.get("kind") in _OF_THE_DEVICE for part in parts)
    for part in parts:
        if part.get("kind") == told:
            continue
        sentence, is_most = _sentence(part, unknown)
        if window_rows(run)["rank"].nunique() > 1:  # they are those of the first rank alone
            of_rank = f"rank {window_rows(run)['rank'].min():.0f}'s trace"
            sentence = sentence.replace("the trace", of_rank, 1)
        if in_two:  # what follows the first launch is told beside it
            sentence = sentence.replace(_OF_THE_HOST["start"], "before the first launch")
        (first if is_most else last).append(sentence)
    return first, last


MIN_MISSING_FRAC = 0.2
"""Share of launches without their kernel from which that is told: a profiler that stops loses the last ones."""


def _missing_kernels(config: Mapping[str, Any]) -> str:
    """The sentence on launches whose kernels were not recorded; empty for few of them."""
    missing, launches = config.get("launches_without_work"), config.get("kernel_launches")
    if not isinstance(missing, int) or not isinstance(launches, int) or missing < MIN_MISSING_FRAC * launches:
        return ""
    if config.get("last_without_work") is True:
        return (
            f"The last {missing:,} of {launches:,} launches have no kernel in the trace: the recording ended before "
            "the device ran them. What follows is of the others."
        )
    return (
        f"{missing:,} of {launches:,} launches have no kernel in the trace, which the profiler dropped or did not "
        "record: what follows is of the others."
    )


def _lost_tail(config: Mapping[str, Any]) -> str:
    """The sentence on work at the end that the trace lacks; empty where the host waits for none."""
    us = config.get("lost_tail_us")
    if not isinstance(us, int | float) or us <= 0:
        return ""
    return (
        f"The host still waits for the device for {number(us / 1e3, 'ms')} after its last recorded work, so the trace "
        "lacks what ran then: what follows is of the recorded part."
    )


def _sentence(part: Mapping[str, Any], unknown: str) -> tuple[str, bool]:
    """The sentence on one part, and whether it is most of the trace and the host's; empty for a part unlike those that
    the import writes. `unknown`: that the trace does not tell what the host does, in words."""
    us, frac, name_us = (part.get(key) for key in ("us", "frac", "name_us"))
    if not isinstance(us, int | float) or not isinstance(frac, int | float) or not isinstance(name_us, int | float):
        return "", False
    kind, name, ms = str(part.get("kind")), str(part.get("name") or ""), number(us / 1e3, "ms")
    if kind == "first-batch":
        workers = " of the loader's workers" if name else ""
        batch = f"The first batch{workers} took {ms} ({percent(frac)} of the trace) and is left out: "
        later_us = part.get("later_us")
        if isinstance(later_us, int | float) and later_us > 0:
            return f"{batch}later ones take {number(later_us / 1e3, 'ms')} at most.", frac > MOST_FRAC
        return f"{batch}profile further ones.", frac > MOST_FRAC
    if (why := _OF_THE_DEVICE.get(kind)) is not None:
        host = f" The host waits in {name}." if name else ""
        runs_us = part.get("runs_us")
        if isinstance(runs_us, int | float) and runs_us > 0:
            why = f"almost {why}"
        kernel = f", most of it {kernel_in_words(str(part['kernel']))}" if part.get("kernel") else ""
        return f"Left out are the {ms} before ({percent(frac)} of the trace), in which {why}{kernel}.{host}", False
    if (where := _OF_THE_HOST.get(kind)) is None:
        return "", False
    inside = f", {number(name_us / 1e3, 'ms')} of them in {name}" if name else unknown
    return f"{ms} of the trace ({percent(frac)}) come {where} and are left out{inside}.", frac > MOST_FRAC
