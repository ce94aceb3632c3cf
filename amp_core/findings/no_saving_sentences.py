"""What the first sentence says of a trace in which no single change would save much.

>>> no_saving(run, savings)
'No single change would save 5.00 % or more of the step: GEMM/conv takes 71 % of it, on tensor cores.'
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.blocks import MAX_FEW_BLOCKS, blocks_of
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix, matrix_kinds
from amp_core.analysis.performance.memory_rate import rate_at_most
from amp_core.analysis.performance.memory_savings import FUSED_FRAC
from amp_core.analysis.performance.product_savings import gain_by_padding, sizes_to_pad_to
from amp_core.analysis.performance.saving import MIN_KERNEL_US, MIN_SAVED_FRAC, longest_name
from amp_core.analysis.performance.savings import MAX_UNKNOWN_FRAC, Savings
from amp_core.analysis.performance.shortest_kernels import is_shortest
from amp_core.analysis.performance.step_cost import part_of
from amp_core.analysis.performance.timeline import timeline
from amp_core.findings.matrix_sentences import compiled_for, matrix_work
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import core_names, is_amd, is_of_other_vendor
from amp_core.hardware.kernel_names import SMALL_TYPES
from amp_core.hardware.kernel_names.dtypes import of_token
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number, percent
from amp_core.traces.operators import is_compiled_code


def busy_frac(savings: Savings) -> float:
    """The share of the step in which the device works."""
    cost = savings.cost
    return float(1 - (np.nan_to_num(cost.us("gaps")) + np.nan_to_num(cost.us("data"))) / cost.step_us)


def own_profiler(run: Run) -> str:
    """With which tool to profile one kernel alone, as part of a sentence; empty where none is known."""
    device = str(run.head.config.get("device") or "")
    if not device.startswith("cuda"):
        return ""
    gpu = profiled_gpu(run, device, str(window_rows(run)["device_name"].iloc[0])).name
    if is_of_other_vendor(gpu):
        return ""
    made_for = "" if gpu else compiled_for(longest_name(kernel_rows(run), "name"))[0]
    if is_amd(gpu) or made_for.startswith("gfx"):
        return ", as with rocprofv3"
    return f", as with Nsight Compute{'' if gpu or made_for else ' or rocprofv3'}"


def few_blocks(run: Run, kernel: str) -> str:
    """That an unclassified kernel mostly has fewer blocks than the GPU has multiprocessors, as a sentence; empty where
    it has more or no grid is recorded."""
    rows = timeline(run)
    rows = rows[(rows["name"] == kernel) & (rows["tensor_core"] == "unknown") & rows["blocks_per_sm"].notna()]
    frac = float(rows["total_us"][rows["blocks_per_sm"] < 1].sum()) / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    if frac < MIN_FEW_BLOCKS_FRAC:
        return ""
    when = "" if frac > 1 - MIN_BESIDE_FRAC else f" for {percent(frac)} of its time"
    return f" That kernel has fewer blocks than the GPU has multiprocessors{when}, so alone it does not fill the GPU."


def few_blocks_of_product(run: Run, kernel: str) -> str:
    """That a kernel of products has far fewer blocks than the GPU has multiprocessors, and what helps, as a sentence;
    empty where it has more for some of its sizes, or how many is not known."""
    ops = matrix_ops(run)
    found = [blocks_of(run, row) for row in ops[ops["kernel"] == kernel].to_dict("records")]
    known = [one for one in found if one is not None and one.units]
    most = max(known, key=lambda one: one.per_unit, default=None)
    if most is None or len(known) < len(found) or most.per_unit >= MAX_FEW_BLOCKS:
        return ""
    amd = bool(most.gpu) or is_amd(profiled_gpu(run, str(run.head.config.get("device") or "")).name)
    units = f"{most.units} {'compute units' if amd else 'multiprocessors'}"
    whose = f"the {units} or more of a {most.gpu} GPU" if most.gpu else f"the {units} of the GPU"
    tuned = " (torch.cuda.tunable.enable() times them)" if amd else ""
    return (
        f"It has {most.per_unit * most.units:,.0f} blocks for {whose}, of which it uses {percent(most.per_unit)} at "
        f"most: splitting its sums (K), more rows per call, or another kernel of the library{tuned} may take less."
    )


def padding(run: Run, kernel: str, whose: str = "Its sizes") -> str:
    """That the sizes of a kernel's products bar faster ones, as a sentence that begins with `whose`; empty where they
    do not, or differ."""
    ops = matrix_ops(run)
    ops = ops[(ops["kernel"] == kernel) & gain_by_padding(ops)]
    if ops[["op", "sizes"]].drop_duplicates().shape[0] != 1:
        return ""
    first = ops.iloc[0]
    return (
        f"{whose} ({first['sizes']}) are not all multiples of 16 bytes, which bars kernels that load so many at a "
        f"time: pad them ({sizes_to_pad_to(first.to_dict())})."
    )


MIN_FEW_BLOCKS_FRAC = 0.5
"""Share of an unclassified kernel's time in launches that do not fill the GPU from which that is told."""


