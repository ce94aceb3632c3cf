"""Typed rows of the tables `kernels` and `windows`, of one or all windows.

    rows = kernel_rows(run)                 # without AMPscope's own kernels, null texts as ""
    windows = window_rows(run, step=50)     # those that begin at step 50

If another program recorded operators of the CPU beside kernels of a GPU, only the kernels are kept.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gemm_shapes import is_matrix_op, product, tensor_shapes
from amp_core.hardware.kernel_names import COPIES, GEMM_CATEGORIES
from amp_core.store.run import Run
from amp_core.traces.collect import COMPILING
from amp_core.traces.operators import is_compiled_code, is_range
from amp_core.traces.replay import REACHES

_TEXTS = (
    *("name", "tensor_core", "precision", "op", "top_op", "module", "phase", "device", "category", "in_shapes"),
    *("in_dtypes", "serves"),
)
_NUMBERS = (
    *("step", "steps", "count", "total_us", "rank", "longest_us", "beside_us", "counted_us", "moved_bytes"),
    "lone_us",
    "scores_us",
    "fused_away_us",
    "op_calls",
    "causal_count",
)
_FUNCTIONS = ("host_function", "data_function", "longer_function")
_HOST_TEXTS = (
    "host_op",
    "host_call",
    "host_call_kind",
    "host_call_op",
    "host_rest_op",
    "host_kernel",
    "host_range",
    "host_between",
)
_WINDOW_NUMBERS = (
    "step",
    "steps",
    "wall_us",
    "busy_us",
    "idle_us",
    "data_us",
    "idle_data_us",
    "optimizer_us",
    "watch_us",
    "kernel_us",
    "launches",
    "cast_us",
    "communication_us",
    "communication_alone_us",
    "idle_between_collectives_us",
    "copies_alone_us",
    "syncs",
    "last_syncs",
    "sync_us",
    "rank",
    "idle_sync_us",
    "idle_syncs",
    "idle_wait_us",
    "idle_wait_lost_us",
    "idle_latency_us",
    "idle_filling_us",
    "idle_late_start_us",
    "idle_graph_us",
    "idle_profiling_us",
    "idle_dispatch_us",
    "idle_elsewhere_us",
    "idle_copy_us",
    "idle_copy_sync_us",
    "idle_between_waits_us",
    "launches_between_waits",
    "host_op_us",
    "host_function_us",
    "host_function_launches",
    "data_function_us",
    "host_call_us",
    "lead_us",
    "lead_data_us",
    "products",
    "host_call_op_us",
    "host_rest_op_us",
    "host_kernel_us",
    "host_range_us",
    "host_us",
    "idle_sync_op_us",
    "idle_wait_op_us",
    "idle_wait_sync_us",
    "host_outside_us",
    "host_between_us",
    "alone_loading_us",
    "longest_idle_us",
    "longer_gap_steps",
    "longer_optimizer_us",
    "longer_function_us",
    "longer_function_launches",
    "late_until_us",
    "lead_outside_us",
    "began_us",
    "pause_us",
    *REACHES,
    "unwaited_us",
    "unwaited_op_us",
    "unwaited_alone_us",
    "optimizer_sooner_us",
)


def is_compiled(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which kernels of a trace ran in compiled code: the compiler's own, and those that it calls."""
    of_compiler = rows["name"].str.match(r"triton_\w+_fused") | rows["op"].str.match(r"triton_\w+_fused")
    return of_compiler | rows["top_op"].map(is_compiled_code).astype(bool)


def is_compiled_in_part(run: Run) -> bool:
    """Whether part of a model is taken to be compiled, by the number of its kernels that run in compiled code, or that
    the host launches from it."""
    rows, launched_frac = kernel_rows(run), run.head.config.get("compiled_launch_frac")
    if isinstance(launched_frac, float) and launched_frac >= MIN_COMPILED_FRAC:
        return True
    return bool(rows["count"].where(is_compiled(rows), 0.0).sum() >= MIN_COMPILED_FRAC * rows["count"].sum() > 0)


SOFTMAX = "aten::_softmax"
PRODUCTS_OF_BATCHES = ("aten::bmm", "aten::baddbmm")
MIN_SOFTMAX_FRAC = 0.25
"""Time of softmax over that of the products of batches from which they are taken for attention."""
MAX_SCORES_RATIO = 2.0
"""Values of a softmax over those of a product of batches, or the other way round, up to which it may be of these: a
model may add a column to its scores, or leave padding out."""


