"""Rules on imported traces of a CPU: what of its time a change could save."""

import re
from dataclasses import replace

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.layouts import layout_copies as copies_for_layout
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving
from amp_core.findings.cpu_families import dominant_size
from amp_core.findings.cpu_parts import (
    MIN_ATTENTION_FRAC,
    MIN_FP64_FRAC,
    MIN_IN_OPERATORS_FRAC,
    NOT_USED,
    ON_CPUS_ALONE,
    TOO_SMALL,
    CpuPart,
    attention_part,
    convolution_part,
    cpu_rows,
    fp64_part,
    hosts_loading_part,
    judged_rows,
    layout_part,
    loading_in_operators,
    loading_part,
    on_macos,
    optimizer_part,
    outside_part,
    pace_part,
    part_gradients_part,
    unused_gpu,
    waiting_part,
    without_loading,
    without_onednn,
)
from amp_core.findings.host_reductions import reductions_remedy
from amp_core.findings.host_sentences import MIN_WORKERS_FRAC, worker_part
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.repeated_work import steps_of
from amp_core.findings.signals import facts
from amp_core.findings.trace_findings import for_what_runs, guides_remedy, reported_saving, saving_finding
from amp_core.store.run import Run
from amp_core.text.formatting import percent


def _rows(run: Run) -> pd.DataFrame:
    """Rows of the operators of a trace of a CPU that the first sentence judges; none for others."""
    return run.cached_frame(["kernels", "windows"], _judged)


def _judged(run: Run) -> pd.DataFrame:
    rows = kernel_rows(run)
    if not is_trace(run) or rows.empty or not on_cpu(rows):
        return rows[:0]
    return judged_rows(without_loading(run, cpu_rows(run)))


def cpu_finding(run: Run, part: CpuPart, remedy: Remedy | None = None) -> Finding:
    """The finding of a part, with its milliseconds per step."""
    steps, per_step = steps_of(run)
    ms = part.us / steps / 1e3 if part.us > 0 else None
    what = f"{part.what[0].upper()}{part.what[1:]}"
    unit = "" if ms is None else f"ms{per_step}{_BEYOND.get(part.code, '')}"
    return replace(make_finding(part.code, what, part.where, value=ms, unit=unit, remedy=remedy), win_ms=ms)


_BEYOND = {"shared-processor": " beyond what is usual", "fp64-operators": " saved at twice the rate"}
"""What the time of a finding is, where it is not all of what the title names."""


def cpu_waits_for_data(run: Run) -> list[Finding]:
    """`waiting-for-data` of a trace of a CPU, unless its workers' start and end are most of the trace; and of one that
    lacks the device's work."""
    remedy = _LOADERS.get(str(run.head.config.get("loader")), _LOADERS["own process"])
    if (on_host := hosts_loading_part(run)) is not None:
        return [cpu_finding(run, on_host, remedy)]
    part = loading_part(run) if len(_rows(run)) and worker_part(run) is None else None
    if part is None:
        return []
    if loading_in_operators(run) >= MIN_IN_OPERATORS_FRAC:
        remedy = _LOADED_BY_OPERATORS
    return [cpu_finding(run, part, SMALL_BATCHES if has_small_batches(run) else remedy)]


_LOADED_BY_OPERATORS = Remedy(
    "The loop's own process makes its batches with operators, so fewer or faster ones help. Make once, before the "
    "loop, what is the same in each pass, and the rest in operators on whole batches.",
    "batches = [make(batch) for batch in source]   # once, where memory allows it",
)


def has_small_batches(run: Run) -> bool:
    """Whether worker processes load batches in little more than it takes to pass one to the loop's process."""
    windows = window_rows(run)
    us, steps = (float(windows[name].fillna(0.0).sum()) for name in ("data_us", "steps"))
    return run.head.config.get("loader") == "workers" and 0 < us <= MAX_PASSING_US * steps


MAX_PASSING_US = 1000.0
"""To receive a batch from a worker process takes some hundred microseconds: a message, and shared memory to map."""
SMALL_BATCHES = Remedy(
    "Faster arithmetic does not help here. A batch comes in less than 1 ms, and passing it from a worker process "
    "takes about as long: load such small batches in the loop's own process, or keep all of the data on the device.",
    "data = data.to(device)   # once; batch = data[indices] in the loop, without a DataLoader",
)


