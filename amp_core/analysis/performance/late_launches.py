"""What a device waits for late launches: how long, and what the host does meanwhile, in words and as `LateHost`.

>>> late_launches(idle, between_us=0.0).host
LateHost(calls='allocation', is_in_first_call=False, has_longer_gaps=False)
"""

import re
from dataclasses import dataclass, replace

import pandas as pd

from amp_core.analysis.performance.first_calls import first_calls_of
from amp_core.analysis.performance.host_copies import TO_HOST, tiny_copies
from amp_core.analysis.performance.idle import Idle, alone_loading_us, copies_of_values, longest_named, longest_of
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Basis, IdleSaving, LateHost, time_and_lead
from amp_core.analysis.performance.training_part import optimizer_frac
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number
from amp_core.traces.between_operators import NEW_TENSOR
from amp_core.traces.operators import is_compiled_code

MAX_SHORT_US = 30.0
"""Longer kernels are not named as short ones: a few launches fit into each, so the gaps are not due to their length."""
SHORT_LEAD_US = 300.0
"""Before the first kernel of a step Python and the dispatch of operators take less, as between two later ones
(`amp_core.traces.idle_causes.DISPATCH_US`)."""
LAUNCH_US = 10.0
"""Approximate cost of launching a kernel on the host: shorter kernels cannot keep a GPU busy. Decides where the lengths
of the gaps between kernels are not recorded."""


def late_launches(idle: Idle, between_us: float) -> IdleSaving:
    """What the device waits for launches: with launches that are slow one by one, or for something else. `between_us`
    of it is told with the collectives that it lies between."""
    basis, late, calls = idle.basis, _how_long(idle, between_us), _host_calls(idle)
    in_calls = calls.us >= late.us / 2 > 0
    in_copies = late.lead_us < late.us / 2 and _is_copying(idle.run, idle.windows, late.us * basis.steps)
    launch_bound = late.is_slow and not in_calls and not in_copies
    in_python_us = late.python_us if launch_bound else 0.0
    if in_python_us < max(SHORT_LEAD_US, MIN_SAVED_FRAC * basis.cost.step_us):
        in_python_us = 0.0
    late = late.without_python() if in_python_us else late
    if in_calls:
        meanwhile = _in_calls(idle, late, calls)
    elif launch_bound:
        meanwhile = _slow_one_by_one(idle, late, in_python_us)
    else:
        meanwhile = _in_others(idle, late, in_copies=in_copies)
    code = "launch-bound" if launch_bound else "host-bound"
    waits = ", which waits for each kernel," if idle.launches_block else ""
    why = f" because the host{waits} launches too late{meanwhile.words}"
    if not idle.knows_launches:
        code, why = "unexplained-idle", f"{meanwhile.gap}, and the trace has no launches that would show why"
    or_waits = " or waits in collectives" if basis.is_long(late.loading_us) else ""
    return IdleSaving(
        code,
        late.us,
        basis.cost.step_us,
        f"The GPU is idle{or_waits} for {time_and_lead(late.us - late.lead_us, late.lead_us, basis)}{why}",
        meanwhile.where or "host",
        lead_us=late.lead_us,
        before_us=idle.before_us,
        is_of_part=meanwhile.place_us is not None and meanwhile.place_us < NEARLY_ALL_FRAC * late.us,
        copies_values=launch_bound and bool(tiny_copies(idle.run)[0]),
        host=meanwhile.host,
    )


@dataclass(frozen=True)
class _Meanwhile:
    """What the host does while the device waits for late launches."""

    words: str
    """After `launches too late`."""
    host: LateHost
    where: str = ""
    """The calls or the operator that account for much of it; empty if nothing does."""
    place_us: float | None = None
    """How long per step the host is in the longest such place; None where none is told."""
    gap: str = ""
    """That most of it is in one piece, if nothing else is told."""