def has_attention_in_steps(rows: pd.DataFrame) -> bool:
    """Whether rows of kernels compute attention in steps: a softmax of scores takes long beside products of batches."""
    products_us = float(rows["total_us"][rows["op"].isin(PRODUCTS_OF_BATCHES)].sum())
    return products_us > 0 and softmax_of_scores_us(rows) >= MIN_SOFTMAX_FRAC * products_us


def softmax_of_scores_us(rows: pd.DataFrame) -> float:
    """The time of softmax that may be of the scores of attention, microseconds: these are what a product of batches
    makes. Others, as of experts, have other sizes. Of sizes that were not recorded, all of it."""
    softmax, products = rows[rows["op"] == SOFTMAX], rows[rows["op"].isin(PRODUCTS_OF_BATCHES)]
    made = [product(op, sizes) for op, sizes in products[["op", "in_shapes"]].drop_duplicates().itertuples(index=False)]
    scores = [one.batch * one.sizes["M"] * one.sizes["N"] for one in made if one is not None]
    values = [math.prod(next(iter(tensor_shapes(sizes)), ())) for sizes in softmax["in_shapes"]]
    is_of_scores = [
        sizes == "" or not scores or any(many <= MAX_SCORES_RATIO * one <= MAX_SCORES_RATIO**2 * many for one in scores)
        for sizes, many in zip(softmax["in_shapes"], values, strict=True)
    ]
    return float(softmax["total_us"][is_of_scores].sum())


@dataclass(frozen=True)
class FirstCalls:
    """The first calls of an operator, where these take nearly all of its time."""

    op: str
    us: float
    """How long they take together, microseconds."""
    count: int

    @property
    def which(self) -> str:
        """`first call`, `first 2 calls`."""
        return "first call" if self.count == 1 else f"first {self.count} calls"


def all_first_calls(run: Run) -> list[FirstCalls]:
    """The first calls that take nearly all of their operators' time and much of the trace, the longest first."""
    config = run.head.config.get("first_calls")
    found = []
    for op, value in config.items() if isinstance(config, dict) else ():
        us, count = value if isinstance(value, list | tuple) and len(value) == 2 else (value, 1)  # of older versions
        if isinstance(us, int | float) and isinstance(count, int):
            found.append(FirstCalls(str(op), float(us), count))
    return sorted(found, key=lambda calls: -calls.us)


def first_calls_of(run: Run, op: str, op_us: float = np.inf) -> FirstCalls | None:
    """The first calls of an operator, if they are most of `op_us` of its time; else None."""
    calls = next((calls for calls in all_first_calls(run) if calls.op == op), None)
    return calls if calls is not None and MOST_OF_FIRST_FRAC * calls.us <= op_us else None


MOST_OF_FIRST_FRAC = 0.5
"""Of a first call with nine tenths of an operator's time: a part of that time which is this long is mostly in it."""
MIN_COMPILED_FRAC = 0.1
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
"""Those of torch that take `fused=True`."""


MIN_BACKWARD_FRAC = 0.1
"""Share of backward in the time or in the number of kernels from which a program trains though no optimizer runs, no
gradient is accumulated as by `backward()`, and none is of a layer: a simulation may ask for the gradient of a few
operators."""
_OF_LAYERS = r"(?:Addmm|\bMm|Linear|Convolution\w*|(?:Batch|Layer|Group|Rms|RMS)Norm|Embedding)Backward"
"""Backward of operators with parameters."""


def in_training(run: Run, rows: pd.DataFrame) -> bool:
    """Whether rows of kernels are of a training: with an optimizer, or with enough of backward."""
    if (rows["phase"] == "optimizer").any():
        return True
    back = rows["phase"] == "backward"
    of_layers = rows["top_op"].str.contains(_OF_LAYERS)
    if run.head.config.get("accumulates_gradients") is True or (back & of_layers).any():
        return bool(back.any())
    parts = [rows[name].astype(float) for name in ("total_us", "count")]
    return any(part[back].sum() >= MIN_BACKWARD_FRAC * part.sum() > 0 for part in parts)


ZEROING = ("aten::zero_", "aten::_foreach_zero_")
"""Operators of `zero_grad(set_to_none=False)`, which fill tensors that exist already."""