_LOADERS = {
    "own process": Remedy(
        "Do less work per sample, as by decoding once, transforming once what is not random, and caching the result. "
        "Worker processes load ahead of time where processors are free beside the model's threads.",
        "loader = DataLoader(data, batch_size, num_workers=2, persistent_workers=True)",
    ),
    "workers": Remedy(
        "Faster operators do not help here. The loader has worker processes, which do not keep up: do less work per "
        "sample, as by decoding once, transforming once what is not random, and caching the result, and leave them "
        "processors beside the model's threads.",
        "cached = [decode(sample) for sample in dataset]   # once, where memory or disk allows it",
    ),
}
"""Advice by where the trace shows that data is loaded."""


def cpu_waits_for_ranks(run: Run) -> list[Finding]:
    """`exposed-communication` of traces of a CPU: waiting for late ranks."""
    part = waiting_part(run) if len(_rows(run)) else None
    if part is None:
        return []
    if part.where.startswith("rank"):
        return [cpu_finding(run, part, _LATE_RANK)]
    exchange = next((remedy for words, remedy in _EXCHANGES if words.search(part.where)), None)
    return [cpu_finding(run, part, exchange or reductions_remedy(run))]


_EXCHANGES = (
    (
        re.compile(r"gather|broadcast|(?<!reduce_)scatter"),
        Remedy(
            "Nothing is computed meanwhile. Exchange less, as counts instead of what they are counted from, and less "
            "often.",
            "torch.distributed.all_reduce(torch.tensor([correct, total]))   # two numbers, instead of gathered objects",
        ),
    ),
    (
        re.compile(r"send|recv"),
        Remedy(
            "Nothing is computed meanwhile. Small messages cost their latency, whatever they carry: send fewer, or let "
            "one collective do it, as all_reduce where neighbours pass a sum on.",
            "torch.distributed.all_reduce(values)   # instead of sends and receives in a loop",
        ),
    ),
)
"""Advice by what ranks exchange."""


_LATE_RANK = Remedy(
    "The others wait for this rank in collectives, which neither a faster network nor overlap shortens. Compare what "
    "it does before them: more or longer samples, fewer processors, or work that it does alone.",
    "lengths = [len(sample) for sample in shard]\nprint(rank, sum(lengths))   # as much for each rank",
)


def cpu_optimizer(run: Run) -> list[Finding]:
    """`unfused-optimizer` of a trace of a CPU."""
    rows = _rows(run)
    part = optimizer_part(run, rows) if len(rows) else None
    if part is None or not part.is_fusible:
        return []
    finding = cpu_finding(run, part, _FUSED_ON_CPU)
    if (rows["op"] == "aten::embedding_dense_backward").any() and dominant_size(rows, float(rows["total_us"].sum())):
        finding = replace(finding, advice=f"{finding.advice} {_WHOLE_TABLES}")
    return [finding]


_WHOLE_TABLES = (
    "It goes over all rows of the embeddings, of which a batch uses few: with torch.nn.Embedding(…, sparse=True) and "
    "torch.optim.SparseAdam, without weight decay for them, backward and step take the used rows alone."
)


_FUSED_ON_CPU = Remedy(
    "Its operators read and write each parameter several times, one by one. From PyTorch 2.4 on, the fused "
    "implementation of Adam, AdamW, SGD and Adagrad makes one pass on a CPU too.",
    "optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)",
)


@rule(
    Entry(
        code="loader-start",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=442,
        what="Starting and ending the loader's worker processes takes most of an imported trace.",
        signal="The time before the first batch of a loader with workers, and after its last one.",
        threshold=f"{percent(MIN_WORKERS_FRAC)} of the trace: below that, the batches themselves count.",
        advice="Workers start anew with each pass over a loader, and import the program where they are spawned. Take "
        "num_workers=0 for few batches, or keep one loader and its workers for all passes.",
        snippet="loader = DataLoader(data, batch_size, num_workers=n, persistent_workers=True)   # once, not per epoch",
        page="step-cost",
    )
)
def loader_start(run: Run) -> list[Finding]:
    """`loader-start`: the start and the end of a loader's workers."""
    part = worker_part(run)
    return [cpu_finding(run, part)] if part is not None else []


