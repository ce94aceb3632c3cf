"""The rule on the host of an imported trace, which launches too late: advice by what it does meanwhile."""

import re
from dataclasses import replace

import pandas as pd

from amp_core.analysis.performance.host_copies import MAX_TINY_BYTES, TO_HOST
from amp_core.analysis.performance.idle import longest_named
from amp_core.analysis.performance.kernels import kernel_rows, numbers_of_import, window_rows
from amp_core.analysis.performance.late_launches import (
    COPYING,
    MIN_OF_ONE_FRAC,
    unknown_host,
)
from amp_core.analysis.performance.saving import IdleSaving, Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.launch_remedies import FIRST_PASS, IN_PIECES
from amp_core.findings.longer_gaps import two_places
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, rule
from amp_core.findings.signals import facts
from amp_core.findings.snippets import PROFILE
from amp_core.findings.step_sentences import captured_anew, passes_sentence
from amp_core.findings.trace_findings import SAVING_THRESHOLD, guides_remedy, reported_saving, saving_finding
from amp_core.findings.trace_launches import is_in_pieces, launch_remedy, replays_one_graph, with_waits
from amp_core.store.run import Run
from amp_core.text.formatting import number
from amp_core.traces.host_functions import ASLEEP
from amp_core.traces.operators import is_compiled_code


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
        advice="Meanwhile the host does something else: preprocessing, logging, operators on the CPU, or setting up a "
        "library at its first call. Profile it with stacks after a warm-up, and move that work out of the loop.",
        snippet="with torch.profiler.profile(with_stack=True, record_shapes=True) as prof:\n    train_step(batch)\n"
        'print(prof.key_averages(group_by_stack_n=5).table(sort_by="self_cpu_time_total", row_limit=10))',
        page="step-cost",
    )
)
def host_bound(run: Run) -> list[Finding]:
    """`host-bound`: idle time of the GPU that the host causes."""
    saving = reported_saving(run, "host-bound", IdleSaving)
    return [] if saving is None else [saving_finding(run, saving, with_waits(run, _host_remedy(run, saving)))]


def _host_remedy(run: Run, saving: IdleSaving) -> Remedy:
    """What to advise for the host of a trace, by what it does while the device waits."""
    on_cuda = str(run.head.config.get("device")).startswith("cuda")
    if passes_sentence(run):
        return FIRST_PASS
    in_calls = saving.host.calls if saving.host.calls in _CALLS else None
    if in_calls == "graphs" and not any(run.head.config.get(name) for name in ("captures", "graph_builds")):
        launches = run.head.config.get("graph_launches")
        return _GRAPH_LAUNCHES if isinstance(launches, int) and launches < MIN_REPLAYS else _MANY_REPLAYS
    if in_calls in (None, "graphs") and captured_anew(run):
        return _CAPTURED_ANEW
    if in_calls == "graphs" and _BY_COMPILED_CODE in saving.where:
        return _CAPTURED_BY_COMPILED_CODE
    if in_calls == "allocation":
        return _allocation(run, on_cuda=on_cuda)
    if in_calls == "compiling" and _are_compiled_ahead(run):
        return _INTERNAL_FORMATS
    if in_calls == "torch.compile" and numbers_of_import(run, "compilations", "count") == [1]:
        return _COMPILED_ONCE
    if in_calls is not None:
        of_any_device = on_cuda or in_calls in ("compiling", "torch.compile")
        return _CALLS[in_calls] if of_any_device else replace(_CALLS[in_calls], snippet=_WARM_UP)
    if saving.host.is_in_first_call:
        return _FIRST_CALL_OF_PART if saving.is_of_part else _FIRST_CALL
    if saving.where in COPYING:
        return _CALLS["copies"] if _waits_for_pageable_copies(run) else _copies_again(run)
    if CREATES.fullmatch(saving.where):
        return replace(_ON_DEVICE, snippet=created_on_device(saving.where))
    if _BUILDS.search(saving.where):
        return _BUILT_ONCE
    if saving.where in set(window_rows(run)["host_function"]):
        if _OF_OUTPUT.search(saving.where.rpartition(": ")[2]):
            return _IN_OUTPUT
        if saving.where.endswith(ASLEEP):
            return _sleeps(run)
        if _OF_MODEL.search(saving.where):
            return _IN_FORWARD
        if not _launches_most(run, saving.where):
            return _in_python(run, saving)
        return _AROUND_GRAPH if on_cuda and replays_one_graph(run) else _IN_LOOP
    if is_compiled_code(saving.where):
        launches, calls = (run.head.config.get(name) for name in ("graph_launches", "compiled_calls"))
        if not isinstance(launches, int):
            return _BEFORE_KERNEL if _is_before_one_kernel(run) else _IN_COMPILED
        if is_in_pieces(run):
            return IN_PIECES
        return _BETWEEN_REPLAYS if isinstance(calls, int) and launches <= calls else _IN_GRAPHS
    if saving.host.builds_tensors:
        return _FROM_VALUES
    if run.head.config.get("thinned") is True:
        return _THINNED
    if _in_many_operators(run):
        return _many_operators(run)
    if facts(run.head.environment, "profiler").get("with_stack"):
        return _in_two_places(run) or _HAS_STACKS
    if pause_us := _pause_us(run):
        return Remedy(_PAUSES.format(us=number(pause_us / 1e3, "ms")), GUIDE["host-bound"].snippet)
    if run.head.config.get("without_operators") is True:
        return _WITHOUT_OPERATORS
    rows = kernel_rows(run)
    launches = rows["op"].eq(saving.where).any() and saving.where.startswith("aten::")
    return _IN_LAUNCHING if launches else guides_remedy(saving)


