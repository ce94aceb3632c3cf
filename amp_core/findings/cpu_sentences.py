"""What the first sentence says of the CPU, in traces without the work of a device.

cpu_sentence(run)     # 'The trace contains no device activity: on the CPU, aten::addmm takes 62.4 % of the ...'
"""

import re

import numpy as np
import pandas as pd

from amp_core.analysis.performance.first_calls import first_calls_of
from amp_core.analysis.performance.gemm_shapes import format_sizes, product
from amp_core.analysis.performance.idle import longest_named
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, numbers_of_import, on_cpu, window_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, longest_name
from amp_core.findings.cpu_families import (
    COMPILING,
    dominant_size,
    family,
    large_tensors,
    light_beside,
    second_operator,
    single_rows,
)
from amp_core.findings.cpu_parts import (
    SLOW_CONVOLUTIONS,
    CpuPart,
    attention_part,
    cpu_rows,
    cpu_windows,
    fp64_part,
    has_onednn,
    judged_rows,
    layout_part,
    loading_part,
    longest_operator,
    on_macos,
    optimizer_part,
    outside_part,
    pace_part,
    part_gradients_part,
    unused_gpu,
    waiting_part,
    wall_us,
    without_loading,
    without_onednn,
)
from amp_core.findings.repeated_work import growing_sentence
from amp_core.findings.signals import facts
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, percent, size
from amp_core.traces.operators import is_range

_ELSEWHERE = " This process waits for others, whose work the trace does not hold: profile these."


_DROPOUT = ("aten::bernoulli_", "aten::native_dropout", "aten::_fused_dropout")
_DROPOUT_LAYERS = ("aten::dropout", "aten::dropout_", "aten::feature_dropout")
_WITHOUT_TRAINING = (
    " It draws the masks of dropout, and the trace contains no backward: call model.eval() for inference."
)


def cpu_sentence(run: Run) -> str:
    """What takes longest in a trace of a CPU: loading data, the time outside operators, the optimizer, or an operator.
    Empty for other runs."""
    rows = kernel_rows(run)
    if not is_trace(run) or rows.empty or not on_cpu(rows):
        return ""
    everything = cpu_rows(run)
    if everything.empty:  # all of it is AMPscope's own work
        return ""
    beside = without_loading(run, everything)
    longest_us, operators = _operators(run, beside)
    if len(beside) < len(everything) and "outside of operators" not in operators:
        operators = f"outside of loading data, {operators}"
    ranges = _ranges(run)
    in_range = f" {ranges[0].upper()}{ranges[1:]}." if ranges else ""
    if _is_outside_first(run, longest_us):
        sentence, in_range = _outside_first(run, ranges, operators), ""
    else:
        sentence = _beside_operators(run, operators, longest_us)
    if (waiting := waiting_part(run)) is not None:
        sentence = f"{waiting.what}; {sentence}"
    cold, is_first = _cold(run)
    further = f"{'' if is_first or not cold else f' {cold}'}{in_range}{_freeing(run)}{_of_gpu(run)}{_own_process(run)}"
    before = f". {cold} On the CPU," if is_first else ": on the CPU,"
    return f"{_few(run)}The trace contains no device activity{before} {sentence}{further}"


def longest_frac(run: Run) -> float:
    """The share of the time that what takes longest in a trace of a CPU has; 0 for other runs. A loop of Python comes
    before it where that takes longer."""
    everything = cpu_rows(run) if is_trace(run) else pd.DataFrame()
    whole_us = wall_us(cpu_windows(run)) if len(everything) and on_cpu(everything) else 0.0
    if whole_us <= 0:
        return 0.0
    rows = judged_rows(without_loading(run, everything))
    parts = (loading_part(run), outside_part(run), waiting_part(run), optimizer_part(run, rows))
    _, longest_us = longest_operator(rows)
    (compiling_us,) = numbers_of_import(run, "compilations", "us")
    return max(longest_us, compiling_us, *(part.us for part in parts if part is not None)) / whole_us


def _few(run: Run) -> str:
    """That operators run for a small part of the time that the profiler ran, as a sentence before others; else
    empty."""
    us, before_us, after_us = numbers_of_import(run, "few_operators", "us", "before_us", "after_us")
    whole_us = us + before_us + after_us
    if not 0 < us <= whole_us:
        return ""
    return (
        f"Operators run within {number(us / 1e3)} of the {number(whole_us / 1e3, 'ms')} that the profiler ran "
        f"({percent(us / whole_us)}): the {number(before_us / 1e3)} before and {number(after_us / 1e3, 'ms')} after "
        "are other work, or the profiler's own. "
    )