def _in_calls(idle: Idle, late: "_Late", calls: "_Calls") -> _Meanwhile:
    """A host that is in calls into the runtime, with the operator that most of them are in, and the operator in which
    it is longest beside them."""
    windows, basis = idle.windows, idle.basis
    words = f", {number(calls.us / 1e3, 'ms')} of it {CALLS[calls.kind]} ({calls.names})"
    calling, its_us = longest_named(windows, "host_call_op")
    if calling and its_us / basis.steps >= MOST_OF_CALLS_FRAC * calls.us:
        words += f"{'' if its_us / basis.steps >= NEARLY_ALL_FRAC * calls.us else ', most'} in {calling}"
    words += _captured_once(idle.run, calls)
    in_none = _outside(windows, late.us, basis)
    beside = [_place(idle.run, windows, "host_rest_op", basis, "beside these calls")]
    beside += [] if unknown_host(idle.run) else [in_none]
    words += _by_size(*beside)
    host = LateHost(calls=calls.kind, builds_tensors=in_none.name == NEW_TENSOR)
    return _Meanwhile(words, host, calls.names, calls.us)


def _captured_once(run: Run, calls: "_Calls") -> str:
    """That these calls capture graphs, which happens once, as part of a sentence; empty for other calls, and where
    several calls of compiled code capture some."""
    captures = run.head.config.get("captures")
    if calls.kind != "graphs" or not isinstance(captures, int) or not captures or "captured_calls" in run.head.config:
        return ""
    if not _CAPTURES.search(calls.names):
        return ""
    count = "1 graph is" if captures == 1 else f"{captures:,} graphs are"
    return f", a one-time cost of the first call, in which {count} captured"


_CAPTURES = re.compile(r"Capture|Instantiate|CUDAGraphNode")
"""In the names of calls and ranges that capture graphs, or build them of what was captured."""


def _slow_one_by_one(idle: Idle, late: "_Late", in_python_us: float) -> _Meanwhile:
    """A host whose launches are slow one by one, after `in_python_us` before the first kernel."""
    windows, basis = idle.windows, idle.basis
    are_longer = late.longer_us >= max(MIN_LONGER_FRAC * late.us, MIN_SAVED_FRAC * basis.cost.step_us)
    are_longer &= _in_most_steps(windows) and not unknown_host(idle.run)
    longer = f", {number(late.longer_us / 1e3, 'ms')} of it in gaps of 0.3 ms and more" if are_longer else ""
    between = _between(idle) if basis.is_long(late.us - late.lead_us) else ""
    if waits_at_start(windows) or waits_early(windows):
        first = number(float(windows["late_until_us"].max()) / 1e3, "ms")
        between = f", nearly all within its first {first}{between}"
    marked = _marked_place(idle.run, windows, late.us, basis)
    gap = "" if basis.unit == "step" or marked.name or longer else _one_gap(windows, late.us * basis.steps)
    in_python = ""
    if in_python_us:
        before = number(in_python_us / 1e3, "ms")
        in_python = (
            f"; for {before} before the first kernel the host is in no operator and no call, but in Python or other "
            "code"
        )
    host = LateHost(is_in_first_call=marked.is_in_first_call, has_longer_gaps=are_longer)
    return _Meanwhile(f"{between}{marked.words}{gap}{longer}{in_python}", host, gap=gap)


def _in_others(idle: Idle, late: "_Late", *, in_copies: bool) -> _Meanwhile:
    """A host that is in operators, in Python, or in neither."""
    run, windows, basis, column = idle.run, idle.windows, idle.basis, _host_column(idle.windows)
    place = _place(run, windows, column, basis)
    in_place = f"{place.words}{', which copies and starts no kernel' if in_copies and place.name in COPYING else ''}"
    place_us = longest_named(windows, column)[1] / basis.steps
    has_functions = windows["host_function_us"].sum() > 0
    in_none = _Place() if has_functions else _outside(windows, late.us, basis)
    if unknown := unknown_host(run):
        in_none = _Place(in_none.name, "" if has_functions or in_place else unknown)
    marked = _Place() if has_functions or in_place else _marked_place(run, windows, late.us, basis)
    is_told = basis.unit == "step" or in_place or marked.name or in_none.words.startswith(",")
    gap = "" if is_told else _one_gap(windows, late.us * basis.steps)
    where = place.name if place_us >= MIN_OF_ONE_FRAC * late.us else ""
    host = LateHost(
        is_in_first_call=marked.is_in_first_call or (place.is_in_first_call and where == place.name),
        builds_tensors=in_none.name == NEW_TENSOR,
    )
    in_operator = f"{in_place}{marked.words}{_before(windows, place.name, basis)}{gap}"
    words = _by_size(_Place(words=in_operator, us=max(place.us, marked.us)), in_none)
    return _Meanwhile(words, host, where, place_us if place.name else None, gap)


