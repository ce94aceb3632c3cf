"""Rules on imported traces: communication with nothing beside it, and ranks that others wait for."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import (
    Transfer,
    began_later_us,
    collective_rows,
    collective_table,
    has_all_ranks,
    longest_transfer,
    started_apart,
)
from amp_core.analysis.performance.communication_savings import compress_hook
from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.kernels import (
    holds_collectives_alone,
    is_matrix,
    kernel_rows,
    on_cpu,
    window_rows,
)
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving
from amp_core.analysis.performance.savings import Savings, possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, rule
from amp_core.findings.rules.trace_cpu import cpu_waits_for_ranks
from amp_core.findings.signals import facts
from amp_core.findings.snippets import PROFILE
from amp_core.findings.trace_findings import SAVING_THRESHOLD, for_what_runs, reported_saving, saving_finding
from amp_core.formats import element_bytes
from amp_core.hardware.kernel_names import SMALL_TYPES
from amp_core.store.run import Run
from amp_core.text.formatting import number, size
from amp_core.traces.operators import is_compiled_code

_OTHER_RANKS = " Waiting for a slower rank looks the same: import the traces of all ranks to compare them."


@rule(
    Entry(
        code="exposed-communication",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=434,
        what="The GPU of an imported trace communicates without computing at the same time.",
        signal="Time of communication kernels with no other kernel running concurrently.",
        threshold=SAVING_THRESHOLD,
        advice="Overlap communication with backward by using smaller buckets, or accumulate over micro-batches."
        + _OTHER_RANKS,
        snippet="model = DistributedDataParallel(model, bucket_cap_mb=10, gradient_as_bucket_view=True)",
        page="step-cost",
    )
)
def exposed_communication(run: Run) -> list[Finding]:
    """`exposed-communication`: communication with nothing beside it."""
    if on_cpu(kernel_rows(run)):
        return cpu_waits_for_ranks(run)
    if not saving_finding(run, "exposed-communication"):
        return []
    rows = collective_rows(run)
    exposed = rows.groupby("name")["alone_us"].sum()
    name = str(exposed.idxmax()) if exposed.sum() > 0 else ""
    dtypes = rows[rows["name"] == name].groupby("dtype")["alone_us"].sum()
    dtype = str(dtypes.idxmax()) if len(dtypes) else ""
    transfer_frac = _transfer_frac(rows)
    transfers = transfer_frac >= MIN_TRANSFER_FRAC
    is_wide = dtype in ("float64", "float32") or not (dtype or _computes_in_16_bits(run))
    narrower = ", and 16-bit activations" if is_wide and transfers else ""
    own = rows[rows["name"] == name]
    of_experts = bool(own["kernel"].str.contains(_EXPERT_KERNELS).any())
    savings = possible_savings(run)
    in_training = savings is not None and savings.trains
    exchange = _exchange(dtype, of_experts=of_experts, transfers=transfers, in_training=in_training)
    late = next((c for c in savings.ranked if c.late_ranks), None) if savings is not None else None
    has_stacks = facts(run.head.environment, "profiler").get("with_stack")
    late_remedy = _LATE_RANKS_WITH_STACKS if has_stacks else _LATE_RANKS
    if late is not None:
        remedy = _HELD_RANKS if late.held_ranks == late.late_ranks else late_remedy
        if late.slower_ratio:
            is_of_experts = rows["kernel"].str.contains(_EXPERT_KERNELS).any()
            remedy = _HOT_EXPERTS if is_of_experts else _SLOWER_GPUS
        elif remedy is late_remedy and started_apart(run):
            remedy = _STARTED_APART
            if began_later_us(run):  # the title says so
                remedy = replace(remedy, advice=remedy.advice.replace(_LATER_ONES, ""))
        if not late.all_waiting:
            remedy = replace(remedy, advice=_AND_TRANSFER)
        elif late.all_hosts_us and remedy is late_remedy:
            launch_bound = savings is not None and any(c.code == "launch-bound" for c in savings.ranked)
            remedy = _slow_hosts(late, launch_bound=launch_bound)
        if not has_all_ranks(run):
            remedy = replace(remedy, advice=f"{remedy.advice}{_LATER_STILL}")
        return for_what_runs(
            run, saving_finding(run, "exposed-communication", remedy.advice, remedy.snippet, training=True)
        )
    are_few = _are_large(own) or not _are_several(run, name)
    fewer = "" if are_few else ": fewer, larger collectives"
    inference = Remedy(
        f"Overlap communication with computation, or shard the model differently{fewer}{narrower}.",
        _ASYNCHRONOUS.get(name, _ASYNCHRONOUS["all_reduce"]),
    )
    hidden = _hidden_at_most(savings)
    if hidden:
        inference = replace(inference, advice=f"{inference.advice} {hidden}")
    special = _special(run, own, name) or _functional(run, own, savings, hidden, narrower=bool(narrower))
    inference = special or inference
    if of_experts and special is None:
        inference = exchange
    findings = saving_finding(run, "exposed-communication", inference.advice, inference.snippet)
    entry = GUIDE["exposed-communication"].advice
    if findings and findings[0].advice.startswith(entry):  # the advice for inference stays
        remedy = exchange if name in _EXCHANGES else _COLLECTIVES.get(name, Remedy(entry, findings[0].snippet))
        if name == "all_reduce" and _is_per_parameter(run):
            remedy = _BUCKETS
        elif name == "all_reduce" and _is_unsplit(rows) and not _is_bucket(run, rows):
            remedy = replace(_UNSPLIT, snippet=_UNSPLIT.snippet.replace("bf16_compress_hook", compress_hook(run)))
        elif name in ("all_gather", "reduce_scatter") and _is_in_optimizer(run, name):
            remedy = Remedy(_OPTIMIZER_SHARDS, _ASYNCHRONOUS[name])
        if special is not None:
            remedy = special
        elif savings is not None and _computes_us(savings) < MIN_SAVED_FRAC * savings.cost.step_us:
            remedy = _NOTHING_BESIDE
        elif name == "all_reduce" and hidden and remedy.advice not in (_BUCKETS.advice, _UNSPLIT.advice):
            remedy = replace(_OUTLASTS, advice=f"{_OUTLASTS.advice} {hidden}")
        elif hidden:
            remedy = replace(remedy, advice=f"{remedy.advice} {hidden}")
        findings = [replace(f, advice=f.advice.replace(entry, remedy.advice), snippet=remedy.snippet) for f in findings]
    if holds_collectives_alone(run):
        findings = [replace(f, advice=_ALONE.advice, snippet=_ALONE.snippet) for f in findings]
    missing = next((c for c in savings.ranked if c.waiting_us), None) if savings is not None else None
    if has_all_ranks(run) or missing is not None:
        findings = [replace(f, advice=f.advice.replace(_OTHER_RANKS, "")) for f in findings]
    if missing is not None:
        is_whole = has_all_ranks(run)
        awaited = run.head.config.get("awaited_rank")
        is_later = window_rows(run)["step"].min() > 0
        see = "record all ranks, and import their traces together to see which is late"
        if isinstance(awaited, int):
            see = f"the ranks that are here wait longest for rank {awaited}, so record that one too"
        told = [_with_missing_ranks(f, missing, see, is_whole=is_whole, is_later=is_later) for f in findings]
        return for_what_runs(run, told)
    saving = reported_saving(run, "exposed-communication")
    if saving is not None and saving.waited_us >= MIN_WAITED_FRAC * saving.saved_us > 0:
        findings = [_with_waiting(f, saving, late_remedy, transfers=transfer_frac >= MIN_SAVED_FRAC) for f in findings]
    transfer = longest_transfer(run)
    on_gpu = str(run.head.config.get("device")).startswith("cuda")
    if transfer is not None and on_gpu and _is_slow(transfer) and saving is not None and saving.tells_transfer:
        slow = _SLOW_LINK.format(rate=number(transfer.gb_per_s, "GB/s"))
        findings = [replace(f, advice=f"{slow} {f.advice}", snippet=_TOPOLOGY) for f in findings]
    return for_what_runs(run, findings)


MIN_WAITED_FRAC = 1 / 3
"""Share of exposed communication that surely is waiting from which this comes first: more of it may be."""
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


def _is_slow(transfer: Transfer) -> bool:
    """Whether a message is large, and slower than links between GPUs."""
    return transfer.message_bytes >= MIN_SLOW_BYTES and transfer.gb_per_s < MAX_SLOW_GB_PER_S


def _special(run: Run, rows: pd.DataFrame, name: str) -> Remedy | None:
    """Advice where the collectives of one kind are launched by graphs, carry a few bytes, or run beside computing
    already; None for others. Of `collective_rows`."""
    alone_us, total_us = float(rows["alone_us"].sum()), float(rows["total_us"].sum())
    kernels = kernel_rows(run)
    kernels = kernels[kernels["name"].isin(set(rows["kernel"]))]
    in_graphs = (kernels["op"] == "") | kernels["op"].map(is_compiled_code).astype(bool)
    captured_us = float(kernels["total_us"][in_graphs].sum())
    is_captured = captured_us >= MIN_CAPTURED_FRAC * float(kernels["total_us"].sum()) > 0
    has_operators = run.head.config.get("without_operators") is not True  # otherwise no kernel has one
    if is_captured and has_operators and run.head.config.get("graph_launches"):
        has_own = kernels["name"].str.contains(_ENGINES_OWN).any()
        advice = _IN_GRAPHS.advice.replace(_USE_OWN, "") if has_own else _IN_GRAPHS.advice
        return replace(_IN_GRAPHS, advice=advice)
    tiny_us = float(rows["alone_us"][rows["message_bytes"] <= MAX_TINY_BYTES].sum())
    if tiny_us >= MIN_TINY_FRAC * alone_us > 0:
        largest = float(rows["message_bytes"][rows["message_bytes"] <= MAX_TINY_BYTES].max())
        return replace(_TINY, advice=_TINY.advice.format(bytes=size(largest)))
    if alone_us <= MAX_ALONE_FRAC * total_us and name in _EXCHANGES:
        part = "Most" if alone_us <= total_us / 2 else "Part"
        return replace(_OVERLAPPED, advice=f"{part} of {_OVERLAPPED.advice}")
    return None


def _functional(run: Run, rows: pd.DataFrame, savings: Savings | None, hidden: str, *, narrower: bool) -> Remedy | None:
    """Advice where most of the collectives are DTensor's or functional ones, which are asynchronous; None for others.
    `narrower`: whether fewer bits are; `hidden`: what is said of overlap."""
    kernels = kernel_rows(run)
    kernels = kernels[kernels["name"].isin(set(rows["kernel"]))]
    us = float(kernels["total_us"][kernels["top_op"].str.contains(_FUNCTIONAL_OPS)].sum())
    if us < MIN_FUNCTIONAL_FRAC * float(kernels["total_us"].sum()) or us <= 0:
        return None
    if savings is not None and hidden and _free_us(savings) < MIN_HIDDEN_FRAC * _exposed_us(savings):
        bits = "exchange 16 bits, or " if narrower else ""
        smaller = f"{hidden} {_SMALLER.advice}{bits}use a faster link.{_OTHER_RANKS}"
        return Remedy(smaller, _SMALLER.snippet if (rows["name"] == "all_gather").all() else _REDUCED_APART)
    also = ", shard the model differently, or exchange 16 bits" if narrower else ", or shard the model differently"
    return replace(_FUNCTIONAL, advice=f"{_FUNCTIONAL.advice}{also}.{f' {hidden}' if hidden else ''}{_OTHER_RANKS}")


MIN_HIDDEN_FRAC = 0.1
"""Share of exposed communication that overlap may hide from which it is advised on."""
_SMALLER = Remedy(
    "Make the transfer smaller: keep results sharded where the next layer or the loss can use them so, gather only "
    "what is used, ",
    "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)   # the result stays sharded",
)
_REDUCED_APART = "RowwiseParallel(output_layouts=Shard(1))   # each rank keeps its part of the sum"
MIN_FUNCTIONAL_FRAC = 0.5
"""Share of such collectives from which that is told."""
_FUNCTIONAL_OPS = r"^(?:_?c10d_functional::|Redistribute)"
"""Operators of functional collectives, and DTensor's around them."""
_FUNCTIONAL = Remedy(
    "These collectives are DTensor's or functional ones, asynchronous already, but what comes next needs their "
    "results. Let tensor parallelism overlap parts of them with products",
    "torch._inductor.config._micro_pipeline_tp = True   # asynchronous tensor parallelism\n"
    "model = torch.compile(model)",
)
MIN_CAPTURED_FRAC, MIN_TINY_FRAC = 0.9, 0.5
MAX_ALONE_FRAC = 0.8
"""Share of exchanges with nothing beside them up to which the program lets them run beside what it computes."""
MAX_TINY_BYTES = 512
"""Messages up to this hold a few values, as sizes, and are bound by latency."""
_ENGINES_OWN = r"(?i)allreduce_fusion|one_?shot|two_?shot|cross_device_reduce|multimem|quick_?reduce"
"""In the names of kernels that serving engines have for collectives of small messages."""
_USE_OWN = "use its own kernels where the messages are small, "
_IN_GRAPHS = Remedy(
    "These collectives are launched by captured graphs, so what runs beside them is set where the graph is captured: "
    "let the engine overlap them with products there, use its own kernels where the messages are small, or shard the "
    "model differently." + _OTHER_RANKS,
    "nvidia-smi topo -m   # the links between the GPUs; on AMD: rocm-smi --showtopo",
)
_TINY = Remedy(
    "Most of this is in messages of {bytes} or less, whose transfer takes microseconds: the rest is waiting for other "
    "ranks, or the latency of each call. Exchange such values less often, on the host's own group, or together with "
    "others, and record all ranks to see which is late.",
    'sizes = torch.distributed.new_group(backend="gloo")   # for values that the host needs\n'
    "torch.distributed.all_gather_object(out, value, group=sizes)",
)
_OVERLAPPED = Remedy(
    "this communication runs beside computing already, and this is what is left: give it more to run beside, or "
    "exchange fewer bytes." + _OTHER_RANKS,
    "...   # more that does not depend on what is exchanged\nwork.wait()",
)
MIN_LARGE_US = 1000.0
"""Mean time of collectives that are bound by their bytes, and not by their number."""


