"""Rules on other kernels of imported traces: that memory bounds, of the optimizer, of batch norm, of unknown type."""

from dataclasses import replace

import pandas as pd

from amp_core.analysis.performance.attention import SOFTMAX, has_attention_in_steps
from amp_core.analysis.performance.compiled import (
    is_compiled_in_part,
    is_compiled_without_fusion,
    is_one_graph,
    replays_unfused_graphs,
)
from amp_core.analysis.performance.fp64_savings import fp64_rows
from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.gpus import is_before_triton
from amp_core.analysis.performance.growing_joins import MIN_GROWING_FRAC, growing_joins
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, on_cpu, window_rows, without_ranges
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.memory_savings import is_accumulating
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, MemorySaving, Saving, longest_name
from amp_core.analysis.performance.savings import possible_savings
from amp_core.analysis.performance.training_part import takes_fused
from amp_core.findings.few_blocks import few_blocks_sentence
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.no_saving_sentences import own_profiler
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.trace_cpu import cpu_optimizer
from amp_core.findings.rules.trace_products import attention_in_steps
from amp_core.findings.signals import facts
from amp_core.findings.trace_findings import SAVING_THRESHOLD, guides_remedy, reported_saving, saving_finding, trains
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, percent


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
        threshold=(
            f"{SAVING_THRESHOLD} Fusing them is assumed to halve their time, and to make a long chain of them as long "
            "as its longest kernel."
        ),
        advice=(
            "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. Compile the model."
        ),
        snippet="model = torch.compile(model)",
        page="step-cost",
    )
)
def memory_bound_kernels(run: Run) -> list[Finding]:
    """`memory-bound-kernels`: kernels that fusing would speed up."""
    saving = reported_saving(run, "memory-bound-kernels", MemorySaving)
    if saving is None:
        return []
    if saving.lone_us and saving.fused_us < MIN_SAVED_FRAC * saving.step_us:
        return [saving_finding(run, saving, Remedy(f"{_WIDER} {_LONE_CASTS}", _OF_ITS_TYPE))]
    remedy = _of_fewer_passes(run, saving)
    lone = _LONE_CASTS if saving.lone_us else ""
    attention = attention_in_steps(run).advice if _has_smaller_attention(saving) else ""
    parts = (remedy.advice, attention, _fp64(run), _added_gradients(run), _growing(run), _unvectorized(run), lone)
    return [saving_finding(run, saving, replace(remedy, advice=" ".join(filter(None, parts))))]


def _has_smaller_attention(saving: MemorySaving) -> bool:
    """Whether attention in steps would be reported by itself, and other kernels save more."""
    return saving.where != SOFTMAX and saving.attention_us >= MIN_SAVED_FRAC * saving.step_us


def _added_gradients(run: Run) -> str:
    """That gradients are added to ones that exist already, as a sentence, if that is much of the step; else empty."""
    savings, rows = possible_savings(run), kernel_rows(run)
    us = float(rows["total_us"][is_accumulating(rows) & rows["op"].isin(_ADDS)].sum())
    whole_us = float(window_rows(run)["wall_us"].sum())
    if savings is None or us < MIN_ADDED_FRAC * whole_us:
        return ""
    return (
        f"Adding gradients to ones that exist already takes another {100 * us / whole_us:.0f} % of the {savings.unit}: "
        "with one backward per step, optimizer.zero_grad(set_to_none=True) leaves it out."
    )


def _growing(run: Run) -> str:
    """That concatenations copy all of the one before, as a sentence, if that is much of the step; else empty."""
    savings, rows = possible_savings(run), kernel_rows(run)
    us, whole_us = float(rows["total_us"][growing_joins(rows)].sum()), float(window_rows(run)["wall_us"].sum())
    if savings is None or us <= MIN_GROWING_FRAC * whole_us:
        return ""
    return (
        f"Another {100 * us / whole_us:.0f} % of the {savings.unit} is in concatenations that each copy the result of "
        "the one before: collect the parts in a list and concatenate once, or write them into a tensor allocated "
        "beforehand."
    )


