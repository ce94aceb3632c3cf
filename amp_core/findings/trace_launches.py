"""Advice for imported traces in which the device waits for launches: by what is compiled, captured or fused already.

launch_bound_of_trace(run)     # the finding, if there is one
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.compiled import is_compiled_in_part, is_compiled_without_fusion, is_one_graph
from amp_core.analysis.performance.gpus import is_before_triton
from amp_core.analysis.performance.host_copies import tiny_copies
from amp_core.analysis.performance.idle_savings import LATE_LAUNCHES
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.late_launches import (
    waits_at_start,
    waits_early,
)
from amp_core.analysis.performance.matrix_kinds import is_matrix, multiplies
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, IdleSaving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.analysis.performance.training_part import ZEROING, optimizer_frac, takes_fused
from amp_core.findings.launch_remedies import (
    AHEAD_OF_GRAPH,
    ALL_COMPILED,
    ALL_COMPILED_ELSEWHERE,
    AT_START,
    AT_START_OF_STEPS,
    BEFORE_TRITON,
    BEFORE_TRITON_WITH_OPTIMIZER,
    BESIDE_GRAPH,
    BETWEEN_STEPS,
    BEYOND_CAPTURED,
    COMPILED,
    COMPILED_ELSEWHERE,
    COMPILED_ONCE,
    COMPILED_ONCE_ELSEWHERE,
    COMPILED_OPTIMIZER,
    EARLY,
    EARLY_BEFORE_GRAPH,
    ELSEWHERE,
    FIRST_PASS,
    FUSED_OPTIMIZER,
    GRAPHS,
    GRAPHS_AND_COMPILED,
    GRAPHS_OF_INFERENCE,
    IN_PIECES,
    LACKS_MODEL,
    NO_OPTIMIZER,
    NO_OPTIMIZER_ELSEWHERE,
    OF_ENGINE,
    ON_NPU,
    ONE_COPY,
    OWN_OPTIMIZER,
    OWN_OPTIMIZER_ELSEWHERE,
    RECURRENT,
    RECURRENT_AND_OPTIMIZER,
    SCRIPTED,
    SHARDED,
    SHARDED_COMPILED,
    UNBLOCKED,
    UNBROKEN,
    UNBROKEN_OF_INFERENCE,
    UNFUSED,
    UNFUSED_ELSEWHERE,
    WAITS,
    WAITS_ELSEWHERE,
    WITHOUT_MODEL,
)
from amp_core.findings.longer_gaps import is_fused_optimizer, longer_us, told_longer_gaps
from amp_core.findings.model import Finding, Remedy
from amp_core.findings.signals import facts
from amp_core.findings.snippets import FIND_WAITS, LAUNCH_BEFORE_WAITS, TIME_BY_EVENTS
from amp_core.findings.step_sentences import passes_sentence
from amp_core.findings.trace_findings import guides_remedy, reported_saving, saving_finding
from amp_core.findings.trace_sentence import may_lack_model
from amp_core.store.run import Run
from amp_core.text.formatting import mean_count, percent


def launch_bound_of_trace(run: Run) -> list[Finding]:
    """`launch-bound` of an imported trace, with advice on what is left to do."""
    saving = reported_saving(run, "launch-bound", IdleSaving)
    if saving is None:
        return []
    remedy = launch_remedy(run) or guides_remedy(saving)
    if remedy not in _AT_FIRST:
        remedy = _with_details(run, remedy, saving)
    if facts(run.head.environment, "profiler").get("with_stack"):
        remedy = replace(remedy, advice=f"{remedy.advice} {_SLOWED}")
    return [saving_finding(run, saving, remedy)]


_AT_FIRST = (FIRST_PASS, AT_START, AT_START_OF_STEPS, EARLY, EARLY_BEFORE_GRAPH)
"""Advice for what happens at the start alone: nothing of the loop shortens that."""


def _with_details(run: Run, remedy: Remedy, saving: IdleSaving) -> Remedy:
    """The remedy, with what else of the loop's launches, waits and longer gaps can be shortened."""
    share, casts = _zeroing_frac(run), _autocasts(run)
    zeroing = _ZEROING.format(share=percent(share)) if share >= MIN_ZEROING_FRAC else ""
    advice = " ".join(filter(None, (remedy.advice, zeroing, casts)))
    remedy = with_waits(run, replace(remedy, advice=advice))
    told = told_longer_gaps(run) if saving.host.has_longer_gaps else ""
    return replace(remedy, advice=f"{remedy.advice} {told}") if told else remedy