def no_saving(run: Run, savings: Savings, *, in_16_bits: bool = False) -> str:
    """That no single change saves much, and what takes the time, as sentences. `in_16_bits`: products in 8 would."""
    cost = savings.cost
    if savings.unknown_frac > MAX_UNKNOWN_FRAC:
        if told := _unknown_products(run, savings):
            return told
        is_narrow = of_token(savings.unknown_kernel) in ("fp16", "bf16", *SMALL_TYPES) or _is_narrow(run)
        of_16_bits = " is" if is_narrow else " and the savings from 16 bits are"
        return (
            f"The device is busy for {percent(busy_frac(savings))} of the {savings.unit}. "
            f"{percent(savings.unknown_frac)} of its kernel time cannot be classified by kernel name, "
            f"{percent(savings.unknown_kernel_frac)} of the {savings.unit} in "
            f"{kernel_in_words(savings.unknown_kernel)}, so the share of GEMM/conv{of_16_bits} unknown."
            f"{few_blocks(run, savings.unknown_kernel)}"
        )
    rows = kernel_rows(run)
    cores, _ = core_names(cost.device_name)
    off = rows[is_matrix(rows) & (rows["tensor_core"] == "no") & rows["precision"].isin(["fp16", "bf16"])]
    off = off[~off["name"].str.contains("gemv", regex=False)]  # one row has no use for them
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
    of_longest = rows[~is_matrix(rows) & (named == (others.idxmax() if longest else ""))]
    at_rate = _at_rate(run, savings, of_longest, longest) if longest else _Beside()
    longest += at_rate.sentences
    if savings.peak_frac is None and work.kernel_frac > MAIN_PRODUCT_FRAC and not longest:
        it_takes = "it takes" if len(work.kinds.fracs) == 1 else "they take"
        kernels = rows["op"].where((rows["op"] != "") & ~rows["op"].map(is_compiled_code).astype(bool), named_by_kernel)
        us = rows["total_us"][~is_matrix(rows)].groupby(kernels).sum()
        other_frac = float(us.max() / window_rows(run)["wall_us"].sum()) if len(us) else 0.0
        is_long = other_frac >= MIN_SAVED_FRAC
        nothing = "Nothing that is looked for" if is_long else "Nothing"
        name = str(us.idxmax()) if is_long else ""
        family = f" ({percent(work.family_frac)} with those of its kind)" if work.family_frac else ""
        longest_other = (
            f" Beside it, {name} takes {percent(other_frac)}{_of_softmax(name, savings)}." if is_long else ""
        )
        busy = busy_frac(savings)
        throughout = f" The device is busy for {percent(busy)} of the {savings.unit}." if busy >= ALL_BUSY_FRAC else ""
        alone = few_blocks_of_product(run, work.kernel) or f"Profile it alone{own_profiler(run)}."
        alone = " ".join(filter(None, (padding(run, work.kernel), alone)))
        told = (
            f"{nothing} beside {work.kinds.text} would save {percent(MIN_SAVED_FRAC)} or more of the {savings.unit}: "
            f"{it_takes} {work.shares} of it{work.where}."
        )
        if work.could_be_faster:
            told = (
                f"{work.kinds.subject} {work.kinds.verb} {work.shares} of the {savings.unit}{work.where}."
                f"{work.could_be_faster}"
            )
        return (
            f"{told} One kernel takes {percent(work.kernel_frac)}{family}: {kernel_in_words(work.kernel)}. "
            f"{alone}{longest_other}{throughout}{rest}"
        )
    whole = f"the {savings.unit}" if longest else "it"
    of_products = f"{work.kinds.text} {work.kinds.verb} {work.shares} of {whole}{work.where}"
    parts = [part for part in (longest, of_products if work.frac > 0 or not longest else "") if part]
    told = ", and ".join(parts)
    other, other_frac = _longest_other(run)
    if not longest and other_frac >= MIN_BESIDE_FRAC and (in_steps := _of_softmax(other, savings)):
        return (
            f"{kernel_in_words(other)} takes {percent(other_frac)} of the {savings.unit}{in_steps}. "
            f"Products, those of attention among them, take {percent(work.frac)}{work.where}.{rest}"
        )
    beside = at_rate if longest else _beside_products(run, savings)
    change = "no single change that is looked for" if beside.is_left else "no single change"
    change = f"in 16 bits, {change}" if in_16_bits else change
    nothing = f"{change[0].upper()}{change[1:]} would save {percent(MIN_SAVED_FRAC)} or more of the {savings.unit}"
    if beside.first and not longest:
        nothing = f"{beside.first} Beside that, {nothing[0].lower()}{nothing[1:]}"
    if at_rate.first:
        products = f": {of_products}" if work.frac > 0 else ""
        apart = f" Beside that, {nothing[0].lower()}{nothing[1:]}{products}." if share < 1 - MIN_SAVED_FRAC else ""
        return f"{at_rate.first}{apart}{rest}"
    return f"{nothing}: {told}.{'' if longest else beside.sentences}{rest}"