def _unvectorized(run: Run) -> str:
    """That layer norms run in two kernels since their rows bar the vectorized one, as a sentence, if the first of them,
    which sums each row, takes much of the step and no size tells otherwise; else empty."""
    savings, rows = possible_savings(run), kernel_rows(run)
    norms = rows[rows["name"].str.contains(_OF_LAYER_NORM)]
    moments = norms[norms["name"].str.contains(_MOMENTS, regex=False)]
    us, whole_us = float(moments["total_us"].sum()), float(window_rows(run)["wall_us"].sum())
    lengths = [shapes[0][-1] for text in moments["in_shapes"].unique() if (shapes := tensor_shapes(text)) and shapes[0]]
    is_even = bool(lengths) and all(length % VECTOR_ELEMENTS == 0 for length in lengths)
    if savings is None or us < MIN_ADDED_FRAC * whole_us or len(norms) == len(moments) or is_even:
        return ""
    return (
        f"{100 * us / whole_us:.0f} % of the {savings.unit} is in the first of two kernels of each layer norm: from "
        f"PyTorch 1.11 on one vectorized kernel does both where the last dimension is a multiple of {VECTOR_ELEMENTS}."
    )


_MOMENTS, _OF_LAYER_NORM = "RowwiseMomentsCUDAKernel", "RowwiseMomentsCUDAKernel|LayerNormForwardCUDAKernel"
"""torch's kernels for layer norm where it is not vectorized; group norm has the first of them, too."""
VECTOR_ELEMENTS = 4
"""Elements of a row that torch's vectorized layer norm loads at a time (`layer_norm_kernel.cu`)."""
_ADDS, MIN_ADDED_FRAC = ("aten::add_", "aten::add"), 0.02
"""Operators by which a gradient is added to one that exists, and share of the step from which that is told."""


_LONE_CASTS = (
    "Nothing is fused with casts between products: keep weights, and what comes before the product, in its type."
)
_WIDER = "Nearly all of this is casts, which a compiler leaves between products."
_OF_ITS_TYPE = "model = model.to(x.dtype)   # of a quantized layer: the dtype that it unpacks its weights to"


_BEFORE_TRITON = Remedy(
    "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. This GPU is too old for "
    "the compiler's Triton (compute capability 7.0): script these operators, or write a kernel for them.",
    "f = torch.jit.script(f)   # fuses elementwise operators",
)


def _fp64(run: Run) -> str:
    """How much of the step computes in FP64 beside products, as a sentence, if it is much and no finding of its own;
    else empty."""
    savings, rows = possible_savings(run), fp64_rows(kernel_rows(run, everything=True))
    us = float(rows["total_us"][~is_matrix(rows)].sum())
    whole_us = float(window_rows(run)["wall_us"].sum())
    if savings is None or us < MIN_SAVED_FRAC * whole_us or savings.reported("fp64-operators", Saving) is not None:
        return ""
    named = longest_name(rows[rows["op"] != ""], "op") or kernel_in_words(longest_name(rows, "name"))
    share = f"{100 * us / whole_us:.0f} %"
    return (
        f"Here: FP64 takes {share} of the {savings.unit}, most in {named}, and FP32 would halve the bytes of these "
        "kernels."
    )


def _of_fewer_passes(run: Run, saving: MemorySaving) -> Remedy:
    """Advice by what is compiled already, and without smaller dtypes where these are in use."""
    remedy = _by_compiling(run, saving)
    if saving.are_shortest or saving.are_small or _is_in_16_bits(run):
        remedy = replace(remedy, advice=remedy.advice.replace(_SMALLER, ""))
    if saving.are_shortest or saving.are_small:
        fewer = _FEWER_KERNELS if saving.are_shortest else _FEWER_SMALL
        return replace(remedy, advice=remedy.advice.replace(_FEWER_PASSES, fewer))
    if few := few_blocks_sentence(run, saving):
        return replace(remedy, advice=f"{few} {remedy.advice.replace('These kernels', 'The others', 1)}")
    return remedy


