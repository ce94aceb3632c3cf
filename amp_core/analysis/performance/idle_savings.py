"""What the idle time of a device would save, by its cause: data, the host, synchronizations, queued work.

>>> for saving in idle_savings(run, windows, rows, basis): print(saving.code, saving.saved_us)
host-bound 12700.0
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import with_late_launches
from amp_core.analysis.performance.kernels import (
    TO_HOST,
    first_calls_of,
    holds_collectives_alone,
    kernel_rows,
    optimizer_frac,
    tiny_copies,
    window_rows,
)
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Basis, Saving
from amp_core.analysis.performance.step_cost import step_cost
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, mean_count, number
from amp_core.traces.operators import is_compiled_code

VALUES_COPIED = "on average to the host"
"""What is said of copies of single values in a loop."""
GRAPH_START = "for a captured graph to start"
MAX_SHORT_US = 30.0
"""Longer kernels are not named as short ones: a few launches fit into each, so the gaps are not due to their length."""
SHORT_LEAD_US = 300.0
"""Before the first kernel of a step Python and the dispatch of operators take less, as between two later ones
(`amp_core.traces.idle_causes.DISPATCH_US`)."""
LAUNCH_US = 10.0
"""Approximate cost of launching a kernel on the host: shorter kernels cannot keep a GPU busy. Decides where the lengths
of the gaps between kernels are not recorded."""


@dataclass(frozen=True)
class _Idle:
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
        """Idle time after the host waited for the device, in other than copies that are told themselves."""
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
    def knows_launches(self) -> bool:
        """Whether the trace has launches, which tell why a device is idle."""
        return not self.windows[["idle_sync_us", "idle_wait_us", "idle_dispatch_us"]].isna().all(axis=None)


def idle_savings(
    run: Run, windows: pd.DataFrame, rows: pd.DataFrame, basis: Basis, between_us: float = 0.0
) -> list[Saving]:
    """Savings of these windows per step. `between_us` of the time before late launches is told with the collectives
    that it lies between."""
    idle = _Idle(run, with_late_launches(run, windows), rows, basis)
    if holds_collectives_alone(run):
        return []
    late, syncs = _late_launches(idle, between_us), _after_syncs(idle)
    if syncs.saved_us > idle.sync_us and syncs.saved_us >= MIN_AS_MUCH_RATIO * late.saved_us:
        late = replace(late, rank_limit_us=JUST_BELOW * syncs.saved_us)  # the waits are the cause
    return [_for_data(idle), late, syncs, _queued(idle)]


MIN_AS_MUCH_RATIO = 0.9
"""What a step gains without the host's waits, over what it gains if its launches do not come late, from which the waits
come first."""


def _for_data(idle: _Idle) -> Saving:
    """What the device waits for data."""
    us, lead_us = float(np.nan_to_num(idle.basis.cost.us("data"))), idle.us("lead_data_us")
    function, in_function = _longest_of(idle.windows, "data_function", idle.basis)
    return Saving(
        "waiting-for-data",
        us + lead_us,
        idle.basis.cost.step_us,
        f"The GPU waits for data {_when(us, lead_us, idle.basis)}{in_function}",
        function or "data loading",
        lead_us=lead_us,
        before_us=idle.before_us,
    )


def _after_syncs(idle: _Idle) -> Saving:
    """What the device is idle after the host waited for it."""
    us = idle.sync_us
    where, in_syncs = _syncing(idle.windows, "idle_sync_op", us * idle.basis.steps)
    counted = float(idle.windows["idle_syncs"].sum(min_count=len(idle.windows)))  # not in runs of older versions
    number = _per_step(counted, idle.basis.steps) if counted > 0 else idle.basis.cost.syncs
    number_of = _number_of_syncs(number)
    what = f"The GPU is idle for {idle.basis.taken(us)} after {number_of} with the host{in_syncs}{_of_values(idle)}"
    sooner_us = min(idle.gaps_us, idle.us("unwaited_us"))
    if sooner_us >= MIN_AHEAD_RATIO * us and idle.basis.is_long(sooner_us) and not idle.of_copies.sync_us:
        us = sooner_us
        where, _ = longest_named(idle.windows, "unwaited_op")
        in_syncs = "" if not where else f" ({where})" if number == 1 else f", the longest in {where}"
        what = f"The host launches late after {number_of}{in_syncs}: without these waits it would be ahead of the GPU"
    return Saving("host-syncs", us, idle.basis.cost.step_us, what, where or "synchronizing calls")


MIN_AHEAD_RATIO = 1.25
"""What a step gains if the host does not wait, over the idle time right after its waits, from which more is told."""


def _queued(idle: _Idle) -> Saving:
    """What the device is idle with work launched, without what would not end the step sooner."""
    wait_us = idle.wait_us
    is_unexplained = idle.us("idle_late_start_us") >= wait_us / 2 > 0
    waited_for = ": it waits for another GPU or rank, the host, or the start of a CUDA graph"
    if idle.us("idle_graph_us") >= wait_us / 2 > 0:
        waited_for = f": it waits {GRAPH_START}"
    elif is_unexplained:
        waited_for = ", and nothing in the trace shows what it waits for"
        if idle.us("idle_wait_sync_us") >= wait_us / 2:  # otherwise the host runs ahead of it
            _, in_waits = _syncing(idle.windows, "idle_wait_op", wait_us * idle.basis.steps)
            waited_for += f"; the host waits meanwhile, in synchronizations{in_waits}"
    gpu, held_us, step_us, unit = _held(idle.windows, wait_us, idle.basis)
    lost = idle.us("idle_wait_lost_us") / max(idle.us("idle_wait_us"), 1e-3)
    what = f"{gpu} is idle for {100 * held_us / step_us:.0f} % of {unit} although work is queued{waited_for}"
    saved_us = held_us * max(0.0, 1 - lost)
    return Saving("kernel-wait", saved_us, step_us, what, "streams", is_sure=not is_unexplained)


def _late_launches(idle: _Idle, between_us: float) -> Saving:
    """What the device waits for launches: with launches that are slow one by one, or for something else."""
    run, windows, basis = idle.run, idle.windows, idle.basis
    copying_us, loading_us = idle.of_copies.late_us, alone_loading_us(windows) / basis.steps
    others_us = idle.us("idle_latency_us", "idle_filling_us", "idle_elsewhere_us")
    late_us = max(0.0, idle.gaps_us - idle.sync_us - idle.of_copies.sync_us - idle.wait_us - others_us)
    lead_us = idle.before_us - idle.us("lead_data_us")
    beside_us = idle.us("idle_profiling_us") + copying_us
    us = max(0.0, late_us - min(late_us, between_us) + lead_us + loading_us - beside_us)
    lead_us -= min(lead_us, copying_us)
    dispatch_us = idle.us("idle_dispatch_us") + (lead_us if lead_us < SHORT_LEAD_US else 0.0)
    known = windows["idle_dispatch_us"].notna().all()  # not in runs that older versions imported
    kind, calls, call_us = _host_calls(windows, basis)
    in_calls = call_us >= us / 2 > 0
    is_slow = dispatch_us >= us / 2 if known else _mean_kernel_us(idle.rows) < LAUNCH_US
    in_copies = lead_us < us / 2 and _is_copying(run, windows, us * basis.steps)
    launch_bound = not in_calls and is_slow and not in_copies
    in_python = ""
    python_us = idle.us("lead_outside_us") if lead_us >= SHORT_LEAD_US else 0.0
    if launch_bound and python_us >= max(SHORT_LEAD_US, MIN_SAVED_FRAC * basis.cost.step_us):
        us, lead_us = max(0.0, us - python_us), max(0.0, lead_us - python_us)
        in_python = (
            f"; for {number(python_us / 1e3, 'ms')} before the first kernel the host is in no operator and no call, "
            "but in Python or other code"
        )
    op, in_op = ("", "") if launch_bound or in_calls else _host_op(run, windows, basis)
    in_op += ", which copies and starts no kernel" if in_copies and op in COPYING else ""
    named_us = call_us if in_calls else longest_named(windows, _host_column(windows))[1] / basis.steps
    named = windows["host_function_us"].sum() > 0 and not in_calls
    outside = "" if launch_bound or named else _outside(windows, us, basis)
    # The time before the first kernel is told apart.
    longer_us = us - dispatch_us - loading_us - (lead_us if lead_us >= SHORT_LEAD_US else 0.0)
    are_longer = longer_us >= max(MIN_LONGER_FRAC * us, MIN_SAVED_FRAC * basis.cost.step_us)
    if launch_bound and are_longer and _in_most_steps(windows):
        outside = f", {number(longer_us / 1e3, 'ms')} of it in {LONGER_GAPS}"
    if unknown := unknown_host(run):
        outside = "" if launch_bound or in_calls or named or in_op else unknown
    marked = "" if in_calls or in_op or (named and not launch_bound) else _place(run, windows, us, basis)
    is_told = idle.basis.unit == "step" or in_calls or in_op or marked or outside.startswith(",")
    gap = "" if is_told else _one_gap(windows, us * basis.steps)
    code = "launch-bound" if launch_bound else "host-bound"
    if idle.knows_launches:
        between = _between(idle) if launch_bound and basis.is_long(us - lead_us) else ""
        calling = _in_calls(run, windows, kind, calls, call_us, basis) if in_calls else ""
        before = "" if launch_bound or in_calls else _before(windows, op, basis)
        if launch_bound and (waits_at_start(windows) or waits_early(windows)):
            first = number(float(windows["late_until_us"].max()) / 1e3, "ms")
            between = f", nearly all within its first {first}{between}"
        what = f"{between}{calling}{in_op}{marked}{before}{gap}{outside}{in_python}"
        why = f" because the host launches too late{what}"
    else:
        code, why = "unexplained-idle", f"{gap}, and the trace has no launches that would show why"
    or_waits = " or waits in collectives" if basis.is_long(loading_us) else ""
    return Saving(
        code,
        us,
        basis.cost.step_us,
        f"The GPU is idle{or_waits} for {_when(us - lead_us, lead_us, basis)}{why}",
        (calls if in_calls else op if named_us >= MIN_OF_ONE_FRAC * us else "") or "host",
        lead_us=lead_us,
        before_us=idle.before_us,
        is_of_part=bool(op or in_calls) and named_us < NEARLY_ALL_FRAC * us,
    )


def waits_at_start(windows: pd.DataFrame) -> bool:
    """Whether the device waits for launches in the first part of each window without steps, and its host is ahead of it
    from then on."""
    return _waits_until(windows, MAX_START_FRAC)


def waits_early(windows: pd.DataFrame) -> bool:
    """The same of a part that may be most of the window, after which the host is ahead for long."""
    ahead_us = windows["wall_us"] - windows["late_until_us"].fillna(0.0)
    return _waits_until(windows, MAX_EARLY_FRAC) and bool((ahead_us >= MIN_AHEAD_US).all())


def _waits_until(windows: pd.DataFrame, most_frac: float) -> bool:
    us = windows["late_until_us"].fillna(0.0)
    return bool((us > 0).all() and (us <= most_frac * windows["wall_us"]).all() and windows["steps"].isna().all())


MAX_START_FRAC, MAX_EARLY_FRAC = 0.25, 0.75
"""Shares of a window up to which it is its start, and up to which what follows is not a small part."""
MIN_AHEAD_US = 1000.0
"""A shorter rest of a window does not tell that its host stays ahead."""


def _mean_kernel_us(rows: pd.DataFrame) -> float:
    """The mean time of a kernel that computes; 0 without any."""
    computing = rows[rows["category"] != "communication"]
    return float(computing["total_us"].sum() / max(1.0, computing["count"].sum()))


def _between(idle: _Idle) -> str:
    """Between what the gaps of slow launches lie, as part of a sentence: short kernels, copies of values, and the
    optimizer's kernels if they are most."""
    mean_us, of_optimizer = _mean_kernel_us(idle.rows), optimizer_frac(idle.rows)
    kernels = f", between kernels of {mean_us:.1f} µs on average" if 0 < mean_us < MAX_SHORT_US else ""
    stepping = f", with {100 * of_optimizer:.0f} % of the launches in the optimizer"
    return f"{kernels}{stepping if of_optimizer >= MIN_OF_OPTIMIZER_FRAC else ''}{_of_values(idle)}"