def _unknown_products(run: Run, savings: Savings) -> str:
    """That unclassified kernels multiply matrices for most of their time, as their names or operators tell, as
    sentences; empty where it is less, or where the savings from 16 bits are known."""
    rows = kernel_rows(run)
    unknown = rows[rows["tensor_core"] == "unknown"]
    products, others = unknown[is_matrix(unknown)], unknown[~is_matrix(unknown)]
    if 2 * float(products["total_us"].sum()) <= float(unknown["total_us"].sum()):
        return ""
    whole_us = max(float(window_rows(run)["wall_us"].sum()), MIN_KERNEL_US)
    kinds = matrix_kinds(products["total_us"], products["category"] == "attention")
    cores, _ = core_names(savings.cost.device_name)
    us = products.groupby("name")["total_us"].sum()
    untold = "neither their precision nor" if products["precision"].fillna("").eq("").any() else "not"
    beside, its_us = longest_name(others, "name"), others.groupby("name")["total_us"].sum().max()
    is_told = beside and its_us >= MIN_BESIDE_FRAC * whole_us
    beside = f" Beside it, {kernel_in_words(beside)} takes {percent(its_us / whole_us)}." if is_told else ""
    narrow = _is_narrow(run)
    so = "" if narrow else " If their inputs are FP32, 16 bits may save much of this: how much cannot be told."
    return (
        f"The device is busy for {percent(busy_frac(savings))} of the {savings.unit}. {kinds.subject} {kinds.verb} "
        f"{percent(float(products['total_us'].sum()) / whole_us)} of it in kernels whose names tell {untold} whether "
        f"they use {cores}, the longest, with {percent(float(us.max()) / whole_us)}, "
        f"{kernel_in_words(str(us.idxmax()))}."
        f"{so}{few_blocks(run, savings.unknown_kernel)}{beside}"
    )