@dataclass(frozen=True)
class _Late:
    """How long a device waits for late launches, microseconds per step."""

    us: float
    """All of it."""
    lead_us: float
    """Its part before the first kernel."""
    python_us: float
    """Part of `lead_us` in which the host is in no operator and no call."""
    dispatch_us: float
    """Its part in gaps between launches that follow each other at once."""
    loading_us: float
    """Its part in collectives that wait for a launch of the own host."""
    is_slow: bool
    """Whether launches that are slow one by one are half of it."""

    def without_python(self) -> "_Late":
        """The same without `python_us`."""
        us, lead_us = (max(0.0, us - self.python_us) for us in (self.us, self.lead_us))
        return replace(self, us=us, lead_us=lead_us, python_us=0.0)

    @property
    def longer_us(self) -> float:
        """Its part in longer gaps. The time before the first kernel is told apart, if that is long."""
        return self.us - self.dispatch_us - self.loading_us - (self.lead_us if self.lead_us >= SHORT_LEAD_US else 0.0)


def _how_long(idle: Idle, between_us: float) -> _Late:
    """How long the device waits for late launches, without `between_us`."""
    windows = idle.windows
    copying_us, loading_us = idle.of_copies.late_us, alone_loading_us(windows) / idle.basis.steps
    others_us = idle.us("idle_latency_us", "idle_filling_us", "idle_elsewhere_us")
    late_us = max(0.0, idle.gaps_us - idle.sync_us - idle.of_copies.sync_us - idle.wait_us - others_us)
    lead_us = idle.before_us - idle.us("lead_data_us")
    beside_us = idle.us("idle_profiling_us") + copying_us
    us = max(0.0, late_us - min(late_us, between_us) + lead_us + loading_us - beside_us)
    lead_us -= min(lead_us, copying_us)
    is_long = lead_us >= SHORT_LEAD_US
    dispatch_us = idle.us("idle_dispatch_us") + (0.0 if is_long else lead_us)
    known = windows["idle_dispatch_us"].notna().all()  # not in runs that older versions imported
    is_slow = bool(dispatch_us >= us / 2 if known else _mean_kernel_us(idle.rows) < LAUNCH_US)
    return _Late(us, lead_us, idle.us("lead_outside_us") if is_long else 0.0, dispatch_us, loading_us, is_slow)


def waits_at_start(windows: pd.DataFrame) -> bool:
    """Whether the device waits for launches in the first part of each window, or of each step, and its host is ahead of
    it from then on."""
    return _waits_until(windows, MAX_START_FRAC)


def waits_early(windows: pd.DataFrame) -> bool:
    """The same of a part that may be most of the window, after which the host is ahead for long."""
    ahead_us = _of_one_step_us(windows) - windows["late_until_us"].fillna(0.0)
    return _waits_until(windows, MAX_EARLY_FRAC) and bool((ahead_us >= MIN_AHEAD_US).all())


def _waits_until(windows: pd.DataFrame, most_frac: float) -> bool:
    us = windows["late_until_us"].fillna(0.0)
    return bool((us > 0).all() and (us <= most_frac * _of_one_step_us(windows)).all())


def _of_one_step_us(windows: pd.DataFrame) -> "pd.Series[float]":
    """How long a step of each window takes, or the window if it has none."""
    return windows["wall_us"] / windows["steps"].where(windows["steps"] > 0, 1.0)


MAX_START_FRAC, MAX_EARLY_FRAC = 0.25, 0.75
"""Shares of a window up to which it is its start, and up to which what follows is not a small part."""
MIN_AHEAD_US = 1000.0
"""A shorter rest of a window does not tell that its host stays ahead."""


def _mean_kernel_us(rows: pd.DataFrame) -> float:
    """The mean time of a kernel that computes; 0 without any."""
    computing = rows[rows["category"] != "communication"]
    return float(computing["total_us"].sum() / max(1.0, computing["count"].sum()))


def _between(idle: Idle) -> str:
    """Between what the gaps of slow launches lie, as part of a sentence: short kernels, copies of values, and the
    optimizer's kernels if they are most."""
    mean_us, of_optimizer = _mean_kernel_us(idle.rows), optimizer_frac(idle.rows)
    kernels = f", between kernels of {mean_us:.1f} µs on average" if 0 < mean_us < MAX_SHORT_US else ""
    stepping = f", with {100 * of_optimizer:.0f} % of the launches in the optimizer"
    return f"{kernels}{stepping if of_optimizer >= MIN_OF_OPTIMIZER_FRAC else ''}{copies_of_values(idle.run)}"