def _of_values(idle: _Idle) -> str:
    """That values are copied to the host one by one, as part of a sentence; else empty."""
    tiny, tiny_bytes = tiny_copies(idle.run)
    size = f"{tiny_bytes:.0f} byte{'s' if tiny_bytes >= 1.5 else ''}"
    return f", with {tiny:,.0f} copies of {size} {VALUES_COPIED}" if tiny else ""


def _per_step(count: float, steps: float) -> float:
    """How many there are per step; a whole number where one more or less, as after the last step, makes it one."""
    nearest = float(round(count / steps))
    return nearest if nearest > 0 and abs(count - nearest * steps) <= 1 < steps else count / steps


def _number_of_syncs(number_of: float | None) -> str:
    """`2 synchronizations`."""
    if not number_of:
        return "synchronizations"
    return f"{mean_count(number_of)} synchronization{'s' if number_of != 1 else ''}"


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
LONGER_GAPS = "gaps of 0.3 ms and more"
LATE_LAUNCHES = ("launch-bound", "host-bound")
"""Savings of the time in which the host launches too late."""
JUST_BELOW = 0.999
"""Of the waiting for a late rank: the most that one cause saves, so that the waiting ranks first."""


def idle_of_late_rank(run: Run, late: Saving, unit: str) -> list[Saving]:
    """The same of the one rank that the others wait for: what makes it late. A step becomes shorter by no more than
    they wait, but for what shortens the launches of all ranks where their hosts are nearly as slow, and the cause is
    told after the waiting."""
    rank = late.late_ranks[0]
    windows, rows = (frame[frame["rank"] == rank] for frame in (window_rows(run), kernel_rows(run)))
    cost = step_cost(run, rank=rank)
    savings = idle_savings(run, windows, rows, Basis(cost, float(cost.steps or len(windows)), unit, rates=None))
    limit_us = JUST_BELOW * late.saved_us
    most_us = {"launch-bound": math.inf if late.is_of_all_hosts else limit_us}
    return [
        replace(
            saving,
            saved_us=min(saving.saved_us, most_us.get(saving.code, limit_us)),
            lead_us=min(saving.lead_us, most_us.get(saving.code, limit_us)),
            rank_limit_us=min(saving.rank_limit_us, limit_us),
            what=saving.what.replace("The GPU", f"Rank {rank}'s GPU", 1).replace(f"of the {unit}", f"of its {unit}"),
        )
        for saving in savings
    ]


