"""What the idle time of a device would save, by its cause: data, the host, synchronizations, queued work.

>>> for saving in idle_savings(run, windows, rows, basis): print(saving.code, saving.saved_us)
host-bound 12700.0
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import with_late_launches
from amp_core.analysis.performance.idle import Idle, copies_of_values, longest_named, longest_of
from amp_core.analysis.performance.kernels import holds_collectives_alone, kernel_rows, window_rows
from amp_core.analysis.performance.late_hosts import LateHosts, late_host_us
from amp_core.analysis.performance.late_launches import MOST_OF_CALLS_FRAC, NEARLY_ALL_FRAC, late_launches
from amp_core.analysis.performance.saving import Basis, IdleSaving, LateRankSaving, Saving, time_and_lead
from amp_core.analysis.performance.step_cost import step_cost
from amp_core.store.run import Run
from amp_core.text.formatting import mean_count


def idle_savings(
    run: Run, windows: pd.DataFrame, rows: pd.DataFrame, basis: Basis, between_us: float = 0.0
) -> list[Saving]:
    """Savings of these windows per step. `between_us` of the time before late launches is told with the collectives
    that it lies between."""
    idle = Idle(run, with_late_launches(run, windows), rows, basis)
    if holds_collectives_alone(run):
        return []
    late, syncs = late_launches(idle, between_us), _after_syncs(idle)
    if syncs.saved_us > idle.sync_us and syncs.saved_us >= MIN_AS_MUCH_RATIO * late.saved_us:
        late = replace(late, rank_limit_us=JUST_BELOW * syncs.saved_us)  # the waits are the cause
    return [_for_data(idle), late, syncs, _queued(idle)]


MIN_AS_MUCH_RATIO = 0.9
"""What a step gains without the host's waits, over what it gains if its launches do not come late, from which the waits
come first."""


def _for_data(idle: Idle) -> Saving:
    """What the device waits for data."""
    us, lead_us = float(np.nan_to_num(idle.basis.cost.us("data"))), idle.us("lead_data_us")
    function, in_function = longest_of(idle.windows, "data_function", idle.basis)
    return Saving(
        "waiting-for-data",
        us + lead_us,
        idle.basis.cost.step_us,
        f"The GPU waits for data {time_and_lead(us, lead_us, idle.basis)}{in_function}",
        function or "data loading",
        lead_us=lead_us,
        before_us=idle.before_us,
    )


def _after_syncs(idle: Idle) -> IdleSaving:
    """What the device is idle after the host waited for it."""
    us = idle.sync_us
    where, in_syncs = _syncing(idle.windows, "idle_sync_op", us * idle.basis.steps)
    counted = float(idle.windows["idle_syncs"].sum(min_count=len(idle.windows)))  # not in runs of older versions
    number = _per_step(counted, idle.basis.steps) if counted > 0 else idle.basis.cost.syncs
    number_of = _number_of_syncs(number)
    of_values = copies_of_values(idle.run)
    what = f"The GPU is idle for {idle.basis.taken(us)} after {number_of} with the host{in_syncs}{of_values}"
    sooner_us, alone_us = 0.0 if idle.launches_block else min(idle.gaps_us, idle.us("unwaited_us")), math.inf
    if sooner_us >= MIN_AHEAD_RATIO * us and idle.basis.is_long(sooner_us) and not idle.of_copies.sync_us:
        us = sooner_us
        where, _ = longest_named(idle.windows, "unwaited_op")
        if idle.windows["unwaited_alone_us"].notna().all():  # not in runs of older versions
            alone_us = idle.us("unwaited_alone_us")
        in_syncs = "" if not where else f" ({where})" if number == 1 else f", the longest in {where}"
        what = f"The host launches late after {number_of}{in_syncs}: without these waits it would launch sooner"
    where = where or "synchronizing calls"
    step_us = idle.basis.cost.step_us
    return IdleSaving("host-syncs", us, step_us, what, where, copies_values=bool(of_values), alone_us=alone_us)


MIN_AHEAD_RATIO = 1.25
"""What a step gains if the host does not wait, over the idle time right after its waits, from which more is told."""


def _queued(idle: Idle) -> IdleSaving:
    """What the device is idle with work launched, without what would not end the step sooner."""
    wait_us = idle.wait_us
    is_handed_over = idle.us("idle_handover_us") >= wait_us / 2 > 0
    is_unexplained = idle.us("idle_late_start_us") >= wait_us / 2 > 0 and not is_handed_over
    waits_for_graph, waits_in = idle.us("idle_graph_us") >= wait_us / 2 > 0, ""
    waited_for = ": it waits for another GPU or rank, the host, or the start of a CUDA graph"
    if waits_for_graph:
        waited_for = ": it waits for a captured graph to start"
    elif is_handed_over:
        waited_for = ": it waits for an event of another stream, and begins some time after that"
    elif is_unexplained:
        waited_for = ", and nothing in the trace shows what it waits for"
        if idle.us("idle_wait_sync_us") >= wait_us / 2:  # otherwise the host runs ahead of it
            waits_in, in_waits = _syncing(idle.windows, "idle_wait_op", wait_us * idle.basis.steps)
            waited_for += f"; the host waits meanwhile, in synchronizations{in_waits}"
    gpu, held_us, step_us, unit = _held(idle.windows, wait_us, idle.basis)
    lost = idle.us("idle_wait_lost_us") / max(idle.us("idle_wait_us"), 1e-3)
    what = f"{gpu} is idle for {100 * held_us / step_us:.0f} % of {unit} although work is queued{waited_for}"
    saved_us = held_us * max(0.0, 1 - lost)
    return IdleSaving(
        "kernel-wait",
        saved_us,
        step_us,
        what,
        "streams",
        is_sure=not is_unexplained,
        waits_for_graph=waits_for_graph,
        is_handed_over=is_handed_over and not waits_for_graph,
        waits_in=waits_in,
    )


def _per_step(count: float, steps: float) -> float:
    """How many there are per step; a whole number where one more or less, as after the last step, makes it one."""
    nearest = float(round(count / steps))
    return nearest if nearest > 0 and abs(count - nearest * steps) <= 1 < steps else count / steps


def _number_of_syncs(number_of: float | None) -> str:
    """`2 synchronizations`."""
    if not number_of:
        return "synchronizations"
    return f"{mean_count(number_of)} synchronization{'s' if number_of != 1 else ''}"


LATE_LAUNCHES = ("launch-bound", "host-bound")
"""Savings of the time in which the host launches too late."""
JUST_BELOW = 0.999
"""Of the waiting for a late rank: the most that one cause saves, so that the waiting ranks first."""


def idle_of_late_rank(run: Run, late: LateRankSaving, unit: str) -> list[Saving]:
    """The same of the one rank that the others wait for: what makes it late. A step becomes shorter by no more than
    they wait, but for what shortens the launches of all ranks where their hosts are nearly as slow, and the cause is
    told after the waiting. Where the others wait longer for their own hosts, the waiting is no limit, unless the late
    rank's GPU is slow."""
    rank = late.late_ranks[0]
    windows, rows = (frame[frame["rank"] == rank] for frame in (window_rows(run), kernel_rows(run)))
    cost = step_cost(run, rank=rank)
    savings = idle_savings(run, windows, rows, Basis(cost, float(cost.steps or len(windows)), unit, rates=None))
    others_us = _others_late_us(run, late.late_ranks)
    is_cause = late.slower_ratio > 0 or others_us <= late.saved_us
    limit_us = JUST_BELOW * late.saved_us if is_cause else math.inf
    theirs = "" if is_cause else f", the others' for {100 * others_us / late.step_us:.0f} %,"
    most_us = {"launch-bound": math.inf if late.is_of_all_hosts else limit_us}
    return [
        replace(
            _of_rank(saving, rank, unit, theirs),
            saved_us=min(saving.saved_us, most_us.get(saving.code, limit_us)),
            lead_us=min(saving.lead_us, most_us.get(saving.code, limit_us)),
            rank_limit_us=min(saving.rank_limit_us, limit_us),
        )
        for saving in savings
    ]