def _are_large(rows: pd.DataFrame) -> bool:
    """Whether collectives take long each: of `collective_rows`."""
    return bool(len(rows) and rows["total_us"].mean() >= MIN_LARGE_US)


MIN_SEVERAL = 4.0
"""Collectives of a kind per step, or profiled window, of which fewer may be made."""


def _are_several(run: Run, name: str) -> bool:
    """Whether there are enough collectives of that kind per step for one to replace several."""
    table = collective_table(run)
    return bool(table["count"][table["name"] == name].sum() >= MIN_SEVERAL)


def _computes_in_16_bits(run: Run) -> bool:
    """Whether most time of products is in 16 or fewer bits, so that what they exchange hardly is in more."""
    rows = kernel_rows(run)
    rows = rows[is_matrix(rows) & (rows["precision"] != "")]
    return bool(rows["total_us"][rows["precision"].isin(SMALL_TYPES)].sum() > rows["total_us"].sum() / 2)


def _computes_us(savings: Savings) -> float:
    """Time per step in which the device does something other than communicating."""
    parts = savings.cost.parts
    return float(parts["us"][~parts["part"].isin(["data", "gaps", "communication", "watch"])].sum())


def _exposed_us(savings: Savings) -> float:
    """Time per step in which the device only communicates."""
    return float(np.nan_to_num(savings.cost.us("communication")))


