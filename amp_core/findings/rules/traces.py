"""Rules on imported traces: whether the device was recorded, and its waits and copies."""

import re
from dataclasses import replace

from amp_core.analysis.performance.collectives import has_all_ranks
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle_savings import CALLS, GRAPH_START, MIN_OF_ONE_FRAC, longest_named
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.signals import facts
from amp_core.findings.step_sentences import captured_anew, passes_sentence
from amp_core.findings.trace_findings import SAVING_THRESHOLD, for_what_runs, saving_finding, trains
from amp_core.findings.trace_launches import FIRST_PASS, launch_remedy
from amp_core.hardware.gpus import is_amd
from amp_core.store.run import Run
from amp_core.traces.operators import is_compiled_code

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
        signal="Calls that launch work, operators that only run on an accelerator, or allocations of its memory, and "
        "no kernel.",
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
    counts = [run.head.config.get(name) for name in ("accelerator_ops", "device_allocations")]
    operators, allocations = (count if isinstance(count, int) else 0 for count in counts)
    if launches:
        seen, unit = f"{launches:,} launches", "launch{es} without kernels"
    elif operators or not allocations:
        seen, unit = "operators of a GPU", "operator{s} of a GPU without kernels"
    else:
        seen, unit = "allocations of its memory", "allocations and frees of its memory"
    counted = launches or operators or allocations
    entry_snippet = _HOW.format(activity=_ACTIVITIES.get(device, "CUDA"))
    finding = make_finding(
        "device-not-recorded",
        f"The device ({device}) was not recorded: the trace contains {seen} but no kernel",
        device,
        value=float(counted) if counted else None,
        unit=unit.format(s="s" * (counted != 1), es="es" * (counted != 1)),
    )
    if device == "mps":
        return for_what_runs(run, [replace(finding, advice=_APPLE.advice, snippet=_APPLE.snippet)])
    if launches and device == "cuda" and not is_amd(profiled_gpu(run, device).name):
        return for_what_runs(run, [replace(finding, advice=_KEPT_BACK, snippet=entry_snippet)])
    return for_what_runs(run, [replace(finding, snippet=entry_snippet)])


_KEPT_BACK = (
    "The trace has the calls that launch, which CUPTI gives as it gives the kernels: the driver kept these back. "
    "Permission for them is missing (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES; NVreg_RestrictProfilingToAdminUsers=0 gives "
    "it to all users), another profiler is attached, or the driver gives them to nobody, as older ones under WSL. "
    "Then record again."
)
"""Advice for launches without kernels on a GPU of NVIDIA's."""
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
    findings = saving_finding(run, "waiting-for-data")
    if not kernel_rows(run, everything=True)["name"].str.contains("Pinned -> Device", regex=False).any():
        return findings
    return [replace(f, snippet=f.snippet.replace("pin_memory=True, ", "")) for f in findings]


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
    remedy = _host_remedy(run, findings[0]) if findings else None
    return for_what_runs(
        run, [replace(f, advice=remedy.advice, snippet=remedy.snippet) if remedy else f for f in findings]
    )


def _host_remedy(run: Run, finding: Finding) -> Remedy | None:
    """What to advise for the host of a trace, by what it does while the device waits; None for the guide's advice."""
    on_cuda = str(run.head.config.get("device")).startswith("cuda")
    if passes_sentence(run):
        return FIRST_PASS
    in_calls = next((kind for kind in _CALLS if CALLS[kind] in finding.title), None)
    if in_calls == "graphs" and not any(run.head.config.get(name) for name in ("captures", "graph_builds")):
        return _GRAPH_LAUNCHES
    if in_calls is None and captured_anew(run):
        in_calls = "graphs"
    if in_calls is not None:
        of_any_device = on_cuda or in_calls in ("compiling", "torch.compile")
        return _CALLS[in_calls] if of_any_device else replace(_CALLS[in_calls], snippet=_WARM_UP)
    if finding.where in _COPYING and _waits_for_pageable_copies(run):
        return _CALLS["copies"]
    if _CREATES.fullmatch(finding.where):
        return _ON_DEVICE
    if finding.where in set(window_rows(run)["host_function"]):
        return _IN_PYTHON
    if is_compiled_code(finding.where):
        return _IN_GRAPHS if run.head.config.get("graph_launches") else _IN_COMPILED
    if _in_many_operators(run):
        return _many_operators(run)
    if facts(run.head.environment, "profiler").get("with_stack"):
        return _HAS_STACKS
    return _WITHOUT_OPERATORS if run.head.config.get("without_operators") is True else None


