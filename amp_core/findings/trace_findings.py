"""Findings on imported traces from possible savings, and the sentence that comes first.

first_sentence(run)      # 'Largest possible saving: the GPU waits for data 51 % of the step (up to 619 of 1,211 ms).'
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle_savings import VALUES_COPIED, longest_named
from amp_core.analysis.performance.kernels import (
    is_matrix,
    kernel_rows,
    left_of_operators,
    matrix_kinds,
    mostly_misclocked,
    multiplies,
    numbers_of_import,
    of_copies,
    window_rows,
)
from amp_core.analysis.performance.memory_savings import FUSED_FRAC, SCATTERS
from amp_core.analysis.performance.saving import MIN_KERNEL_US, MIN_SAVED_FRAC, Saving, longest_name, step_share
from amp_core.analysis.performance.savings import MAX_UNKNOWN_FRAC, Savings, possible_savings
from amp_core.findings.cpu_sentences import cpu_sentence
from amp_core.findings.host_sentences import host_alone, worker_sentence
from amp_core.findings.left_out_sentences import MOST_FRAC, parts_left_out
from amp_core.findings.matrix_sentences import matrix_work
from amp_core.findings.model import Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding
from amp_core.findings.repeated_work import (
    MIN_LOOP_FIRST_FRAC,
    growing_sentence,
    loop_frac,
    loop_sentence,
    recomputed_sentence,
)
from amp_core.findings.signals import facts
from amp_core.findings.step_sentences import (
    captured_anew,
    few_long_steps,
    of_ranks,
    passes_sentence,
    profilers_part,
    slow_memory,
    uneven_device,
    uneven_steps,
)
from amp_core.hardware.gpus import core_names, is_amd
from amp_core.hardware.kernel_names import SMALL_TYPES
from amp_core.hardware.kernel_names.dtypes import of_token
from amp_core.store.run import Run
from amp_core.text.formatting import duration, kernel_in_words, number, percent
from amp_core.traces.operators import is_compiled_code

SAVING_THRESHOLD = "Possible savings of at least 5 % of the step."
"""What a guide entry states as its threshold if its finding is one of the possible savings."""


def saving_finding(
    run: Run, code: str, inference_advice: str = "", inference_snippet: str = "", *, training: bool = False
) -> list[Finding]:
    """The finding `code` if a trace has that saving. The advice and the snippet are for traces without training, or
    with `training` for all."""
    savings = possible_savings(run)
    saving = next((c for c in savings.ranked if c.code == code), None) if savings else None
    if savings is None or saving is None:
        return []
    remedy = None
    if inference_advice and (training or not savings.trains):
        remedy = Remedy(inference_advice, inference_snippet)
    won = saving.saved_us > 0
    whole = f"the {savings.unit} with the time before it" if saving.lead_us else f"the {savings.unit}"
    others = f", with {saving.others} other{'s' if saving.others > 1 else ''}" if saving.others else ""
    if saving.is_of_part:
        others = ", with what the host does beside it"
    finding = make_finding(
        code,
        f"{saving.what}; could save {saving.how_much()}" if won else saving.what,
        saving.where,
        value=saving.share if won else None,
        limit=MIN_SAVED_FRAC if won else None,
        unit=f"share of {whole} saved{others}" if won else "",
        remedy=remedy,
    )
    if saving.here:
        finding = replace(finding, advice=f"{finding.advice} Here: {saving.here}.")
    return [replace(finding, win_ms=float(saving.rank_us) / 1e3 if won else None)]


def for_what_runs(run: Run, findings: list[Finding]) -> list[Finding]:
    """The findings of a trace, with code that calls the model alone where the trace contains no training, and with
    torch_npu's profiler where that recorded it."""
    if str(run.head.config.get("device")).startswith("npu"):
        findings = [replace(f, advice=_for_npu(f.advice), snippet=_for_npu(f.snippet)) for f in findings]
    if trains(run):
        return findings
    return [replace(f, snippet=f.snippet.replace("train_step(batch)", "model(batch)")) for f in findings]


def _for_npu(text: str) -> str:
    """Advice or code with the profiler of NPUs, which has no sums of operators."""
    text = _TABLE.sub('prof.export_chrome_trace("trace.json")', text.replace("ProfilerActivity.CUDA", _NPU_ACTIVITY))
    return _PROFILER.sub("torch_npu.profiler", text)