def _in_two_places(run: Run) -> Remedy | None:
    """What to advise where two places hold much of the longer gaps; None for others."""
    if not (places := two_places(run)):
        return None
    advice = f"{places} Call these less often, or beside the device's work. Recording stacks slows the host"
    return replace(_HAS_STACKS, advice=f"{advice}: time the steps without them first.")


def _allocation(run: Run, *, on_cuda: bool) -> Remedy:
    """Advice for calls that allocate or free memory, without what does not happen here: pinned memory by the names of
    the calls, `empty_cache` where all memory of the device is freed in operators, a warm-up where it is freed after
    steps in which it is not."""
    called = ", ".join(window_rows(run).query("host_call_kind == 'allocation'")["host_call"].dropna())
    remedy = _CALLS["allocation"]
    pinned = [_OF_PINNED.search(name) is not None for name in called.split(", ") if name]
    if all(pinned) and pinned:
        return _PINNED_ONCE
    frees = run.head.config.get("later_frees")
    if isinstance(frees, int) and frees >= MIN_LATER_FREES and not any(pinned):
        return _MEMORY_SHORT if on_cuda else replace(_MEMORY_SHORT, snippet="")
    left_out = [] if any(pinned) else [" allocate pinned buffers once,"]
    if not run.head.config.get("outer_frees") and not unknown_host(run):
        left_out += [" after empty_cache(),", " remove empty_cache(),"]
    advice = remedy.advice
    for part in left_out:
        advice = advice.replace(part, "")
    return replace(remedy, advice=advice, snippet=remedy.snippet if on_cuda else _WARM_UP)


MIN_LATER_FREES = 3
"""Calls that free memory after a step without any from which an allocator flushes its cache."""
_MEMORY_SHORT = Remedy(
    "Memory runs short here, after a step in which none was freed, so this is no warm-up: the caching allocator frees "
    "its cache and allocates again. Take fewer bytes, as by smaller batches or activation checkpointing, and let "
    "segments grow, which avoids fragmentation.",
    'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"   # before the first allocation',
)
_OF_PINNED = re.compile(r"Host(?:Alloc|Malloc|Free|Register|Unregister)|MallocHost|FreeHost")
"""In the names of calls that allocate or free pinned memory."""
_PINNED_ONCE = Remedy(
    "Between launches the program allocates or frees pinned memory, which takes long. Allocate pinned buffers once.",
    "host = torch.empty(shape, pin_memory=True)   # once, before the loop",
)