def _in_many_operators(run: Run) -> bool:
    """Whether the host is in operators while the device waits, in each step, and in none of them for long."""
    savings, windows = possible_savings(run), window_rows(run)
    saving = next((c for c in savings.ranked if c.code == "host-bound"), None) if savings else None
    steps = float(windows["steps"].sum())
    if saving is None or steps < MIN_STEPS or saving.saved_us <= 0:
        return False
    us = saving.saved_us * steps
    outside_us = float(windows["host_outside_us"].fillna(0.0).sum())
    named_us = max(longest_named(windows, column)[1] for column in ("host_op", "host_function"))
    return named_us < MIN_OF_ONE_FRAC * us and outside_us < MAX_OUTSIDE_FRAC * us


MIN_STEPS = 2
MAX_OUTSIDE_FRAC = 0.2
"""Share of the time in which the host should launch that may be in no operator where it is in many."""


def _many_operators(run: Run) -> Remedy:
    longest, _ = longest_named(window_rows(run), "host_op")
    launches = launch_remedy(run) or GUIDE["launch-bound"]
    buffers = (
        f" {_BUFFERS}" if longest in _FLATTENING and kernel_rows(run)["category"].eq("communication").any() else ""
    )
    return Remedy(f"{_MANY_OPERATORS}{buffers} {launches.advice}", launches.snippet)


_MANY_OPERATORS = (
    "The host is in operators meanwhile, in none of them for long: a processor that is slow, shared or slowed by the "
    "profiler needs that much for each. Time the steps without the profiler."
)
_FLATTENING = ("aten::unflatten_dense_tensors", "aten::flatten_dense_tensors")
_BUFFERS = (
    "DistributedDataParallel flattens and unflattens the model's buffers, as those of batch norm, to broadcast them "
    "before each forward: broadcast_buffers=False leaves that out."
)
_COPYING = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda")
"""Operators that copy to the device, or on the host."""


def _waits_for_pageable_copies(run: Run) -> bool:
    """Whether the host's longest calls while the device is idle copy, and from memory that is not pinned."""
    pageable = kernel_rows(run, everything=True)["name"].str.contains("Pageable -> Device", regex=False).any()
    return bool(pageable and (window_rows(run)["host_call_kind"] == "copies").any())


