"""What a trace shows of work that is done more than once: in words, for the first sentence and for findings.

>>> growing_sentence(run)
'56 passes, 98.1 % of the time of all operators, compute all rows so far, 200 to 255, 1 more each: keys and values of …'
"""

from amp_core.analysis.performance.kernels import is_trace, kernel_rows, numbers_of_import, on_cpu, window_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.signals import facts, mappings
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, percent
from amp_core.traces.loops import MIN_PASSES


def growing_sentence(run: Run) -> str:
    """That every pass of a model computes all rows so far, as a sentence; empty where none does."""
    passes, first, last, share = numbers_of_import(run, "growing_rows", "passes", "first", "last", "frac")
    if passes < 2 or not is_trace(run):
        return ""
    each = (last - first) / (passes - 1)
    return (
        f"{passes:,.0f} passes, {percent(share)} of the time of all {_work(run)}, compute all rows so far, "
        f"{first:,.0f} to {last:,.0f}, {each:,.0f} more each: keys and values of earlier tokens are not cached."
    )


def growing_won_us(run: Run) -> float:
    """What a cache could save of the profiled time at most, microseconds, if a pass takes as long as it has rows; 0
    where nothing grows."""
    passes, first, last, share = numbers_of_import(run, "growing_rows", "passes", "first", "last", "frac")
    if passes < 2 or not last >= first > 0:
        return 0.0
    needed = last / (passes * (first + last) / 2)
    return float(window_rows(run)["wall_us"].sum()) / _ranks(run) * share * max(0.0, 1 - needed)


def recomputed_sentence(run: Run) -> str:
    """That backward computes much of forward anew, as a sentence; empty where it does not."""
    us, share = numbers_of_import(run, "recomputation", "us", "frac")
    if us <= 0 or not is_trace(run):
        return ""
    steps, unit = steps_of(run)
    but = " but collectives" if _work(run) == "kernels" and len(run.collectives) else ""
    return (
        f"Activation checkpointing computes forward anew in backward for {percent(share)} of the time of all "
        f"{_work(run)}{but} ({number(us / steps / 1e3, 'ms')}{unit})."
    )


def loop_sentence(run: Run) -> str:
    """That a loop of Python over small operators takes long, as a sentence; empty where none does."""
    passes, operators, us, of_us = numbers_of_import(run, "operator_loop", "passes", "operators", "us", "of_us")
    names = facts(run.head.config, "operator_loop").get("names")
    if passes < MIN_PASSES or not 0 < us <= of_us or not isinstance(names, list) or not is_trace(run):
        return ""
    if _is_behind_device(run):
        return ""
    each = f"the same {operators:,.0f} operators{_most(run, int(operators))}" if operators > 1 else str(names[0])
    further = _further(run)
    kind, (kernels,) = loop_kind(run), numbers_of_import(run, "operator_loop", "kernels")
    launching = f" and launches {kernels:,.0f} kernels outside of operators" if kind == SLICES else ""
    loops, advice = ("Loops of Python run", _OF_LOOPS) if further else ("A loop of Python runs", _OF_LOOP[kind])
    per_step = steps_of(run)[1]
    return (
        f"{loops} {each} {passes:,.0f} times{per_step}{further}{launching}, for {number(us / 1e3)} of "
        f"{number(of_us / 1e3, 'ms')}{' of one step' if per_step else ''} ({percent(us / of_us)}): {advice}."
    )


def _most(run: Run, operators: int) -> str:
    """Which of a loop's operators take longest, as part of a sentence: those that take about as long as the longest."""
    of_loop = facts(run.head.config, "operator_loop")
    names, us = (list(map(str, of_loop["names"])), of_loop.get("names_us"))
    if not isinstance(us, list) or len(us) != len(names):  # a run that an older version imported
        us = [0.0] * len(names)
    pairs = zip(names, us, strict=True)
    alike = [name for name, its_us in pairs if name == names[0] or its_us >= MIN_ALIKE_FRAC * us[0] > 0]
    most = "" if len(alike) == operators or len(names) == 1 else "most in "
    return f", {most}{join_words(alike)},"


MIN_ALIKE_FRAC = 0.9
"""Share of the longest operator's time from which another one takes about as long."""


def _further(run: Run) -> str:
    """Further loops of a step, as part of a sentence; else empty."""
    told = []
    for one in mappings(facts(run.head.config, "operator_loop"), "further"):
        passes, operators = (one.get(name) for name in ("passes", "operators"))
        if not isinstance(passes, int) or not isinstance(operators, int):
            continue
        what = f"{operators:,} others, most in {one.get('name')}," if operators > 1 else str(one.get("name"))
        told.append(f"{what} {passes:,} times")
    return f", and {join_words(told)}" if told else ""


def _is_behind_device(run: Run) -> bool:
    """Whether a device hardly waits for the host, so that a shorter loop of the host ends no step sooner."""
    savings = possible_savings(run)
    if savings is None:
        return False
    late = [saving for code in _LATE if (saving := savings.of(code, Saving)) is not None]
    return sum(saving.saved_us for saving in late) < MIN_SAVED_FRAC * savings.cost.step_us


_LATE = ("launch-bound", "host-bound", "host-syncs", "unexplained-idle")
"""Savings of what the device waits for the host."""


SLICES, COMPARES, MOVES, OTHER = "slices", "compares", "moves", "other"
"""Kinds of loops: that launch a kernel on each slice, that compare tensors, that only gather and write elements, and
those of which it is not known whether a pass needs the result of the one before."""
_OF_LOOP = {
    SLICES: "put the dimension that it slices into the grid of its kernels",
    COMPARES: "compute its passes at once, or each in fewer operators",
    MOVES: "it only moves elements, so index all of them at once",
    OTHER: "compute each of its passes in fewer operators, or compile the loop",
}
_OF_LOOPS = "compute each of their passes in fewer operators, or compile the loops"


def loop_kind(run: Run) -> str:
    """The kind of that loop."""
    (kernels,) = numbers_of_import(run, "operator_loop", "kernels")
    is_of = facts(run.head.config, "operator_loop").get
    if kernels >= MIN_PASSES:
        return SLICES
    return COMPARES if is_of("compares") is True else MOVES if is_of("moves") is True else OTHER


def is_of_loop(run: Run, op: str) -> bool:
    """Whether an operator is one of that loop, or called by one of these."""
    called = facts(run.head.config, "operator_loop").get("called")
    return isinstance(called, list) and op in called and loop_sentence(run) != ""


def loop_frac(run: Run) -> float:
    """The share of that loop; 0 without one."""
    us, of_us = numbers_of_import(run, "operator_loop", "us", "of_us")
    return us / of_us if loop_sentence(run) else 0.0


MIN_LOOP_FIRST_FRAC = 0.5
"""Share of the host's time in a loop of Python from which that comes first where no work of a device is known."""


def steps_of(run: Run) -> tuple[float, str]:
    """The steps of one rank, 1 without marks, and ` per step` where there are any."""
    steps = float(window_rows(run)["steps"].fillna(0.0).sum()) / _ranks(run)
    return max(1.0, steps), " per step" if steps else ""


def _ranks(run: Run) -> int:
    return max(1, int(window_rows(run)["rank"].nunique()))


def _work(run: Run) -> str:
    return "operators" if on_cpu(kernel_rows(run)) else "kernels"