def _is_before_one_kernel(run: Run) -> bool:
    """Whether nearly all of what a device waits for late launches is before those of one kernel, which has several."""
    windows, savings = window_rows(run), possible_savings(run)
    kernel, us = longest_named(windows, "host_kernel")
    saving = savings.of("host-bound", IdleSaving) if savings is not None else None
    rows = kernel_rows(run, everything=True)
    launches = float(rows["count"][rows["name"] == kernel].sum())
    late_us = saving.saved_us * max(1.0, float(windows["steps"].fillna(0.0).sum())) if saving is not None else 0.0
    return launches >= MIN_LAUNCHES_OF_ONE and us >= MIN_OF_ONE_KERNEL_FRAC * late_us > 0


MIN_LAUNCHES_OF_ONE, MIN_OF_ONE_KERNEL_FRAC = 3, 0.8
"""Launches of that kernel, and share of the time before them, from which its launches are what takes long."""


def _sleeps(run: Run) -> Remedy:
    """Advice for a program that sleeps, and for launches that are slow one by one beside that."""
    windows = window_rows(run)
    idle_us, dispatch_us = (float(windows[name].fillna(0.0).sum()) for name in ("idle_us", "idle_dispatch_us"))
    if dispatch_us < MIN_DISPATCH_FRAC * idle_us:
        return _SLEEPS
    part = f"{number(dispatch_us / 1e3)} of the {number(idle_us / 1e3, 'ms')} that the device is idle"
    small = f"For {part}, launches are slow one by one: batch or compile small operators."
    return replace(_SLEEPS, advice=f"{_SLEEPS.advice} {small}")


MIN_DISPATCH_FRAC = 0.25
"""Share of gaps between launches in the idle time from which they are told beside a pause."""


def _launches_most(run: Run, function: str) -> bool:
    """Whether most of what a device does is launched in a function: then it is the loop, or a part of it."""
    windows = window_rows(run)
    windows = windows[windows["host_function"] == function]
    launches = float(windows["host_function_launches"].fillna(0.0).sum())
    return launches >= max(MIN_LAUNCHES, MIN_OF_LAUNCHES_FRAC * float(windows["launches"].sum()))


MIN_LAUNCHES, MIN_OF_LAUNCHES_FRAC = 10, 0.5
"""Launches in a function, and their share of all, from which it is no preparation that could be made once."""
MIN_COMPILED_AHEAD_FRAC, MIN_COMPILED_AHEAD = 0.5, 10
"""Share and number of kernels with a name of `aclnn` from which torch_npu takes compiled operators where it has
them."""


def _are_compiled_ahead(run: Run) -> bool:
    """Whether most kernels of an NPU are of operators that are compiled already."""
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["category"] != "communication"]
    ahead = float(rows["count"][rows["name"].str.startswith("aclnn")].sum())
    return ahead >= max(MIN_COMPILED_AHEAD, MIN_COMPILED_AHEAD_FRAC * float(rows["count"].sum()))


def _in_many_operators(run: Run) -> bool:
    """Whether the host is in operators while the device waits, in each step or a later one than the first, and in none
    of them for long that launches nothing."""
    saving, windows = _of_host(run)
    steps = float(windows["steps"].sum())
    is_later = windows["step"].min() > 0  # for which the program has warmed up
    if saving is None or saving.saved_us <= 0 or (steps < MIN_STEPS and not (steps and is_later)):
        return False
    us = saving.saved_us * steps
    outside_us = float(windows["host_outside_us"].fillna(0.0).sum())
    (op, op_us), (_, function_us) = (longest_named(windows, column) for column in ("host_op", "host_function"))
    if kernel_rows(run)[["op", "top_op"]].isin([op]).any(axis=None):  # its calls launch
        op_us = 0.0
    return max(op_us, function_us) < MIN_OF_ONE_FRAC * us and outside_us < MAX_OUTSIDE_FRAC * us