def _free_us(savings: Savings) -> float:
    """Time per step in which the device computes with no collective beside it."""
    return max(0.0, _computes_us(savings) - savings.cost.overlap_us)


MIN_OVERLAP_RATIO = 1 / 3
"""Share of exposed communication that computing without it has to last, for overlap to hide much of it."""


def _hidden_at_most(savings: Savings | None) -> str:
    """How much overlap hides at most, as a sentence; empty where that may be much of the exposed communication."""
    if savings is None or _free_us(savings) >= MIN_OVERLAP_RATIO * _exposed_us(savings):
        return ""
    free, exposed = number(_free_us(savings) / 1e3), number(_exposed_us(savings) / 1e3, "ms")
    alone = " without collectives beside it" if savings.cost.overlap_us > 0 else ""
    return f"The device computes for {free} ms per {savings.unit}{alone}, so overlap hides at most that of {exposed}."


_OUTLASTS = Remedy(
    "Collectives take longer than what is computed beside them, so smaller ones that begin earlier change little: "
    "exchange fewer bytes, or less often, as after several micro-batches." + _OTHER_RANKS,
    "with model.no_sync():   # in all micro-batches but the last\n    loss.backward()",
)
_ALONE = Remedy(
    "Whether the device computes beside these collectives is not in the trace, so what overlap would save is unknown. "
    "Record the CPU and all kernels on every rank." + _OTHER_RANKS,
    'save = torch.profiler.tensorboard_trace_handler("traces")   # on every rank: one file each\n'
    "with torch.profiler.profile(on_trace_ready=save) as prof:\n    train_step(batch)",
)
"""Of traces that hold collectives and nothing else."""
_NOTHING_BESIDE = Remedy(
    "The device does hardly anything beside its collectives, so no overlap hides them: send fewer, larger messages, "
    "and give each rank more work." + _OTHER_RANKS,
    "out = torch.cat(parts)   # one message\ntorch.distributed.all_reduce(out)",
)