_NPU_ACTIVITY = "ProfilerActivity.NPU"
_PROFILER, _TABLE = re.compile(r"\btorch\.profiler\b"), re.compile(r"print\(prof\.key_averages\(.*\)\)")


def trains(run: Run) -> bool:
    """Whether a trace contains backward or an optimizer; by its operators where it has no kernels."""
    savings = possible_savings(run)
    if savings is not None:
        return savings.trains
    return bool(run.ops["phase"].isin(["backward", "optimizer"]).any())


def first_sentence(run: Run) -> str:
    """The largest possible saving in a trace, or that there is none; of a CPU, what takes longest; and what of the
    trace is left out, first if that is most of it and the host's doing. Empty for other runs."""
    before, after = parts_left_out(run)
    if nothing := _nothing_to_judge(run):
        return " ".join((nothing, *before, *after))
    (uneven, us), savings = uneven_device(run), possible_savings(run)
    windows = window_rows(run)
    each_us = float(windows["wall_us"].sum()) / max(1, windows["rank"].nunique())  # `us` is of one rank
    largest = savings.ranked[0] if savings and savings.ranked else None
    # What is shorter with faster kernels is known only where these take equally long.
    is_main = largest is None or largest.code not in _IDLE or us >= each_us * largest.share
    is_loop = savings is None and loop_frac(run) >= MIN_LOOP_FIRST_FRAC
    main = (_vectors(run), growing_sentence(run), _first_sentence(run), _small(run))
    first = [text for text, comes_first in ((uneven, is_main), (loop_sentence(run), is_loop)) if comes_first]
    then = [text for text in (uneven, loop_sentence(run)) if text not in first]
    told = (slow_memory(run), worker_sentence(run), *before, few_long_steps(run), *first, *main, *then)
    again = (captured_anew(run), passes_sentence(run), recomputed_sentence(run))
    figures = (*again, profilers_part(run), uneven_steps(run), of_ranks(run))
    return of_copies(run, " ".join(filter(None, (*told, *figures, *after))))


MAX_NO_WORK_FRAC = 0.001
"""Share of a window with less device activity than which there is nothing to save on the device."""


def _nothing_to_judge(run: Run) -> str:
    """That a trace holds neither work of the device worth the name nor what the host does; else empty."""
    if mostly_misclocked(run):
        return _misclocked(run)
    if left := left_of_operators(run):
        return _sampled(run, left)
    windows = window_rows(run)
    if run.head.config.get("without_operators") is not True or windows.empty:
        return ""
    busy_us, wall_us = (float(windows[name].sum()) for name in ("busy_us", "wall_us"))
    if busy_us >= MAX_NO_WORK_FRAC * wall_us:
        return ""
    return (
        f"The trace holds practically no device activity, {number(busy_us / 1e3, 'ms')} of "
        f"{number(wall_us / 1e3, 'ms')}, and no operators, so there is nothing to judge: profile what the device "
        "works on, after a warm-up, and record ProfilerActivity.CPU too."
    )


def _misclocked(run: Run) -> str:
    """What is known of a device's work whose times are none of the trace."""
    count, us, span_us, off_us, name_us = numbers_of_import(
        run, "misclocked", "count", "us", "span_us", "off_us", "name_us"
    )
    name = kernel_in_words(str(facts(run.head.config, "misclocked").get("name")))
    return (
        f"The start times of {count:,.0f} kernels and copies are invalid, {duration(off_us / 1e6)} or more away from "
        f"the host's, so neither idle time nor overlap can be told. They take {number(us / 1e3)} of the "
        f"{number(span_us / 1e3, 'ms')} that the host's events last, {number(name_us / 1e3, 'ms')} of it {name}."
    )


def _sampled(run: Run, left: float) -> str:
    """What is known of a trace of which that share of the operators is left."""
    rows, windows = kernel_rows(run), window_rows(run)
    name, steps = longest_name(rows, "name"), float(windows["steps"].fillna(0.0).sum())
    us = float(rows["total_us"][rows["name"] == name].sum()) / (steps or float(len(windows)))
    each = f"{number(us / 1e3, 'ms')} per {'step' if steps else 'profiled window'}"
    return (
        f"The file holds about {number(100 * left, digits=1)} % of the operators, and the launches and kernels of the "
        "others were removed with them: neither idle time nor overlap can be judged, so look at the file from which "
        f"they were removed. Of what is left, {kernel_in_words(name)} takes longest, {each}."
    )