def late_host_us(windows: pd.DataFrame, late: Saving) -> float:
    """How long per step the devices of the other ranks than the late ones are idle because their own hosts launch too
    late, the mean in microseconds."""
    others = windows[~windows["rank"].isin(late.late_ranks)]
    causes = ["idle_data_us", "idle_sync_us", "idle_wait_us", "idle_latency_us", "idle_filling_us"]
    causes += ["idle_elsewhere_us", "idle_profiling_us"]
    us = others["idle_us"].fillna(0.0) - others[causes].fillna(0.0).sum(axis=1)
    return float(us.clip(lower=0.0).sum()) / max(1.0, float(others["steps"].fillna(0.0).sum()) or float(len(others)))


def alone_loading_us(windows: pd.DataFrame) -> float:
    """Time in which a device only communicates while its own host stays in a call, as in a first launch of a kernel:
    without the communication it would be idle."""
    return float(windows["alone_loading_us"].fillna(0.0).sum())


MIN_OF_OPTIMIZER_FRAC = 0.5
"""Share of the optimizer in the launches from which it is named where the host launches too slowly."""
MIN_OF_ONE_FRAC = 1 / 3
"""Share of the time in which the host launches too late from which one operator is the place of the finding."""
MIN_OF_ONE_RATIO = 1.5
"""A rank whose work waits that many times as long as that of the mean rank is named, with its own time."""


