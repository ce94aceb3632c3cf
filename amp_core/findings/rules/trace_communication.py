"""The rule on imported traces whose devices communicate with nothing beside it, or wait for other ranks."""

from dataclasses import replace

from amp_core.analysis.performance.collectives import longest_transfer
from amp_core.analysis.performance.following_collectives import following_transfer
from amp_core.analysis.performance.kernels import kernel_rows, on_cpu
from amp_core.analysis.performance.saving import CommunicationSaving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import rule
from amp_core.findings.rules.trace_cpu import cpu_waits_for_ranks
from amp_core.findings.trace_findings import SAVING_THRESHOLD, in_this_trace, saving_finding
from amp_core.findings.transfer_remedies import OVERLAP, Transfers, transfer_remedy, without_other_ranks
from amp_core.findings.waiting_remedies import (
    after_late_hosts,
    late_rank_remedy,
    with_missing_ranks,
    with_waiting,
)
from amp_core.store.run import Run
from amp_core.text.formatting import number


@rule(
    Entry(
        code="exposed-communication",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=434,
        what="The GPU of an imported trace communicates without computing at the same time.",
        signal="Time of communication kernels with no other kernel running concurrently.",
        threshold=SAVING_THRESHOLD,
        advice=OVERLAP.advice,
        snippet=OVERLAP.snippet,
        page="step-cost",
    )
)
def exposed_communication(run: Run) -> list[Finding]:
    """`exposed-communication`: communication with nothing beside it."""
    if on_cpu(kernel_rows(run)):
        return cpu_waits_for_ranks(run)
    savings = possible_savings(run)
    if savings is None:
        return []
    if (late := savings.of_late_ranks) is not None:
        return [saving_finding(run, late, late_rank_remedy(run, late))]
    saving = savings.reported("exposed-communication", CommunicationSaving)
    if saving is None:
        return []
    return [saving_finding(run, saving, _of_transfer(run, saving, Transfers(run, savings)))]


def _of_transfer(run: Run, saving: CommunicationSaving, transfers: Transfers) -> Remedy:
    """Advice on the transfer, after what the traces tell of waiting."""
    remedy = transfer_remedy(transfers)
    if saving.hardly_waits:
        remedy = without_other_ranks(remedy)
    if saving.late_hosts_us:
        return after_late_hosts(remedy, run, saving)
    if saving.waiting_us:
        return with_missing_ranks(remedy, run, saving)
    if saving.waited_us >= MIN_WAITED_FRAC * saving.saved_us > 0:
        remedy = with_waiting(remedy, run, saving, transfers.transfer_frac)
    else:
        remedy = replace(remedy, advice=f"{remedy.advice}{in_this_trace(saving)}")
    return _on_slow_link(run, remedy) if saving.tells_transfer else _on_crawling_link(run, remedy)


MIN_WAITED_FRAC = 1 / 3
"""Share of exposed communication that surely is waiting from which this comes first: more of it may be."""


def _on_slow_link(run: Run, remedy: Remedy) -> Remedy:
    """The remedy after what to say of messages that are large, and slower than links between GPUs."""
    transfer = longest_transfer(run)
    is_slow = (
        transfer is not None
        and str(run.head.config.get("device")).startswith("cuda")
        and transfer.message_bytes >= MIN_SLOW_BYTES
        and transfer.gb_per_s < MAX_SLOW_GB_PER_S
    )
    if transfer is None or not is_slow:
        return remedy
    slow = _SLOW_LINK.format(rate=number(transfer.gb_per_s, "GB/s"))
    return replace(remedy, advice=f"{slow} {remedy.advice}", snippet=_TOPOLOGY)


def _on_crawling_link(run: Run, remedy: Remedy) -> Remedy:
    """The same where no other ranks tell the transfer, but collectives that follow one another at once do."""
    transfer = following_transfer(run)
    if transfer is None or not str(run.head.config.get("device")).startswith("cuda"):
        return remedy
    if transfer.message_bytes < MIN_SLOW_BYTES or transfer.gb_per_s >= MAX_CRAWLING_GB_PER_S:
        return remedy
    crawling = _CRAWLING_LINK.format(takes=f"{transfer.words[0].upper()}{transfer.words[1:]}")
    return replace(remedy, advice=f"{crawling} {remedy.advice}", snippet=_TOPOLOGY)


MAX_CRAWLING_GB_PER_S = 4.0
"""Algorithm bandwidth of large messages below which any link between GPUs of one machine is far from its rate: PCIe of
the third generation moves 16 GB/s, NVLink and xGMI ten times as much and more."""
_CRAWLING_LINK = (
    "{takes}, each time, right after another collective and with nothing computed beside it: waiting would vary, so "
    "the link is slow, far below any between GPUs of one machine. Find first which path it takes, and whether the "
    "GPUs have peer access."
)
MAX_SLOW_GB_PER_S, MIN_SLOW_BYTES = 20.0, 2**20
"""Algorithm bandwidth of messages that large which NVLink exceeds many times, from 2016 on, and PCIe hardly reaches."""
_SLOW_LINK = (
    "At {rate} these messages go over PCIe, the host's memory or a network, and not over links between the GPUs: where "
    "the ranks share a machine with such links, find why they are not used."
)
_TOPOLOGY = (
    "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH python main.py   # the path that each pair of ranks takes\n"
    "nvidia-smi topo -m   # the links between the GPUs; on AMD: rocm-smi --showtopo"
)