_WITHOUT_OPERATORS = Remedy(
    "The trace does not show what the host does between launches, for no operator was recorded. Record "
    "ProfilerActivity.CPU too.",
    _HOW.format(activity="CUDA"),
)
_CREATES = re.compile(
    r"(?:aten::|<built-in method )(?:rand|randn|randint|randperm|normal|uniform|zeros|ones|full|arange|eye)_?"
    r"(?: of type object.*>)?"
)
"""Operators that create a tensor, and so can do it on the device, and torch's functions of that name in stacks."""
_ON_DEVICE = Remedy(
    "The host creates tensors in this operator while the GPU waits. Create them on the device.",
    "x = torch.randn(shape, device=device)   # instead of torch.randn(shape).to(device)",
)
_IN_PYTHON = Remedy(
    "Between launches the host runs this function and what it calls; a timeline shows who calls it. Call it once, "
    "before the loop, do the same on the device, or where it prepares batches, run it in the loader's workers.",
    "prepared = prepare(inputs)   # once, before the loop",
)
_IN_COMPILED = Remedy(
    "The host is in compiled code: Python that the compiler wrote checks guards and launches one kernel after the "
    "other, and sizes that are new are compiled. Let it capture CUDA graphs, which launch all of them at once, and "
    "look for what is compiled again.",
    'model = torch.compile(model, mode="reduce-overhead")   # TORCH_LOGS=recompiles names what is compiled again',
)
_IN_GRAPHS = Remedy(
    "The host is in compiled code, of which a part is replayed as graphs: look for what is compiled or captured again, "
    "and for what breaks the graph.",
    "TORCH_LOGS=recompiles,graph_breaks python main.py",
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
    "torch.compile": Remedy(
        "torch.compile compiles at the first call of its code, and again for other sizes or settings. Profile after a "
        "warm-up in which every size has occurred; what is still compiled then is compiled anew.",
        "TORCH_LOGS=recompiles python main.py   # names what is compiled again, and why",
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
_GRAPH_LAUNCHES = Remedy(
    "No graph is captured or built here: the host stays in the launch of a large one, and the first launch uploads it. "
    "Upload it once before the loop, and capture fewer nodes: small copies and kernels fused, not one by one.",
    "graph.replay()   # once, before the loop; in C++: cudaGraphUpload(graph, stream)",
)


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
    return for_what_runs(run, saving_finding(run, "unexplained-idle"))


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
        remedy = _LATE_START if is_late_start else _ALL_RANKS_RECORDED if has_all_ranks(run) else None
    told = [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings
    return for_what_runs(run, told)


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
        code="copies",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=435,
        what="Copies and fills take a noticeable part of the step of an imported trace.",
        signal="Time of memcpy and memset operations.",
        threshold=SAVING_THRESHOLD,
        advice="Pin host memory: copies from it are faster, and run beside kernels and what the host does. Keep reused "
        "data on the device.",
        snippet="loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
        page="step-cost",
    )
)
def copies(run: Run) -> list[Finding]:
    """`copies`: time of copies and fills."""
    findings = saving_finding(run, "copies")
    known = _COPIES if trains(run) else _COPIES | _COPIES_OF_INFERENCE
    remedy = next((r for word, r in known.items() if findings and word in findings[0].where), None)
    if remedy is _COPIES["Pinned"]:
        rows = run.timeline
        copied = rows["category"] == "memcpy"
        if copied.any() and not rows["stream"][copied].isin(rows["stream"][~copied]).any():
            remedy = Remedy(_ON_OWN_STREAM, "x = bytes_of_images.to(device, non_blocking=True).float().div_(255)")
    elif remedy is None and _CREATES.fullmatch(longest_named(window_rows(run), "host_op")[0]):
        remedy = _CREATED
    elif remedy is known["DtoH"] and _is_pageable_both_ways(run):
        remedy = replace(_PIN_BOTH, advice=_PIN_ON_TWO_STREAMS) if _has_stream_per_way(run) else _PIN_BOTH
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings


def _has_stream_per_way(run: Run) -> bool:
    """Whether copies to and from the device are on different streams."""
    rows = run.timeline
    down, up = (set(rows["stream"][rows["name"].str.contains(way)].dropna()) for way in ("DtoH", "HtoD"))
    return bool(down and up) and not down & up


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
_PIN_ON_TWO_STREAMS = (
    "Copies in both directions use memory that is not pinned: the driver copies it once more, and one direction waits "
    "for the other, though they are on streams of their own. Pin it."
)
_ON_OWN_STREAM = (
    "The copies already come from pinned memory, on a stream of their own, and outlast what runs beside them. Copy "
    "fewer bytes: integers and 16 bits, widened on the device."
)
_CREATED = Remedy(
    "The host creates tensors while the GPU waits, and then copies them: created on the device, they need no copy.",
    _ON_DEVICE.snippet,
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
_COPIES_OF_INFERENCE = {
    "Memset": Remedy(
        "Fills of whole tensors: allocate with empty() what is overwritten, and keep what stays 0.",
        "y = torch.empty(shape, device=device)   # instead of zeros, where all of it is written",
    ),
    "DtoH": Remedy(
        "Results are copied to the host. Reduce them on the device first, and copy only occasionally.",
        "results.append(y)   # on the device; torch.cat(results).cpu() once",
    ),
}
"""The same where the trace contains no training."""