def _held(windows: pd.DataFrame, wait_us: float, basis: Basis) -> tuple[str, float, float, str]:
    """The GPU of which work waits, for how long per step, of how long a step, and that in words: those of one rank if
    it is far above the mean."""
    ranks = windows.groupby("rank")
    us = ranks["idle_wait_us"].sum() / ranks["steps"].sum().where(lambda steps: steps > 0, ranks.size())
    if len(us) < 2 or us.max() < MIN_OF_ONE_RATIO * wait_us:
        return "The GPU", wait_us, basis.cost.step_us, f"the {basis.unit}"
    own = windows[windows["rank"] == us.idxmax()]
    own_steps = float(own["steps"].fillna(0.0).sum()) or float(len(own))
    step_us = float(own["wall_us"].sum()) / own_steps
    return f"Rank {us.idxmax():.0f}'s GPU", min(float(us.max()), step_us), step_us, f"its {basis.unit}"


def _host_op(run: Run, windows: pd.DataFrame, basis: Basis) -> tuple[str, str]:
    """The operator in which the host spends most of the time in which it should launch, or the Python function if that
    is longer, and that as part of a sentence; empty if it is not much of the step."""
    column = _host_column(windows)
    op, in_op = _longest_of(windows, column, basis)
    return op, in_op if column == "host_function" else f"{in_op}{_in_first(run, windows, column, op)}"


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