def with_waits(run: Run, remedy: Remedy) -> Remedy:
    """The remedy, with the waits that a graph does not go across where its code captures one."""
    windows = window_rows(run)
    syncs, steps = (float(windows[name].fillna(0.0).sum()) for name in ("inner_syncs", "steps"))
    per = steps or float(len(windows))
    least = MIN_INNER_SYNCS if steps else MIN_SYNCS_PER_STEP
    captures = any(call in remedy.snippet for call in _CAPTURING) and not replays_one_graph(run)
    captures &= run.head.config.get("launch_blocking") is not True  # then it waits for each kernel
    if not captures or syncs <= least * per or _WAITS_FIRST in remedy.advice:
        return remedy
    ops = windows["inner_sync_op"][windows["inner_sync_op"] != ""]
    longest = "" if syncs == per else "the longest "  # not the most often
    where = f", {longest}in {ops.mode().iloc[0]}" if len(ops) else ""
    unit = "step" if steps else "profiled window"
    times = f"{'once' if syncs == per else f'{mean_count(syncs / per)} times'} per {unit}{where}"
    return replace(remedy, advice=f"{remedy.advice} The host waits for the GPU {times}: no graph goes across a wait.")


MIN_INNER_SYNCS = 0.5
"""Waits per step between its first and its last launch from which they are told."""


def _is_beside_optimizer(run: Run) -> bool:
    """Whether the optimizer's marked steps cost hardly any of the idle time: of longer gaps that are most of it, hardly
    any are in them, or the device would wait as long if the host took no time in them, as where it waits afterwards."""
    windows = window_rows(run)
    in_longer_us, in_optimizer_us = longer_us(windows), float(windows["longer_optimizer_us"].fillna(0.0).sum())
    is_marked, idle_us = bool(run.head.config.get("optimizers")), float(windows["idle_us"].fillna(0.0).sum())
    sooner_us = float(windows["optimizer_sooner_us"].fillna(np.inf).sum())  # unknown in older runs
    all_us = in_longer_us if in_longer_us > idle_us / 2 else idle_us if sooner_us < MIN_SOONER_FRAC * idle_us else 0.0
    return is_marked and in_optimizer_us < MIN_OPTIMIZER_FRAC * all_us


_SLOWED = "Stacks were recorded, which slows Python: time the program without the profiler first."
_CAPTURING = ("reduce-overhead", "cuda.graph", "graph.replay", "make_graphed")
_WAITS_FIRST = "neither a CUDA graph nor compiled code goes across such a wait"


MIN_ZEROING_FRAC = 0.1
"""Share of the fills of gradients in the launches from which they are told."""
_ZEROING = (
    "{share} of the launches fill tensors that exist already, as gradients before backward: "
    "optimizer.zero_grad(set_to_none=True) leaves these out, and what adds to them."
)


def _zeroing_frac(run: Run) -> float:
    """The share of fills of tensors that exist already in the launches of a trace of training; 0 for others."""
    savings, rows = possible_savings(run), kernel_rows(run, everything=True)
    fills = float(rows["count"][rows["top_op"].isin(ZEROING)].sum())
    return fills / max(1.0, float(rows["count"].sum())) if savings is not None and savings.trains else 0.0


MIN_CASTS_FRAC = 0.2
"""Share of autocast's casts in the launches from which they are told."""
_BETWEEN_FLOATS = r'^$|\["(?:float|c10::Half|c10::BFloat16)", "(?:float|c10::Half|c10::BFloat16)"'
"""Input types of such a cast, where they are recorded."""
_ASKED_CASTS = r"copy|^aten::(?:to|type_as|_autocast_\w+)$"
"""Operators that a program calls to convert a tensor."""