@rule(
    Entry(
        code="python-outside-operators",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=443,
        what="In most of an imported trace of a CPU no operator runs: Python or other code does.",
        signal="Time in no operator, without that of loading data and of the profiler.",
        threshold="Half of the time: below that, the operators count.",
        advice="Faster operators do not help here. Record Python's stacks to see which functions run, and move what "
        "they do out of the loop, into operators on whole tensors, or into compiled code.",
        snippet="with torch.profiler.profile(with_stack=True) as prof:\n    train_step(batch)\n"
        'prof.export_chrome_trace("trace.json.gz")',
        page="step-cost",
    )
)
def python_outside_operators(run: Run) -> list[Finding]:
    """`python-outside-operators`: a CPU that mostly runs no operator."""
    part = outside_part(run) if len(_rows(run)) else None
    if part is None:
        return []
    finding = cpu_finding(run, part)
    if part.is_one_gap:
        finding = replace(finding, advice=_ONE_GAP.advice, snippet=_ONE_GAP.snippet)
    elif not _rows(run)["name"].str.contains("::", regex=False).any():
        finding = replace(finding, advice=_OLD_TORCH.advice, snippet=_OLD_TORCH.snippet)
    elif facts(run.head.environment, "profiler").get("with_stack"):
        finding = replace(finding, advice=_HAS_STACKS.advice, snippet=_HAS_STACKS.snippet)
    return [for_what_runs(run, finding)]


_ONE_GAP = Remedy(
    "Faster operators do not help here. Most of it is one gap: something is set up, as by the first backward, or the "
    "program waits once. Profile several passes after a warm-up.",
    "for _ in range(5):\n    train_step(batch)   # before the profiler starts",
)
_OLD_TORCH = Remedy(
    "Faster operators do not help here. This version of PyTorch, before 1.7, records no stacks of Python: sample the "
    "program, and move what its functions do out of the loop, or into operators on whole tensors.",
    "py-spy record --output profile.svg -- python main.py",
)
"""Operators have no namespace in its traces."""
_HAS_STACKS = Remedy(
    "Faster operators do not help here. The trace has Python's stacks: a timeline shows the functions in which no "
    "operator runs. Recording them slows Python, so time the program without the profiler first.",
    "began = time.perf_counter()\ntrain_step(batch)\nprint(time.perf_counter() - began)",
)


@rule(
    Entry(
        code="shared-processor",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=444,
        what="Equal calls, or equal steps, of an imported trace of a CPU take unequally long.",
        signal="Calls of the same operator and sizes beside their median; steps of the same operators beside the "
        "fastest quarter of them.",
        threshold="A fifth of the operators' time in calls of three times the median, or a quarter beyond the pace of "
        f"the fastest steps, and {percent(MIN_SAVED_FRAC)} of all of the time.",
        advice="Other programs, a quota, or more threads than processors slow the same work now and then. Give the "
        "program processors of its own, and no more threads than these in all: those of each rank and of a loader's "
        "workers count.",
        snippet="torch.set_num_threads(torch.get_num_threads() // processes)   # and see /sys/fs/cgroup/cpu.max",
        page="step-cost",
    )
)
def shared_processor(run: Run) -> list[Finding]:
    """`shared-processor`: a CPU that takes unequally long for the same."""
    part = _pace(run, "shared-processor")
    if part is None:
        return []
    finding = cpu_finding(run, part, _HALTED if part.is_halted else _SHARED_MAC if on_macos(run) else None)
    if part.count:  # the first step is none of them
        ms = part.us / part.count / 1e3
        finding = replace(finding, value=ms, unit="ms in each of them beyond the pace of the fastest quarter")
    return [finding]


_SHARED_MAC = Remedy(
    "Other programs, or more threads than processors, slow the same work now and then. End what else runs on the Mac, "
    "and take no more threads than it has fast processors: those of each rank and of a loader's workers count.",
    "torch.set_num_threads(os.cpu_count() // processes)   # or fewer: slow processors count here too",
)
"""Processors of Apple are fast and slow ones, and macOS has no cgroups."""
_HALTED = Remedy(
    "Calls that compute nothing took long then, too, so no operator is to blame: the machine was suspended, the "
    "process was stopped, or it waited for memory that was swapped out. Profile again.",
    "print(psutil.virtual_memory().available, psutil.swap_memory().used)",
)


@rule(
    Entry(
        code="costly-calls",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=445,
        what="Operators of an imported trace of a CPU cost about as much to call as they compute.",
        signal="The time of its own of operators that call others, by call; the mean time of all operators.",
        threshold="Half of the operators' time at 30 µs a call or more, or 5 µs an operator on average: torch takes "
        "about a microsecond to dispatch one, and Python a few to call it.",
        advice="Fewer operators on more data each help, and faster ones do not. Time the program without the profiler "
        "first, whose own cost is one per operator too.",
        snippet="y = torch.stack(parts).sum(0)   # one operator for all, instead of one for each in a loop\n"
        "model = torch.compile(model)   # from PyTorch 2.0 on, on Windows 2.5",
        page="step-cost",
    )
)
def costly_calls(run: Run) -> list[Finding]:
    """`costly-calls`: many operators on little data."""
    part = _pace(run, "costly-calls")
    return [cpu_finding(run, part)] if part is not None else []