def _small(run: Run) -> str:
    """What changes that save too little each would save together; empty if that is little too, or one saves enough."""
    savings = possible_savings(run)
    if savings is None or any(c.saved_us > 0 for c in savings.ranked) or len(savings.small) < 2:
        return ""
    us = sum(c.saved_us for c in savings.small)
    if us < MIN_SAVED_FRAC * savings.cost.step_us:
        return ""
    largest = savings.small[0]
    return (
        f"Smaller savings add up to {percent(us / savings.cost.step_us)}; the largest: "
        f"{_in_sentence(largest)} ({largest.how_much(savings.unit)})."
    )


MIN_VECTOR_FRAC, MIN_VECTOR_STEP_FRAC = 0.8, 0.5
"""Shares of the kernel time and of the step from which products of a matrix and a vector are told first."""


def _vectors(run: Run) -> str:
    """That nearly all kernel time is products of a matrix and a vector, as in decoding at batch 1; else empty."""
    savings, rows = possible_savings(run), kernel_rows(run)
    if savings is None or rows.empty:
        return ""
    us = float(rows["total_us"][rows["name"].str.contains("gemv", regex=False)].sum())
    share = us / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    wall_us = float(window_rows(run)["wall_us"].sum())
    if share < MIN_VECTOR_FRAC or us < MIN_VECTOR_STEP_FRAC * wall_us:
        return ""
    return (
        f"Products of a matrix and a vector take {percent(share)} of the kernel time: they read every weight for one "
        "row, so memory bounds them, and larger batches or weights of fewer bits help."
    )


def _first_sentence(run: Run) -> str:
    savings = possible_savings(run)
    if savings is None:
        if "launches_without_kernels" in run.head.config:
            missing = "kernel" if "timed_op" in run.head.config else "device activity"
            return f"No {missing} was recorded, so the device's performance cannot be analysed.{host_alone(run)}"
        return cpu_sentence(run)
    if savings.capture_us:
        return (
            f"The trace records the capture of a graph, {number(savings.capture_us / 1e3)} of "
            f"{number(savings.cost.step_us / 1e3, 'ms')} per {savings.unit}, and no launch of one: captured kernels do "
            "not run, so the device's performance cannot be analysed. Profile the graph's replays."
        )
    largest = savings.ranked[0] if savings.ranked else None
    if largest is not None and largest.code in GUIDE and largest.saved_us > 0:
        # Short gaps all along are those of a loop.
        is_start = not savings.trains or _busy_frac(savings) < MAX_STARTING_FRAC
        at_start = savings.unit != "step" and is_start
        of_trace = 1 - _left_out_frac(run) if largest.code == "launch-bound" else 1.0
        at_start &= largest.code != "launch-bound" or of_trace < MOST_FRAC
        repeats = run.head.config.get("equal_passes")
        at_start &= not (isinstance(repeats, int) and repeats >= MIN_REPEATS)
        idle = at_start and not passes_sentence(run) and _busy_frac(savings) * of_trace < MOSTLY_IDLE_FRAC
        hint = _idle_hint(run) if idle else ""
        whole = _all_idle(savings, largest) + (_late_beside(savings, largest) or _held(largest) or _next(savings))
        writes = scattered(run, savings)
        is_first = writes is not None and writes.frac > max(largest.share, MIN_SCATTER_FIRST_FRAC)
        first = f"{writes.sentence} " if writes is not None and is_first else ""
        whole += f" {writes.sentence}" if writes is not None and not is_first else ""
        known = "argest possible saving" + (" of known cause" if _is_larger_unsure(savings) else "")
        known += " while the device waits" if _is_larger_behind(savings) else ""
        saving = f"{known}: {_in_sentence(largest)} ({largest.how_much(savings.unit)}).{whole}{hint}"
        if savings.unknown_kernel_frac > max(largest.share, MAIN_KERNEL_FRAC):
            return (
                f"{first}One kernel takes {percent(savings.unknown_kernel_frac)} of the {savings.unit} and "
                f"{_unknown(run, savings)}. Profile it alone{_profiler(run)}. Beside it, the l{saving}"
            )
        work = matrix_work(run, savings)
        if largest.share < MAX_SMALL_FRAC and work.frac > MIN_MAIN_FRAC and largest.code not in _OF_PRODUCTS:
            it = "it" if len(work.kinds.fracs) == 1 else "them"
            return (
                f"{first}{work.kinds.subject} {work.kinds.verb} {work.shares} of the {savings.unit}{work.where}. "
                f"Beside {it}, the l{saving}"
            )
        return f"{first}L{saving}"
    return _nothing(run, savings)


