"""Rules on imported traces: whether the device was recorded, and its waits, communication and copies."""

from dataclasses import replace

from amp_core.analysis.performance.collectives import collective_rows, collective_table
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.savings import CALLS, GRAPH_START, possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.signals import facts
from amp_core.findings.trace_findings import SAVING_THRESHOLD, saving_finding
from amp_core.store.run import Run

_OTHER_RANKS = " Waiting for a slower rank looks the same: import the traces of all ranks to compare them."
_ACTIVITIES = {"cuda": "CUDA", "xpu": "XPU", "hpu": "HPU", "mtia": "MTIA", "mlu": "MLU", "privateuseone": "PrivateUse1"}
_HOW = """\
from torch.profiler import ProfilerActivity, profile, schedule

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.{activity}],
    schedule=schedule(wait=5, warmup=2, active=3),
    record_shapes=True,
) as prof:
    for batch in loader:
        train_step(batch)
        prof.step()
prof.export_chrome_trace("trace.json.gz")"""


@rule(
    Entry(
        code="device-not-recorded",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=428,
        what="A trace contains no device activity, though the program used a device: operator times are launch "
        "times, not compute times.",
        signal="Calls that launch work, or operators that only run on an accelerator, and no kernel.",
        threshold="One of them.",
        advice="Without kernels, the device's performance cannot be analysed. Record again with the device's "
        "profiler activity; without permission for it (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES, or another profiler "
        "attached) the profiler omits kernels.",
        snippet=_HOW.format(activity="CUDA"),
        page="",
    )
)
def device_not_recorded(run: Run) -> list[Finding]:
    """`device-not-recorded`: an imported trace of a program that used a device, without the device's work."""
    launches = run.head.config.get("launches_without_kernels")
    if not isinstance(launches, int):
        return []
    device = str(run.head.config.get("device") or "cuda")
    seen = f"{launches:,} launches" if launches else "operators of a GPU"
    entry_snippet = _HOW.format(activity=_ACTIVITIES.get(device, "CUDA"))
    finding = make_finding(
        "device-not-recorded",
        f"The device ({device}) was not recorded: the trace contains {seen} but no kernel",
        device,
        value=float(launches),
        limit=0.0,
        unit="launches without kernels",
    )
    if device == "mps":
        return [replace(finding, advice=_APPLE.advice, snippet=_APPLE.snippet)]
    return [replace(finding, snippet=entry_snippet)]


_APPLE = Remedy(
    "torch.profiler does not record Apple's GPUs: operator times are those of launching, and of waiting where a value "
    "is read. Record signposts with torch.mps.profiler, and look at them in Instruments.",
    'with torch.mps.profiler.profile(mode="interval", wait_until_completed=False):\n    train_step(batch)',
)


@rule(
    Entry(
        code="waiting-for-data",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=431,
        what="The GPU of an imported trace is idle while the program loads data.",
        signal="GPU idle time during the DataLoader's ranges.",
        threshold=SAVING_THRESHOLD,
        advice="Faster arithmetic does not help here. Load data ahead of time with more worker processes, and do "
        "less work per sample on the CPU.",
        snippet="loader = DataLoader(\n    data, batch_size, num_workers=8, pin_memory=True, persistent_workers=True, "
        "prefetch_factor=4\n)",
        page="step-cost",
    )
)
def waiting_for_data(run: Run) -> list[Finding]:
    """`waiting-for-data`: idle time of the GPU while data is loaded."""
    return saving_finding(run, "waiting-for-data")


@rule(
    Entry(
        code="host-bound",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=432,
        what="The GPU of an imported trace is idle because the host does something other than launching kernels.",
        signal="GPU idle time that ends with a kernel launched during it.",
        threshold=f"{SAVING_THRESHOLD} Most of it in gaps of 0.3 ms or more; in shorter ones, the finding is "
        "launch-bound.",
        advice="Between launches the host does something else: preprocessing, logging, operators on the CPU, or "
        "setting up a library at its first call. Profile the host with stacks after a warm-up, and move that work out "
        "of the loop.",
        snippet="with torch.profiler.profile(with_stack=True, record_shapes=True) as prof:\n    train_step(batch)\n"
        'print(prof.key_averages(group_by_stack_n=5).table(sort_by="self_cpu_time_total", row_limit=10))',
        page="step-cost",
    )
)
def host_bound(run: Run) -> list[Finding]:
    """`host-bound`: idle time of the GPU that the host causes."""
    findings = saving_finding(run, "host-bound")
    remedy = next((r for kind, r in _CALLS.items() if findings and CALLS[kind] in findings[0].title), None)
    if remedy is None:
        named = bool(findings) and findings[0].where in set(window_rows(run)["host_function"])
        stacks = facts(run.head.environment, "profiler").get("with_stack")
        known = _IN_PYTHON if named else _HAS_STACKS if stacks else None
        return [replace(f, advice=known.advice, snippet=known.snippet) for f in findings] if known else findings
    on_device = str(run.head.config.get("device")).startswith("cuda") or remedy is _CALLS["compiling"]
    snippet = remedy.snippet if on_device else _WARM_UP
    return [replace(f, advice=remedy.advice, snippet=snippet) for f in findings]