def _pace(run: Run, code: str) -> CpuPart | None:
    """What makes equal work take unequally long, if it is of that code."""
    rows = _rows(run)
    part = pace_part(run, rows) if len(rows) else None
    return part if part is not None and part.code == code else None


@rule(
    Entry(
        code="fallback-convolution",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=446,
        what="Convolutions of an imported trace of a CPU run in torch's plain implementation.",
        signal="Operators such as `aten::_slow_conv2d_forward`.",
        threshold="5 % of the operators' time.",
        advice="It is the convolution that torch takes where oneDNN is missing, disabled, or lacks the dtype. Use a "
        "build of torch with oneDNN, and FP32 or BF16.",
        snippet="print(torch.backends.mkldnn.is_available(), torch.backends.mkldnn.enabled)",
        page="step-cost",
    )
)
def fallback_convolution(run: Run) -> list[Finding]:
    """`fallback-convolution`: convolutions without oneDNN."""
    rows = _rows(run)
    part = convolution_part(rows) if len(rows) else None
    if part is None:
        return []
    finding = replace(cpu_finding(run, part), advice=without_onednn(run, rows, part.where))
    return [replace(finding, snippet=_ON_MPS) if on_macos(run) else finding]


_ON_MPS = 'model = model.to("mps")\nbatch = batch.to("mps")'


@rule(
    Entry(
        code="attention-in-steps",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=447,
        what="Attention of an imported trace of a CPU is computed in steps.",
        signal="A softmax beside products of batches.",
        threshold=f"{percent(MIN_ATTENTION_FRAC)} of the operators' time.",
        advice="Each step writes and reads all scores. Compute attention in one operator, which keeps a block of them "
        'in the cache; models of transformers that have it take attn_implementation="sdpa".',
        snippet="y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of bmm, softmax, bmm",
        page="step-cost",
    )
)
def attention_in_steps(run: Run) -> list[Finding]:
    """`attention-in-steps`: attention without its operator."""
    rows = _rows(run)
    part = attention_part(rows) if len(rows) else None
    return [cpu_finding(run, part)] if part is not None else []


@rule(
    Entry(
        code="layout-copies",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=422,
        what="An imported trace copies tensors into another layout again and again.",
        signal="Copies without a change of type within `contiguous` and `clone`.",
        threshold="5 % of a GPU's step, 10 % of the operators' time on a CPU.",
        advice="The elements lie in another order than the next operator takes. Lay weights out once, keep one memory "
        "format for model and input, and leave out contiguous() where the next operator takes strides.",
        snippet="weight = weight.transpose(-2, -1).contiguous()   # once, before the loop",
        page="step-cost",
    )
)
def layout_copies(run: Run) -> list[Finding]:
    """`layout-copies`: tensors that are copied for their layout."""
    rows = _rows(run)
    part = layout_part(rows) if len(rows) else None
    if part is not None:
        return [cpu_finding(run, part)]
    saving = reported_saving(run, "layout-copies", Saving)
    if saving is None:
        return []
    return [saving_finding(run, saving, _OF_ACTIVATIONS if _copies_activations(run) else guides_remedy(saving))]


@rule(
    Entry(
        code="part-gradients",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=421,
        what="Gradients of parts of tensors take long in an imported trace: each writes the whole tensor.",
        signal="`SelectBackward0` and `SliceBackward0` with additions, 40 % as many as parts or more; or `CopySlices`.",
        threshold="5 % of the step, or of the operators' time on a CPU.",
        advice="The backward of x[i] or x[:n] fills a tensor of the whole size with zeros, copies one gradient into it "
        "and adds it to those of the other parts. Take all parts at once, for the backward of unbind and split joins "
        "the gradients in one pass, or compute on all of them, as one grouped product does for experts.",
        snippet="for part in x.unbind(0):   # instead of x[i]\n    ...\na, b = x.split(n, dim=-1)   # instead of "
        "x[..., :n], x[..., n:]",
        page="step-cost",
    )
)
def part_gradients(run: Run) -> list[Finding]:
    """`part-gradients`: backward of parts of tensors."""
    rows = _rows(run)
    part = part_gradients_part(rows) if len(rows) else None
    if part is not None:
        return [cpu_finding(run, part, _STACKED if part.is_of_assignments else None)]
    saving = reported_saving(run, "part-gradients", Saving)
    if saving is None:
        return []
    return [saving_finding(run, saving, _STACKED if "CopySlices" in saving.where else guides_remedy(saving))]