def _of_host(run: Run) -> tuple[Saving | None, pd.DataFrame]:
    """The saving of this rule, and the rows of `window_rows` of the hosts that it is of: a late rank's alone."""
    savings, windows = possible_savings(run), window_rows(run)
    late = savings.of_late_ranks if savings is not None else None
    if late is not None and len(late.late_ranks) == 1:
        windows = windows[windows["rank"] == late.late_ranks[0]]
    return reported_saving(run, "host-bound", IdleSaving), windows


def _pause_us(run: Run) -> float:
    """How long the host does nothing that was recorded, equally long in each step, where that is most of the saving; 0
    for others."""
    saving, windows = _of_host(run)
    us = float(windows["pause_us"].fillna(0.0).mean())
    return us if saving is not None and us >= MIN_PAUSE_FRAC * saving.saved_us else 0.0


MIN_PAUSE_FRAC = 0.5
"""Share of the time in which the host should launch that is in one equally long pause per step from which that is what
to look for."""
_PAUSES = (
    "In each step the host does nothing for the same {us}, in no operator and no call, as a sleep or a timeout would "
    "be. Profile it with stacks, and leave the pause out, or wait for what it waits for."
)
MIN_STEPS = 2
MAX_OUTSIDE_FRAC = 1 / 3
"""Share of the time in which the host should launch that may be in no operator where it is in many."""


def _many_operators(run: Run) -> Remedy:
    longest, _ = longest_named(window_rows(run), "host_op")
    launches, rows = launch_remedy(run) or GUIDE["launch-bound"], kernel_rows(run)
    in_forward = rows["top_op"][rows["phase"] == "forward"]
    broadcasts = in_forward.isin(_FLATTENING).any() and in_forward.str.contains("broadcast", regex=False).any()
    broadcasts |= longest in _FLATTENING and rows["category"].eq("communication").any()
    buffers = f" {_BUFFERS}" if broadcasts else ""
    return Remedy(f"{_MANY_OPERATORS}{buffers} {launches.advice}", launches.snippet)


_MANY_OPERATORS = (
    "The host is in many operators meanwhile: a processor that is slow, shared or slowed by the profiler takes so "
    "long, for each of them or now and then. Time the steps without the profiler."
)
_FLATTENING = ("aten::unflatten_dense_tensors", "aten::flatten_dense_tensors")
_BUFFERS = (
    "DistributedDataParallel flattens and unflattens the model's buffers, as those of batch norm, to broadcast them "
    "before each forward: broadcast_buffers=False leaves that out."
)


def _waits_for_pageable_copies(run: Run) -> bool:
    """Whether the host's longest calls while the device is idle copy, and from memory that is not pinned."""
    pageable = kernel_rows(run, everything=True)["name"].str.contains("Pageable -> Device", regex=False).any()
    return bool(pageable and (window_rows(run)["host_call_kind"] == "copies").any())


_WITHOUT_OPERATORS = Remedy(
    "The trace does not show what the host does between launches, for no operator was recorded. Record "
    "ProfilerActivity.CPU too.",
    PROFILE.format(activity="CUDA"),
)
_IN_LAUNCHING = Remedy(
    "The host is that long in operators that launch work themselves, before their launch or after it: a first call "
    "sets up its library, others allocate memory or wait for the device, as where launches are made to block. Profile "
    "with stacks and memory after a warm-up.",
    "with torch.profiler.profile(with_stack=True, profile_memory=True) as prof:\n    train_step(batch)",
)
_THINNED = Remedy(
    "The trace does not show what the host does between launches, for most operators are missing in the file. Record "
    "again, or look at the file from which they were removed: compressed, it takes a tenth of its size.",
    'prof.export_chrome_trace("trace.json.gz")   # compressed, with all events',
)
CREATES = re.compile(
    r"(?:aten::|<built-in method )(rand|randn|randint|randperm|normal|uniform|zeros|ones|full|arange|eye)_?"
    r"(?: of type object.*>)?"
)
"""Operators that create a tensor, and so can do it on the device, and torch's functions of that name in stacks."""
_ON_DEVICE = Remedy("The host creates tensors in this operator while the GPU waits. Create them on the device.")
_FROM_VALUES = Remedy(
    "The host builds tensors from Python's values while the device waits, one value after the other. Build what stays "
    "the same once, before the loop, and keep it on the device; give what changes as NumPy arrays.",
    "table = torch.tensor(values, device=device)   # once, before the loop\nx = torch.from_numpy(array)",
)
_FUNCTIONS = {"normal": "randn", "uniform": "rand"}
"""Functions of torch that call an operator of another name."""
_OF_SHAPE = ("rand", "randn", "zeros", "ones")