_IN_PYTHON = Remedy(
    "Between launches the host runs this function and what it calls; a timeline shows who calls it. Call it once, "
    "before the loop, run it in worker processes, or do the same on the device.",
    "loader = DataLoader(data, batch_size, num_workers=8)   # what prepares a batch runs in other processes",
)
_HAS_STACKS = Remedy(
    "Between launches the host does something else, in many short functions. The trace has Python's stacks: a timeline "
    "shows them in the gaps of the device. Recording them slows the host: time the steps without stacks first.",
    "with torch.profiler.profile(with_stack=False) as prof:\n    train_step(batch)",
)
_WARM_UP = "for _ in range(5):\n    train_step(batch)   # before the profiler starts"
_CALLS = {
    "allocation": Remedy(
        "Between launches the program asks the driver for memory. The caching allocator does so until it is warm, "
        "after empty_cache(), and when memory runs short: then it frees its cache and allocates again. Profile after a "
        "warm-up, remove empty_cache(), allocate pinned buffers once, and avoid fragmentation or use smaller batches.",
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"   # before the first allocation',
    ),
    "uncached": Remedy(
        "Memory is freed between most launches, tensor by tensor, and each free waits for the device: the caching "
        "allocator is switched off. Switch it on again; it is meant to be off for debugging only.",
        'os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)   # before the first allocation; and the one with HIP',
    ),
    "compiling": Remedy(
        "Operators are compiled between launches, for the sizes of their inputs, and again for other sizes. Let "
        "torch_npu take its compiled operators, and profile after a warm-up.",
        "torch_npu.npu.set_compile_mode(jit_compile=False)   # before the first operator",
    ),
    "loading": Remedy(
        "The first launch of a kernel loads its code, which takes milliseconds. Profile after a warm-up in which every "
        "kernel has run. If later launches are as slow, the process has too little of a processor.",
        _WARM_UP,
    ),
    "graphs": Remedy(
        "Graphs are captured or instantiated between launches, or are large. Capture each of them once, before the "
        "loop, with inputs of fixed sizes.",
        "with torch.cuda.graph(graph):   # once\n    y = model(x)\ngraph.replay()   # in the loop",
    ),
    "copies": Remedy(
        "Calls that copy return late: memory that is not pinned is copied by the host first. Pin it.",
        "loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
    ),
    "setup": Remedy(
        "Streams, events, contexts or communicators are set up between launches. Create them once, before the loop, "
        "and profile after a warm-up.",
        _WARM_UP,
    ),
}
"""Advice by the kind of runtime calls in which the host stays."""


@rule(
    Entry(
        code="unexplained-idle",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=441,
        what="The GPU of an imported trace is idle, and no launch in the trace shows why.",
        signal="GPU idle time in a trace whose kernels name no launch.",
        threshold=SAVING_THRESHOLD,
        advice="The host may launch too late, or the kernels may wait for others: the calls that launch them tell the "
        "one from the other. Record the CPU too, and before the work is launched, and keep its events in the file.",
        snippet=_HOW.format(activity="CUDA"),
        page="step-cost",
    )
)
def unexplained_idle(run: Run) -> list[Finding]:
    """`unexplained-idle`: idle time of the GPU in a trace without launches."""
    return saving_finding(run, "unexplained-idle")


@rule(
    Entry(
        code="kernel-wait",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=433,
        what=(
            "The GPU of an imported trace is idle although work has been launched: the work waits for something "
            "outside this GPU."
        ),
        signal="GPU idle time that ends with a kernel launched before it.",
        threshold=SAVING_THRESHOLD,
        advice="No stream of this GPU runs in that time, so the work waits for another GPU or rank, for a host "
        "function, or for a CUDA graph to start. Traces of all ranks show which rank is late; a timeline shows the "
        "launch.",
        snippet="with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:   # on all ranks\n"
        '    train_step(batch)\nprof.export_chrome_trace(f"rank{rank}.json.gz")',
        page="step-cost",
    )
)
def kernel_wait(run: Run) -> list[Finding]:
    """`kernel-wait`: idle time of the GPU with work launched."""
    savings = possible_savings(run)
    is_late_start = savings is not None and any(c.code == "kernel-wait" and not c.is_sure for c in savings.ranked)
    findings = saving_finding(run, "kernel-wait")
    if findings and GRAPH_START in findings[0].title:
        remedy: Remedy | None = _GRAPH_LATE
    else:
        remedy = _LATE_START if is_late_start else _ALL_RANKS_RECORDED if _has_all_ranks(run) else None
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings


def _has_all_ranks(run: Run) -> bool:
    """Whether the traces of all ranks of a run of several are here; several devices in one file are ranks that were
    merged, or those of one process."""
    windows = window_rows(run)
    several = windows.groupby("rank", dropna=False)["device"].nunique().max() > 1
    return bool(several or windows["rank"].nunique() >= run.head.world_size > 1)


_ALL_RANKS_RECORDED = Remedy(
    "No stream of this GPU runs in that time, so the work waits for another GPU or rank, for a host function, or for a "
    "CUDA graph to start. A timeline shows the launch, and synchronization events, which NVIDIA's profiler records, "
    "show the stream that it waits for.",
    "from torch._C._profiler import _ExperimentalConfig\n\n"
    "config = _ExperimentalConfig(enable_cuda_sync_events=True)\n"
    "with torch.profiler.profile(experimental_config=config) as prof:\n    train_step(batch)",
)


_STEP_TIMES = (
    "torch.accelerator.synchronize()\nbegan = time.perf_counter()\nfor _ in range(10):\n    train_step(batch)\n"
    "torch.accelerator.synchronize()\nprint((time.perf_counter() - began) / 10)"
)
_GRAPH_LATE = Remedy(
    "The graph was launched, and begins long after that with no stream of the GPU running: its first launch uploads "
    "it, and profilers prepare each of its nodes. Time the same steps without the profiler. If the time remains, "
    "launch the graph once before the loop, and capture fewer nodes: small copies and kernels fused, not one by one.",
    _STEP_TIMES,
)
_LATE_START = Remedy(
    "No stream of the GPU runs in that time, and no graph or host function holds work up, so the trace shows nothing "
    "to wait for. The profiler, a virtual or shared GPU, or the first run of a kernel can delay its start, which costs "
    "most where the host waits after every few kernels. Time the same steps without the profiler: if they are that "
    "much faster, this idle time is the profiler's, and the rest of the trace still holds.",
    _STEP_TIMES,
)


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
    rows = collective_rows(run)
    exposed = rows.groupby("name")["alone_us"].sum()
    name = str(exposed.idxmax()) if exposed.sum() > 0 else ""
    dtypes = rows[rows["name"] == name].groupby("dtype")["alone_us"].sum()
    dtype = str(dtypes.idxmax()) if len(dtypes) else ""
    narrower = ", and 16-bit activations" if dtype in ("float64", "float32", "") else ""
    findings = saving_finding(
        run,
        "exposed-communication",
        f"Overlap communication with computation, or shard the model differently: fewer, larger collectives{narrower}.",
        _ASYNCHRONOUS.get(name, _ASYNCHRONOUS["all_reduce"]),
    )
    entry = GUIDE["exposed-communication"].advice
    if findings and findings[0].advice.startswith(entry):  # the advice for inference stays
        remedy = _COLLECTIVES.get(name, Remedy(entry, findings[0].snippet))
        if name == "all_reduce" and _is_per_parameter(run):
            remedy = _BUCKETS
        elif name in ("all_gather", "reduce_scatter") and _is_in_optimizer(run, name):
            remedy = Remedy(_OPTIMIZER_SHARDS, _ASYNCHRONOUS[name])
        findings = [replace(f, advice=f.advice.replace(entry, remedy.advice), snippet=remedy.snippet) for f in findings]
    if _has_all_ranks(run):
        findings = [replace(f, advice=f.advice.replace(_OTHER_RANKS, "")) for f in findings]
    return findings


def _is_per_parameter(run: Run) -> bool:
    """Whether gradients are reduced one by one: many small all-reduces in backward and none elsewhere."""
    table = collective_table(run)
    table = table[table["name"] == "all_reduce"]
    count = float(table["count"].sum())
    small = table["message_bytes"].isna() | (table["message_bytes"] < MAX_SMALL_BYTES)
    short = 1e3 * float(table["ms"].sum()) < MAX_SMALL_US * count
    return bool(count >= MIN_SMALL_COUNT and short and (small & (table["phase"] == "backward")).all())