def _is_in_16_bits(run: Run) -> bool:
    """Whether nearly all kernels that memory bounds are of types of 16 bits, as their names or inputs tell."""
    rows = kernel_rows(run)
    rows = rows[rows["category"].isin(["norm", "elementwise", "reduction"])]
    half = rows["name"].str.contains(_HALF) | rows["in_dtypes"].str.contains(_HALF)
    return float(rows["total_us"][half].sum()) >= MIN_HALF_FRAC * float(rows["total_us"].sum()) > 0


_FEWER_PASSES = "memory-bound, so fewer passes over memory help"
_FEWER_KERNELS = "mostly so short that starting them takes their time, so fewer ones help"
_FEWER_SMALL = (
    "mostly small: they move so little for their time that starting them, or their few blocks, takes it, so fewer ones "
    "help"
)
_SMALLER, MIN_HALF_FRAC = ", as do smaller dtypes", 0.9
_HALF = r"(?i)bfloat16|c10::Half|__half"
"""In the names of types of 16 bits."""


def _within_operator(run: Run) -> str:
    """The operator that no part of torch registers and within which most of these kernels are launched, as
    `gsplat::rasterization_3dgs`; empty where none is."""
    rows = kernel_rows(run)
    rows = rows[rows["category"].isin(["norm", "elementwise", "reduction", "cast", "layout"])]
    rows = rows[rows["op"].str.startswith("aten::")]
    us = rows["total_us"][rows["top_op"].str.match(_REGISTERED)].groupby(rows["top_op"]).sum()
    return str(us.idxmax()) if 2 * float(us.max() if len(us) else 0.0) > float(rows["total_us"].sum()) else ""


_REGISTERED = r"(?!aten::|prims?::|c10d|autograd::|torch|inductor::|profiler::)[a-z]\w*::\w+$"
"""Operators of other libraries, which torch.compile takes as they are; what torch itself registers is none."""


def _by_compiling(run: Run, saving: MemorySaving) -> Remedy:
    """Advice on what to compile, by what is compiled already."""
    if operator := _within_operator(run):
        return Remedy(
            f"These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. {operator} "
            "launches them, an operator of its own into which torch.compile does not look: fuse them in its code.",
            f"torch.ops.{operator.replace('::', '.')}   # or its parts in Python, if there are any, compiled",
        )
    if saving.where == SOFTMAX and has_attention_in_steps(kernel_rows(run)):
        in_steps = attention_in_steps(run)
        return replace(in_steps, advice=f"{in_steps.advice} For the rest, compile the model.")
    if "Compiled" in saving.where or is_compiled_without_fusion(run):
        return _UNFUSED_GRAPHS if replays_unfused_graphs(run) else _UNFUSED
    if is_before_triton(run):
        return _BEFORE_TRITON
    if not is_compiled_in_part(run):
        return _SCRIPTED if run.head.config.get("scripted") is True else guides_remedy(saving)
    return Remedy(_COMPILED_ONCE, guides_remedy(saving).snippet) if is_one_graph(run) else _NOT_COMPILED