def created_on_device(op: str) -> str:
    """Code that creates a tensor on the device, for an operator that `CREATES` one."""
    match = CREATES.fullmatch(op)
    name = _FUNCTIONS.get(match[1], match[1]) if match else "randn"
    given = "shape" if name in _OF_SHAPE else "..."
    return f"x = torch.{name}({given}, device=device)   # instead of torch.{name}({given}).to(device)"


_BUILDS = re.compile(r"cpp_extension|ninja|(?i:jit)|triton/(?:compiler|runtime)|_inductor|_dynamo|nvcc|nvrtc")
"""Files and functions that build or compile code."""
_BUILT_ONCE = Remedy(
    "Code is built or loaded here, at its first use. Build it before the loop, and profile after a warm-up.",
    "for _ in range(5):\n    train_step(batch)   # before the profiler starts",
)
_IN_PYTHON = Remedy(
    "Between launches the host runs this function and what it calls; a timeline shows who calls it. If its result "
    "stays the same, call it once, before the loop; if it prepares batches, run it in the loader's workers; else do "
    "the same on the device.",
    "prepared = prepare(inputs)   # once, before the loop",
)
_ON_RESULTS = Remedy(
    "Between launches the host runs this function and what it calls; a timeline shows who calls it. The trace has "
    "copies of tensors to the host too: if this function works on those, do that on the device, and copy what is read "
    "alone; else call it once, before the loop, where its result stays the same.",
    "y = postprocess(x)   # on the device, where x is, instead of on x.cpu()",
)


def _in_python(run: Run, saving: IdleSaving) -> Remedy:
    """What to advise for a Python function between launches, by whether the host may work on results in it."""
    rows = kernel_rows(run, everything=True)
    rows = rows[(rows["category"] == "memcpy") & rows["name"].str.contains(TO_HOST)]
    copies = (rows["moved_bytes"] > MAX_TINY_BYTES * rows["count"]).any()
    return _ON_RESULTS if copies and saving.lead_us < saving.saved_us / 2 else _IN_PYTHON