def _freeing(run: Run) -> str:
    """That freeing large tensors takes long, as a sentence; else empty."""
    us, of_us, count, most_bytes = numbers_of_import(run, "freeing", "us", "of_us", "count", "most_bytes")
    if not 0 < MIN_SAVED_FRAC * of_us <= us <= of_us:
        return ""
    return (
        f" Freeing {count:,.0f} tensors of up to {size(most_bytes)} takes {number(us / 1e3)} of the "
        f"{number(of_us / 1e3, 'ms')} ({percent(us / of_us)}): their memory goes back to the system each time. Write "
        "into tensors that stay (out=), or preload an allocator that keeps memory, as jemalloc."
    )


MIN_COLD_FRAC, MIN_COLD_FIRST_FRAC = 0.05, 0.25
"""Share of the time in one call of a view, which computes nothing, from which the trace is one of first calls; and that
of first calls beyond later ones from which these come first."""
MIN_COLD_VIEW_US = 1000.0
"""Time of one call of a view from which a trace of few such calls is one of first calls: views take microseconds."""


def _cold(run: Run) -> tuple[str, bool]:
    """That first calls take long, or one call of a view, as a sentence, else empty; and whether it comes first."""
    count, us, of_us = numbers_of_import(run, "first_sizes", "count", "us", "of_us")
    # Where each pass has a row more, each has first calls, whatever ran before.
    is_told = numbers_of_import(run, "slow_calls", "us")[0] > 0 or bool(growing_sentence(run))
    if count >= 1 and 0 < us <= of_us and not is_told:
        told = (
            f"First calls on {count:,.0f} sizes take {number(us / 1e3)} of the {number(of_us / 1e3, 'ms')} of "
            "operators beyond later ones on the same sizes: profile after a warm-up."
        )
        return told, us >= MIN_COLD_FIRST_FRAC * of_us
    longest_us, place, calls = numbers_of_import(run, "long_view", "us", "place", "calls")
    is_one_pass = 0 < calls <= MAX_FIRST_PLACE and float(window_rows(run)["steps"].fillna(0.0).max()) <= 1
    is_long = longest_us >= MIN_COLD_FRAC * wall_us(cpu_windows(run)) > 0
    if not is_long and not (is_one_pass and longest_us >= MIN_COLD_VIEW_US):
        return "", False
    name = str(facts(run.head.config, "long_view").get("op"))
    took = f"One call of {name}, which computes nothing, takes {number(longest_us / 1e3, 'ms')}"
    if place > MAX_FIRST_PLACE:
        return f"{took}, {place - 1:,.0f} calls after its first one: its thread was interrupted.", False
    return f"{took}: these are first calls, so profile after a warm-up.", True


MAX_FIRST_PLACE = 3
"""Calls of an operator up to which one may be its first in some way, as on another type."""


def _of_gpu(run: Run) -> str:
    """That the machine has a GPU of which the trace has nothing, as a further sentence; else empty."""
    gpu = unused_gpu(run)
    return f" {gpu.what}." if gpu is not None else ""


def _own_process(run: Run) -> str:
    """That the loop loads its data itself, as a further sentence, where loading is told; else empty."""
    is_alone = run.head.config.get("loader") == "own process"
    is_told = is_alone and loading_part(run) is not None
    return " Data is loaded in the loop's own process (num_workers=0)." if is_told else ""


def _ranges(run: Run) -> str:
    """The range that the program marks with most of the time, or those beside one another in which most of it passes
    without operators, as part of a sentence; empty without such."""
    name, us = longest_named(window_rows(run), "host_range")
    whole_us = float(window_rows(run)["wall_us"].sum())
    if outside_part(run) is not None and (several := _several_ranges(run, whole_us)):
        return several
    if not name or us < MIN_RANGE_FRAC * whole_us:
        return ""
    return f"the program's range {name} takes {percent(us / whole_us)} of the time"


def _several_ranges(run: Run, whole_us: float) -> str:
    """Several ranges that take much of `whole_us` together, as part of a sentence; else empty. Of one rank alone."""
    named = facts(run.head.config, "outside_ranges")
    names, us = (named.get(key) for key in ("names", "us"))
    if not isinstance(names, list) or not isinstance(us, list) or not len(names) == len(us) >= 2:
        return ""
    if window_rows(run)["rank"].nunique() > 1 or not MIN_RANGE_FRAC * whole_us <= sum(us) <= MAX_SUM * whole_us:
        return ""
    (first, first_us), *others = zip(names, us, strict=True)
    further = join_words([f"{name} {percent(its_us / whole_us)}" for name, its_us in others])
    return f"the program's range {first} takes {percent(first_us / whole_us)} of the time, {further}"