_SCRIPTED = Remedy(
    "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. The model is scripted by "
    "torch.jit, which torch.compile does not take: compile the module that was scripted instead.",
    "model = torch.compile(module)   # the module itself, without torch.jit.script",
)
_COMPILED_ONCE = (
    "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. One compiled graph is "
    "part of the trace already: compile what is launched beside it too."
)
_NOT_COMPILED = Remedy(
    "These kernels are memory-bound, so fewer passes over memory help, as do smaller dtypes. Part of the model is "
    "compiled already: find what breaks its graph, and compile the rest.",
    'TORCH_LOGS="graph_breaks" python main.py   # names each break, and why',
)
_UNFUSED = Remedy(
    "These kernels are memory-bound, and run in compiled code that still launches one kernel per operator: its backend "
    "does not fuse. Take one that does, as inductor.",
    'model = torch.compile(model, backend="inductor")   # not eager, aot_eager or ts',
)
_UNFUSED_GRAPHS = Remedy(
    "These kernels are memory-bound, and run in graphs of compiled code that hold one kernel per operator: its backend "
    "does not fuse. Take inductor, which fuses and captures graphs too.",
    'model = torch.compile(model, mode="reduce-overhead")   # of inductor, instead of backend="cudagraphs"',
)


@rule(
    Entry(
        code="unfused-optimizer",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=439,
        what="The optimizer of an imported trace takes a large share, in kernels or operators that are not fused.",
        signal="Time and number of kernels, or of a CPU's operators, in the optimizer phase, without `_fused_` ones.",
        threshold=f"{SAVING_THRESHOLD} Fusing is assumed to halve the time.",
        advice="Each of its operations reads and writes all parameters. The fused implementation reads them once.",
        snippet="optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
        page="step-cost",
    )
)
def unfused_optimizer(run: Run) -> list[Finding]:
    """`unfused-optimizer`: an optimizer in many kernels."""
    saving = reported_saving(run, "unfused-optimizer", Saving)
    if saving is None:
        return cpu_optimizer(run) if takes_fused(run) else []
    return [saving_finding(run, saving, guides_remedy(saving) if takes_fused(run) else _COMPILED_STEP)]


_COMPILED_STEP = Remedy(
    "Each operation reads and writes all parameters, and this optimizer takes no fused=True. A compiler fuses its "
    "step; so does one of torch.optim with fused=True, where it does the same.",
    "compiled_step = torch.compile(optimizer.step)",
)


_OF_THE_BATCH = r"bn_fw_tr|batchnorm_fwtr|batch_norm_collect_statistics|BatchNormFwdTrain"
"""Kernels of cuDNN, torch and MIOpen that compute the statistics of a batch for batch norm."""


def _counts_batches(rows: pd.DataFrame) -> bool:
    """Whether the program counts its batches, `num_batches_tracked`, as often as it calls batch norm, among operators
    of a CPU with their shapes; or whether batch norm computes the statistics of a batch by operators of its own."""
    inside = rows[(rows["top_op"] == "aten::batch_norm") & rows["name"].isin(_STATISTICS)]
    if int(inside["count"].sum()):
        return True
    outermost = rows[rows["top_op"] == rows["name"]]
    counts = outermost[outermost["name"].isin(_COUNTS) & outermost["in_shapes"].str.startswith("[[], []")]
    counts = counts[counts["in_dtypes"].str.contains(_INTEGER)]
    norms = rows[rows["name"] == "aten::batch_norm"]
    return bool(counts["count"].sum() >= norms["count"].sum() > 0)


_STATISTICS = ("aten::mean", "aten::sum", "aten::var", "aten::var_mean", "aten::batch_norm_update_stats")
"""Operators that batch norm calls in training alone."""
_COUNTS = ("aten::add_", "aten::add")
"""Operators by which torch.nn counts batches, up to PyTorch 1.12 by the second."""
_INTEGER = r'^\["(?:long|(?:__)?int64)'
"""At the begin of the input types of an operator on a tensor of 64-bit integers."""