_IN_LOOP = Remedy(
    "This function launches most of what the GPU does, and runs Python in between; a timeline shows which. Move out of "
    "it what each pass repeats, and launch more work at once.",
    "step = torch.compile(step)   # or one batched call, as torch.bmm, for many small ones",
)
_AROUND_GRAPH = Remedy(
    "Most passes replay one graph here, and the GPU waits for the Python around it, as for inputs and their small "
    "copies. Prepare the next pass while this one runs, as the asynchronous scheduling of serving engines "
    "does, and launch it before results are read.",
    "graph.replay()\nbatch = prepare(requests)   # while the graph runs; vLLM: --async-scheduling",
)
_SLEEPS = Remedy(
    "The program sleeps there while the device has nothing to do. Leave the pause out, or wait for what it waits for.",
    "torch.accelerator.synchronize()   # instead of time.sleep, to wait for the device",
)
_OF_OUTPUT = re.compile(r"(?i)log|dump|write|save|print|report|checkpoint|export|json|pickle|serialize|emit|flush")
"""In the names of functions that write something."""
_IN_OUTPUT = Remedy(
    "Between launches the host runs this function, which writes something; a timeline shows who calls it. Call it less "
    "often, give it less to write, or have a thread or another process write while the next step runs.",
    "if step % 100 == 0:\n    pool.submit(write, metrics)   # pool = ThreadPoolExecutor(1)",
)
_OF_MODEL = re.compile(r"(?:^nn\.Module: |: (?:forward|__call__|_call_impl|_wrapped_call_impl|call_size)$)")
"""Python functions of a model or a layer, which launch the device's work."""
_IN_FORWARD = Remedy(
    "The host is in this function of the model before it launches: checks, hooks, guards of compiled code, or the "
    "profiler, which records each call with its stack. Time the same steps without stacks. If the time remains, look "
    "for what this function does then, and whether something stops the process.",
    "with torch.profiler.profile(with_stack=False) as prof:\n    train_step(batch)",
)
_COPIES_AGAIN = Remedy(
    "The host copies tensors in this operator while the device waits. Copy what is reused, as weights, to the device "
    "once, before the loop.",
    "model = model.to(device)   # once\nx = x.to(device, non_blocking=True)",
)
_COPIES_AGAIN_OR_BATCHES = Remedy(
    f"{_COPIES_AGAIN.advice.removesuffix('.')}, and each batch from pinned memory.",
    f"{_COPIES_AGAIN.snippet}   # of a DataLoader with pin_memory=True",
)
"""Of a training, where the names of copies do not tell from which memory they are, as on NPUs."""
_CONVERTS = Remedy(
    "The host converts or copies tensors in this operator while the device waits. Copy what is reused, as weights, to "
    "the device once, before the loop, and convert on the device.",
    "model = model.to(device, torch.{dtype})   # once\nx = x.to(device, non_blocking=True).to(torch.{dtype})",
)


def _copies_again(run: Run) -> Remedy:
    """Advice for tensors that are copied, and where recorded types tell so converted, again and again."""
    converting = run.ops[run.ops["cast_bytes"] > 0].sort_values("cast_bytes")
    dtype = str(converting["in_dtypes"].iloc[-1]).partition(",")[0] if len(converting) else ""  # of the target
    if dtype:
        return replace(_CONVERTS, snippet=_CONVERTS.snippet.format(dtype=dtype))
    rows = kernel_rows(run, everything=True)
    told = rows["name"][rows["category"] == "memcpy"].str.contains("Pinned|Pageable").any()
    savings = possible_savings(run)
    return _COPIES_AGAIN if told or savings is None or not savings.trains else _COPIES_AGAIN_OR_BATCHES