MAX_SUM = 1.05
"""Shares of ranges beside one another sum to no more than all of the time, but for some overlap."""


MIN_RANGE_FRAC = 0.5
"""Share of the time from which a range is told."""


def _faster_convolutions(run: Run, rows: pd.DataFrame, longest: str, share: float) -> str:
    """What may make convolutions of oneDNN faster that take this share of the operators' time, as a sentence; empty for
    other operators and where it is small."""
    if longest not in _OF_ONEDNN or share < MIN_CONVOLUTIONS_FRAC:
        return ""
    is_narrow = rows["in_dtypes"][rows["op"] == longest].str.contains("BFloat16|Half").any()
    no_bf16 = is_narrow or on_macos(run)
    bf16 = "" if no_bf16 else ", and BF16 where the processor multiplies it (AMX, AVX512-BF16)"
    return f" What may make it faster: channels_last, {COMPILING}{bf16}."


def _drawn(longest: str, share: float) -> str:
    """What to do about random values that take this share of the operators' time, as a sentence; empty for other
    operators and where it is small."""
    if longest not in _DRAWS or share < MIN_DRAWN_FRAC:
        return ""
    return " Draw random values once, before the loop, or on the device that takes them (device=...)."


_DRAWS, MIN_DRAWN_FRAC = ("aten::normal_", "aten::uniform_", "aten::random_"), 0.5
MIN_CONVOLUTIONS_FRAC = 0.5
_OF_ONEDNN = ("aten::mkldnn_convolution", "aten::mkldnn_convolution_backward")


def _operators(run: Run, rows: pd.DataFrame) -> tuple[float, str]:
    """The time of what takes longest among operators in microseconds, and a sentence on it."""
    longest, longest_us = longest_operator(rows)
    us = rows.groupby("op")["total_us"].sum()
    rows = judged_rows(rows)
    in_range, total = is_range(longest) and us.index.str.contains("::").any(), float(rows["total_us"].sum())
    is_fallback = longest.startswith(SLOW_CONVOLUTIONS) and not has_onednn(rows)
    advice = (
        f" {without_onednn(run, rows, longest)}"
        if is_fallback
        else _faster_convolutions(run, rows, longest, longest_us / total) or _drawn(longest, longest_us / total)
    )
    calls, cost_us = _calls_in_range(run, longest) if in_range else (0.0, 0.0)
    is_cost = in_range and cost_us >= MIN_COST_FRAC * longest_us
    what = f"Python or other code in {longest}, outside of operators," if in_range else longest
    what = f"{longest} beside its {calls:,.0f} operators" if is_cost else what
    what += _serving(rows, longest, total)
    whole, whole_us = "the operators' time", total
    if in_range and (in_all_us := wall_us(cpu_windows(run))) > 0:
        whole, whole_us = f"the {number(in_all_us / 1e3, 'ms')} from the first operator to the last", in_all_us
    sentence = f"{what} takes {percent(longest_us / whole_us)} of {whole} ({number(longest_us / 1e3, 'ms')})"
    sentence += ", most of which is the same cost of calling these" if is_cost else ""
    in_first = first_call(run, longest, longest_us)
    sentence += in_first or _few_calls(rows[rows["name"] == longest]) or _one_call(rows[rows["name"] == longest])
    sentence += _caller(rows, longest, total)
    family_us, of_family = family(rows, longest, longest_us, total)
    second = ""
    if not family_us:
        all_us = wall_us(cpu_windows(run))
        second = second_operator(rows, longest, total) or light_beside(rows, longest, total, all_us)
    further = f"{second}{_attention(rows)}{_layouts(rows)}{single_rows(rows, total)}"
    further += large_tensors(rows, total) or dominant_size(rows, total)
    further += _ELSEWHERE if longest.startswith("rpc_") else ""
    if not run.kernels["phase"].isin(["backward", "optimizer"]).any():
        further += _WITHOUT_TRAINING if longest in _DROPOUT else _dropout_beside(run, rows, total)
    sentence = f"{sentence}{of_family}{WARM_UP if in_first else ''}.{advice}{further}"
    compiled, compiling_us, share = numbers_of_import(run, "compilations", "count", "us", "frac")
    if compiling_us >= longest_us:
        several = f", {compiled:,.0f} times" if compiled > 1 else ""
        again = ", with dynamic=True where sizes change" if compiled > 1 else ""
        what = f"torch.compile compiles for {percent(share)} of the time{several}"
        return compiling_us, f"{what}: profile after a warm-up{again}."
    pace = pace_part(run, rows)
    if (fp64 := fp64_part(rows)) is not None:
        in_fp64 = f"{fp64.what}, where FP32 has half the bytes, and twice the rate in vectors"
        if pace is None or pace.us <= fp64.us:
            return total, f"{in_fp64}; {sentence}"
        sentence += f" {in_fp64[0].upper()}{in_fp64[1:]}."
    largest_us = max(longest_us, family_us)
    parts = part_gradients_part(rows)
    if parts is not None and parts.us > max(largest_us, pace.us if pace is not None else 0.0):
        uneven = f" {pace.what[0].upper()}{pace.what[1:]}." if pace is not None else ""
        return parts.us, f"{parts.what}: {_joined(parts)}; {sentence}{uneven}"
    if parts is not None:
        sentence += f" {parts.what[0].upper()}{parts.what[1:]}: {_joined(parts)}."
    optimizer = optimizer_part(run, rows)
    if optimizer is not None and optimizer.us > largest_us:
        fuse = ": fused=True, from PyTorch 2.4 on, makes them one" if optimizer.is_fusible else ""
        return optimizer.us, f"{optimizer.what}{fuse}; {sentence}"
    if pace is not None and (pace.us == 0 or pace.us >= MIN_PACE_FRAC * total):
        return total, f"{pace.what}; {sentence}"
    if pace is not None:
        return largest_us, f"{sentence} {pace.what[0].upper()}{pace.what[1:]}."
    return largest_us, sentence