@rule(
    Entry(
        code="batchnorm-in-training-mode",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=429,
        what="Batch norm runs in training mode in an imported trace of inference.",
        signal="Kernels of aten::batch_norm that compute the statistics of the batch; on a CPU, batches counted beside "
        "it (num_batches_tracked), where shapes are recorded; its argument, where a device was not recorded. No "
        "backward and no optimizer.",
        threshold="One such kernel, or as many counts as calls. A profile of the forward pass of a training, and batch "
        "norm without running statistics (track_running_stats=False), look the same.",
        advice="In training mode an output depends on the rest of its batch, the running statistics change, and the "
        "kernels take longer. Call model.eval() before inference.",
        snippet="model.eval()\nwith torch.inference_mode():\n    y = model(x)",
        page="step-cost",
    )
)
def batchnorm_in_training_mode(run: Run) -> list[Finding]:
    """`batchnorm-in-training-mode`: a trace that trains nothing, with batch norm that does."""
    rows = kernel_rows(run)
    if on_cpu(rows):  # with all that an operator calls
        rows = without_ranges(kernel_rows(run, everything=True))
    if not is_trace(run) or run.kernels["phase"].isin(["backward", "optimizer"]).any():  # outside of the steps too
        return []
    calls = run.head.config.get("norms_in_training")  # of a device that was not recorded
    if isinstance(calls, int) and calls > 0 and not trains(run):
        title = "Batch norm runs in training mode, but the trace contains no training"
        return [make_finding("batchnorm-in-training-mode", title, "aten::batch_norm", value=calls, unit="calls")]
    # Instance norm calls the same kernels, but from an operator of its own.
    norms = rows[rows["top_op"] == "aten::batch_norm"]
    if on_cpu(rows):
        norms = norms if _counts_batches(rows) else norms[:0]
    else:
        norms = norms[norms["name"].str.contains(_OF_THE_BATCH)]
    if norms.empty:
        return []
    share = float(norms["total_us"].sum() / rows["total_us"].sum())
    whole = "operators' time" if on_cpu(rows) else "kernel time"
    longest = norms.iloc[int(norms["total_us"].to_numpy().argmax())]
    title = f"Batch norm runs in training mode, {percent(share)} of the {whole}, but the trace contains no training"
    where, unit = str(longest["module"]) or str(longest["top_op"]), f"share of {whole}"
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
    saving = reported_saving(run, "unknown-kernels", Saving)
    if saving is None:
        return []
    rows = kernel_rows(run)
    unknown = rows[rows["tensor_core"] == "unknown"]
    in_operators = unknown[unknown["op"] != ""]["total_us"].sum() >= 0.5 * unknown["total_us"].sum()
    shapes = facts(run.head.environment, "profiler").get("record_shapes") or rows["in_shapes"].ne("").any()
    # Shapes and dtypes are an operator's: they tell nothing of kernels that none launched, unless none was recorded.
    are_own = shapes or not (in_operators or rows["op"].eq("").all())
    return [saving_finding(run, saving, _own_kernels(run) if are_own else guides_remedy(saving))]


def _own_kernels(run: Run) -> Remedy:
    """What to advise for kernels that no rule and no operator tells, with a profiler of the device's vendor."""
    profiler = own_profiler(run)
    on_nvidia, on_amd = "Nsight" in profiler, "rocprof" in profiler
    snippet = _NSIGHT if on_nvidia else _ROCPROF if on_amd else _OTHER_PROFILER
    other = "" if on_nvidia or on_amd else " in a profiler of the device's vendor"
    return Remedy(
        "The tensor-core share is uncertain by that much. These kernels are the program's own or a library's, or run "
        f"in a captured graph: profile them alone{profiler or other}, which shows what units they use.",
        f"{snippet}   # on AMD: {_ROCPROF}" if on_nvidia and on_amd else snippet,
    )


_NSIGHT = "ncu --section ComputeWorkloadAnalysis python main.py"
_ROCPROF = "rocprofv3 --pmc SQ_INSTS_MFMA -- python main.py"
"""Counts the matrix instructions of each kernel (AMD, MI200 and MI300 series performance counters)."""
_OTHER_PROFILER = 'with torch.profiler.record_function("alone"):\n    call_kernel()   # in the vendor\'s profiler'