MIN_REPEATS = 3
"""Equal passes from which a trace is one of a loop, and not of the start of a program."""
_IDLE = ("launch-bound", "host-bound", "host-syncs", "kernel-wait", "waiting-for-data")
MIN_OTHER_IDLE_FRAC = 0.1
"""Share of the step that a device is idle for other causes than the largest saving's, from which all of it is told."""


def _all_idle(savings: Savings, largest: Saving) -> str:
    """How long the device is idle in all, where that is of several causes; else empty."""
    device = next((one for one in ("The GPU", "The device") if largest.what.startswith(f"{one} ")), "")
    idle_us = float(np.nan_to_num(savings.cost.us("gaps", "data")))
    others_us = idle_us - (largest.saved_us - largest.lead_us)
    if largest.code not in _IDLE or not device or others_us < MIN_OTHER_IDLE_FRAC * savings.cost.step_us:
        return ""
    share = step_share(idle_us, savings.cost)
    return f" In all, {device[0].lower()}{device[1:]} is idle for {share} of the {savings.unit}."


MIN_NEXT_RATIO, MIN_NEXT_FRAC = 0.4, 0.1
"""The second largest saving is told with the largest from that share of it and of the step on."""


_OF_VALUES = {"launch-bound", "host-syncs", "copies"}
"""Savings that are one where values are copied to the host one by one."""


def _is_larger_unsure(savings: Savings) -> bool:
    """Whether a saving that is not sure is larger than the first one."""
    return any(one.saved_us > savings.ranked[0].saved_us and not one.is_sure for one in savings.ranked)


def _is_larger_behind(savings: Savings) -> bool:
    """Whether kernels save more than the first one, but not before the device no longer waits."""
    return any(one.saved_us > savings.ranked[0].saved_us and one.waits_for_idle for one in savings.ranked)


def _next(savings: Savings) -> str:
    """The second largest saving as a sentence, if it is about as large; else empty."""
    if len(savings.ranked) < 2:
        return ""
    first, second = savings.ranked[:2]
    if VALUES_COPIED in first.what + second.what and {first.code, second.code} <= _OF_VALUES:  # one copy ends both
        return ""
    if second.saved_us > first.saved_us and not second.is_sure:
        return f" {second.what}."
    if second.rank_us < MIN_NEXT_RATIO * first.rank_us or second.share < MIN_NEXT_FRAC or not second.is_sure:
        return ""
    if first.late_ranks:  # what makes them late
        return f" {second.what}."
    return f" The next: {_in_sentence(second)} ({second.how_much(savings.unit)})."


@dataclass(frozen=True)
class ScatteredWrites:
    """The operator that writes to scattered places for long."""

    name: str
    frac: float
    """Its share of the step."""
    sentence: str


def scattered(run: Run, savings: Savings) -> ScatteredWrites | None:
    """The operator with most of the time among those that write to scattered places; None where none takes long."""
    rows = kernel_rows(run)
    rows = rows[rows["op"].str.contains(SCATTERS) & (rows["category"] != "communication")]
    us = rows.groupby("op")["total_us"].sum()
    steps = float(window_rows(run)["steps"].fillna(0.0).sum()) or float(len(window_rows(run)))
    each_us = float(us.max()) / steps if len(us) else 0.0
    if each_us < MIN_SCATTER_FRAC * savings.cost.step_us:
        return None
    name, share = str(us.idxmax()), step_share(each_us, savings.cost)
    told = f"{kernel_in_words(name)} takes {share} of the {savings.unit}, as it writes to scattered places."
    return ScatteredWrites(name, each_us / savings.cost.step_us, told)