def _is_narrow(run: Run) -> bool:
    """Whether all products whose types are known are in 16 or fewer bits, so that others hardly are in more."""
    rows = kernel_rows(run)
    types = set(rows["precision"][is_matrix(rows) & (rows["precision"] != "")])
    return bool(types) and types <= {"fp16", "bf16", *SMALL_TYPES}


@dataclass(frozen=True)
class _Beside:
    """What is told beside the products."""

    sentences: str = ""
    first: str = ""
    """What comes before everything else: a change that is no saving of its own, and would save as much as one."""
    is_left: bool = False
    """Whether a change that is no saving of its own would shorten it."""


def _beside_products(run: Run, savings: Savings) -> _Beside:
    """The longest kernel that multiplies no matrices; without a long one, those that memory bounds, and those as short
    as any, if they take much; else nothing."""
    name, share = _longest_other(run)
    if share >= MIN_BESIDE_FRAC:
        return _Beside(f" Beside them, {kernel_in_words(name)} takes {percent(share)}.")
    rows, wall_us = kernel_rows(run), float(window_rows(run)["wall_us"].sum())
    shortest = rows[is_shortest(rows) & part_of(rows).isin(_MEMORY_PARTS)]
    shortest_frac = float(shortest["total_us"].sum()) / wall_us
    starting = ""
    if shortest_frac >= MIN_BESIDE_FRAC:
        count, us = (float(shortest[column].sum()) for column in ("count", "total_us"))
        starting = (
            f" Another {percent(shortest_frac)} is in {count:,.0f} kernels that are as short as any here, "
            f"{number(us / count)} µs on average: starting them takes that time, not memory, so fewer, fused ones take "
            "less."
        )
    memory_frac = float(np.nan_to_num(savings.cost.us(*_MEMORY_PARTS))) / savings.cost.step_us
    memory_frac -= shortest_frac if starting else 0.0
    if memory_frac < MIN_MEMORY_FRAC:
        return _Beside(starting, is_left=bool(starting))
    passes = _passes_over_one(run)
    others, first = "in many short or already fused ones", ""
    if passes is not None:
        others = f"{percent(passes.frac)} in these; the others are many short or already fused ones"
        step_ms = savings.cost.step_us / 1e3
        first = (
            f"{passes.kernels} kernels that each pass over one tensor of {passes.sizes} take {percent(passes.frac)} of "
            f"the {savings.unit}: fewer passes may halve that (up to {number(FUSED_FRAC * passes.frac * step_ms)} of "
            f"{number(step_ms, 'ms')} per {savings.unit})."
        )
    sentences = f" Memory-bound kernels take {percent(memory_frac)}, {others}.{starting}"
    return _Beside(sentences, first, is_left=bool(first or starting))


_MEMORY_PARTS = ("memory_bound", "cast", "layout")


@dataclass(frozen=True)
class _Passes:
    """Kernels without products that pass over one large tensor, each once per step."""

    kernels: int
    sizes: str
    frac: float
    """Their share of the profiled time."""


def _passes_over_one(run: Run) -> _Passes | None:
    """Such kernels, where half of their time would be a saving; else None."""
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
        return None
    return _Passes(kernels, str(rows["sizes"].iloc[-1]), frac)


LARGE_ELEMENTS = 2**27
"""A tensor of so many elements is larger than the cache of any GPU."""
MIN_PASS_FRAC = 0.05
"""Share of the time of such kernels from which one passes over the tensor, and does not read a few of its values."""