def _autocasts(run: Run) -> str:
    """That autocast's casts, those within other operators and in backward, are a large share of the launches, and how
    fewer do, as a sentence; else empty."""
    savings, rows = possible_savings(run), kernel_rows(run)
    casts = rows[(rows["category"] == "cast") & rows["in_dtypes"].str.contains(_BETWEEN_FLOATS)]
    within = casts["top_op"].str.startswith("aten::") & ~casts["top_op"].str.contains(_ASKED_CASTS)
    back = casts["top_op"].str.startswith("ToCopyBackward")
    count, count_back = (float(casts["count"][of].sum()) for of in (within, back))
    share = (count + min(count, count_back)) / max(1.0, float(rows["count"].sum()))
    if savings is None or share < MIN_CASTS_FRAC:
        return ""
    told = f"{percent(share)} of the launches are autocast's casts"
    if not savings.trains:
        return f"{told}: weights converted once, by model.half(), need none."
    products_us = float(rows["total_us"][is_matrix(rows)].sum())
    if products_us >= MIN_SAVED_FRAC * float(window_rows(run)["wall_us"].sum()):
        return ""
    return f"{told}, and products as short as here gain less from 16 bits: leave autocast out."


def launch_remedy(run: Run) -> Remedy | None:
    """What to advise where the device waits for launches; None for the guide's advice."""
    if passes_sentence(run):
        return FIRST_PASS
    if may_lack_model(run):
        return LACKS_MODEL
    if run.head.config.get("launch_blocking") is True:
        return UNBLOCKED
    if remedy := _remedy_of_start(run):
        return remedy
    rows, savings = kernel_rows(run), possible_savings(run)
    device = str(run.head.config.get("device"))
    if device.startswith("npu"):
        return _training_on_npu(run) if savings is not None and savings.trains else ON_NPU
    on_cuda = device.startswith("cuda")  # AMD's GPUs too
    compiled, graphs = is_compiled_in_part(run), bool(run.head.config.get("graph_launches"))
    launches, steps = (float(window_rows(run)[name].fillna(0.0).sum()) for name in ("launches", "steps"))
    each = optimizer_frac(rows) * launches / max(1.0, steps)
    is_fused = is_fused_optimizer(rows) or optimizer_frac(rows) < MIN_OPTIMIZER_FRAC or each <= MAX_FUSED_LAUNCHES
    is_fused |= _is_beside_optimizer(run)
    if optimizer_frac(rows) >= MIN_OPTIMIZER_ALONE_FRAC and not is_fused:
        return FUSED_OPTIMIZER if takes_fused(run) else COMPILED_OPTIMIZER
    if on_cuda and _waits_between_steps(run):
        return BETWEEN_STEPS
    between = _launches_between_waits(run)
    if tiny_copies(run)[0] and between is not None and between <= MAX_OF_LOOP:
        return ONE_COPY
    if on_cuda and between:
        when = f"after some {between:.0f} launches" if between >= 1.5 else "after each launch"
        larger = ", or use larger batches" if between > MAX_OF_LOOP else ""
        return Remedy(
            f"{WAITS} Where it does, the host waits for it {when}, and {_WAITS_FIRST}: remove these first{larger}.",
            find_waits(run),
        )
    if on_cuda and graphs and replays_one_graph(run):
        return BESIDE_GRAPH if _waits_for_results(run) else AHEAD_OF_GRAPH
    if on_cuda and compiled and rows["op"].str.startswith(_ENGINES).any():
        of_vllm = rows["op"].str.startswith("vllm::").any()
        remedy = IN_PIECES if graphs and is_in_pieces(run) else _of_engine(run) if not graphs else None
        if remedy is not None:
            return remedy if of_vllm else replace(remedy, snippet=_ENGINE_GRAPHS)
    if on_cuda and graphs and compiled and is_in_pieces(run):
        return replace(IN_PIECES, snippet=_ENGINE_GRAPHS)
    if on_cuda and graphs and compiled and _nothing_breaks(run):
        return UNBROKEN if savings and savings.trains else UNBROKEN_OF_INFERENCE
    if on_cuda and graphs:
        return GRAPHS_AND_COMPILED if compiled else GRAPHS if savings and savings.trains else GRAPHS_OF_INFERENCE
    if on_cuda and run.head.config.get("gathers_weights") is True:
        return SHARDED_COMPILED if compiled else SHARDED
    if is_compiled_without_fusion(run):
        return UNFUSED if on_cuda else UNFUSED_ELSEWHERE
    if compiled and _is_compiled_throughout(run):
        return ALL_COMPILED if on_cuda else ALL_COMPILED_ELSEWHERE
    if compiled and is_one_graph(run):
        return COMPILED_ONCE if on_cuda else COMPILED_ONCE_ELSEWHERE
    if compiled:
        return COMPILED if on_cuda else COMPILED_ELSEWHERE
    if on_cuda and run.head.config.get("scripted") is True:
        return SCRIPTED
    if on_cuda and _recurrent_frac(rows) >= MIN_RECURRENT_FRAC:
        return RECURRENT if is_fused or not takes_fused(run) else RECURRENT_AND_OPTIMIZER
    if is_fused and not steps and not multiplies(rows) and not run.head.config.get("equal_passes"):
        return WITHOUT_MODEL
    if on_cuda and is_before_triton(run):
        return BEFORE_TRITON if is_fused or not takes_fused(run) else BEFORE_TRITON_WITH_OPTIMIZER
    if is_fused:
        return NO_OPTIMIZER if on_cuda else NO_OPTIMIZER_ELSEWHERE
    if not takes_fused(run):
        return OWN_OPTIMIZER if on_cuda else OWN_OPTIMIZER_ELSEWHERE
    return None if on_cuda else ELSEWHERE