def _with_waiting(finding: Finding, saving: Saving, late: Remedy, *, transfers: bool) -> Finding:
    """The finding with the waiting for late ranks first, and what else it advises for the transfer alone; without that
    where no more than a small part is transfer. `late`: what to advise for late ranks."""
    transfer = finding.advice.replace(f" Here: {saving.here}.", "")
    advice = (
        f"At least {number(saving.waited_us / 1e3)} of the {number(saving.saved_us / 1e3, 'ms')} are waiting for ranks "
        f"that enter the collectives late, which overlap does not shorten: {saving.here}."
    )
    if transfers and saving.saved_us - saving.waited_us >= MIN_SAVED_FRAC * saving.saved_us:
        advice += f" For the rest: {transfer}"
    if saving.here.startswith("rank "):
        return replace(finding, advice=advice, snippet=late.snippet)
    stacks = late.snippet.replace("on the late ranks", "on all ranks")
    return replace(finding, advice=advice, snippet=finding.snippet if transfers else stacks)


def _with_missing_ranks(finding: Finding, saving: Saving, see: str, *, is_whole: bool, is_later: bool) -> Finding:
    """The finding with advice to find what is waited for first, and what else it advises for the transfer alone.
    `see`: how to find the late rank. `is_whole`: whether all ranks that the traces name are here. `is_later`: whether
    no step is a first one."""
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
        advice += f" The rest, at most {number(transfer_us / 1e3, 'ms')}, is the transfer. {finding.advice}"
    is_most = saving.waiting_us >= transfer_us
    return replace(finding, advice=advice, snippet=_RECORD_ALL if is_most else finding.snippet)


