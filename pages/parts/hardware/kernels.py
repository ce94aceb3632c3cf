"""Kernels of a profiled window as cards, tables and text."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import TensorCoreUse, kernel_table
from amp_core.hardware.gpus import Gpu, core_names
from pages.parts import address, cards, glossary, loaders, tables, words
from pages.parts.hardware import profiled

BY = {"kernel": "Kernel", "op": "Operator", "module": "Module", "phase": "Phase", "category": "Category"}
SORTS = {
    "name": st.column_config.TextColumn("Name", pinned=True, width=240),
    "time_frac": tables.share("Share of time"),
    "total_ms": profiled.TIME_MS,
    "count": profiled.COUNT,
    "matrix_frac": tables.share("GEMM/conv", help_="Of its own time"),
    "tensor_frac": tables.share("On tensor cores", help_="Of its own time"),
    "unknown_frac": tables.share("Unclassified", help_="Of its own time"),
}
KERNELS = {name: SORTS[name] for name in ("name", "time_frac", "total_ms", "count")} | {
    "tensor_core": st.column_config.TextColumn("Tensor cores"),
    "precision": st.column_config.TextColumn("Precision"),
    "category": st.column_config.TextColumn("Category"),
    "op": st.column_config.TextColumn("Operator", help="That of most of its time"),
    "module": st.column_config.TextColumn("Module", help="That of most of its time"),
    "phase": st.column_config.TextColumn("Phase", help="That of most of its time"),
}
OPS = {
    "op": st.column_config.TextColumn("Operator", pinned=True, width=170),
    "module": st.column_config.TextColumn("Module"),
    "phase": st.column_config.TextColumn("Phase"),
    "time_frac": tables.share("Share of time"),
    "total_ms": profiled.TIME_MS,
    "tensor_core": st.column_config.TextColumn("Tensor cores"),
    "why": st.column_config.TextColumn("Why", width="large"),
    "precision": st.column_config.TextColumn("Precision"),
    "sizes": st.column_config.TextColumn("Sizes", help="Of one product, M × K by K × N; channels of a convolution"),
    "padded": st.column_config.TextColumn("Padded", help="The next sizes that 16 bytes divide"),
    "tflops": st.column_config.NumberColumn("TFLOP/s", format="%.3g", help="Achieved in its GEMM/conv kernels"),
    "of_peak_frac": tables.percent("Of data sheet", help_="Of the dense peak rate"),
    "kernel": st.column_config.TextColumn("Kernel of most time", width="large"),
}
ON_CPU = ("tensor_core", "tensor_frac", "unknown_frac", "precision", "op")
"""Columns that do not apply to a CPU's operators."""

UNKNOWN = "Kernels whose names do not reveal whether they use tensor cores, such as those compiled by Triton."
PIPE = "The hardware counter of the time in which the tensor pipe was active. It needs Hopper or newer."

UTILISATION = (
    "GPU utilisation in `nvidia-smi` is neither: it is the share of time in which any kernel ran, on tensor cores or "
    "not."
)


def counter(use: TensorCoreUse) -> str:
    """What the hardware counter reports, and why the table differs from it."""
    gpu = Gpu(use.device_name, use.capability)
    if use.counter_frac is None:
        none = "this GPU has none (NVML has it for Hopper and newer)"
        without = none if gpu.counts_tensor_use is False else words.escape(use.counter_why) or "none was recorded"
        return f"No hardware counter: {words.sentence(without)}"
    basis = (
        "of these steps" if use.counter_where == "window" else "of the whole run, since too few fell into the window"
    )
    samples = words.plural(use.counter_samples, "sample")
    sentence = (
        f"By hardware counter, the tensor pipe was busy {words.percent(use.counter_frac)} of the time (mean of "
        f"{samples} {basis}). Kernels that use it ran {words.percent(use.tensor_wall_frac)} of the time. Such kernels "
        "also load, wait and store, so the counter is lower; well below half, the GEMMs are too small or poorly shaped."
    )
    if use.tensor_wall_frac is not None and use.counter_frac > use.tensor_wall_frac + 0.05:
        sentence += " Here it is higher: unclassified kernels use tensor cores, or the samples cover other work."
    return sentence


