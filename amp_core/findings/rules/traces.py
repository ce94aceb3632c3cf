"""Rules on imported traces: whether the device was recorded, and when, and what it waits for beside the host."""

from dataclasses import replace

from amp_core.analysis.performance.collectives import has_all_ranks
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import kernel_rows, mostly_misclocked, numbers_of_import
from amp_core.analysis.performance.saving import IdleSaving, Saving
from amp_core.findings.launch_remedies import SORTED_ANEW
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.trace_cpu import SMALL_BATCHES, cpu_waits_for_data, has_small_batches
from amp_core.findings.signals import facts
from amp_core.findings.snippets import PROFILE
from amp_core.findings.trace_findings import (
    SAVING_THRESHOLD,
    for_what_runs,
    guides_remedy,
    reported_saving,
    saving_finding,
)
from amp_core.findings.trace_launches import COALESCE
from amp_core.hardware.gpus import is_amd
from amp_core.store.run import Run
from amp_core.text.formatting import duration, number

_ACTIVITIES = {
    "cuda": "CUDA",
    "xpu": "XPU",
    "hpu": "HPU",
    "mtia": "MTIA",
    "mlu": "MLU",
    "npu": "NPU",
    "privateuseone": "PrivateUse1",
}


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
        snippet=PROFILE.format(activity="CUDA"),
        page="",
    )
)
def device_not_recorded(run: Run) -> list[Finding]:
    """`device-not-recorded`: an imported trace of a program that used a device, without the device's work."""
    launches = run.head.config.get("launches_without_kernels")
    if not isinstance(launches, int) or mostly_misclocked(run):
        return []
    device = str(run.head.config.get("device") or "cuda")
    counts = [run.head.config.get(name) for name in ("accelerator_ops", "device_allocations", "device_thread_ops")]
    operators, allocations, of_threads = (count if isinstance(count, int) else 0 for count in counts)
    (untimed,) = numbers_of_import(run, "untimed", "count")
    if untimed > 0:
        finding = make_finding(
            "device-not-recorded",
            f"The device's times ({device}) were not recorded: no kernel or copy takes any, of {untimed:,.0f} in all",
            device,
            value=untimed,
            unit=f"kernel{'s and copies' if untimed > 1 else ' or copy'} without times",
        )
        snippet = PROFILE.format(activity=_ACTIVITIES.get(device, "CUDA"))
        return [for_what_runs(run, replace(finding, advice=_UNTIMED, snippet=snippet))]
    if launches:
        seen, unit = f"{launches:,} launches", "launch{es} without kernels"
    elif of_threads:
        seen, unit = "a backward on threads of a device", "operator{s} of backward on threads of a device"
    elif operators or not allocations:
        seen, unit = "operators of a GPU", "operator{s} of a GPU without kernels"
    else:
        seen, unit = "allocations of its memory", "allocations and frees of its memory"
    counted = launches or operators or allocations or of_threads
    entry_snippet = PROFILE.format(activity=_ACTIVITIES.get(device, "CUDA"))
    gpu = profiled_gpu(run, device).name if of_threads else ""
    title = f"The device ({gpu or device}) was not recorded: the trace contains {seen} but no kernel"
    if "timed_op" in run.head.config:
        title = f"The device's kernels ({device}) were not recorded: the trace has times of its operators alone"
    finding = make_finding(
        "device-not-recorded",
        title,
        device,
        value=float(counted) if counted else None,
        unit=unit.format(s="s" * (counted != 1), es="es" * (counted != 1)),
    )
    if device == "mps":
        return [for_what_runs(run, replace(finding, advice=_APPLE.advice, snippet=_APPLE.snippet))]
    if run.head.config.get("metric_ranges"):
        return [for_what_runs(run, replace(finding, advice=_METRICS, snippet=entry_snippet))]
    if run.head.config.get("legacy_format"):
        return [for_what_runs(run, replace(finding, advice=_LEGACY, snippet=entry_snippet))]
    if run.head.config.get("times_by_events"):
        return [for_what_runs(run, replace(finding, advice=_BY_EVENTS, snippet=entry_snippet))]
    if launches and device == "cuda" and not is_amd(profiled_gpu(run, device).name):
        older = _older_driver(run)
        if run.head.config.get("device_requested") is True:
            advice = f"{_REQUESTED.advice}{older}"
            return [for_what_runs(run, replace(finding, advice=advice, snippet=_REQUESTED.snippet))]
        return [for_what_runs(run, replace(finding, advice=f"{_KEPT_BACK}{older}", snippet=entry_snippet))]
    return [for_what_runs(run, replace(finding, snippet=entry_snippet))]