def _place(run: Run, windows: pd.DataFrame, host_us: float, basis: Basis) -> str:
    """The part of the sentence on the Python function, or else the range that the program marks, with most of the time
    in which the host launches too late; empty where none has half of it."""
    for column in ("host_function", "host_range"):
        if longest_named(windows, column)[1] >= MIN_OF_PLACE_FRAC * host_us * basis.steps > 0:
            place, in_place = _longest_of(windows, column, basis)
            return f"{in_place}{_in_first(run, windows, column, place)}"
    return ""


MIN_OF_PLACE_FRAC = 0.5
"""Share of the time in which the host launches too late from which one function or range is its place."""


def _host_column(windows: pd.DataFrame) -> str:
    """The column that tells more of what the host does: its operators, or the functions of Python."""
    return "host_function" if windows["host_function_us"].sum() > windows["host_op_us"].sum() else "host_op"


def _in_first(run: Run, windows: pd.DataFrame, column: str, op: str) -> str:
    """That an operator or a range is blamed for its first call, as part of a sentence; empty for others."""
    us = float(windows[windows[column] == op][f"{column}_us"].sum()) if op else 0.0
    calls = first_calls_of(run, op, us)
    return f" ({IN_FIRST}{calls.which})" if calls is not None else ""


IN_FIRST = "nearly all in its "
"""What is said of a place of which the first calls take nearly all of the time."""


def _in_calls(run: Run, windows: pd.DataFrame, kind: str, calls: str, call_us: float, basis: Basis) -> str:
    """The part of the sentence on calls into the runtime, with the operator that most of them are in, and the operator
    in which the host is longest beside them."""
    sentence = f", {number(call_us / 1e3, 'ms')} of it {CALLS[kind]} ({calls})"
    calling, its_us = longest_named(windows, "host_call_op")
    if calling and its_us / basis.steps >= MOST_OF_CALLS_FRAC * call_us:
        sentence += f"{'' if its_us / basis.steps >= NEARLY_ALL_FRAC * call_us else ', most'} in {calling}"
    op, in_op = _longest_of(windows, "host_rest_op", basis, "beside these calls")
    return f"{sentence}{in_op}{_in_first(run, windows, 'host_rest_op', op)}"