def _dropout_beside(run: Run, rows: pd.DataFrame, total_us: float) -> str:
    """That dropout draws masks beside a longer operator, as a further sentence; empty where it takes little."""
    (us,) = numbers_of_import(run, "dropout_time", "us")
    if us <= 0 or us > total_us:  # masks that a program draws itself, or a run that an older version imported
        us = float(rows["total_us"][rows["name"].isin(_DROPOUT) | rows["top_op"].isin(_DROPOUT_LAYERS)].sum())
    if not rows["name"].isin(_DROPOUT).any() or us < MIN_SAVED_FRAC * total_us:
        return ""
    return (
        f" Dropout takes {percent(us / total_us)}, and the trace contains no backward: call model.eval() for inference."
    )


def _joined(parts: CpuPart) -> str:
    """What to do about gradients of parts, as a part of a sentence."""
    if parts.is_of_assignments:
        return "torch.stack of a list of the parts, instead of x[i] = y, leaves that out"
    return "x.unbind() or x.split() instead of x[i] or x[:n] joins them once"


MIN_COST_FRAC = 0.5
"""Share of a range's own time in calling its operators from which it is that cost, and not Python's."""


def _calls_in_range(run: Run, name: str) -> tuple[float, float]:
    """The operators that lie directly in a range, and what calling these costs, microseconds; 0 where no cost of calls
    is known."""
    each_us, calls = numbers_of_import(run, "call_cost", "each_us", "in_range")
    if facts(run.head.config, "call_cost").get("range_name") != name or not (each_us > 0 and calls > 0):
        return 0.0, 0.0
    return calls, each_us * calls


MIN_PACE_FRAC = 0.25
"""Share of the operators' time that an uneven processor costs from which that comes before the longest operator."""


def _attention(rows: pd.DataFrame) -> str:
    """That attention is computed in steps, as a further sentence; else empty."""
    if (part := attention_part(rows)) is None:
        return ""
    return (
        f" {part.what[0].upper()}{part.what[1:]}: F.scaled_dot_product_attention computes it in one operator, without "
        "the matrix of scores in memory."
    )


def _layouts(rows: pd.DataFrame) -> str:
    """That copies into another layout take long, as a further sentence; else empty."""
    part = layout_part(rows)
    return f" {part.what[0].upper()}{part.what[1:]}." if part is not None else ""


def _serving(rows: pd.DataFrame, product: str, total_us: float) -> str:
    """What serves a product, as copies of its bias, if that takes much of the operators' time."""
    us = rows[(rows["op"] == product) & (rows["name"] != product)].groupby("name")["total_us"].sum()
    if us.empty or us.max() < MIN_SAVED_FRAC * total_us:
        return ""
    return f", with {us.idxmax()} within it ({percent(float(us.max()) / total_us)}),"