def _remedy_of_start(run: Run) -> Remedy | None:
    """What to advise where the host is ahead of the device after the start of the window, or of each step; None for
    others, and where a step waits for launches before its first kernel."""
    windows = window_rows(run)
    if windows["steps"].notna().any():
        at_start = waits_at_start(windows) and not _waits_between_steps(run)
        return AT_START_OF_STEPS if at_start else None
    if not waits_at_start(windows) and not waits_early(windows):
        return None
    if run.head.config.get("graph_launches") and not run.head.config.get("captures"):
        return EARLY_BEFORE_GRAPH
    return AT_START if waits_at_start(windows) else EARLY


def _recurrent_frac(rows: pd.DataFrame) -> float:
    """The share of recurrent layers, with all their steps in one operator, in the launches."""
    is_one = rows["top_op"].str.contains(_RECURRENT_OPS) | rows["op"].str.contains(_RECURRENT_OPS)
    return float(rows["count"][is_one].sum() / max(1.0, rows["count"].sum()))


MIN_RECURRENT_FRAC = 0.25
"""Share of recurrent layers in the launches from which compiling what is around them leaves too much."""
_RECURRENT_OPS = (
    r"^(?:aten::(?:gru|lstm|rnn_tanh|rnn_relu|_cudnn_rnn|miopen_rnn)(?:_backward)?|(?:Cudnn|Miopen)Rnn\w*)$"
)


def find_waits(run: Run) -> str:
    """A snippet that finds the waits of a trace, or does without them, by the call that most of them are."""
    if waits_for_device(run):
        return TIME_BY_EVENTS
    return LAUNCH_BEFORE_WAITS if waits_for_events(run) else FIND_WAITS


def waits_for_device(run: Run) -> bool:
    """Whether most synchronizations of a trace are of the whole device, as those of `torch.cuda.synchronize`."""
    return str(run.head.config.get("sync_call")).endswith("DeviceSynchronize")