def _older_driver(run: Run) -> str:
    """That the driver is older than the runtime, by the versions in the head of the trace, as a further sentence; else
    empty. CUDA writes a version as 12040 for 12.4."""
    profiler = facts(run.head.environment, "profiler")
    versions = [profiler.get(f"cuda_{what}_version") for what in ("driver", "runtime")]
    driver, runtime = (one if isinstance(one, int) else 0 for one in versions)
    if not 0 < driver < runtime:
        return ""
    told, newer = (f"{one // 1000}.{one % 1000 // 10}" for one in (driver, runtime))
    return (
        f" Here the driver (CUDA {told}) is older than the runtime and its profiler (CUDA {newer}), which may be the "
        f"cause: take a driver for CUDA {newer}, or a PyTorch that is built for CUDA {told}."
    )


_UNTIMED = (
    "The profiler names the device's work and lost its times. Record again after a warm-up in the same process; where "
    "they are lost again, try another version of PyTorch or of the driver."
)
"""Advice for work of a device that stands in the trace without times."""
_METRICS = (
    "The profiler had to measure metrics of CUPTI's (profiler_metrics), for which it runs each kernel again and writes "
    "ranges instead of kernels; the times of the launches are those of the repetitions. Record again without metrics."
)
"""Advice for launches without kernels in a trace with `cuda_profiler_range` events."""
_LEGACY = (
    "The file has the format of the older torch.autograd.profiler, which records no kernels: at most, it times "
    "operators on the device. Record with torch.profiler.profile and ProfilerActivity.CUDA, from PyTorch 1.8.1 on."
)
"""Advice for a trace of the processes `CPU functions` and `CUDA functions`."""
_BY_EVENTS = (
    "Two events are recorded for each operator: torch measured operators with them, as torch.autograd.profiler does, "
    "and did not ask for kernels. Record with torch.profiler.profile and ProfilerActivity.CUDA."
)
"""Advice for launches without kernels where torch timed operators with events."""
_DRIVER = (
    "the driver kept the kernels back: permission is missing (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES; "
    "NVreg_RestrictProfilingToAdminUsers=0 gives it to all users), another profiler is attached, or the driver gives "
    "them to nobody, as older ones under WSL."
)
_KEPT_BACK = (
    "The trace has the calls that launch. Either ProfilerActivity.CUDA was not among the activities, or " + _DRIVER
)
"""Advice for launches without kernels on a GPU of NVIDIA's."""
_REQUESTED = Remedy(
    f"ProfilerActivity.CUDA was among the activities, for the trace has the profiler's overhead, so {_DRIVER}",
    "python main.py 2>&1 | grep -i cupti   # the error with which the profiler gives up the kernels\n"
    "nvidia-smi   # the driver, and other processes on the GPU",
)
"""The same where the activity of the device was requested."""
_APPLE = Remedy(
    "torch.profiler does not record Apple's GPUs: operator times are those of launching, and of waiting where a value "
    "is read. Record signposts with torch.mps.profiler, and look at them in Instruments.",
    'with torch.mps.profiler.profile(mode="interval", wait_until_completed=False):\n    train_step(batch)',
)


@rule(
    Entry(
        code="invalid-times",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=427,
        what="Work of a device starts far outside of its imported trace, as where a driver writes no start.",
        signal="Start times of kernels and copies beside the times of the host's events.",
        threshold="A minute and ten times the length of the trace away from it, of most of the device's time.",
        advice="Only the lengths of these kernels are known, so idle time, overlap and steps cannot be analysed. "
        "Update the device's driver and its profiler, and record again.",
        snippet=PROFILE.format(activity="PrivateUse1"),
        page="",
    )
)
def invalid_times(run: Run) -> list[Finding]:
    """`invalid-times`: work of a device whose times are none of the trace."""
    count, us, off_us = numbers_of_import(run, "misclocked", "count", "us", "off_us")
    if not mostly_misclocked(run):
        return []
    device = str(run.head.config.get("device") or "")
    finding = make_finding(
        "invalid-times",
        f"{count:,.0f} kernels and copies, {number(us / 1e3, 'ms')} in all, start {duration(off_us / 1e6)} or more "
        "away from the host's events",
        device,
        value=count,
        limit=0.0,
        unit="kernels and copies",
    )
    activity = _ACTIVITIES.get(device.partition(":")[0], "CUDA")
    return [for_what_runs(run, replace(finding, snippet=PROFILE.format(activity=activity)))]