def optimizer_frac(rows: pd.DataFrame) -> float:
    """The share of the optimizer in the launches of kernels, without the fills of gradients."""
    stepping = (rows["phase"] == "optimizer") & ~rows["top_op"].isin(ZEROING)
    return float(rows["count"][stepping].sum() / max(1.0, rows["count"].sum()))


def takes_fused(run: Run) -> bool:
    """Whether an optimizer of a trace may take `fused=True`; also where the trace names none."""
    names = run.head.config.get("optimizers")
    return not isinstance(names, list) or not names or any(name in FUSED_OPTIMIZERS for name in names)


def is_compiled_without_fusion(run: Run) -> bool:
    """Whether a model is compiled as one graph whose backend launches one kernel per operator: one call of compiled
    code per step, which launches many kernels, none of them fused."""
    rows, windows, config = kernel_rows(run), window_rows(run), run.head.config
    calls, launched_frac = config.get("compiled_calls"), config.get("compiled_launch_frac")
    if not isinstance(calls, int) or not isinstance(launched_frac, float) or not calls:
        return False
    ranks = max(1, windows["rank"].nunique())
    steps = max(1.0, float(windows["steps"].sum()) / ranks)
    in_each = launched_frac * float(rows["count"].sum()) / ranks / calls
    fused = rows["name"].str.contains("triton", regex=False) | rows["op"].str.startswith("triton_")
    return calls <= steps and in_each >= MIN_COMPILED_LAUNCHES and not fused.any()


def is_one_graph(run: Run) -> bool:
    """Whether the compiled code of a trace is one graph, called once or with one number, so that no break shows."""
    return run.head.config.get("compiled_calls") == 1 or run.head.config.get("compiled_regions") == 1


def replays_unfused_graphs(run: Run) -> bool:
    """Whether each call of compiled code launches a graph whose kernels are torch's own, one per operator, as those of
    the backend `cudagraphs`."""
    launches, calls = (run.head.config.get(name) for name in ("graph_launches", "compiled_calls"))
    if not isinstance(launches, int) or not isinstance(calls, int) or not launches >= calls > 0:
        return False
    return not kernel_rows(run)["name"].str.contains("triton", regex=False).any()


MIN_COMPILED_LAUNCHES = 10.0
"""Launches of one call of compiled code from which some of them could be fused."""


def kernel_rows(run: Run, step: int | None = None, everything: bool = False) -> pd.DataFrame:
    """Rows of `kernels` with total_us above 0, of the window that begins at `step` or of all; null texts are "".

    Kernels launched outside of the windows are left out.

    `tensor_core` is yes, no, unknown, or "" on a CPU. There, what serves a product has that as `op`. Unless
    `everything` is true, kernels of watching itself, copies and fills are left out.
    """
    return run.cached_frame(["kernels"], _kernel_rows, step, everything)


def _kernel_rows(run: Run, step: int | None, everything: bool) -> pd.DataFrame:
    frame = _typed(run.kernels, _TEXTS, _NUMBERS)
    if frame.empty:
        return frame
    frame = _with_what_serves(frame)
    frame["total_us"] = frame["total_us"].where(np.isfinite(frame["total_us"]), 0.0)
    frame = frame[(frame["total_us"] > 0) & _chosen(frame, step)]
    if frame["step"].notna().any():  # in a trace with marked steps, a row without a step was launched outside of them
        frame = frame[frame["step"].notna()]
    if not everything:
        frame = frame[(frame["phase"] != "watch") & ~frame["category"].isin(COPIES)]
    on_cpu = frame["device"].str.startswith("cpu")
    frame = _accelerators_alone(frame)
    known = frame["tensor_core"].isin(["yes", "no", "unknown", ""])
    frame["tensor_core"] = frame["tensor_core"].where(known, "unknown").where(~on_cpu, "")
    return frame.reset_index(drop=True)