def waits_for_events(run: Run) -> bool:
    """The same of events, for which a program waits by itself where it reads results."""
    return str(run.head.config.get("sync_call")).endswith("EventSynchronize")


MIN_BETWEEN_WAITS_FRAC = 0.5
"""Share of the idle time in stretches of few launches between two waits from which these come before graphs."""
MIN_SYNCS_PER_STEP = 1.5
"""A graph holds the launches of a step that has only one synchronization, as that of its loss."""


def _launches_between_waits(run: Run) -> float | None:
    """Launches from one wait of the host for the GPU to the next, where the idle time is in stretches of few launches;
    None where there are many, hardly any synchronizations, or most of the idle time comes before the first launch."""
    windows, savings = window_rows(run), possible_savings(run)
    saving = next((c for c in savings.ranked if c.code in LATE_LAUNCHES), None) if savings else None
    if saving is None or saving.lead_us > saving.saved_us / 2:
        return None
    us = windows["idle_between_waits_us"].fillna(0.0)
    syncs, steps = (float(windows[name].sum()) for name in ("syncs", "steps"))
    per = steps or float(len(windows))
    is_frequent = syncs > max(1.0, MIN_SYNCS_PER_STEP * steps)
    if not is_frequent or float(us.sum()) / per < MIN_BETWEEN_WAITS_FRAC * saving.saved_us:
        return None
    return float((us * windows["launches_between_waits"].fillna(0.0)).sum() / us.sum())


def _waits_between_steps(run: Run) -> bool:
    """Whether nearly all of the idle time comes before the first work of a step, in a loop that waits in each."""
    windows, savings = window_rows(run), possible_savings(run)
    saving = savings.of("launch-bound", IdleSaving) if savings is not None else None
    syncs, steps = (float(windows[name].fillna(0.0).sum()) for name in ("syncs", "steps"))
    return saving is not None and saving.lead_us >= MIN_LEAD_FRAC * saving.saved_us > 0 and syncs >= steps > 0


MIN_LEAD_FRAC = 0.9
"""Share of a saving before the first work of a step from which the rest is none of its cause."""
MAX_OF_LOOP = 2.5
"""Launches from one wait to the next, up to which values are read in a loop that does nothing else."""


MIN_RESULTS_FRAC = 0.1
"""Share of the time after waits of the host in what else the device waits for the host from which these are told."""


def _waits_for_results(run: Run) -> bool:
    """Whether the device is idle after waits of the host for longer than a small part of what it waits for the host."""
    us = window_rows(run)[["idle_sync_us", "idle_wait_us", "idle_dispatch_us"]].fillna(0.0).sum()
    return bool(us["idle_sync_us"] >= MIN_RESULTS_FRAC * us.sum())


def replays_one_graph(run: Run) -> bool:
    """Whether a trace launches one graph per step, or per call of compiled code, with nearly all kernels in it: these
    have no operator."""
    launches, calls = (run.head.config.get(name) for name in ("graph_launches", "compiled_calls"))
    windows = window_rows(run)
    steps = float(windows["steps"].sum()) / max(1, windows["rank"].nunique())
    most = max(steps, float(calls) if isinstance(calls, int) else 0.0)
    rows = kernel_rows(run)
    captured = float(rows["count"][rows["op"] == ""].sum())
    is_all = captured >= MIN_CAPTURED_FRAC * float(rows["count"].sum())
    if not isinstance(launches, int) or run.head.config.get("without_operators") is True:
        return False
    is_large = captured >= MIN_NODES * launches * max(1, windows["rank"].nunique())
    return is_all and (launches <= most or is_large)


MIN_PIECES = 5
"""Graphs that one call of compiled code replays, from which its compiler has split it on purpose."""


def is_in_pieces(run: Run) -> bool:
    """Whether each call of compiled code replays many graphs: a backend splits it where it cannot capture."""
    launches, calls = (run.head.config.get(name) for name in ("graph_launches", "compiled_calls"))
    return isinstance(launches, int) and isinstance(calls, int) and launches >= MIN_PIECES * calls > 0