MOST_OF_CALLS_FRAC, NEARLY_ALL_FRAC = 0.5, 0.95
"""Shares of the time of calls from which the operator that they are in is named, and from which all of them are."""


def _outside(windows: pd.DataFrame, host_us: float, basis: Basis) -> str:
    """The part of the sentence on the time in which the host is in no operator; empty if it is little."""
    us = basis.each_us(windows["host_outside_us"].fillna(0.0))
    if us < max(MIN_OUTSIDE_FRAC * host_us, MIN_SAVED_FRAC * basis.cost.step_us):
        return ""
    return f", {number(us / 1e3, 'ms')} of it in no operator"


def _before(windows: pd.DataFrame, op: str, basis: Basis) -> str:
    """The kernel whose late launch ends most of the longer gaps, as part of a sentence, where the operator says no more
    than that the host is in compiled code; else empty."""
    kernel, us = longest_named(windows, "host_kernel")
    if not is_compiled_code(op) or us < MIN_BEFORE_FRAC * longest_named(windows, "host_op")[1]:
        return ""
    return f", {number(us / basis.steps / 1e3, 'ms')} of it before {kernel_in_words(kernel)}"


MIN_BEFORE_FRAC = 0.5
"""Share of the time in compiled code from which the kernel is named before which the device waits."""
MIN_OUTSIDE_FRAC = 0.2
"""Share of the time in which the host launches too late from which the part in no operator is told."""


def _longest_of(windows: pd.DataFrame, column: str, basis: Basis, part: str = "of it") -> tuple[str, str]:
    """The value of a column of names with most of its time, and that as part of a sentence; empty if it is not much of
    the step. `part`: of which time it is."""
    name, us = longest_named(windows, column)
    if us / basis.steps < MIN_SAVED_FRAC * basis.cost.step_us:
        return "", ""
    return name, f", {number(us / basis.steps / 1e3, 'ms')} {part} in {name}"


def _syncing(windows: pd.DataFrame, column: str, whole_us: float) -> tuple[str, str]:
    """The operator in which the host waits for most of a time, and that as part of a sentence; empty for less than half
    of it."""
    op, us = longest_named(windows, column)
    if not op or us < MOST_OF_CALLS_FRAC * whole_us:
        return "", ""
    return op, f" ({op})" if us >= NEARLY_ALL_FRAC * whole_us else f", most of that in {op}"


def longest_named(windows: pd.DataFrame, column: str) -> tuple[str, float]:
    """The value of a column of names with most of its time in all of the windows, and that time in microseconds; empty
    and 0 where nothing is named."""
    us = windows[windows[column] != ""].groupby(column)[f"{column}_us"].sum()
    return (str(us.idxmax()), float(us.max())) if len(us) else ("", 0.0)


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


def _host_calls(windows: pd.DataFrame, basis: Basis) -> tuple[str, str, float]:
    """The kind of runtime calls in which the host spends most of the time in which it should launch, the names of the
    longest of them, and their time per step in microseconds."""
    us = windows[windows["host_call_kind"] != ""].groupby("host_call_kind")["host_call_us"].sum() / basis.steps
    if us.empty:
        return "", "", 0.0
    kind = str(us.idxmax())
    longest = windows[windows["host_call_kind"] == kind].sort_values("host_call_us").iloc[-1]
    return kind, str(longest["host_call"]), float(us.max())


def _when(us: float, lead_us: float, basis: Basis) -> str:
    """`28 % of the step and 1.61 ms before its first kernel`."""
    if not basis.is_long(lead_us):
        return basis.taken(us)
    before = number(lead_us / 1e3, "ms")
    if not basis.is_long(us):
        return f"{before} before the first kernel of the {basis.unit}"
    return f"{basis.taken(us)} and {before} before its first kernel"
