"""Advice on waiting in collectives: for late ranks, and for ranks whose traces are missing.

>>> late_rank_remedy(run, saving).advice
'Nearly all of this is waiting for ranks that enter the collectives late, which neither a faster network nor ...'
"""

from dataclasses import replace

from amp_core.analysis.performance.collectives import collective_rows, has_all_ranks
from amp_core.analysis.performance.kernels import window_rows
from amp_core.analysis.performance.rank_waiting import began_later_us, started_apart
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, CommunicationSaving, IdleSaving, LateRankSaving
from amp_core.findings.model import Remedy
from amp_core.findings.signals import facts
from amp_core.findings.snippets import PROFILE
from amp_core.findings.trace_findings import in_this_trace, reported_saving, trains
from amp_core.findings.transfer_remedies import EXPERT_KERNELS, MIN_TRANSFER_FRAC, RECORD_ALL, without_other_ranks
from amp_core.store.run import Run
from amp_core.text.formatting import number


def late_rank_remedy(run: Run, late: LateRankSaving) -> Remedy:
    """What to advise where nearly all of it is waiting for late ranks."""
    remedy = looking(run)
    if late.slower_ratio:
        is_of_experts = collective_rows(run)["kernel"].str.contains(EXPERT_KERNELS).any()
        remedy = _HOT_EXPERTS if is_of_experts else _SLOWER_GPUS
    elif late.held_ranks == late.late_ranks:
        remedy = _HELD_RANKS
    elif started_apart(run):  # the title says whether they began later
        remedy = _STARTED_APART
        if began_later_us(run):
            remedy = replace(remedy, advice=remedy.advice.replace(_LATER_ONES, ""))
    elif late.all_waiting and late.all_hosts_us:
        remedy = _slow_hosts(late, launch_bound=reported_saving(run, "launch-bound", IdleSaving) is not None)
    if not late.all_waiting:
        remedy = replace(remedy, advice=_AND_TRANSFER)
    later = "" if has_all_ranks(run) else _LATER_STILL
    return replace(remedy, advice=f"{remedy.advice}{later}{in_this_trace(late)}")


def looking(run: Run) -> Remedy:
    """How to find what late ranks do before the collectives."""
    return _LATE_RANKS_WITH_STACKS if facts(run.head.environment, "profiler").get("with_stack") else _LATE_RANKS


def with_waiting(remedy: Remedy, run: Run, saving: CommunicationSaving, transfer_frac: float) -> Remedy:
    """The remedy of the transfer after the waiting for late ranks; without that where no more than `transfer_frac`, a
    small part, is transfer. It tells `Saving.here`."""
    advice = (
        f"At least {number(saving.waited_us / 1e3)} of the {number(saving.saved_us / 1e3, 'ms')} are waiting for ranks "
        f"that enter the collectives late, which overlap does not shorten: {saving.here}."
    )
    rest_us = saving.saved_us - saving.waited_us
    is_long = transfer_frac >= MIN_SAVED_FRAC and rest_us >= MIN_SAVED_FRAC * saving.saved_us
    tells_rest = is_long and not _is_behind_hosts(run, saving, rest_us)
    if tells_rest:
        advice += f" For the rest: {remedy.advice}"
    late = looking(run).snippet
    if saving.here.startswith("rank "):
        return Remedy(advice, late)
    return Remedy(advice, remedy.snippet if tells_rest else late.replace("on the late ranks", "on all ranks"))


def after_late_hosts(remedy: Remedy, run: Run, saving: CommunicationSaving) -> Remedy:
    """The remedy of the transfer that is left where ranks wait for ranks whose hosts are late."""
    advice = f"Shorten what makes those hosts late first.{in_this_trace(saving)}"
    if not trains(run) and saving.saved_us <= MAX_BEHIND_HOSTS_FRAC * saving.hosts_us:
        return Remedy(f"{advice} The transfer is no limit while the hosts are late.", looking(run).snippet)
    return replace(remedy, advice=f"{advice} For the rest: {remedy.advice}")


def with_missing_ranks(remedy: Remedy, run: Run, saving: CommunicationSaving) -> Remedy:
    """The remedy of the transfer after advice to find what is waited for: ranks whose traces are missing."""
    remedy, is_whole = without_other_ranks(remedy), has_all_ranks(run)
    is_later = window_rows(run)["step"].min() > 0  # no step is a first one
    see, awaited = "record all ranks, and import their traces together to see which is late", _awaited(run)
    if awaited is not None:
        see = f"the ranks that are here wait longest for rank {awaited}, so record that one too"
    transfer_us = saving.saved_us - saving.waiting_us
    waiting = f"{'At least' if saving.waiting_is_sure else 'About'} {number(saving.waiting_us / 1e3, 'ms')}"
    advice = (
        f"{waiting} of this is no transfer, which neither overlap nor fewer bytes shorten, and none of these "
        f"ranks enters so late: {'' if is_later else _SETS_UP}a rank whose trace is not here may be late, or the "
        f"network stalls. {'Record' if is_later else 'Profile after a warm-up, and record'} all ranks."
        if is_whole
        else f"{waiting} of this is waiting for ranks that enter the collectives late, which neither overlap "
        f"nor fewer bytes shorten: {see}."
    )
    if transfer_us >= MIN_TRANSFER_FRAC * saving.saved_us:
        rest = f"The rest, at most {number(transfer_us / 1e3, 'ms')}, is the transfer"
        shorter = (
            f". {remedy.advice}"
            if not _is_behind_hosts(run, saving, transfer_us)
            else ", which is no limit while the hosts are late."
        )
        advice += f" {rest}{shorter}{in_this_trace(saving)}"
    is_most = saving.waiting_us >= transfer_us
    return Remedy(advice, RECORD_ALL if is_most else remedy.snippet)