_SETS_UP = "the first collective of a group sets up its connections, "
_RECORD_ALL = (
    'save = torch.profiler.tensorboard_trace_handler("traces")   # on every rank: one file each\n'
    "with torch.profiler.profile(on_trace_ready=save) as prof:\n    train_step(batch)"
)
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


def _slow_hosts(late: Saving, *, launch_bound: bool) -> Remedy:
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


def _is_per_parameter(run: Run) -> bool:
    """Whether gradients are reduced one by one: many small all-reduces in backward and none known to
    be elsewhere."""
    table = collective_table(run)
    table = table[table["name"] == "all_reduce"]
    count = float(table["count"].sum())
    small = table["message_bytes"].isna() | (table["message_bytes"] < MAX_SMALL_BYTES)
    short = 1e3 * float(table["ms"].sum()) < MAX_SMALL_US * count
    in_backward = (table["phase"] == "backward") | (run.head.config.get("without_operators") is True)  # then unknown
    return bool(count >= MIN_SMALL_COUNT and short and (small & in_backward).all())


def _is_unsplit(rows: pd.DataFrame) -> bool:
    """Whether most bytes of gradients are reduced in messages that no smaller bucket splits: of `collective_rows`."""
    bytes_ = rows["message_bytes"][(rows["name"] == "all_reduce") & (rows["phase"] != "forward")].fillna(0.0)
    return bool(bytes_[bytes_ > BUCKET_BYTES].sum() > bytes_.sum() / 2)