def _at_rate(run: Run, savings: Savings, rows: pd.DataFrame, longest: str) -> _Beside:
    """The rate at which large calls of an operator that memory bounds move memory, as part of a sentence, and what it
    could save where that is low for calls so large; nothing for others, and where the rate or that of the data sheet is
    unknown. `longest`: that the operator takes most of the kernel time, as the begin of a sentence."""
    rates = dense_rates(profiled_gpu(run, str(run.head.config.get("device") or "")).name)
    bounds = part_of(rows).isin(_MEMORY_PARTS).all() and (rows["total_us"] >= MIN_LARGE_US * rows["count"]).all()
    rate = rate_at_most(rows) if bounds else 0.0
    if rates is None or not rate or rate > rates.gb_per_s:
        return _Beside()
    frac = rate / rates.gb_per_s
    told = f", at up to {number(rate, 'GB/s')}, {percent(frac)} of its memory's rate"
    us, count = float(rows["total_us"].sum()), float(rows["count"].sum())
    saved_frac = (1 - frac / max(USUAL_RATE_FRACS)) * us / float(window_rows(run)["wall_us"].sum())
    is_elementwise = bool(rows["category"].isin(["elementwise", "cast"]).all())
    is_huge = 1e3 * rate * us >= MIN_HUGE_BYTES * count
    if not (is_elementwise and is_huge) or frac >= MAX_LOW_RATE_FRAC or saved_frac < MIN_SAVED_FRAC:
        return _Beside(told, is_left=frac < GOOD_RATE_FRAC)
    step_ms = savings.cost.step_us / 1e3
    low, high = (f"{100 * usual:.0f}" for usual in USUAL_RATE_FRACS)
    is_vectorized = rows["name"].str.contains("vectorized", regex=False).all()  # torch takes these for such rows alone
    contiguous = ", and" if is_vectorized else ", whether the tensors' rows are contiguous, and"
    first = (
        f"Largest possible saving: {longest}{told}, where calls as large reach {low} to {high} % (up to "
        f"{number(saved_frac * step_ms)} of {number(step_ms, 'ms')} per {savings.unit}). Check the clocks and the "
        f"power limit, other processes on the GPU{contiguous} whether it is only a partition of one."
    )
    return _Beside(told, first, is_left=True)


MIN_HUGE_BYTES, MAX_LOW_RATE_FRAC = 1e8, 0.5
"""Bytes of one call, more than a cache holds, and the share of the data sheet's rate of memory below which an
elementwise kernel on so many is slow for a reason that its sizes do not tell."""
USUAL_RATE_FRACS = (0.7, 0.8)
"""Shares of that rate that such kernels usually reach, as copies of the STREAM benchmark do."""
MIN_LARGE_US = 50.0
"""Shorter kernels move less than memory could while they start and end."""
GOOD_RATE_FRAC = 0.6
"""Share of the data sheet's rate of memory that kernels should reach that read and write large tensors once."""


def _longest_other(run: Run) -> tuple[str, float]:
    """The longest kernel that neither multiplies matrices nor communicates, and its share of the profiled time."""
    rows = kernel_rows(run)
    us = rows[~is_matrix(rows) & (rows["category"] != "communication")].groupby("name")["total_us"].sum()
    return (str(us.idxmax()), float(us.max() / window_rows(run)["wall_us"].sum())) if len(us) else ("", 0.0)


def _of_softmax(kernel: str, savings: Savings) -> str:
    """What a long softmax beside products tells of a model that does not train, whose loss needs one."""
    is_softmax = "softmax" in kernel.lower() and not savings.trains
    return ": attention is computed in steps, and a fused kernel keeps its scores on the chip" if is_softmax else ""


MIN_MEMORY_FRAC = 0.2
"""Share of the step in memory-bound kernels, none of them long, from which they are told together."""
MIN_BESIDE_FRAC = 0.1
"""Share of the profiled time from which a kernel other than products is named where nothing else is to be said."""


ALL_BUSY_FRAC = 0.99
"""Share of the step in which the device works from which neither launches nor waits take any of it."""
MAIN_PRODUCT_FRAC = 0.25
"""A product of unknown efficiency with more of the step than this is named where nothing else is to be said."""
MAIN_OP_FRAC = 0.5
"""An operator other than products that takes more of the kernel time is named where nothing else is to be said."""