def shares(use: TensorCoreUse) -> None:
    """Tensor-core shares of GEMM/conv time and of kernel time, the unknown share, and the counter."""
    cores, _ = core_names(use.device_name)
    left, right = cards.pairs()
    with left:
        beside = f"of its time; GEMM/conv: {words.percent(use.matrix_frac)}"
        on = words.percent(use.matrix_tensor_frac)
        cards.card(f"GEMM/conv on {cores}", on, beside, help_=glossary.tip("tensor core"))
        whole = f"of {words.number(use.kernel_us / 1e3, 'ms')} of kernels"
        cards.card(f"Kernels on {cores}", words.percent(use.tensor_frac), whole)
    with right:
        beside = f"{words.percent(use.matrix_unknown_frac)} of GEMM/conv time"
        cards.card("Unclassified", words.percent(use.unknown_frac), beside, help_=UNKNOWN)
        beside = "not recorded" if use.counter_frac is None else "of wall time"
        cards.card("Tensor pipe busy, by counter", words.percent(use.counter_frac), beside, help_=PIPE)


def matrix_work(ops: pd.DataFrame, use: TensorCoreUse) -> None:
    """GEMM/conv kernels that do not use tensor cores, and how padding would help."""
    cores, _ = core_names(use.device_name)
    shown = profiled.milliseconds(ops.assign(tflops=ops["flops_per_s"] / 1e12))
    off = shown[shown["tensor_core"] != "yes"]
    if use.on_cpu:
        _ops("GEMM/conv", off, ("time_frac", "total_ms", "sizes", "tflops"))
    elif len(off):
        title = f"GEMM/conv that is not on {cores}, and why"
        _ops(title, off, ("time_frac", "why", "precision", "sizes", "total_ms", "tflops", "of_peak_frac", "kernel"))
    odd = shown[shown["padded"] != words.NONE]
    if len(odd):
        caption = (
            f"{words.percent(odd['time_frac'].sum())} of kernel time is in products of such sizes. Multiples of 8 "
            "(FP16, BF16), 4 (TF32) or 16 (FP8, INT8) are a matter of speed: since cuBLAS 11 any size runs there."
        )
        columns = ("time_frac", "sizes", "padded", "tensor_core", "precision", "total_ms", "tflops", "of_peak_frac")
        _ops("Sizes that padding would help", odd, columns, caption)
    on = shown[shown["tensor_core"] == "yes"]
    if len(on):
        with st.expander(f"GEMM/conv on {cores} ({words.plural(len(on), 'operator')})"):
            _ops("", on, ("time_frac", "precision", "sizes", "total_ms", "tflops", "of_peak_frac", "kernel"))


def _ops(title: str, ops: pd.DataFrame, columns: tuple[str, ...], caption: str = "") -> None:
    if title:
        st.header(title, anchor=False)
    if caption:
        st.caption(caption)
    shown = tables.known(ops, {name: OPS[name] for name in ("op", "module", "phase", *columns)})
    alt = f"{title or 'GEMM/conv'}, by operator, module and phase."
    tables.show(ops, column_config=shown, column_order=list(shown), alt=alt)


def added_up(run: Run, step: int | None, cpu: bool) -> None:
    """Kernel time, summed by a chosen key; on a CPU the kernels are its operators."""
    with st.expander("All operators" if cpu else "All kernels"):
        _table_of_all(run, step, cpu)


def _table_of_all(run: Run, step: int | None, cpu: bool) -> None:
    names = {k: "Operator" if cpu and k == "kernel" else name for k, name in BY.items() if not (cpu and k == "op")}
    key = f"tensor_cores.by.{cpu}"
    by = address.choose("by", "Group by", list(names), "kernel", key, format_func=names.get)
    table = profiled.milliseconds(loaders.analysed(kernel_table, run, by, step))
    columns = {n: c for n, c in (KERNELS if by == "kernel" else SORTS).items() if not (cpu and n in ON_CPU)}
    if cpu:
        columns["count"] = tables.count("Calls")
    columns = tables.known(table, columns)
    alt = f"Time by {names[by].lower()}."
    tables.show(table, column_config=columns, column_order=list(columns), alt=alt)
