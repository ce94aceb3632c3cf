"""The parts of a CPU's time in a trace that a change could save, in words: for the first sentence and for findings.

>>> pace_part(run, judged_rows(cpu_rows(run)))
CpuPart(code='shared-processor', us=6100000.0, what='6,100 of the 13,113 ms of operators (46.5 %) are what 43 calls …')
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.attention import SOFTMAX, has_attention_in_steps
from amp_core.analysis.performance.collectives import collective_rows
from amp_core.analysis.performance.kernels import kernel_rows, numbers_of_import, window_rows, without_ranges
from amp_core.analysis.performance.late_launches import IN_ONE_GAP, MIN_ONE_GAP_FRAC
from amp_core.analysis.performance.late_rank_savings import late_rank_saving
from amp_core.analysis.performance.layouts import layout_copies
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.part_gradients import part_gradients
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, longest_name
from amp_core.analysis.performance.training_part import ZEROING, takes_fused
from amp_core.findings.repeated_work import MIN_LOOP_FIRST_FRAC, loop_frac
from amp_core.findings.signals import facts, mappings
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent, size
from amp_core.traces.operators import is_range

MAX_OUTSIDE_FRAC = 0.5
"""With more of the time outside operators, that is told, before the longest operator."""
MIN_FUNCTION_FRAC = 0.2
"""Share of the time outside of operators from which the function with most of it is named."""
MIN_OPTIMIZER_FRAC = 0.25
"""Share of the time from which the optimizer comes before the longest operator, if it takes more."""
MAX_SMALL_US, MAX_SMALL_ROW_US, MIN_SMALL_FRAC = 5.0, 20.0, 0.75
"""Operators of less than the first on average, with that share of their time in those of less than the second, cost as
much to call as to compute: torch takes about a microsecond to dispatch one, and Python a few to call it."""
MAX_FUSED_CALLS = 8
"""Operators of an optimizer per step that fusing hardly makes fewer."""
_LOADING = "data loading"
_FUSED = ("aten::_fused_", "aten::_foreach_")


@dataclass(frozen=True)
class CpuPart:
    """A part of the time of a trace of a CPU."""

    code: str
    """Code of the finding."""
    us: float
    """How long it takes in all, or beyond what is usual, mean over the ranks; 0 where no change surely shortens it."""
    what: str
    """It, as a part of a sentence."""
    where: str
    """The operator, the function or the part of the program concerned."""
    is_fusible: bool = False
    """Of an optimizer: whether `fused=True` makes its operators fewer."""
    is_one_gap: bool = False
    """Of time in no operator: whether most of it is in one piece."""
    is_halted: bool = False
    """Of calls that take longer than equal ones: whether those that compute nothing took long, too, all at once."""
    is_of_assignments: bool = False
    """Of gradients of parts: whether these are assigned to."""
    count: int = 0
    """Of marked steps or passes that take unequally long: how many are compared."""


def cpu_windows(run: Run) -> pd.DataFrame:
    """Rows of `windows` whose sums are means over the ranks."""
    windows = window_rows(run)
    sums = [
        *("steps", "wall_us", "data_us", "idle_us", "idle_data_us", "optimizer_us", "host_function_us"),
        "idle_profiling_us",
    ]
    return windows.assign(**{name: windows[name] / max(1, windows["rank"].nunique()) for name in sums})


def wall_us(windows: pd.DataFrame) -> float:
    """The profiled time without the profiler's own work, microseconds."""
    return float(windows["wall_us"].sum() - np.nan_to_num(windows["idle_profiling_us"]).sum())


def cpu_rows(run: Run) -> pd.DataFrame:
    """Rows of `kernels`, allocations too, with sums that are means over the ranks."""
    rows = kernel_rows(run, everything=True)  # allocations start the device at their first call
    rows = rows[rows["phase"] != "watch"]
    ranks = max(1, window_rows(run)["rank"].nunique())
    return rows.assign(total_us=rows["total_us"] / ranks, count=rows["count"] / ranks)


