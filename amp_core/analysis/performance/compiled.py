"""What of a trace's kernels is launched from compiled code, and whether a compiler fused them.

>>> is_compiled_in_part(run)
True
"""

import pandas as pd

from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.store.run import Run
from amp_core.traces.operators import is_compiled_code


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


MIN_COMPILED_FRAC = 0.1


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