MIN_SCATTER_FRAC, MIN_SCATTER_FIRST_FRAC = 0.1, 0.3
"""Shares of the step from which such an operator is told, and from which it comes first if it takes more than the
largest saving."""


def _held(largest: Saving) -> str:
    """That the GPUs of late ranks do not start queued work, for how long; empty for others."""
    idle = largest.here.split(";")[0]
    return f" {idle[:1].upper()}{idle[1:]}." if largest.held_ranks and largest.held_ranks == largest.late_ranks else ""


def _late_beside(savings: Savings, largest: Saving) -> str:
    """The waiting for late ranks, where the ranks are idle for longer by their own hosts; else empty."""
    late = next((c for c in savings.ranked if c.late_ranks or c.of_hosts_us), None)
    return f" Beside that, {_in_sentence(late)}." if late is not None and largest.code in _IDLE else ""


MAX_SMALL_FRAC, MIN_MAIN_FRAC = 0.2, 0.5
"""Where less than the first of the step can be saved, products that take more than the second are told before that."""
_OF_PRODUCTS = ("fp32-products", "slow-products")
"""Savings whose sentence tells what products take."""


def _unknown(run: Run, savings: Savings) -> str:
    """What is not known of the longest unclassified kernel, and its name."""
    rows = kernel_rows(run)
    rows = rows[(rows["name"] == savings.unknown_kernel) & is_matrix(rows) & (rows["precision"] != "")]
    if rows.empty:
        return f"cannot be classified by name: {kernel_in_words(savings.unknown_kernel)}"
    precision = str(rows["precision"].iloc[0]).upper()
    kernel = kernel_in_words(savings.unknown_kernel)
    return f"multiplies matrices in {precision}, whether on matrix cores is unknown: {kernel}"


MAIN_KERNEL_FRAC = 0.2
"""An unclassified kernel with more of the step than this, and than the largest saving, is named first."""


MOSTLY_IDLE_FRAC, MAX_STARTING_FRAC = 0.1, 0.01
"""A window without steps with less work than the first share is hardly one of training; with less than the second it
shows first calls, also where backward runs."""


def _left_out_frac(run: Run) -> float:
    """The share of a trace that is in no window, and the host's."""
    listed = run.head.config.get("left_out")
    parts = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
    fracs = [part.get("frac") for part in parts if part.get("kind") in ("start", "wait", "end")]
    return float(sum(frac for frac in fracs if isinstance(frac, int | float)))


MIN_OF_IDLE_FRAC = 0.5
"""Share of the idle time from which one operator or function that the host is in accounts for it."""


def _idle_hint(run: Run) -> str:
    """What to say of a window without steps and with little work of the device. What it looks like is told where
    neither an operator nor a function accounts for the idle time."""
    windows = window_rows(run)
    idle_us = float(windows[["idle_us", "lead_us"]].fillna(0.0).to_numpy().sum())
    calls_us = float(windows["host_call_us"].fillna(0.0).sum())
    named_us = max(longest_named(windows, column)[1] for column in ("host_op", "host_function"))
    accounted = named_us >= max(MIN_OF_IDLE_FRAC * idle_us, 2 * calls_us)
    like = "" if accounted else ", like the start of a program or an idle server"
    no_model = "" if multiplies(kernel_rows(run)) else f" No product of matrices runs: {_NO_MODEL}."
    return (
        f" The trace has no step markers and little device activity{like}: call prof.step() and profile after a "
        f"warm-up.{no_model}"
    )


_NO_MODEL = "the model may not be in the trace"


def may_lack_model(run: Run) -> bool:
    """Whether the first sentence says that the model may not be in the trace: then no advice about it fits."""
    return _NO_MODEL in _first_sentence(run)


def _busy_frac(savings: Savings) -> float:
    cost = savings.cost
    return float(1 - (np.nan_to_num(cost.us("gaps")) + np.nan_to_num(cost.us("data"))) / cost.step_us)


def _in_sentence(saving: Saving) -> str:
    text = saving.what
    return text if text[:2].isupper() else f"{text[0].lower()}{text[1:]}"  # GEMM/conv keeps its capitals