def first_call(run: Run, op: str, op_us: float = np.inf) -> str:
    """That nearly all of an operator's time is in its first calls; empty for others."""
    calls = first_calls_of(run, op, op_us)
    return f", {number(calls.us / 1e3, 'ms')} of it in its {calls.which}" if calls is not None else ""


WARM_UP = ": profile after a warm-up"


MIN_OF_CALLER_FRAC, ALL_OF_IT_FRAC, MIN_CALLERS_RATIO = 0.8, 0.99, 1.2
"""Shares of an operator's time in another one, or in a node of autograd, from which that is named, and from which it is
all of it; and how many times as long the other takes from which its own share is told."""
_USUAL_CALLERS = re.compile(
    r"(?i)linear|mm|matmul|conv|attention|einsum|embedding|contiguous|clone|reshape|zero|ones|full|empty|rand|like|"
    r"dropout|norm|lstm|gru|rnn|accumulate|copy|cat|stack|::to$|_to_|loss|pool|(?:select|slice|index)backward"
)
"""What operators are a part of as a matter of course, or what is told otherwise."""


def _caller(rows: pd.DataFrame, op: str, total_us: float) -> str:
    """The operator, or the node of autograd, in which another one has nearly all of its time, as part of a sentence;
    empty where that is a matter of course."""
    us = rows[rows["op"] == op].groupby("top_op")["total_us"].sum()
    caller = str(us.idxmax()) if len(us) else ""
    base = re.sub(r"(?:backward)?\d*$", "", caller.rpartition("::")[2].replace("_", "").lower())
    if not base or _USUAL_CALLERS.search(caller) is not None or us.max() < MIN_OF_CALLER_FRAC * us.sum():
        return ""
    its_us = float(rows["total_us"][rows["top_op"] == caller].sum())
    in_all = f", which takes {percent(its_us / total_us)}" if its_us >= MIN_CALLERS_RATIO * float(us.sum()) else ""
    if not in_all and base in op.replace("_", ""):
        return ""
    return f", {'all' if us.max() > ALL_OF_IT_FRAC * us.sum() else 'most'} of it in {caller}{in_all}"


MIN_OF_FEW_FRAC, MAX_FEW_FRAC = 0.9, 0.1
"""Share of an operator's time from which calls of one size are named, if they are no larger a share of its calls."""


def _few_calls(rows: pd.DataFrame) -> str:
    """The sizes of few calls of a product that take nearly all of its time."""
    shapes, calls = longest_name(rows, "in_shapes"), float(rows["count"].sum())
    of_shapes = rows[rows["in_shapes"] == shapes]
    us, few = float(of_shapes["total_us"].sum()), float(of_shapes["count"].sum())
    made = product(str(rows["op"].iloc[0]), shapes)
    if made is None or us < MIN_OF_FEW_FRAC * float(rows["total_us"].sum()) or few > MAX_FEW_FRAC * calls:
        return ""
    return f", nearly all of it in {few:,.0f} of its {calls:,.0f} calls ({format_sizes(made.sizes)})"


def _one_call(rows: pd.DataFrame) -> str:
    """That nearly all of an operator's time is in one of many calls; empty for others."""
    calls, longest_us = float(rows["count"].sum()), float(rows["longest_us"].max())
    if calls * MAX_FEW_FRAC < 1 or not longest_us >= MIN_OF_FEW_FRAC * float(rows["total_us"].sum()):
        return ""
    return f", nearly all of it in one of its {calls:,.0f} calls"


def _is_outside_first(run: Run, longest_us: float) -> bool:
    """Whether the time in which no operator runs is longer than the longest operator's and than that of loading."""
    loading, outside = loading_part(run), outside_part(run)
    loading_us = loading.us if loading is not None else 0.0
    return outside is not None and outside.us > longest_us and outside.us >= loading_us


def _outside_first(run: Run, ranges: str, operator: str) -> str:
    """The time in which no operator runs and the ranges that contain it, before the sentence on operators."""
    outside = outside_part(run)
    return "; ".join(filter(None, (outside.what if outside is not None else "", ranges, operator)))


def _beside_operators(run: Run, operator: str, longest_us: float) -> str:
    """The sentence on operators, with the time in which data is loaded. The longest comes first."""
    loading, outside = loading_part(run), outside_part(run)
    outside_us = outside.us if outside is not None else 0.0
    if loading is not None and loading.us > max(longest_us, outside_us):
        return f"{loading.what}; {operator}"
    if loading is not None:
        return f"{operator} Loading data takes {percent(loading.us / wall_us(cpu_windows(run)))} of the time."
    return operator