def _is_behind_hosts(run: Run, saving: CommunicationSaving, transfer_us: float) -> bool:
    """Whether hosts launch too late for so long that a transfer hardly delays what they launch; gradients are sent
    while backward goes on."""
    return saving.of_hosts_us > 0 and not trains(run) and transfer_us <= MAX_BEHIND_HOSTS_FRAC * saving.hosts_us


MAX_BEHIND_HOSTS_FRAC = 0.25
"""Time of transfers over that of late launches up to which they hardly delay these."""


def _awaited(run: Run) -> int | None:
    """The rank that those which are here wait longest for, if its trace is missing and they tell it."""
    awaited = run.head.config.get("awaited_rank")
    return awaited if isinstance(awaited, int) else None


_SETS_UP = "the first collective of a group sets up its connections, "
_LATER_STILL = " A rank whose trace is missing may enter later still: import the traces of all ranks."
_HOT_EXPERTS = Remedy(
    "The others wait for the rank whose experts get most of the tokens, which no faster network shortens. Replicate "
    "its hot experts, or place them on other ranks, by the tokens that each expert gets.",
    "tokens = torch.bincount(expert_of_token.flatten(), minlength=experts)   # per layer, summed over ranks",
)
_SLOWER_GPUS = Remedy(
    "The others wait for a GPU that takes longer for as many kernels, which neither a faster network nor overlap "
    "shortens. Look at its clocks, power limit, temperature and other processes; where sizes differ between ranks, it "
    "has more data.",
    "nvidia-smi --query-gpu=index,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv -l 1",
)
_LATER_ONES = ", and later ones hardly wait"
_STARTED_APART = Remedy(
    f"Nearly all of this is in the first collective{_LATER_ONES}: the ranks begin what was recorded at different "
    "times, which tells nothing of a loop. Record several steps, after a warm-up.",
    PROFILE.format(activity="CUDA"),
)
_LATE_RANKS = Remedy(
    "Nearly all of this is waiting for ranks that enter the collectives late, which neither a faster network nor "
    "overlap shortens. Profile those ranks with stacks, and find what they do before the collectives that the others "
    "do not do, or do in less time.",
    "with torch.profiler.profile(with_stack=True) as prof:   # on the late ranks\n    train_step(batch)\n"
    'print(prof.key_averages(group_by_stack_n=5).table(sort_by="self_cpu_time_total", row_limit=10))',
)
_LATE_RANKS_WITH_STACKS = Remedy(
    "Nearly all of this is waiting for ranks that enter the collectives late, which neither a faster network nor "
    "overlap shortens. The traces have Python's stacks: a timeline shows what these ranks do before the collectives "
    "that the others do not do, or do in less time. Recording stacks slows the hosts, so time the steps without them.",
    "with torch.profiler.profile(with_stack=False) as prof:   # on all ranks\n    train_step(batch)",
)


def _slow_hosts(late: LateRankSaving, *, launch_bound: bool) -> Remedy:
    """Advice where the hosts of all ranks are slow: whichever is the latest, the others wait for it. `launch_bound`:
    that they launch kernel by kernel is a finding of its own."""
    hosts, step = number(late.all_hosts_us / 1e3), number(late.step_us / 1e3, "ms")
    alone, saved = number(max(0.0, late.step_us - late.all_hosts_us) / 1e3), number(late.saved_us / 1e3, "ms")
    return Remedy(
        f"The hosts of the other ranks need {hosts} of {step} themselves, so faster late ranks alone save at most "
        f"{alone} of the {saved}. {_LAUNCHING if launch_bound else 'F'}ind what holds up all hosts: too few processors "
        "or a quota, threads of several ranks on one processor, other processes, or Python's own work.",
        "nproc; cat /sys/fs/cgroup/cpu.max; taskset -cp $PID   # processors, quota, and pinning of each rank",
    )


_LAUNCHING = "What shortens launches shortens the steps of all. If that is not enough, f"
_AND_TRANSFER = (
    "Part of this is waiting for ranks that enter the collectives late: find what those do before the collectives that "
    "the others do not do. The rest is the transfer itself, which overlap, a faster network or fewer bytes shorten."
)
_HELD_RANKS = Remedy(
    "Nearly all of this is waiting for ranks whose GPUs do not start work that is queued, which neither the program, a "
    "faster network nor overlap shortens. Look for other processes on these GPUs, time slices of a virtual GPU, and a "
    "profiler that holds them.",
    "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv   # on the late ranks; on AMD: rocm-smi",
)