def _profiler(run: Run) -> str:
    device = str(run.head.config.get("device") or "")
    if not device.startswith("cuda"):
        return ""
    gpu = profiled_gpu(run, device).name
    return f", as with {'rocprofv3' if is_amd(gpu) else 'Nsight Compute' if gpu else 'Nsight Compute or rocprofv3'}"


def _nothing(run: Run, savings: Savings) -> str:
    cost = savings.cost
    if savings.unknown_frac > MAX_UNKNOWN_FRAC:
        is_narrow = of_token(savings.unknown_kernel) in ("fp16", "bf16", *SMALL_TYPES)
        of_16_bits = " is" if is_narrow else " and the savings from 16 bits are"
        return (
            f"The device is busy for {percent(_busy_frac(savings))} of the {savings.unit}. "
            f"{percent(savings.unknown_frac)} of its kernel time cannot be classified by kernel name, "
            f"{percent(savings.unknown_kernel_frac)} of the {savings.unit} in "
            f"{kernel_in_words(savings.unknown_kernel)}, so the share of GEMM/conv{of_16_bits} unknown."
        )
    rows = kernel_rows(run)
    cores, _ = core_names(cost.device_name)
    off = rows[is_matrix(rows) & (rows["tensor_core"] == "no") & rows["precision"].isin(["fp16", "bf16"])]
    off_frac = float(off["total_us"].sum() / max(rows["total_us"].sum(), MIN_KERNEL_US))
    off_share = float(off["total_us"].sum()) / max(float(window_rows(run)["wall_us"].sum()), MIN_KERNEL_US)
    if off_frac > MAIN_OP_FRAC or off_share >= MIN_SAVED_FRAC:
        kinds = matrix_kinds(off["total_us"], off["category"] == "attention")
        return (
            f"{kinds.subject} in 16 bits {kinds.verb} {percent(off_frac)} of the kernel time without using {cores}. "
            "What these would save depends on the library's kernels; nothing else would save "
            f"{percent(MIN_SAVED_FRAC)} or more of the {savings.unit}."
        )
    work = matrix_work(run, savings)
    rest = f" {savings.ranked[0].what}." if savings.ranked else ""
    named_by_kernel = rows["name"].map(kernel_in_words)
    named = rows["op"].where(rows["op"] != "", named_by_kernel)
    others = rows["total_us"][~is_matrix(rows)].groupby(named).sum()
    share = float(others.max() / rows["total_us"].sum()) if len(others) else 0.0
    longest = f"{others.idxmax()} takes {percent(share)} of the kernel time" if share > MAIN_OP_FRAC else ""
    if savings.peak_frac is None and work.kernel_frac > MAIN_PRODUCT_FRAC and not longest:
        it_takes = "it takes" if len(work.kinds.fracs) == 1 else "they take"
        kernels = rows["op"].where((rows["op"] != "") & ~rows["op"].map(is_compiled_code).astype(bool), named_by_kernel)
        us = rows["total_us"][~is_matrix(rows)].groupby(kernels).sum()
        other_frac = float(us.max() / window_rows(run)["wall_us"].sum()) if len(us) else 0.0
        is_long = other_frac >= MIN_SAVED_FRAC
        nothing = "Nothing that is looked for" if is_long else "Nothing"
        name = str(us.idxmax()) if is_long else ""
        family = f" ({percent(work.family_frac)} with those of its kind)" if work.family_frac else ""
        beside = f" Beside it, {name} takes {percent(other_frac)}{_of_softmax(name, savings)}." if is_long else ""
        return (
            f"{nothing} beside {work.kinds.text} would save {percent(MIN_SAVED_FRAC)} or more of the {savings.unit}: "
            f"{it_takes} {work.shares} of it{work.where}. One kernel takes {percent(work.kernel_frac)}{family}: "
            f"{kernel_in_words(work.kernel)}. Profile it alone{_profiler(run)}.{beside}{rest}"
        )
    whole = f"the {savings.unit}" if longest else "it"
    of_products = f"{work.kinds.text} {work.kinds.verb} {work.shares} of {whole}{work.where}"
    parts = [part for part in (longest, of_products if work.frac > 0 or not longest else "") if part]
    told = ", and ".join(parts)
    beside = "" if longest else _beside_products(run, savings)
    if _IN_STEPS in beside:
        return (
            f"{kernel_in_words(_longest_other(run)[0])} takes {percent(_longest_other(run)[1])} of the {savings.unit}: "
            f"{_IN_STEPS}. Products, those of attention among them, take {percent(work.frac)}{work.where}.{rest}"
        )
    change = "No single change that is looked for" if _HALVED in beside else "No single change"
    return f"{change} would save {percent(MIN_SAVED_FRAC)} or more of the {savings.unit}: {told}.{beside}{rest}"