def _nothing_breaks(run: Run) -> bool:
    """Whether each marked step calls compiled code at most once, which replays one graph, and in training another one
    backward: after a break of the graph more would follow."""
    launches, calls = (run.head.config.get(name) for name in ("graph_launches", "compiled_calls"))
    windows, savings = window_rows(run), possible_savings(run)
    steps = float(windows["steps"].sum()) / max(1, windows["rank"].nunique())
    if not isinstance(launches, int) or not isinstance(calls, int) or savings is None:
        return False
    return calls <= steps and 0 < launches <= (2 if savings.trains else 1) * calls


_ENGINES = ("vllm::", "sglang::")
"""Namespaces of the operators at which serving engines split what they compile."""
_ENGINE_GRAPHS = "graph = torch.cuda.CUDAGraph()   # of whole passes: see the engine's options for CUDA graphs"
MAX_CAPTURED_TOKENS = 512
"""Tokens of the largest pass that vLLM captures unless it is told otherwise."""


def _of_engine(run: Run) -> Remedy:
    """Advice where an engine replays no graph, by the tokens of its passes."""
    tokens = run.head.config.get("pass_tokens")
    if not isinstance(tokens, int) or tokens <= MAX_CAPTURED_TOKENS:
        return OF_ENGINE
    advice = BEYOND_CAPTURED.advice.format(tokens=tokens, most=MAX_CAPTURED_TOKENS)
    return Remedy(advice, BEYOND_CAPTURED.snippet.format(tokens=tokens))


NPU_OPTIMIZERS = ("Adadelta", "Adam", "AdamW", "RMSprop", "SGD")
"""Optimizers of torch of which torch_npu has a fused one."""


def _training_on_npu(run: Run) -> Remedy:
    """Advice for a training on an NPU, with the fused form of its optimizer where torch_npu has one."""
    names = run.head.config.get("optimizers")
    named = [name for name in names if name in NPU_OPTIMIZERS] if isinstance(names, list) else []
    advice = f"{WAITS_ELSEWHERE} Use larger batches, and torch_npu's fused operators"
    if not named or _is_beside_optimizer(run):
        return Remedy(f"{advice}.", "loader = DataLoader(data, 2 * batch_size)")
    fused = f"optimizer = torch_npu.optim.NpuFused{named[0]}(model.parameters(), lr=lr)"
    return Remedy(f"{advice} and optimizers.", fused)


MIN_NODES = 100
"""Kernels per graph from which it holds a whole pass of a model, and not a piece between two breaks."""
MIN_CAPTURED_FRAC = 0.9
"""Share of kernels in a graph from which hardly any is left to capture."""


def _is_compiled_throughout(run: Run) -> bool:
    """Whether all work is launched from compiled code, called once per step where the trace marks steps."""
    calls, launched_frac = run.head.config.get("compiled_calls"), run.head.config.get("compiled_launch_frac")
    windows = window_rows(run)
    steps = float(windows["steps"].sum()) / max(1, windows["rank"].nunique())
    once = steps == 0 or (isinstance(calls, int) and calls <= steps)
    return once and isinstance(launched_frac, float) and launched_frac >= MIN_ALL_COMPILED_FRAC


COALESCE = "aten::_coalesce"
"""The operator that does so."""
MAX_FUSED_LAUNCHES = 2.5
"""Launches of an optimizer per step that fusing does not make fewer: its kernels take lists of tensors already."""
MIN_OPTIMIZER_FRAC = 0.05
"""Share of the optimizer in the launches, or in longer gaps, below which fusing it saves none worth the name."""
MIN_SOONER_FRAC = 0.02
"""Share of the idle time that would go if the host took no time in the optimizer's steps, below which that is none."""
MIN_OPTIMIZER_ALONE_FRAC = 0.9
"""Share of the optimizer in the launches from which nothing else is worth a change."""
MIN_ALL_COMPILED_FRAC = 0.99
"""Share of launches from compiled code from which no break of a graph is left to find."""