_STACKED = Remedy(
    "The backward of x[i] = y copies the gradient of the whole tensor for each part. Collect the parts in a list, and "
    "join them once, for the backward of stack and cat takes views.",
    "parts.append(y)   # instead of x[i] = y\nx = torch.stack(parts)   # after the loop",
)


def _copies_activations(run: Run) -> bool:
    """Whether most of what is copied has three dimensions or more, as no weight of a linear layer has."""
    copies = copies_for_layout(kernel_rows(run))
    ranks = copies["in_shapes"].map(lambda text: max(map(len, tensor_shapes(text)), default=0))
    us = copies["total_us"]
    return bool(us[ranks >= MIN_ACTIVATION_DIMENSIONS].sum() > us.sum() / 2)


MIN_ACTIVATION_DIMENSIONS = 3
_OF_ACTIVATIONS = Remedy(
    "The elements lie in another order than the next operator takes. Keep one memory format for model and input, and "
    "leave out contiguous() where the next operator takes strides, as attention and products do.",
    "y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))   # without contiguous()",
)


@rule(
    Entry(
        code="fp64-operators",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=449,
        what="Much of an imported trace computes in FP64.",
        signal="The dtypes of the operators' inputs, and the names of kernels.",
        threshold=f"{percent(MIN_FP64_FRAC)} of a CPU's operators' time; of a GPU, possible savings of at least 5 % of "
        "the step.",
        advice="FP32 has half the bytes, and on most devices at least twice the rate. Where FP64 is not meant, find "
        "what makes tensors so: arrays of NumPy are unless told otherwise, and one such input makes results FP64.",
        snippet="x = torch.from_numpy(array).float()   # and dtype=torch.float32 where tensors are made",
        page="step-cost",
    )
)
def fp64_operators(run: Run) -> list[Finding]:
    """`fp64-operators`: a device that computes in FP64."""
    if (saving := reported_saving(run, "fp64-operators", Saving)) is not None:
        return [saving_finding(run, saving, guides_remedy(saving))]
    rows = _rows(run)
    part = fp64_part(rows) if len(rows) else None
    return [cpu_finding(run, part)] if part is not None else []


@rule(
    Entry(
        code="idle-gpu",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=448,
        what="An imported trace names a GPU of the machine, and has nothing of it.",
        signal="The GPUs in the head of the trace, and its operators.",
        threshold="A GPU, and no work on it.",
        advice="The model and its inputs are on the CPU, or the GPU was not recorded. Move both to the GPU, and "
        "record its activity.",
        snippet='model = model.to("cuda")\nbatch = batch.to("cuda", non_blocking=True)',
        page="step-cost",
    )
)
def idle_gpu(run: Run) -> list[Finding]:
    """`idle-gpu`: a GPU of which the trace has nothing."""
    part = unused_gpu(run) if len(_rows(run)) else None
    if part is None:
        return []
    finding = cpu_finding(run, part)
    if not is_matrix(kernel_rows(run)).any():  # no model: what is computed on the CPU may only be inputs
        advice = "What the trace computes is on the CPU, or the GPU was not recorded. Create tensors on the GPU."
        made = set(kernel_rows(run, everything=True)["op"])
        call = next((call for call in _CREATES if f"aten::{call.partition('(')[0]}" in made), "")
        snippet = f'x = torch.{call}, device="cuda")' if call else 'x = x.to("cuda")'
        return [replace(finding, advice=advice, snippet=snippet)]
    if ON_CPUS_ALONE in part.what:
        return [replace(finding, advice=_OF_QUANTIZED)]
    if TOO_SMALL in part.what:
        return [replace(finding, advice=_IN_PARTS.advice, snippet=_IN_PARTS.snippet)]
    if NOT_USED in part.what:
        return [replace(finding, advice="The model and its inputs are on the CPU. Move both to the GPU.")]
    return [finding]


_OF_QUANTIZED = (
    "The quantized operators of this model are none of a GPU's. Move the model from before quantization to the GPU, in "
    "16 bits, or quantize it with a library that has kernels for GPUs, as torchao."
)
_IN_PARTS = Remedy(
    "The model and its inputs are on the CPU, and all at once do not fit into the GPU. Compute in parts on it.",
    'model = model.to("cuda")\n'
    'for part in batch.split(2**20):   # as many rows as fit\n    results.append(model(part.to("cuda")))',
)
_CREATES = (
    *("rand(shape", "randn(shape", "randint(high, shape", "normal(mean, std, shape", "zeros(shape", "ones(shape"),
    *("full(shape, value", "arange(end", "linspace(start, end, steps", "eye(n"),
)
"""Calls that create tensors, without what ends them."""