def _is_bucket(run: Run, rows: pd.DataFrame) -> bool:
    """Whether the largest message holds more than the largest tensor that any recorded operator takes, and so more than
    one parameter."""
    reduced = rows[(rows["name"] == "all_reduce") & rows["message_bytes"].notna() & (rows["dtype"] != "")]
    if reduced.empty:
        return False
    widths = reduced["dtype"].map(lambda dtype: element_bytes(dtype) or 4).astype(float)
    elements = float((reduced["message_bytes"] / widths).max())
    taken = kernel_rows(run)
    taken = taken[taken["category"] != "communication"]
    largest = max((math.prod(s) for text in taken["in_shapes"].unique() for s in tensor_shapes(text)), default=0)
    return bool(0 < largest < elements)


BUCKET_BYTES = 1.05 * 25 * 2**20
"""What a bucket of DistributedDataParallel holds by default, 25 MiB; a larger parameter has one of its own."""
_UNSPLIT = Remedy(
    "Most bytes are in messages of more than 25 MiB. At DistributedDataParallel's default each of these is one "
    "parameter, which smaller buckets do not split: reduce gradients in 16 bits, or accumulate over micro-batches."
    + _OTHER_RANKS,
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n\n"
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
)


def _is_in_optimizer(run: Run, name: str) -> bool:
    """Whether most time of a collective is in the optimizer's steps: its state is sharded, and not the model."""
    table = collective_table(run)
    ms = table[table["name"] == name].groupby("phase")["ms"].sum()
    return bool(len(ms) and ms.get("optimizer", 0.0) > ms.sum() / 2)


MIN_SMALL_COUNT, MAX_SMALL_BYTES, MAX_SMALL_US = 50, 2**20, 500.0
"""All-reduces per step, and bytes and time of each, by which gradients are taken to be reduced one by one. A bucket of
DistributedDataParallel holds 25 MB."""
_BUCKETS = Remedy(
    "Gradients are reduced one by one in many calls, and little runs beside them. Reduce them in buckets while "
    "backward goes on, as DistributedDataParallel does." + _OTHER_RANKS,
    "model = DistributedDataParallel(model, gradient_as_bucket_view=True)   # no all_reduce of one's own",
)
_ASYNCHRONOUS = {
    "all_reduce": "work = torch.distributed.all_reduce(x, async_op=True)\n...\nwork.wait()",
    "all_gather": "work = torch.distributed.all_gather_into_tensor(out, x, async_op=True)\n...\nwork.wait()",
    "reduce_scatter": "work = torch.distributed.reduce_scatter_tensor(out, x, async_op=True)\n...\nwork.wait()",
    "all_to_all": "work = torch.distributed.all_to_all_single(out, x, async_op=True)\n...\nwork.wait()",
    "broadcast": "work = torch.distributed.broadcast(x, src=0, async_op=True)\n...\nwork.wait()",
    **dict.fromkeys(("send_recv", "send", "recv"), "work = torch.distributed.irecv(x, src=other)\n...\nwork.wait()"),
}
"""How each collective runs beside what is computed before `wait`."""