def unknown_host(run: Run) -> str:
    """That a trace does not tell what its host does, as part of a sentence; empty if it does."""
    if run.head.config.get("without_operators") is True:
        return "; what the host does then is unknown, for no operator was recorded"
    if run.head.config.get("thinned") is True:
        return "; what the host does then is unknown, for most operators are missing in the file"
    return ""


def _one_gap(windows: pd.DataFrame, idle_us: float) -> str:
    """That most of the idle time of a trace without steps is in one piece, as part of a sentence; else empty."""
    us = float(windows["longest_idle_us"].fillna(0.0).max())
    if us < MIN_ONE_GAP_FRAC * idle_us or us >= NEARLY_ALL_FRAC * idle_us:
        return ""
    return f", {number(us / 1e3, 'ms')} {IN_ONE_GAP}"


def _in_most_steps(windows: pd.DataFrame) -> bool:
    """Whether longer gaps are in most steps, and not in a first one alone; also where that is not known."""
    known = windows[windows["longer_gap_steps"].notna() & (windows["steps"] > 0)]
    return known.empty or float(known["longer_gap_steps"].sum()) >= MIN_STEPS_FRAC * float(known["steps"].sum())


MIN_STEPS_FRAC = 0.5
"""Share of the steps with longer gaps from which these are told: fewer are a start, or a step that is told as long."""
IN_ONE_GAP = "of it in one gap"
MIN_ONE_GAP_FRAC = 0.5
"""Share of idle time in one piece from which that is told where nothing else accounts for it."""
MIN_LONGER_FRAC = 0.3
"""Share of longer gaps in the idle time of short ones from which they are told apart."""


MIN_OF_OPTIMIZER_FRAC = 0.5
"""Share of the optimizer in the launches from which it is named where the host launches too slowly."""
MIN_OF_ONE_FRAC = 1 / 3
"""Share of the time in which the host launches too late from which one operator is the place of the finding."""


COPYING = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda")
"""Operators that copy to the device, or on the host."""


def _is_copying(run: Run, windows: pd.DataFrame, host_us: float) -> bool:
    """Whether the host is in an operator that copies to the device, and starts no kernel, for most of the time in which
    it launches too late, however short each of the gaps is."""
    op, us = longest_named(windows, "host_op")
    if op not in COPYING or us < MIN_OF_PLACE_FRAC * host_us:
        return False
    rows = kernel_rows(run, everything=True)
    rows = rows[(rows["op"] == op) | (rows["top_op"] == op)]
    return bool((rows["category"].isin(COPIES) & ~rows["name"].str.contains(TO_HOST)).all())


@dataclass(frozen=True)
class _Place:
    """An operator, a function or a range in which the host is while the device waits; one without a name is none."""

    name: str = ""
    words: str = ""
    """As part of a sentence."""
    is_in_first_call: bool = False
    us: float = 0.0
    """How long per step."""


def _by_size(*places: _Place) -> str:
    """The words of several places, the longest first."""
    return "".join(place.words for place in sorted(places, key=lambda place: -place.us))


def _place(run: Run, windows: pd.DataFrame, column: str, basis: Basis, part: str = "of it") -> _Place:
    """The longest place that a column of names tells, if it is much of the step, with its first calls where these take
    nearly all of that. `part`: of which time it is."""
    name, words = longest_of(windows, column, basis, part)
    us = float(windows[windows[column] == name][f"{column}_us"].sum()) if name else 0.0
    calls = first_calls_of(run, name, us)
    told = f"{words} (nearly all in its {calls.which})" if calls else words
    if column == "host_function" and words and not calls:
        second, second_us = _second_function(windows)
        told += f" and {number(second_us / basis.steps / 1e3, 'ms')} in {second}" if second else ""
    return _Place(name, told, calls is not None, us / basis.steps)


def _second_function(windows: pd.DataFrame) -> tuple[str, float]:
    """The second function in which the host is while the device waits and its time in microseconds, where that is
    nearly as long as in the first; an empty name for none."""
    us, (second, second_us) = longest_named(windows, "host_function")[1], longest_named(windows, "host_second")
    return (second, second_us) if MIN_SECOND_FRAC * us <= second_us <= us else ("", 0.0)