def idle_of_late_host(run: Run, late: LateHosts, unit: str) -> list[Saving]:
    """The same of the rank whose late host the others wait for: what they wait is the idle time of its GPU seen from
    them, so that this is the whole of it, and no mean over the ranks."""
    windows, rows = (frame[frame["rank"] == late.rank] for frame in (window_rows(run), kernel_rows(run)))
    cost = step_cost(run, rank=late.rank)
    savings = idle_savings(run, windows, rows, Basis(cost, float(cost.steps or len(windows)), unit, rates=None))
    idle, waiting = (100 * us / cost.step_us for us in (_others_late_us(run, (late.rank,)), late.others_us))
    theirs = f", the others' for {idle:.0f} % beside {waiting:.0f} % of waiting for late ranks,"
    return [_of_rank(saving, late.rank, unit, theirs) for saving in savings]


def _of_rank(saving: Saving, rank: int, unit: str, theirs: str) -> Saving:
    """A saving of one rank's windows, with its number, and what is said of the others' GPUs."""
    what = saving.what.replace("The GPU", f"Rank {rank}'s GPU", 1).replace(f"of the {unit}", f"of its {unit}")
    return replace(saving, what=what.replace(" because the host", f"{theirs} because the host", 1))


def _others_late_us(run: Run, ranks: tuple[int, ...]) -> float:
    """How long per step the devices of the other ranks are idle because their own hosts launch too late."""
    windows = window_rows(run)
    return late_host_us(windows[~windows["rank"].isin(ranks)])


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


def _syncing(windows: pd.DataFrame, column: str, whole_us: float) -> tuple[str, str]:
    """The operator in which the host waits for most of a time, and that as part of a sentence; empty for less than half
    of it."""
    op, us = longest_named(windows, column)
    if not op or us < MOST_OF_CALLS_FRAC * whole_us:
        return "", ""
    return op, f" ({op})" if us >= NEARLY_ALL_FRAC * whole_us else f", most of that in {op}"