def _is_in_optimizer(run: Run, name: str) -> bool:
    """Whether most time of a collective is in the optimizer's steps: its state is sharded, and not the model."""
    table = collective_table(run)
    ms = table[table["name"] == name].groupby("phase")["ms"].sum()
    return bool(len(ms) and ms.get("optimizer", 0.0) > ms.sum() / 2)


MIN_SMALL_COUNT, MAX_SMALL_BYTES, MAX_SMALL_US = 50, 2**20, 500.0
"""All-reduces per step, and bytes and time of each, by which gradients are taken to be reduced one by one. A bucket of
DistributedDataParallel holds 25 MB."""
_BUCKETS = Remedy(
    "Gradients are reduced one by one in many small calls, and little runs beside them. Reduce them in buckets while "
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


_EXCHANGE = Remedy(
    "Ranks exchange tokens or embedding rows here. Compute what does not depend on them in the meantime, and exchange "
    "16 bits or fewer." + _OTHER_RANKS,
    "work = torch.distributed.all_to_all_single(out, x, async_op=True)\n...   # the dense layers\nwork.wait()",
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
_COLLECTIVES = {
    **dict.fromkeys(("all_to_all", "send_recv", "send", "recv"), _EXCHANGE),
    "all_gather": _GATHER,
    "reduce_scatter": _REDUCE_SHARDS,
}
"""Advice by the collective with the most exposed time; the guide's is for reduced gradients."""


@rule(
    Entry(
        code="copies",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=435,
        what="Copies and fills take a noticeable part of the step of an imported trace.",
        signal="Time of memcpy and memset operations.",
        threshold=SAVING_THRESHOLD,
        advice="Pin host memory, so that copies overlap with kernels. Keep reused data on the device.",
        snippet="loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
        page="step-cost",
    )
)
def copies(run: Run) -> list[Finding]:
    """`copies`: time of copies and fills."""
    findings = saving_finding(run, "copies")
    remedy = next((r for word, r in _COPIES.items() if findings and word in findings[0].where), None)
    if remedy is _COPIES["Pinned"]:
        rows = run.timeline
        copied = rows["category"] == "memcpy"
        if copied.any() and not rows["stream"][copied].isin(rows["stream"][~copied]).any():
            remedy = Remedy(_ON_OWN_STREAM, "x = bytes_of_images.to(device, non_blocking=True).float().div_(255)")
    elif remedy is _COPIES["DtoH"] and _is_pageable_both_ways(run):
        remedy = _PIN_BOTH
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings


def _is_pageable_both_ways(run: Run) -> bool:
    """Whether copies from and to memory that is not pinned both take long."""
    rows = kernel_rows(run, everything=True)
    us = rows[rows["name"].str.contains("Pageable")].groupby("name")["total_us"].sum()
    down, up = (us[us.index.str.contains(way)].sum() for way in ("DtoH", "HtoD"))
    return bool(up >= MIN_BOTH_WAYS_FRAC * (up + down) > 0)


MIN_BOTH_WAYS_FRAC = 0.25
"""Share of the copies to the device among those from and to memory that is not pinned."""
_PIN_BOTH = Remedy(
    "Copies in both directions use memory that is not pinned: the driver copies it once more, and one direction waits "
    "for the other. Pin it, and copy each direction on a stream of its own.",
    "host = torch.empty(shape, pin_memory=True)\nhost.copy_(result, non_blocking=True)",
)
_ON_OWN_STREAM = (
    "The copies already come from pinned memory, on a stream of their own, and outlast what runs beside them. Copy "
    "fewer bytes: integers and 16 bits, widened on the device."
)
_COPIES = {
    "DtoD": Remedy(
        "These are copies within the device: contiguous(), clone(), cat and changes of layout. Avoid them, or let a "
        "compiler fuse them.",
        "model = torch.compile(model)",
    ),
    "Memset": Remedy(
        "Fills of whole tensors: let the optimizer free gradients instead of setting them to 0, and allocate with "
        "empty() what is overwritten.",
        "optimizer.zero_grad(set_to_none=True)",
    ),
    "Pinned": Remedy(
        "The host's memory is pinned already. Copy the next batch on a stream of its own while this one is computed, "
        "and copy fewer bytes: integers and 16 bits, widened on the device.",
        "with torch.cuda.stream(side):   # and torch.cuda.current_stream().wait_stream(side) before its use\n"
        "    following = batch.to(device, non_blocking=True)",
    ),
    "DtoH": Remedy(
        "Results are copied to the host. Reduce them on the device first, and copy only occasionally.",
        "total += loss.detach()   # on the device; total.item() once per epoch",
    ),
}
"""Advice by the direction of most copies, as the profiler names it; the guide's is for copies from pageable memory."""