def _with_what_serves(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of what serves a product, as the copy of its bias, with that product as `op`, and its category."""
    serving = frame["serves"] != ""
    if not serving.any():
        return frame
    own = frame[~serving].drop_duplicates("name").set_index("name")["category"]
    frame["op"] = frame["op"].mask(serving, frame["serves"])
    frame["category"] = frame["category"].mask(serving, frame["serves"].map(own).fillna("gemm"))
    return frame


def window_rows(run: Run, step: int | None = None) -> pd.DataFrame:
    """Rows of `windows` of the window that begins at `step`, or of all; only those of GPUs if there are any. The wait
    before the first kernel is part of a window of several steps."""
    return run.cached_frame(["windows"], _window_rows, step)


def _window_rows(run: Run, step: int | None) -> pd.DataFrame:
    texts = (
        "device",
        "device_name",
        "sync_op",
        "idle_sync_op",
        "idle_wait_op",
        "unwaited_op",
        *_HOST_TEXTS,
        *_FUNCTIONS,
    )
    frame = _typed(run.windows, texts, _WINDOW_NUMBERS)
    if frame.empty:
        return frame
    frame = _accelerators_alone(frame[_chosen(frame, step)]).reset_index(drop=True)
    return _with_first_wait(frame)


def _with_first_wait(frame: pd.DataFrame) -> pd.DataFrame:
    """Windows of several steps with the wait before the first kernel, as before those of the other steps: the mean is
    then the time from step to step. One step alone is as long as the device marks it."""
    several = frame["steps"] > 1
    lead, data = (frame[name].where(several, 0.0).fillna(0.0) for name in ("lead_us", "lead_data_us"))
    for name, more in (("wall_us", lead), ("idle_us", lead), ("idle_data_us", data)):
        frame[name] = frame[name] + more
    for name in ("lead_us", "lead_outside_us"):
        frame[name] = frame[name].mask(several, 0.0)
    frame["lead_data_us"] = frame["lead_data_us"].mask(several & frame["lead_data_us"].notna(), 0.0)
    return frame


def is_trace(run: Run) -> bool:
    """Whether the run was imported from traces of torch.profiler."""
    return run.head.config.get("format") == "torch.profiler"


def holds_collectives_alone(run: Run) -> bool:
    """Whether a trace holds collectives and nothing else, as one from which the rest was removed: whether a device
    computes beside and between them is unknown."""
    rows = kernel_rows(run, everything=True)
    without = is_trace(run) and run.head.config.get("without_operators") is True
    return bool(without and len(rows) and (rows["category"] == "communication").all())


def traced_step_us(run: Run) -> float | None:
    """Mean wall time of a step in an imported trace, over its windows, in microseconds, of a CPU without the profiler's
    own work; None for other runs and where the trace has no step markers."""
    if run.head.config.get("source") != "import":
        return None
    windows = window_rows(run)
    steps, wall = float(windows["steps"].sum()), float(windows["wall_us"].sum())
    if windows["device"].str.startswith("cpu").all():
        wall -= float(windows["idle_profiling_us"].fillna(0.0).sum())
    return wall / steps if steps > 0 and np.isfinite(wall) else None


def _accelerators_alone(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of a CPU, where others are among them."""
    on_cpu = frame["device"].str.startswith("cpu")
    return frame[~on_cpu] if not on_cpu.all() else frame


def on_cpu(rows: pd.DataFrame) -> bool:
    """Whether the rows of `kernel_rows` are operators of a CPU."""
    return bool(len(rows)) and bool((rows["tensor_core"] == "").all())


def call_counts(rows: pd.DataFrame) -> "pd.Series[float]":
    """Of each row, by how many calls of its operator: 0 of what serves a product on a CPU, which is no call of it."""
    serves = (rows["tensor_core"] == "") & (rows["op"] != "") & (rows["op"] != rows["name"])
    return rows["count"].where(~serves, 0.0)


def without_ranges(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a CPU without the ranges of the program's own among its operators: what these take beside operators
    is none's. Those of compiling, and of compiled code, stay."""
    if not rows["op"].str.contains("::").any():  # operators of PyTorch up to 1.4 look like ranges
        return rows
    keeps = rows["op"].str.endswith(COMPILING) | rows["op"].map(is_compiled_code).astype(bool)
    return rows[~rows["op"].map(is_range).astype(bool) | keeps]


def is_matrix(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows are kernels that multiply matrices; those on tensor cores do, whatever their category."""
    by_name = (rows["category"] == "") & rows["op"].map(is_matrix_op).astype(bool)  # from other programs
    return rows["category"].isin(GEMM_CATEGORIES) | (rows["tensor_core"] == "yes") | by_name


def multiplies(rows: pd.DataFrame) -> bool:
    """Whether any row of kernels multiplies matrices, or may do so."""
    return bool(is_matrix(rows).any() or (rows["tensor_core"] == "unknown").any())


MAIN_RANK_RATIO = 10.0
"""Without step markers the ranks of a trace do the same for equally long; one whose window lasts that many times as
long as that of each other does something else, and a mean over them tells of none. The same of the devices of one
process, by their work."""


def main_rank(run: Run) -> int | None:
    """The rank that alone has nearly all of the profiled time; None for one rank, with marked steps, or where others
    have as much."""
    windows = window_rows(run)
    windows = windows[np.isfinite(windows["wall_us"])]
    us = windows.groupby("rank")["wall_us"].sum().sort_values()
    if len(us) < 2 or windows["steps"].sum() > 0 or us.iloc[-1] < MAIN_RANK_RATIO * us.iloc[-2]:
        return None
    return int(us.index[-1])


def main_device(run: Run) -> str | None:
    """The device that alone does nearly all of the work where one process uses several; None for others."""
    windows, rank = window_rows(run), main_rank(run)
    windows = windows if rank is None else windows[windows["rank"] == rank]
    us = windows.groupby("device")["busy_us"].sum().sort_values()
    if windows["rank"].nunique() > 1 or len(us) < 2 or us.iloc[-1] < MAIN_RANK_RATIO * us.iloc[-2]:
        return None
    return str(us.index[-1])


def of_main(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows, with columns `rank` and `device`, of the rank and of the device that do nearly all, if one does."""
    rank, device = main_rank(run), main_device(run)
    frame = frame if rank is None else frame[frame["rank"] == rank]
    return frame if device is None else frame[frame["device"] == device]


MAX_TINY_BYTES, MIN_TINY_COPIES, MIN_TINY_FRAC = 64.0, 50.0, 0.1
"""Copies to the host of no more bytes read single values; from that many per step (or window) on, and that share of all
launches, they are a loop."""
MIN_OF_WAITS_FRAC, MAX_BETWEEN_VALUES = 0.8, 5.0
"""They are one, too, where so many of the host's waits are theirs, with few launches between two of them: an engine
reads a token after each pass."""


def tiny_copies(run: Run) -> tuple[float, float]:
    """How many copies to the host per step (or window) read single values, and their bytes on average; 0 for few."""
    rows, windows = kernel_rows(run, everything=True), window_rows(run)
    rows = rows[(rows["category"] == "memcpy") & rows["name"].str.contains(TO_HOST) & (rows["moved_bytes"] > 0)]
    rows = rows[rows["moved_bytes"] <= MAX_TINY_BYTES * rows["count"]]
    count = float(rows["count"].sum())
    per_step = count / max(1.0, float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))
    is_loop = count >= MIN_TINY_FRAC * float(windows["launches"].sum())
    few = bool((windows["launches_between_waits"].fillna(0.0) <= MAX_BETWEEN_VALUES).all())
    is_loop |= few and count >= MIN_OF_WAITS_FRAC * float(windows["idle_syncs"].fillna(0.0).sum()) > 0
    if per_step < MIN_TINY_COPIES or not is_loop:
        return 0.0, 0.0
    return per_step, float(rows["moved_bytes"].sum()) / count


def copies_on_own_streams(run: Run) -> bool:
    """Whether no kernel of a trace runs on a stream that copies."""
    rows = run.timeline
    copied = rows["category"] == "memcpy"
    return bool(copied.any() and not rows["stream"][copied].isin(rows["stream"][~copied]).any())


MIN_MANY_COLLECTIVES = 50
"""Collectives per step of which the idle time between them is told with them."""


def between_collectives_us(run: Run, least_us: float) -> float:
    """How long per step (or window) devices are idle between the collectives of a loop that makes many of them, the
    mean in microseconds; 0 for others, and below `least_us`."""
    rows, windows = kernel_rows(run), window_rows(run)
    per = float(windows["steps"].fillna(0.0).sum()) or float(max(1, len(windows)))
    if float(rows["count"][rows["category"] == "communication"].sum()) < MIN_MANY_COLLECTIVES * per:
        return 0.0
    us = float(windows["idle_between_collectives_us"].fillna(0.0).sum()) / per
    return us if us >= least_us else 0.0


def of_copies(run: Run, text: str) -> str:
    """A text on a trace, which calls the device's work copies where it holds no kernel."""
    rows = kernel_rows(run, everything=True)
    if rows.empty or on_cpu(rows) or not rows["category"].isin(COPIES).all():
        return text
    return text.replace("first kernel", "first copy").replace("last kernel", "last copy")


TO_HOST = r"DtoH|D2H|D2M|DeviceToHost"
"""In the names of copies to the host."""


def mostly_misclocked(run: Run) -> bool:
    """Whether most of a device's work has times that are none of the trace, so that only its length is known."""
    us, kept_us = numbers_of_import(run, "misclocked", "us", "kept_us")
    return us > kept_us


def left_of_operators(run: Run) -> float:
    """The share of the operators that is left in a trace from which the others were removed with their kernels, so that
    neither idle time nor overlap is known; 0 where the kernels are there. Of several ranks, by the first."""
    return numbers_of_import(run, "sampled", "operators_frac")[0]


def numbers_of_import(run: Run, entry: str, *names: str) -> list[float]:
    """Numbers of an entry that the import of a trace keeps; 0 for what is missing or damaged."""
    known = run.head.config.get(entry) if is_trace(run) else None
    values = [known.get(name) for name in names] if isinstance(known, dict) else [None] * len(names)
    return [value if isinstance(value, int | float) else 0 for value in values]


def counted_once(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with times that add up to no more than the device was busy: those of kernels that run at the same time
    as others count once. Rows of runs that do not tell these times stay as they are."""
    share = (rows["counted_us"] / rows["total_us"]).where(rows["total_us"] > 0).fillna(1.0).clip(0.0, 1.0)
    return rows.assign(total_us=rows["total_us"] * share, longest_us=rows["longest_us"] * share)


MIN_KIND_FRAC = 0.02
"""Share of the time of what multiplies matrices from which attention, and the rest of it, is named."""


@dataclass(frozen=True)
class MatrixKinds:
    """What multiplies matrices among kernels or operators, in words."""

    text: str
    """`GEMM/conv`, `attention`, or `GEMM/conv and attention`."""
    fracs: tuple[float, ...]
    """The share of each in their time."""

    @property
    def subject(self) -> str:
        """The same at the beginning of a sentence."""
        return f"{self.text[0].upper()}{self.text[1:]}"

    @property
    def verb(self) -> str:
        """`takes`, or of both `take`."""
        return "takes" if len(self.fracs) == 1 else "take"


def matrix_kinds(total_us: "pd.Series[float]", is_attention: "pd.Series[bool]") -> MatrixKinds:
    """The kinds of what multiplies matrices, by time in microseconds."""
    whole = float(total_us.sum())
    attention = float(total_us[is_attention].sum()) / whole if whole > 0 else 0.0
    if attention < MIN_KIND_FRAC:
        return MatrixKinds("GEMM/conv", (1.0,))
    if attention > 1 - MIN_KIND_FRAC:
        return MatrixKinds("attention", (1.0,))
    return MatrixKinds("GEMM/conv and attention", (1 - attention, attention))


def _typed(frame: pd.DataFrame, texts: tuple[str, ...], numbers: tuple[str, ...]) -> pd.DataFrame:
    """Only these columns, as text and as floats; a missing column is "" or NaN."""
    if frame.empty:
        return _no_rows(texts, numbers).copy()
    columns: dict[str, pd.Series[str] | pd.Series[float]] = {}
    for name in texts:
        column = frame[name] if name in frame else pd.Series("", index=frame.index, dtype=str)
        is_text = column.dtype == "str"  # from pandas 3 on
        columns[name] = column.fillna("") if is_text else column.astype(object).where(column.notna(), "").astype(str)
    for name in numbers:
        columns[name] = frame[name].astype(float) if name in frame else pd.Series(np.nan, index=frame.index)
    return pd.DataFrame(columns, index=frame.index)


@functools.cache
def _no_rows(texts: tuple[str, ...], numbers: tuple[str, ...]) -> pd.DataFrame:
    dtypes = dict.fromkeys(texts, "str") | dict.fromkeys(numbers, "float64")
    return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()})


def _chosen(frame: pd.DataFrame, step: int | None) -> "pd.Series[bool]":
    return frame["step"].notna() | True if step is None else frame["step"] == step
