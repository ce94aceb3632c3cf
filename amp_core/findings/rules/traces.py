"""Rules on imported traces: what they contain, and possible savings."""

import re
from dataclasses import replace

from amp_core.analysis.performance.collectives import collective_rows, collective_table
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, window_rows
from amp_core.analysis.performance.savings import CALLS, GRAPH_START, possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.signals import facts
from amp_core.findings.trace_findings import saving_finding
from amp_core.store.run import Run
from amp_core.text.formatting import percent

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
    return [replace(finding, snippet=entry_snippet)]


_THRESHOLD = "Possible savings of at least 5 % of the step."


@rule(
    Entry(
        code="waiting-for-data",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=431,
        what="The GPU of an imported trace is idle while the program loads data.",
        signal="GPU idle time during the DataLoader's ranges.",
        threshold=_THRESHOLD,
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
        threshold=f"{_THRESHOLD} Most of it in gaps of 0.3 ms or more; in shorter ones, the finding is launch-bound.",
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
    snippet = remedy.snippet if str(run.head.config.get("device")).startswith("cuda") else _WARM_UP
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
        code="kernel-wait",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=433,
        what=(
            "The GPU of an imported trace is idle although work has been launched: the work waits for something "
            "outside this GPU."
        ),
        signal="GPU idle time that ends with a kernel launched before it.",
        threshold=_THRESHOLD,
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
    """Whether the traces of all ranks of a run of several are here."""
    return bool(window_rows(run)["rank"].nunique() >= run.head.world_size > 1)


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
    "to wait for. The profiler, a virtual or shared GPU, or the first run of a kernel can delay its start. Time the "
    "same steps without the profiler: if they are that much faster, this idle time is the profiler's, and the rest of "
    "the trace still holds.",
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
        threshold=_THRESHOLD,
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
_COLLECTIVES = {**dict.fromkeys(("all_to_all", "send_recv", "send", "recv"), _EXCHANGE), "all_gather": _GATHER}
"""Advice by the collective with the most exposed time; the guide's is for reduced gradients."""


@rule(
    Entry(
        code="copies",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=435,
        what="Copies and fills take a noticeable part of the step of an imported trace.",
        signal="Time of memcpy and memset operations.",
        threshold=_THRESHOLD,
        advice="Pin host memory, so that copies overlap with kernels. Keep reused data on the device.",
        snippet="loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
        page="step-cost",
    )
)
def copies(run: Run) -> list[Finding]:
    """`copies`: time of copies and fills."""
    findings = saving_finding(run, "copies")
    remedy = next((r for word, r in _COPIES.items() if findings and word in findings[0].where), None)
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings


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


@rule(
    Entry(
        code="fp32-products",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=436,
        what="GEMM/conv of an imported trace runs in FP32 or TF32, where 16 bits are faster.",
        signal="Time of such kernels, by name and by their operators' dtypes, and the data sheet's rates.",
        threshold=_THRESHOLD,
        advice="Run them in 16 bits under autocast, or allow TF32 on GPUs that support it (Ampere and later). BF16 "
        "needs no loss scaling; before Ampere, use FP16 with a GradScaler.",
        snippet="torch.backends.cuda.matmul.allow_tf32 = True\n"
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
        page="tensor-cores",
    )
)
def fp32_products(run: Run) -> list[Finding]:
    """`fp32-products`: products and convolutions that 16 bits would speed up."""
    findings = saving_finding(
        run,
        "fp32-products",
        "Run the model in 16 bits, or allow TF32 on GPUs that support it (Ampere and later).",
        "model = model.to(torch.bfloat16)\nwith torch.inference_mode():\n    y = model(x.to(torch.bfloat16))",
    )
    gpu = profiled_gpu(run, str(run.head.config.get("device") or ""))
    if gpu.capability is None or gpu.takes("bf16"):
        return findings
    training = Remedy(
        "The tensor cores of this GPU only support FP16: run these products in FP16 under autocast, with a GradScaler. "
        "BF16 would be emulated, and there is no TF32.",
        GUIDE["fp16-without-scaler"].snippet,
    )
    inference = Remedy(
        "The tensor cores of this GPU only support FP16: run the model in FP16. BF16 would be emulated, and there is "
        "no TF32.",
        "model = model.to(torch.float16)\nwith torch.inference_mode():\n    y = model(x.to(torch.float16))",
    )
    remedies = [training if f.snippet == GUIDE["fp32-products"].snippet else inference for f in findings]
    return [replace(f, advice=r.advice, snippet=r.snippet) for f, r in zip(findings, remedies, strict=True)]


@rule(
    Entry(
        code="slow-products",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=437,
        what="Tensor-core GEMMs of an imported trace reach only a small share of the peak rate.",
        signal="Operations from the recorded shapes over kernel time, and the data sheet's dense rate.",
        threshold=f"{_THRESHOLD} Below 30 % of the peak rate, and slower than moving the matrices once.",
        advice="Unaligned sizes underuse tensor cores. Pad them to multiples of 16 bytes (8 elements in 16 bits), and "
        "merge small products.",
        snippet="n = -(-n // 8) * 8   # pad to a multiple of 8",
        page="tensor-cores",
    )
)
def slow_products(run: Run) -> list[Finding]:
    """`slow-products`: products on tensor cores far below their rate."""
    findings = saving_finding(run, "slow-products")
    if findings and "bmm" in findings[0].where and _has_eager_attention(run):
        return [replace(f, advice=_IN_STEPS.advice, snippet=_IN_STEPS.snippet) for f in findings]
    if not findings or "Here: " in findings[0].advice:  # sizes to pad to
        return findings
    savings = possible_savings(run)
    ideal_us = max((c.ideal_us for c in savings.ranked), default=0.0) if savings else 0.0
    kinds, other = (_LARGE, _LARGE_PRODUCTS) if ideal_us >= MIN_LARGE_US else (_ALIGNED, _SMALL)
    remedy = next((r for word, r in kinds.items() if word in findings[0].where), other)
    if remedy is _LARGE["attention"] and not _USUAL_HEADS.search(findings[0].title):
        remedy = replace(remedy, advice=f"{remedy.advice} Many are only fast for head sizes of 64 and 128.")
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings]


def _has_eager_attention(run: Run) -> bool:
    """Whether attention is computed in steps: a softmax takes long beside products of batches."""
    us = kernel_rows(run).groupby("op")["total_us"].sum()
    products = us[us.index.isin(["aten::bmm", "aten::baddbmm"])].sum()
    return bool(products > 0 and us.get("aten::_softmax", 0.0) >= MIN_SOFTMAX_FRAC * products)


MIN_SOFTMAX_FRAC = 0.25
"""Time of softmax over that of the products of batches from which they are taken for attention."""
_USUAL_HEADS = re.compile(r"\bD (?:64|128)\b")
_IN_STEPS = Remedy(
    "Softmax takes long beside products of batches: attention is computed in steps, and each writes and reads all "
    "scores. Compute it in one kernel, which keeps them on the chip; models of transformers take "
    'attn_implementation="sdpa".',
    "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of bmm, softmax, bmm",
)
MIN_LARGE_US = 100.0
"""A call that would take this long at a good rate has enough work for any GPU: some ten times a launch."""
_LARGE_PRODUCTS = Remedy(
    "The sizes are aligned and large, so neither padding nor larger batches help: the library's choice of a kernel is "
    "slow here. Let it time its kernels, update it, or try another layout of the inputs.",
    "torch.cuda.tunable.enable()   # times the kernels of each product once, in a warm-up",
)
_LARGE = {
    "attention": Remedy(
        "The calls have enough work for this GPU, so the kernel itself is slow. Time the other implementations, or "
        "update the library.",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
        "with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):   # or FLASH_ATTENTION, CUDNN_ATTENTION\n"
        "    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    ),
    "conv": Remedy(
        "The channels are aligned and the calls are large, so padding gains nothing. Let the library time its "
        "algorithms, and use channels-last memory format.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
    ),
}
"""Advice by the operator where one call has enough work."""
_SMALL = Remedy(
    "The sizes are aligned, so padding gains nothing: there is too little work in one call for this GPU. Use larger "
    "batches, or merge several products into one.",
    "qkv = torch.nn.functional.linear(x, torch.cat([wq, wk, wv]))   # one product instead of three",
)
_ALIGNED = {
    "attention": Remedy(
        "Few heads, short sequences or one query per sequence leave most of the GPU without work, and padding gains "
        "nothing. Use larger batches; for decoding, use a kernel that splits the keys.",
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)   # all sequences in one call",
    ),
    "conv": Remedy(
        "The channels are aligned, so padding gains nothing. Let the library time its algorithms, use channels-last "
        "memory format, and use larger batches.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
    ),
    "bmm": Remedy(
        "The products of a batch are too small for this GPU. If they are those of attention, compute it in one kernel; "
        "otherwise merge them into larger products.",
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of bmm, softmax, bmm",
    ),
}
"""Advice by the operator where no size needs padding."""


@rule(
    Entry(
        code="memory-bound-kernels",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=438,
        what=(
            "Norms, elementwise kernels, casts and reductions of an imported trace, each in its own kernel, take a "
            "large share."
        ),
        signal="Time of such kernels that no compiler has fused.",
        threshold=f"{_THRESHOLD} Fusing them is assumed to halve their time.",
        advice=(
            "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. Compile the model."
        ),
        snippet="model = torch.compile(model)",
        page="step-cost",
    )
)
def memory_bound_kernels(run: Run) -> list[Finding]:
    """`memory-bound-kernels`: kernels that fusing would speed up."""
    findings = saving_finding(run, "memory-bound-kernels")
    if findings and findings[0].where == "aten::_softmax" and _has_eager_attention(run):
        advice = f"{_IN_STEPS.advice} For the rest, compile the model."
        return [replace(f, advice=advice, snippet=_IN_STEPS.snippet) for f in findings]
    if findings and "Compiled" in findings[0].where:
        return [replace(f, advice=_UNFUSED.advice, snippet=_UNFUSED.snippet) for f in findings]
    return findings


_UNFUSED = Remedy(
    "These kernels are memory-bound, and run in compiled code that still launches one kernel per operator: its backend "
    "does not fuse. Take one that does, as inductor.",
    'model = torch.compile(model, backend="inductor")   # not eager, aot_eager or ts',
)


@rule(
    Entry(
        code="unfused-optimizer",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=439,
        what="The optimizer of an imported trace takes a large share, in kernels that are not fused.",
        signal="Time and number of kernels in the optimizer phase, without `_fused_` operators.",
        threshold=f"{_THRESHOLD} Fusing is assumed to halve the time.",
        advice="Each kernel reads and writes all parameters. The fused implementation reads them once.",
        snippet="optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
        page="step-cost",
    )
)
def unfused_optimizer(run: Run) -> list[Finding]:
    """`unfused-optimizer`: an optimizer in many kernels."""
    return saving_finding(run, "unfused-optimizer")


_OF_THE_BATCH = r"bn_fw_tr|batchnorm_fwtr|batch_norm_collect_statistics|BatchNormFwdTrain"
"""Kernels of cuDNN, torch and MIOpen that compute the statistics of a batch for batch norm."""


@rule(
    Entry(
        code="batchnorm-in-training-mode",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=429,
        what="Batch norm runs in training mode in an imported trace of inference.",
        signal="Kernels of aten::batch_norm that compute the statistics of the batch; no backward and no optimizer.",
        threshold="One such kernel. A profile of the forward pass of a training, and batch norm without running "
        "statistics (track_running_stats=False), look the same.",
        advice="In training mode an output depends on the rest of its batch, the running statistics change, and the "
        "kernels take longer. Call model.eval() before inference.",
        snippet="model.eval()\nwith torch.inference_mode():\n    y = model(x)",
        page="step-cost",
    )
)
def batchnorm_in_training_mode(run: Run) -> list[Finding]:
    """`batchnorm-in-training-mode`: a trace that trains nothing, with batch norm that does."""
    rows = kernel_rows(run)
    if not is_trace(run) or run.kernels["phase"].isin(["backward", "optimizer"]).any():  # outside of the steps too
        return []
    # Instance norm calls the same kernels, but from an operator of its own.
    norms = rows[rows["name"].str.contains(_OF_THE_BATCH) & (rows["top_op"] == "aten::batch_norm")]
    if norms.empty:
        return []
    share = float(norms["total_us"].sum() / rows["total_us"].sum())
    longest = norms.iloc[int(norms["total_us"].to_numpy().argmax())]
    title = f"Batch norm runs in training mode, {percent(share)} of the kernel time, but the trace contains no training"
    where, unit = str(longest["module"]) or str(longest["top_op"]), "share of kernel time"
    return [make_finding("batchnorm-in-training-mode", title, where, value=share, limit=0.0, unit=unit)]


@rule(
    Entry(
        code="unknown-kernels",
        severity="info",
        family=SPEED_AND_MEMORY,
        order=505,
        what="Too much of the kernel time of an imported trace is in kernels that cannot be classified by name.",
        signal="Kernels that cannot be classified by name.",
        threshold="20 % of the kernel time.",
        advice="The tensor-core share is uncertain by that much. Record shapes, so that operator dtypes can be "
        "used; kernels in a captured graph have no operator.",
        snippet="torch.profiler.profile(record_shapes=True)",
        page="tensor-cores",
    )
)
def unknown_kernels(run: Run) -> list[Finding]:
    """`unknown-kernels`: too many to judge."""
    findings = saving_finding(run, "unknown-kernels")
    rows = kernel_rows(run)
    unknown = rows[rows["tensor_core"] == "unknown"]
    in_operators = unknown[unknown["op"] != ""]["total_us"].sum() >= 0.5 * unknown["total_us"].sum()
    shapes = facts(run.head.environment, "profiler").get("record_shapes") or rows["in_shapes"].ne("").any()
    # Shapes and dtypes are an operator's: they tell nothing of kernels that none launched, unless none was recorded.
    if shapes or not (in_operators or rows["op"].eq("").all()):
        findings = [replace(f, advice=_OWN_KERNELS.advice, snippet=_OWN_KERNELS.snippet) for f in findings]
    return findings


_OWN_KERNELS = Remedy(
    "The tensor-core share is uncertain by that much. These kernels are the program's own or a library's, or run in a "
    "captured graph: profile them alone with Nsight Compute or rocprofv3, which show what units they use.",
    "ncu --section ComputeWorkloadAnalysis python train.py   # on AMD: rocprofv3",
)