def _beside_products(run: Run, savings: Savings) -> str:
    """The longest kernel that multiplies no matrices, as a sentence, and what a softmax tells; empty without a long
    one."""
    name, share = _longest_other(run)
    memory_frac = float(np.nan_to_num(savings.cost.us("memory_bound", "cast", "layout"))) / savings.cost.step_us
    if share < MIN_BESIDE_FRAC and memory_frac >= MIN_MEMORY_FRAC:
        passes = _passes_over_one(run)
        others = f"{passes}; the others are many short or already fused ones" if passes else ""
        return f" Memory-bound kernels take {percent(memory_frac)}, {others or 'in many short or already fused ones'}."
    if share < MIN_BESIDE_FRAC:
        return ""
    return f" Beside them, {kernel_in_words(name)} takes {percent(share)}{_of_softmax(name, savings)}."


def _passes_over_one(run: Run) -> str:
    """That kernels without products pass over one large tensor, each once per step, as part of a sentence, where half
    of their time would be a saving; else empty."""
    rows, windows = kernel_rows(run), window_rows(run)
    rows = rows[~is_matrix(rows) & (rows["category"] != "communication")]
    rows = rows[rows["count"] <= max(1.0, float(windows["steps"].fillna(0.0).sum()))]
    largest = [max(tensor_shapes(shapes), key=math.prod, default=()) for shapes in rows["in_shapes"]]
    sizes = [" × ".join(str(size) for size in shape if size > 1) for shape in largest]
    rows = rows.assign(elements=[math.prod(shape) for shape in largest], sizes=sizes)
    us = rows[rows["elements"] >= LARGE_ELEMENTS].groupby("elements")["total_us"].sum()
    frac = float(us.max() / windows["wall_us"].sum()) if len(us) else 0.0
    rows = rows[rows["elements"] == (us.idxmax() if len(us) else 0)].sort_values("total_us")
    kernels = int((rows["total_us"] >= MIN_PASS_FRAC * rows["total_us"].sum()).sum())
    if frac * FUSED_FRAC < MIN_SAVED_FRAC or kernels < 2:
        return ""
    tensor = f"one tensor of {rows['sizes'].iloc[-1]}"
    return f"{percent(frac)} in {kernels} that each pass over {tensor}, {_HALVED}"


LARGE_ELEMENTS = 2**27
"""A tensor of so many elements is larger than the cache of any GPU."""
MIN_PASS_FRAC = 0.05
"""Share of the time of such kernels from which one passes over the tensor, and does not read a few of its values."""
_HALVED = "which fewer passes may halve"


def _longest_other(run: Run) -> tuple[str, float]:
    """The longest kernel that neither multiplies matrices nor communicates, and its share of the profiled time."""
    rows = kernel_rows(run)
    us = rows[~is_matrix(rows) & (rows["category"] != "communication")].groupby("name")["total_us"].sum()
    return (str(us.idxmax()), float(us.max() / window_rows(run)["wall_us"].sum())) if len(us) else ("", 0.0)


def _of_softmax(kernel: str, savings: Savings) -> str:
    """What a long softmax beside products tells of a model that does not train, whose loss needs one."""
    is_softmax = "softmax" in kernel.lower() and not savings.trains
    return f": {_IN_STEPS}" if is_softmax else ""


_IN_STEPS = "attention is computed in steps, and a fused kernel keeps its scores on the chip"


MIN_MEMORY_FRAC = 0.2
"""Share of the step in memory-bound kernels, none of them long, from which they are told together."""
MIN_BESIDE_FRAC = 0.1
"""Share of the profiled time from which a kernel other than products is named where nothing else is to be said."""


MAIN_PRODUCT_FRAC = 0.25
"""A product of unknown efficiency with more of the step than this is named where nothing else is to be said."""
MAIN_OP_FRAC = 0.5
"""An operator other than products that takes more of the kernel time is named where nothing else is to be said."""