def _transfer_frac(rows: pd.DataFrame) -> float:
    """The most of exposed communication that is transfer, as a share of it; what is not known is taken for it."""
    known = rows[rows["transfer_us"].notna()]
    alone_us = float(rows["alone_us"].sum())
    least_us = float(rows["alone_us"].sum() - (known["alone_us"] - known["transfer_us"]).clip(lower=0.0).sum())
    return least_us / alone_us if alone_us > 0 else 1.0


MIN_TRANSFER_FRAC = 0.1
"""Share of it from which fewer bytes help."""


def _exchange(dtype: str, *, of_experts: bool, transfers: bool, in_training: bool) -> Remedy:
    """Advice for ranks that exchange values of `dtype`, "" for an unknown one; `of_experts`: by DeepEP's kernels;
    `transfers`: whether fewer bytes would help; `in_training`: low-latency kernels are for decoding."""
    width = element_bytes(dtype) if dtype else None
    narrow = width is not None and (width <= MAX_NARROW_BYTES or dtype.startswith(("int", "uint", "bool", "long")))
    narrower = "" if narrow or not transfers else ", and exchange 16 bits or fewer"
    if of_experts:
        return Remedy(
            "Ranks exchange tokens here. Where dispatch and combine are one kernel each, split them into sending and "
            "receiving, or let them finish asynchronously (async_finish=True), and compute what does not depend on the "
            f"tokens meanwhile, as the other micro-batch{narrower}.{_OTHER_RANKS}",
            _ASYNC_BUFFER if in_training else _BUFFER,
        )
    return Remedy(
        "Ranks exchange tokens or embedding rows here. Compute what does not depend on them in the meantime"
        f"{narrower}.{_OTHER_RANKS}",
        _ALL_TO_ALL,
    )


MAX_NARROW_BYTES = 2
"""Elements of more bytes can be exchanged in 16 bits."""
_EXCHANGES = ("all_to_all", "send_recv", "send", "recv")
_EXPERT_KERNELS = r"(?i:deep_?ep::|\bep::(?:inter|intra)node)"
_ALL_TO_ALL = "work = torch.distributed.all_to_all_single(out, x, async_op=True)\n...   # the dense layers\nwork.wait()"
_BUFFER = (
    "tokens, counts, handle, event, receive = buffer.low_latency_dispatch(\n"
    "    x, experts_of_tokens, max_tokens, num_experts, return_recv_hook=True\n)\n"
    "...   # the other half of the batch, or the shared expert\nreceive()"
)
_ASYNC_BUFFER = (
    "out, _, event = buffer.combine(x, handle, async_finish=True)\n"
    "...   # the other micro-batch\nevent.current_stream_wait()"
)
_GATHER = Remedy(
    "Sharded weights are gathered before the layers that need them. Prefetch them, or shard less." + _OTHER_RANKS,
    "for block, following in zip(blocks, blocks[1:]):   # FSDP2\n"
    "    block.set_modules_to_forward_prefetch([following])",
)
_REDUCE_SHARDS = Remedy(
    "Each rank reduces its shard of the gradients here. Begin that as soon as a gradient is computed, while backward "
    "goes on." + _OTHER_RANKS,
    _ASYNCHRONOUS["reduce_scatter"],
)
_OPTIMIZER_SHARDS = (
    "The optimizer exchanges shards of gradients and weights in its step, with little beside it. Begin each exchange "
    "as soon as its gradient or its new weight is computed, and wait for weights in the next forward." + _OTHER_RANKS
)
_COLLECTIVES = {"all_gather": _GATHER, "reduce_scatter": _REDUCE_SHARDS}
"""Advice by the collective with the most exposed time; the guide's is for reduced gradients."""