def without_loading(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the operators that load data, where loading is told and these take much of the time of all."""
    others, all_us = rows[rows["phase"] != "data"], float(rows["total_us"].sum())
    takes = all_us - float(others["total_us"].sum()) >= MIN_SAVED_FRAC * all_us
    return others if loading_part(run) is not None and takes and len(others) else rows


def loading_part(run: Run) -> CpuPart | None:
    """Loading data; None where it takes little."""
    windows = cpu_windows(run)
    us, whole_us = float(np.nan_to_num(windows["data_us"]).sum()), wall_us(windows)
    if not us >= MIN_SAVED_FRAC * whole_us > 0:
        return None
    steps = float(windows["steps"].sum())
    each = f"{number(us / max(1.0, steps) / 1e3, 'ms')}{' per step' if steps else ''}"
    share = loading_in_operators(run)
    within = f", {percent(share)} of it in operators{_loading_operator(run)}" if share >= MIN_IN_OPERATORS_FRAC else ""
    return CpuPart(
        "waiting-for-data", us, f"loading data takes {percent(us / whole_us)} of the time ({each}){within}", _LOADING
    )


def hosts_loading_part(run: Run) -> CpuPart | None:
    """Loading data in a trace that lacks the device's work; None where it is not most of the host's time."""
    config = run.head.config
    us, frac = config.get("host_op_us"), config.get("host_op_frac")
    is_loading = config.get("host_part") == "data" and "launches_without_kernels" in config
    if not is_loading or not isinstance(us, int | float) or not isinstance(frac, int | float):
        return None
    if frac < MIN_LOADING_FIRST_FRAC:
        return None
    what = f"loading data takes {percent(frac)} of the host's time ({number(us / 1e3, 'ms')})"
    return CpuPart("waiting-for-data", us, what, _LOADING)


MIN_LOADING_FIRST_FRAC = 0.5
"""Share of the host's time in loading from which that is told before what the trace lacks."""


def loading_in_operators(run: Run) -> float:
    """The share of the time of loading in which operators run; 0 without loading."""
    windows = cpu_windows(run)
    us, outside_us = (float(np.nan_to_num(windows[name]).sum()) for name in ("data_us", "idle_data_us"))
    return 1 - outside_us / us if us > 0 else 0.0


def _loading_operator(run: Run) -> str:
    """The operator that takes longest while data is loaded, as part of a sentence; empty where none is told."""
    rows = cpu_rows(run)
    longest = longest_name(rows[rows["phase"] == "data"], "op")
    return f", most in {longest}" if longest else ""


MIN_IN_OPERATORS_FRAC = 0.5
"""Share of loading in operators from which faster or fewer of these shorten it."""


def _outside_us(run: Run) -> float:
    """Time in which no operator runs and no data is loaded, without the profiler's."""
    idle_us, idle_data_us, profiling_us = (
        float(np.nan_to_num(cpu_windows(run)[f"{name}_us"]).sum()) for name in ("idle", "idle_data", "idle_profiling")
    )
    return idle_us - idle_data_us - profiling_us


def waiting_part(run: Run) -> CpuPart | None:
    """Waiting of ranks for late ones in collectives of the host, or else these; None where they take little."""
    unit = "step" if float(window_rows(run)["steps"].fillna(0.0).sum()) else "profiled window"
    saving = late_rank_saving(run, unit) if window_rows(run)["rank"].nunique() > 1 else None
    if saving is None or saving.share < MIN_WAITING_FRAC:
        return _communicating(run)
    steps = float(cpu_windows(run)["steps"].fillna(0.0).sum())
    what = f"{saving.what[0].lower()}{saving.what[1:]} ({saving.how_much(unit)})"
    return CpuPart("exposed-communication", saving.saved_us * max(1.0, steps), what, saving.where)


MIN_WAITING_FRAC = 0.1
"""Share of the step from which such waiting comes first: other savings of the ranks that wait end at it."""
MIN_COMMUNICATING_FRAC, MAX_COMMUNICATING_FRAC = 0.2, 0.5
"""The same of collectives beside which no operator runs, and share of them from which a GPU would not help."""


def _communicating(run: Run) -> CpuPart | None:
    """Collectives of the host beside which no operator runs; None where they take little."""
    rows, whole_us = collective_rows(run), wall_us(cpu_windows(run))
    rows = rows[rows["alone_us"] > 0]
    us = float(rows["alone_us"].sum()) / max(1, window_rows(run)["rank"].nunique())
    if rows.empty or us < MIN_COMMUNICATING_FRAC * whole_us:
        return None
    _, most = max(rows.groupby("name"), key=lambda one: float(one[1]["alone_us"].sum()))
    bytes_ = most["message_bytes"].max()  # which of them holds up the others is not known
    up_to = "up to " if most["message_bytes"].nunique() > 1 else ""
    kind = str(most["name"].iloc[0]).replace("_", "-") + (f" of {up_to}{size(bytes_)}" if bytes_ > 0 else "")
    share = percent(float(most["alone_us"].sum() / rows["alone_us"].sum()))
    kinds = "messages between ranks" if most["name"].iloc[0] in ("send", "recv") else "collectives"
    what = f"{kinds} take {percent(us / whole_us)} of the time, with no operator beside them, {share} of that in {kind}"
    return CpuPart("exposed-communication", us, what, str(most["kernel"].iloc[0]))


def outside_part(run: Run) -> CpuPart | None:
    """The time in which no operator runs, no rank waits in a collective alone, and no data is loaded; None if it is
    less than half of all."""
    communicating = _communicating(run)
    windows, outside_us = cpu_windows(run), _outside_us(run) - (communicating.us if communicating is not None else 0.0)
    whole_us, data_us = wall_us(windows), float(np.nan_to_num(windows["data_us"]).sum())
    if outside_us <= MAX_OUTSIDE_FRAC * whole_us or whole_us <= 0:
        return None
    us = windows[windows["host_function"] != ""].groupby("host_function")["host_function_us"].sum()
    named = len(us) > 0 and us.max() >= MIN_FUNCTION_FRAC * outside_us
    within = f", {number(float(us.max()) / 1e3, 'ms')} of it in {us.idxmax()}" if named else ""
    gap_us = float(window_rows(run)["longest_idle_us"].fillna(0.0).max())
    is_one_gap = not named and gap_us >= MIN_ONE_GAP_FRAC * outside_us
    if is_one_gap:
        within = f", {number(gap_us / 1e3, 'ms')} {IN_ONE_GAP}"
    what = (
        f"no operator runs for {percent(outside_us / whole_us)} of the {number(whole_us / 1e3, 'ms')}"
        f"{', beside loading data' if data_us >= MIN_SAVED_FRAC * whole_us else ''}, but Python or other code{within}"
    )
    where = str(us.idxmax()) if named else "Python"
    return CpuPart("python-outside-operators", outside_us, what, where, is_one_gap=is_one_gap)


def optimizer_part(run: Run, rows: pd.DataFrame) -> CpuPart | None:
    """The optimizer's steps; None if they take little. Of `cpu_rows`."""
    windows = cpu_windows(run)
    stepping = rows[(rows["phase"] == "optimizer") & ~rows["top_op"].isin(ZEROING)]
    us, whole_us, whole = float(stepping["total_us"].sum()), float(rows["total_us"].sum()), "of the operators' time"
    if (marked_us := float(windows["optimizer_us"].sum())) > 0:  # with the Python between the operators
        us, whole_us, whole = marked_us, wall_us(windows), "of the time"
    if us <= MIN_OPTIMIZER_FRAC * whole_us:
        return None
    steps = float(windows["steps"].sum())
    calls = number(stepping["count"].sum() / max(steps, 1)) + (" operators per step" if steps else " operators")
    is_fusible = bool(
        takes_fused(run)
        and not stepping["name"].str.startswith(_FUSED).any()
        and float(stepping["count"].sum()) > MAX_FUSED_CALLS * max(steps, 1)
    )
    each = f"{number(us / max(steps, 1) / 1e3, 'ms')}{' per step' if steps else ''}"
    what = f"the optimizer takes {percent(us / whole_us)} {whole} ({each}), in {calls}"
    return CpuPart("unfused-optimizer", us, what, "optimizer", is_fusible)


def judged_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of the program's ranges, unless one of them is the longest of all."""
    if rows.empty:
        return rows
    name, _ = longest_operator(rows)
    return rows if is_range(name) and rows["op"].str.contains("::").any() else without_ranges(rows)


def longest_operator(rows: pd.DataFrame) -> tuple[str, float]:
    """The name of the operator with most of the time, and that time, within other operators too."""
    us = rows.groupby("op")["total_us"].sum()
    name = str(us.idxmax())
    return name, max(float(us.max()), float(rows["total_us"][rows["name"] == name].sum()))


def pace_part(run: Run, rows: pd.DataFrame) -> CpuPart | None:
    """That the processor is shared, or that calls cost more than what they compute; None for neither. Of
    `judged_rows`."""
    shared = _slow_calls(run, float(rows["total_us"].sum())) or _slow_steps(run)
    if shared is not None and shared.us < MIN_SAVED_FRAC * wall_us(cpu_windows(run)):
        shared = None  # a program that mostly waits, or runs Python, gains nothing by an even processor
    is_of_loop = loop_frac(run) >= MIN_LOOP_FIRST_FRAC  # which is a finding of its own
    return shared or (None if is_of_loop else _costly_calls(run, rows))


def _slow_steps(run: Run) -> CpuPart | None:
    """That steps of the same operators take unequally long."""
    names = ("us", "of_us", "least_us", "most_us", "count")
    us, of_us, least_us, most_us, count = numbers_of_import(run, "slow_steps", *names)
    if us <= 0:
        return None
    kind = "pass" if facts(run.head.config, "slow_steps").get("of_passes") is True else "step"
    what = (
        f"the same operators take {number(least_us / 1e3)} to {number(most_us / 1e3, 'ms')} per {kind} after the "
        f"first, {number(us / 1e3)} of {number(of_us / 1e3, 'ms')} beyond the pace of the fastest quarter of them: the "
        "processor is shared or throttled, or has fewer cores than the program and its workers have threads"
    )
    return CpuPart("shared-processor", us, what, "processor", count=int(count))


def _slow_calls(run: Run, total_us: float) -> CpuPart | None:
    """That equal calls take far longer now and then; of several ranks, on the first. `total_us`: the time of all, for
    runs that older versions imported."""
    names = ("count", "us", "of_us", "longest_us", "usual_us")
    count, us, of_us, longest_us, usual_us = numbers_of_import(run, "slow_calls", *names)
    of_us = of_us if of_us > 0 else total_us
    if count < 1 or us <= 0 or of_us <= 0:
        return None
    ranks = window_rows(run)["rank"]
    of_rank = f" of rank {ranks.min():.0f}" if ranks.nunique() > 1 else ""
    op = str(facts(run.head.config, "slow_calls").get("op"))
    by_passes = facts(run.head.config, "slow_calls").get("by_passes") is True
    by_fastest = facts(run.head.config, "slow_calls").get("by_fastest") is True
    by_steps = facts(run.head.config, "slow_calls").get("by_steps") is True
    than = "the fastest quarter of the same call" if by_passes else "the median of their operator and sizes"
    than = "the fastest of the same call in other steps" if by_steps else than
    than = "the fastest tenth of their operator and sizes" if by_fastest else than
    one = f"one of {op} {number(longest_us / 1e3)} instead of {number(usual_us / 1e3, 'ms')}"
    (halted_us,) = numbers_of_import(run, "slow_calls", "halted_us")
    why = "the processor is shared or throttled, or has fewer cores than the program has threads"
    if halted_us > 0:
        why = f"nearly all of it in {number(halted_us / 1e3, 'ms')} in which the process stood still"
    what = (
        f"{number(us / 1e3)} of the {number(of_us / 1e3, 'ms')} of operators{of_rank} ({percent(us / of_us)}) are what "
        f"{count:,.0f} calls take beyond {than}, {one}: {why}"
    )
    return CpuPart("shared-processor", us, what, "processor", is_halted=halted_us > 0)


def _costly_calls(run: Run, rows: pd.DataFrame) -> CpuPart | None:
    """That calls of operators cost most of the time, whatever they compute."""
    count, each_us = numbers_of_import(run, "call_cost", "count", "each_us")
    total_us, calls = float(rows["total_us"].sum()), float(rows["count"].sum())
    own_us = float(without_ranges(rows)["total_us"].sum())
    if count >= 1 and each_us > 0 and own_us > 0:
        what = (
            f"{count:,.0f} calls of operators by others cost {number(each_us, 'µs')} each, "
            f"{percent(count * each_us / own_us)} of the operators' time, "
            "whatever they compute: time the program without the profiler, and call fewer operators, on more data each"
        )
        return CpuPart("costly-calls", count * each_us, what, "operators")
    is_small = rows["total_us"] < MAX_SMALL_ROW_US * rows["count"]
    small_us = float(rows["total_us"][is_small].sum())
    if calls <= 0 or total_us / calls >= MAX_SMALL_US or small_us < MIN_SMALL_FRAC * total_us:
        return None
    what = (
        f"{calls:,.0f} operators take {number(total_us / calls, 'µs')} each on average, about what it costs to call "
        f"them{_and_outside(run)}: batch what they compute, or compile it"
    )
    return CpuPart("costly-calls", 0.0, what, "operators")  # how much of it calling takes is not known


def _and_outside(run: Run) -> str:
    """That Python takes much of the time between them, as part of a sentence; else empty."""
    share = _outside_us(run) / max(wall_us(cpu_windows(run)), 1e-3)
    return f", and none runs for {percent(share)} of the time" if share >= MIN_OUTSIDE_FRAC else ""


MIN_OUTSIDE_FRAC = 0.2
"""Share of the time outside of small operators from which it is told with them."""


def fp64_part(rows: pd.DataFrame) -> CpuPart | None:
    """Operators on FP64 tensors; None if they take less than half of the operators' time, and without dtypes. Of
    `judged_rows`."""
    first = rows["in_dtypes"].str.extract(f"({_ANY_DTYPE})", expand=False)
    of_fp64, total_us = rows[first == '"double"'], float(rows["total_us"].sum())
    us = float(of_fp64["total_us"].sum())
    if us < MIN_FP64_FRAC * total_us or total_us <= 0:
        return None
    what = f"operators on FP64 tensors take {percent(us / total_us)} of the operators' time"
    return CpuPart("fp64-operators", us / 2, what, "operators")


MIN_FP64_FRAC = 0.5
_ANY_DTYPE = r'"(?:double|float|c10::\w+|__half)"'


def layout_part(rows: pd.DataFrame) -> CpuPart | None:
    """Copies into another layout; None where they take little. Of `judged_rows`."""
    copies, total_us = layout_copies(rows), float(rows["total_us"].sum())
    us = float(copies["total_us"].sum())
    if not us >= MIN_LAYOUT_FRAC * total_us > 0:
        return None
    op = longest_name(copies, "top_op")
    what = f"copies into another layout take {percent(us / total_us)} of the operators' time, most in {op}"
    return CpuPart("layout-copies", us, what, op)


MIN_LAYOUT_FRAC = 0.1
"""Share of such copies in the operators' time from which they are told."""


def attention_part(rows: pd.DataFrame) -> CpuPart | None:
    """Attention that is computed in steps; None where it is not or takes little. Of `judged_rows`."""
    if not has_attention_in_steps(rows):
        return None
    total_us, softmax_us = (float(part["total_us"].sum()) for part in (rows, rows[rows["op"] == SOFTMAX]))
    us = softmax_us + float(rows["total_us"][rows["op"].isin(["aten::bmm", "aten::baddbmm"])].sum())
    if us < MIN_ATTENTION_FRAC * total_us:
        return None
    what = f"attention is computed in steps, {SOFTMAX} alone {percent(softmax_us / total_us)}"
    return CpuPart("attention-in-steps", softmax_us, what, SOFTMAX)


MIN_ATTENTION_FRAC = 0.2
"""Share of attention in steps in the operators' time from which it is told."""


SLOW_CONVOLUTIONS = ("aten::_slow_conv2d", "aten::slow_conv", "aten::thnn_conv2d")
"""Of the backends that aten/src/ATen/native/Convolution.cpp selects among, the last one on a CPU."""


def convolution_part(rows: pd.DataFrame) -> CpuPart | None:
    """Convolutions that oneDNN does not compute; None where they take little. Of `cpu_rows`."""
    slow, total_us = rows[rows["op"].str.startswith(SLOW_CONVOLUTIONS)], float(rows["total_us"].sum())
    us = float(slow["total_us"].sum())
    if not us >= MIN_SAVED_FRAC * total_us > 0 or has_onednn(rows):
        return None
    op = longest_name(slow, "op")
    of_op = percent(float(slow["total_us"][slow["op"] == op].sum()) / total_us)
    most = f"{of_op} in {op}" if (slow["op"] != op).any() else f"all in {op}"
    what = f"convolutions without oneDNN take {percent(us / total_us)} of the operators' time, {most}"
    return CpuPart("fallback-convolution", us, what, op)


def part_gradients_part(rows: pd.DataFrame) -> CpuPart | None:
    """Gradients of parts of tensors; None where they take little. Of `cpu_rows`."""
    found, total_us = part_gradients(rows), float(rows["total_us"].sum())
    if found is None or found.saved_us < MIN_SAVED_FRAC * total_us:
        return None
    share = f"{percent(found.us / total_us)} of the operators' time"
    what = found.in_words(share, found.parts)
    return CpuPart("part-gradients", found.saved_us, what, found.op, is_of_assignments=found.are_assigned)


def has_onednn(rows: pd.DataFrame) -> bool:
    """Whether oneDNN computes other convolutions of the trace: torch computes single, small inputs without it."""
    return bool(rows["op"].eq("aten::mkldnn_convolution").any() or rows["name"].eq("aten::mkldnn_convolution").any())


def on_macos(run: Run) -> bool:
    """Whether a trace is one of macOS."""
    return run.head.config.get("on_macos") is True


def without_onednn(run: Run, rows: pd.DataFrame, op: str) -> str:
    """Why a convolution of a CPU may be none of oneDNN's, as a sentence."""
    if on_macos(run):
        return (
            "It is the convolution that torch takes on a Mac with a processor of Apple's, where it has no oneDNN: move "
            'the model to the device "mps".'
        )
    lacks = not rows["in_dtypes"][rows["op"] == op].str.contains('"float"').any()  # which oneDNN always has
    why = "missing, disabled, or lacks the dtype" if lacks else "missing or disabled"
    return f"It is the convolution that torch takes where oneDNN is {why}: check torch.backends.mkldnn.is_available()."


def unused_gpu(run: Run) -> CpuPart | None:
    """That the machine has a GPU of which the trace has nothing; None for others, and where ranks mostly communicate
    between hosts. Its time is 0: nothing is known."""
    gpus = mappings(run.head.environment, "gpus")
    name = str(gpus[0].get("name", "")) if gpus else ""
    communicating = _communicating(run)  # by a backend that takes tensors of the host alone
    if not name or (
        communicating is not None and communicating.us >= MAX_COMMUNICATING_FRAC * wall_us(cpu_windows(run))
    ):
        return None
    if kernel_rows(run)["op"].str.startswith(_QUANTIZED).any():
        return CpuPart("idle-gpu", 0.0, f"The machine's GPU, {name}, {NOT_USED}: {ON_CPUS_ALONE}", name)
    computes = is_matrix(kernel_rows(run)).any()
    held, has = run.head.config.get("host_peak_bytes"), gpus[0].get("memory_bytes")
    if computes and isinstance(held, int) and isinstance(has, int) and held > has > 0:
        why = f"{NOT_USED}, and its {size(has)} {TOO_SMALL} the {size(held)} that tensors take at once"
        return CpuPart("idle-gpu", 0.0, f"The machine's GPU, {name}, {why}: compute in parts on it", name)
    is_on_host = isinstance(held, int) or run.head.config.get("unused_device") is True
    if (computes and is_on_host) or kernel_rows(run)["op"].str.contains(_OF_THE_CPU).any():
        return CpuPart("idle-gpu", 0.0, f"The machine's GPU, {name}, {NOT_USED}: move the model to it", name)
    do = "record its activity, or move the model to it" if computes else "record its activity, if the program uses it"
    return CpuPart("idle-gpu", 0.0, f"The machine's GPU, {name}, has nothing in the trace: {do}", name)


_QUANTIZED = ("quantized::", "onednn::q")
"""What the names of operators on quantized tensors begin with, which torch has for CPUs."""
ON_CPUS_ALONE = "the quantized operators here run on a CPU alone, so move the model from before quantization to it"
NOT_USED, TOO_SMALL = "is not used", "cannot hold"
_OF_THE_CPU = r"mkldnn|onednn|_for_cpu$"
"""In the names of operators that run on a CPU alone."""