_IN_COMPILED = Remedy(
    "The host is in compiled code: Python that the compiler wrote checks guards and launches one kernel after the "
    "other. Let it capture CUDA graphs, which launch all of them at once.",
    'model = torch.compile(model, mode="reduce-overhead")',
)
_BEFORE_KERNEL = Remedy(
    "Nearly all of that is before one kernel: the host is long in what comes before each of its launches, as building "
    "descriptors, choosing a variant or a hook, or the profiler records its arguments. Time the step without the "
    "profiler, and then that part.",
    "with torch.profiler.profile(record_shapes=False, with_stack=False) as prof:\n    train_step(batch)",
)
_IN_GRAPHS = Remedy(
    "The host is in compiled code, of which a part is replayed as graphs: look for what is compiled or captured again, "
    "and for what breaks the graph.",
    "TORCH_LOGS=recompiles,graph_breaks python main.py",
)
_BETWEEN_REPLAYS = Remedy(
    "Each call of compiled code replays one graph, so nothing breaks it: what remains is the Python around the replay, "
    "such as guards, copies of inputs and autograd. Call it without autograd for inference, and with larger batches.",
    "with torch.inference_mode():   # for inference: no autograd around the replay\n    y = model(x)",
)
_HAS_STACKS = Remedy(
    "Between launches the host does something else, in many short functions. The trace has Python's stacks: a timeline "
    "shows them in the gaps of the device. Recording them slows the host: time the steps without stacks first.",
    "with torch.profiler.profile(with_stack=False) as prof:\n    train_step(batch)",
)
_WARM_UP = "for _ in range(5):\n    train_step(batch)   # before the profiler starts"
_BY_COMPILED_CODE = "CUDAGraphNode"
"""In the names of ranges in which compiled code captures its graphs (`torch._inductor.cudagraph_trees`)."""
_CAPTURED_BY_COMPILED_CODE = Remedy(
    "Compiled code captures its graphs in its first calls, and again for other sizes. Profile after a warm-up in which "
    "every size has occurred; what is still captured then is captured anew.",
    _WARM_UP,
)
_FIRST_CALL = Remedy(
    "The first call of an operator sets up its library, loads its kernels or compiles them. All of this happens once: "
    "profile after a warm-up.",
    _WARM_UP,
)
_FIRST_CALL_OF_PART = Remedy(
    "The first call of an operator sets up its library, loads its kernels or compiles them. That part happens once: "
    "profile after a warm-up, and see what the GPU still waits for.",
    _WARM_UP,
)
"""Where the device also waits for other things that the host does."""
_CALLS = {
    "allocation": Remedy(
        "Between launches the program asks the driver for memory. The caching allocator does so until it is warm, "
        "after empty_cache(), and when memory runs short: then it frees its cache and allocates again. Profile after a "
        "warm-up, remove empty_cache(), allocate pinned buffers once, and avoid fragmentation or use smaller batches.",
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"   # before the first allocation',
    ),
    "uncached": Remedy(
        # Told is the time in which the device is idle: what a free waits for the device before that is not in it.
        "Memory is freed between most launches, tensor by tensor, and the calls themselves take long, also once the "
        "device has ended its work: the caching allocator is switched off. Switch it on again; it is meant to be off "
        "for debugging only.",
        'os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)   # before the first allocation; and the one with HIP',
    ),
    "compiling": Remedy(
        "These calls take the path that compiles operators for the sizes of their inputs, and cost much also where "
        "nothing is compiled. Let torch_npu take its compiled operators.",
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
        "The first calls of a process make the device's context, load libraries and kernels, and create streams. All "
        "of this happens once: profile after a warm-up. If it happens again and again, create streams, events and "
        "communicators before the loop.",
        _WARM_UP,
    ),
}
"""Advice by the kind of runtime calls in which the host stays."""
_COMPILED_ONCE = Remedy(
    "torch.compile compiles at the first call of its code, and nothing is compiled again here: profile after a warm-up "
    "in which every size has occurred.",
    _WARM_UP,
)
_INTERNAL_FORMATS = Remedy(
    "These calls take the path that compiles operators for the sizes of their inputs, and cost much also where nothing "
    "is compiled. Most operators take compiled ones already: forbid internal formats, so that convolutions can too.",
    "torch_npu.npu.config.allow_internal_format = False   # before the first operator",
)
"""Advice for these calls where most operators of an NPU are compiled ahead."""
_CAPTURED_ANEW = Remedy(
    "The compiler captures its graphs anew in several calls. It does so for inputs of other sizes or addresses, and "
    "where it does not know that outputs of an earlier call are no longer used: mark the begin of each step.",
    "torch.compiler.cudagraph_mark_step_begin()   # TORCH_LOGS=cudagraphs names what is captured, and why",
)
MIN_REPLAYS = 5
"""Launches of graphs from which the upload of the first is a small part of all."""
_MANY_REPLAYS = Remedy(
    "No graph is captured or built here: the host stays in their launches, which take the longer the more nodes a "
    "graph has. Capture fewer: small copies and kernels fused, not one by one; and launch each before the one before "
    "it ends.",
    "graph.replay()   # without reading results of the one before",
)
_GRAPH_LAUNCHES = Remedy(
    "No graph is captured or built here: the host stays in the launch of a large one, and the first launch uploads it. "
    "Upload it once before the loop, and capture fewer nodes: small copies and kernels fused, not one by one.",
    "graph.replay()   # once, before the loop; in C++: cudaGraphUpload(graph, stream)",
)