@rule(
    Entry(
        code="waiting-for-data",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=431,
        what="The GPU of an imported trace is idle while the program loads data, or a CPU's loop waits for it.",
        signal="GPU idle time during the DataLoader's ranges; of a CPU, these ranges.",
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
    saving = reported_saving(run, "waiting-for-data", Saving)
    if saving is None:
        return cpu_waits_for_data(run)
    remedy = guides_remedy(saving)
    if (of_loader := _LOADERS.get(str(run.head.config.get("loader")))) is not None:
        of_loader = SMALL_BATCHES if has_small_batches(run) else of_loader
        remedy = Remedy(of_loader.advice, of_loader.snippet or remedy.snippet)
    if kernel_rows(run, everything=True)["name"].str.contains("Pinned -> Device", regex=False).any():
        remedy = replace(remedy, snippet=remedy.snippet.replace("pin_memory=True, ", ""))
    return [saving_finding(run, saving, remedy)]


_LOADERS = {
    "pipeline": Remedy(
        "Faster arithmetic does not help here. A pipeline of transformers prepares its inputs in the loop's own "
        "process, and one that splits them takes no worker processes. Make that faster: take a fast image processor "
        "or tokenizer (use_fast=True), prepare images on the GPU, or prepare all inputs ahead of the pipeline.",
        "processor = AutoImageProcessor.from_pretrained(name, use_fast=True)   # of torchvision, also on the GPU\n"
        "pipe = pipeline(task, model=model, image_processor=processor)",
    ),
    "own process": Remedy(
        "Faster arithmetic does not help here. The loop loads its data itself (num_workers=0): load it ahead of time "
        "in worker processes, and do less work per sample on the CPU."
    ),
    "workers": Remedy(
        "Faster arithmetic does not help here. The loader has worker processes, which do not keep up: do less work per "
        "sample, as by decoding and transforming once and caching the result, or use more workers where processors "
        "are free.",
        "cached = [transform(sample) for sample in dataset]   # once, where memory or disk allows it\n"
        "loader = DataLoader(\n    cached, batch_size, num_workers=len(os.sched_getaffinity(0)), pin_memory=True, "
        "persistent_workers=True\n)",
    ),
}
"""Advice by where the trace shows that data is loaded."""


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
        snippet=PROFILE.format(activity="CUDA"),
        page="step-cost",
    )
)
def unexplained_idle(run: Run) -> list[Finding]:
    """`unexplained-idle`: idle time of the GPU in a trace without launches."""
    saving = reported_saving(run, "unexplained-idle", Saving)
    return [] if saving is None else [saving_finding(run, saving, guides_remedy(saving))]


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
    saving = reported_saving(run, "kernel-wait", IdleSaving)
    return [] if saving is None else [saving_finding(run, saving, _of_queued(run, saving))]


def _of_queued(run: Run, saving: IdleSaving) -> Remedy:
    """What to advise where launched work waits."""
    if saving.waits_in == COALESCE:
        return SORTED_ANEW
    if saving.waits_for_graph:
        launches = run.head.config.get("graph_launches")
        again = isinstance(launches, int) and launches >= MIN_GRAPH_LAUNCHES
        return _GRAPH_LATE_AGAIN if again else _GRAPH_LATE
    if saving.is_handed_over:
        return _HANDED_OVER
    if not saving.is_sure:
        return _LATE_START
    return _ALL_RANKS_RECORDED if has_all_ranks(run) else guides_remedy(saving)


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
MIN_GRAPH_LAUNCHES = 3
"""From that many on the waits are not those of a first launch."""
_GRAPH_LATE_AGAIN = Remedy(
    "The graph was launched, and begins long after that with no stream of the GPU running, at later launches too: "
    "profilers prepare each of its nodes. Time the same steps without the profiler. If the time remains, capture fewer "
    "nodes: small copies and kernels fused, not one by one.",
    _STEP_TIMES,
)
_HANDED_OVER = Remedy(
    "What depends on each other runs on several streams, and each hand-over between these takes longer than the next "
    "kernel of one stream. Launch it on one stream; of a library's own streams, as for recurrent layers, make fewer, "
    "longer calls, or capture a graph.",
    "y = second(first(x))   # both on one stream, without torch.cuda.stream(...) around one of them",
)
_LATE_START = Remedy(
    "No stream of the GPU runs in that time, and no graph or host function holds work up, so the trace shows nothing "
    "to wait for. The profiler, a virtual or shared GPU, or the first run of a kernel can delay its start, which costs "
    "most where the host waits after every few kernels. Time the same steps without the profiler: if they are that "
    "much faster, this idle time is the profiler's, and the rest of the trace still holds.",
    _STEP_TIMES,
)