MIN_SECOND_FRAC = 0.6
"""Share of the time in the first function from which the second is told too."""


def _marked_place(run: Run, windows: pd.DataFrame, host_us: float, basis: Basis) -> _Place:
    """The Python function, or else the range that the program marks, with most of the time in which the host launches
    too late, where one has half of it, or two functions have."""
    for column, beside_us in (("host_function", _second_function(windows)[1]), ("host_range", 0.0)):
        if longest_named(windows, column)[1] + beside_us >= MIN_OF_PLACE_FRAC * host_us * basis.steps > 0:
            return _place(run, windows, column, basis)
    return _Place()


MIN_OF_PLACE_FRAC = 0.5
"""Share of the time in which the host launches too late from which one function or range is its place."""


def _host_column(windows: pd.DataFrame) -> str:
    """The column that tells more of what the host does: its operators, or the functions of Python."""
    return "host_function" if windows["host_function_us"].sum() > windows["host_op_us"].sum() else "host_op"


MOST_OF_CALLS_FRAC, NEARLY_ALL_FRAC = 0.5, 0.95
"""Shares of the time of calls from which the operator that they are in is named, and from which all of them are."""


def _outside(windows: pd.DataFrame, host_us: float, basis: Basis) -> _Place:
    """The time in which the host is in no operator, with the operators around it; none if it is little."""
    us = basis.each_us(windows["host_outside_us"].fillna(0.0))
    if us < max(MIN_OUTSIDE_FRAC * host_us, MIN_SAVED_FRAC * basis.cost.step_us):
        return _Place()
    told = f", {number(us / 1e3, 'ms')} of it in no operator"
    place, its_us = longest_named(windows, "host_between")
    its_us /= basis.steps
    if its_us < MIN_BETWEEN_FRAC * us:
        return _Place("", told, us=us)
    between = "in torch.tensor, which reads Python's values one by one" if place == NEW_TENSOR else f"between {place}"
    part = "" if its_us >= NEARLY_ALL_FRAC * us else f"{number(its_us / 1e3, 'ms')} of that "
    return _Place(place, f"{told}, {part}{between}", us=us)


def _before(windows: pd.DataFrame, op: str, basis: Basis) -> str:
    """The kernel whose late launch ends most of the longer gaps, as part of a sentence, where the operator says no more
    than that the host is in compiled code; else empty."""
    kernel, us = longest_named(windows, "host_kernel")
    if not is_compiled_code(op) or us < MIN_BEFORE_FRAC * longest_named(windows, "host_op")[1]:
        return ""
    return f", {number(us / basis.steps / 1e3, 'ms')} of it before {kernel_in_words(kernel)}"


MIN_BETWEEN_FRAC = 0.5
"""Share of the time in no operator between two operators from which these are told."""
MIN_BEFORE_FRAC = 0.5
"""Share of the time in compiled code from which the kernel is named before which the device waits."""
MIN_OUTSIDE_FRAC = 0.2
"""Share of the time in which the host launches too late from which the part in no operator is told."""


CALLS = {
    "allocation": "allocating or freeing memory",
    "uncached": "allocating and freeing memory without a cache",
    "compiling": "compiling and starting operators",
    "torch.compile": "compiling code",
    "loading": "launching or loading kernels",
    "graphs": "building or launching graphs",
    "copies": "starting copies and fills",
    "setup": "setting up the device",
    "other": "in calls",
}
"""What the host does in calls into the device's runtime, by their kind."""


@dataclass(frozen=True)
class _Calls:
    """Calls into the device's runtime in which a host is while it should launch."""

    kind: str = ""
    """The kind of most of them by time, see `CALLS`."""
    names: str = ""
    """The longest of that kind."""
    us: float = 0.0
    """Their time per step."""


def _host_calls(idle: Idle) -> _Calls:
    """The calls of the kind with most of the time in which the host should launch."""
    windows = idle.windows[idle.windows["host_call_kind"] != ""]
    us = windows.groupby("host_call_kind")["host_call_us"].sum() / idle.basis.steps
    if us.empty:
        return _Calls()
    kind = str(us.idxmax())
    longest = windows[windows["host_call_kind"] == kind].sort_values("host_call_us").iloc[-1]
    return _Calls(kind, str(longest["host_call"]), float(us.max()))
