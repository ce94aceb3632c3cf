"""What products of matrices could save per step of a trace: in 16 bits, or at a good share of the peak rate.

    >>> [saving.code for saving in product_savings(run, rows, basis, has_tensor_cores=True)]
    ['fp32-products', 'slow-products']

Products in FP32 gain the ratio of the data sheet's dense rates, as far as memory allows; products on tensor cores gain
the distance to `GOOD_PEAK_FRAC` of that rate, or to the time that memory needs.
"""

import math
import re
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.attention import PRODUCTS_OF_BATCHES
from amp_core.analysis.performance.blocks import WHOLE_GPUS, architecture, blocks_of
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.fused_attention import is_of_scores
from amp_core.analysis.performance.gathered import Gathered, gathered
from amp_core.analysis.performance.gemm_shapes import product, tensor_shapes
from amp_core.analysis.performance.matrix_kinds import MatrixKinds, is_matrix, matrix_kinds
from amp_core.analysis.performance.roofline import in_16_bits, rate_frac
from amp_core.analysis.performance.saving import MIN_KERNEL_US, Basis, ProductSaving, longest_name, others
from amp_core.analysis.performance.shortest_kernels import shortest_us
from amp_core.analysis.performance.slower_products import SlowerProduct, slower_product
from amp_core.analysis.performance.step_cost import MATRIX_PARTS
from amp_core.formats import memory_bits_of
from amp_core.hardware.data_sheets import Rates, dense_rates
from amp_core.hardware.gpus import core_names
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

GOOD_PEAK_FRAC = 0.6
"""Share of the dense rate that large, well-shaped products reach on current GPUs (cuBLAS: 60 to 75 %)."""
SLOW_PEAK_FRAC = 0.3
"""Products below this share of the dense rate are slow."""
UNKNOWN_RATIO = 2.0
"""Gain of 16 bits over FP32 that is assumed where the data sheet is not listed: half the bytes."""


def product_savings(
    run: Run, rows: pd.DataFrame, basis: Basis, *, has_tensor_cores: bool, is_fused_attention: bool = False
) -> list[ProductSaving]:
    """The savings of products. `rows` of `kernels` count work that runs beside other work once. `is_fused_attention`:
    whether what the products of attention in steps save is counted with its softmax."""
    narrower = _narrower(_without_stalls(rows), basis) if has_tensor_cores else None
    ops = matrix_ops(run)
    ops = ops[~is_of_scores(ops, rows)] if is_fused_attention else ops
    copies = gathered(rows, basis)
    if copies is not None:  # the same change ends both
        ops = ops[~(ops["op"].isin(PRODUCTS_OF_BATCHES) & ops["in_shapes"].isin(copies.products))]
    slow = [one for one in (_slow(run, ops, basis, shortest_us(rows)), _of_gathered(copies, basis)) if one is not None]
    return [one for one in (narrower, max(slow, key=lambda one: one.saved_us, default=None)) if one is not None]


def _of_gathered(copies: Gathered | None, basis: Basis) -> ProductSaving | None:
    """What products save, with the copies of their matrices, that read each of these once, where it is."""
    if copies is None:
        return None
    return ProductSaving(
        "slow-products",
        copies.saved_us,
        basis.cost.step_us,
        f"{copies.in_words(basis)}; a grouped product reads each matrix once, where it is",
        copies.op,
        gathered_us=copies.us,
        are_shared=copies.are_shared,
    )


MIN_STALL_RATIO = 20.0
"""A launch that takes that many times as long as the others of its kernel on the same sizes did something else, such as
wait for a module to be loaded."""


def _without_stalls(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a launch that takes far longer than the others of its kernel on the same sizes, and longer than all
    of them, taken for one of these: faster arithmetic does not shorten it."""
    kernels = rows.groupby(["name", "in_shapes"])
    longest_us = kernels["longest_us"].transform("max")
    others_us = kernels["total_us"].transform("sum") - longest_us
    usual_us = others_us / (kernels["count"].transform("sum") - 1).clip(lower=1.0)
    stalled = (longest_us > others_us) & (longest_us > MIN_STALL_RATIO * usual_us) & (others_us > 0)
    stalled &= rows["in_shapes"] != ""
    at = stalled & (rows["longest_us"] == longest_us)
    return rows.assign(total_us=rows["total_us"].mask(at, rows["total_us"] - longest_us + usual_us))


def _narrower(rows: pd.DataFrame, basis: Basis) -> ProductSaving | None:
    """What 16 bits save of products in FP32 and TF32; None on a device whose rates and settings are not known."""
    matrix = rows[is_matrix(rows) & ~rows["name"].str.contains(_RECURRENCES)]
    fp32 = matrix[(matrix["precision"] == "fp32") & ~matrix["name"].str.contains("gemv", regex=False)]
    whole = "" if basis.rates or fp32.empty else WHOLE_GPUS.get(architecture(longest_name(fp32, "name")), "")
    rates = basis.rates or (dense_rates(f"AMD Instinct {whole}") if whole else None)
    tf32 = matrix[matrix["precision"] == "tf32"]
    slow_us, tf32_us = basis.each_us(fp32["total_us"]), basis.each_us(tf32["total_us"])
    if not matrix["device"].str.startswith("cuda").all():
        return None
    of_three = tf32["name"].str.contains(FP32_OF_THREE)
    ratio, tf32_ratio = (
        _mean_ratio(of, in_16_bits(of, tflops, rates), rates.half / tflops) if rates and tflops else UNKNOWN_RATIO
        for of, tflops in ((fp32, rates and rates.fp32), (tf32, rates and rates.tf32))
    )
    tf32_us_in_16_bits: pd.Series[float] = tf32["total_us"] / tf32_ratio / np.where(of_three, 3.0, 1.0)
    tf32_ratio = float(tf32["total_us"].sum() / tf32_us_in_16_bits.sum()) if tf32_us else tf32_ratio
    in_tf32 = "FP32 made of three products in TF32 each" if tf32_us and of_three.all() else "TF32"
    parts = [
        (_kinds(of), f"{basis.taken(us)} in {name}")
        for of, us, name in ((fp32, slow_us, "FP32"), (tf32, tf32_us, in_tf32))
        if us > 0
    ]
    win = slow_us * (1 - 1 / ratio) + tf32_us * (1 - 1 / tf32_ratio)
    both = slow_us and tf32_us and win
    whole_ratio = (slow_us + tf32_us) / (slow_us + tf32_us - win) if both else ratio if slow_us else tf32_ratio
    times = f"{number(whole_ratio, digits=2)} × as fast"
    of_bf16 = fp32["in_dtypes"].str.contains("BFloat16") | fp32["name"].str.contains("bfloat16")
    is_emulated = float(fp32["total_us"][of_bf16].sum()) >= MIN_EMULATED_FRAC * (slow_us + tf32_us) * basis.steps > 0
    narrower = "FP16 is" if is_emulated else "16 bits are"
    sheet = f"data sheet of an {whole}, for which its kernel is compiled" if whole else "data sheet"
    gain = f"by the {sheet}, {narrower} {times}" if rates else f"{narrower} assumed to be {times}"
    memory_bounds = bool(rates and ratio < MAX_BOUND_FRAC * rates.half / rates.fp32 and slow_us >= tf32_us)
    if memory_bounds and rates is not None and rate_frac(fp32, rates) >= MIN_MEMORY_FRAC:
        gain += ", since memory bounds most of these products"
    longest = longest_name(fp32 if slow_us >= tf32_us else tf32, "name")
    wide = pd.concat([fp32, tf32])
    if len(parts) == 2 and parts[0][0].subject != parts[1][0].subject:
        (one, in_fp32), (other, in_tf32) = parts
        taken = f"{one.subject} {one.verb} {in_fp32}, and {other.text} {in_tf32}"
    else:
        kinds = _kinds(wide)
        taken = f"{kinds.subject} {kinds.verb} {' and '.join(part for _, part in parts)}"
    if is_emulated:
        taken += ", on inputs in BF16, which the tensor cores of this GPU do not take"
    what = f"{taken}; {gain}"
    return ProductSaving(
        "fp32-products",
        win,
        basis.cost.step_us,
        what,
        longest,
        others=others(wide, "name"),
        memory_bounds=memory_bounds,
        is_emulated=is_emulated,
    )


FP32_OF_THREE = r"fmha_cutlass[FB]_f32_"
"""Kernels that compute each product in FP32 as three in TF32, which keeps FP32's precision and no flag turns off:
torch's memory-efficient attention on Ampere and later (OpMultiplyAddFastF32 of CUTLASS)."""
MIN_MEMORY_FRAC = 0.4
"""Share of the memory's rate at which products move their matrices from which that bounds them: otherwise too few
blocks run, or sizes do not fit."""
MIN_EMULATED_FRAC = 0.5
"""Share of products of BF16 in FP32's arithmetic from which that is told."""
MAX_BOUND_FRAC = 0.5
"""Of the ratio of the data sheet's rates, what products gain below which memory bounds most of them."""


MIN_FULL_FRAC = 0.9
"""The same from which they are told to gain all of it."""


def _mean_ratio(rows: pd.DataFrame, ratios: "pd.Series[float]", most: float) -> float:
    """How many times as fast all rows together are, of `most` by the rates of arithmetic alone."""
    us = float((rows["total_us"] / ratios).sum())
    ratio = float(rows["total_us"].sum()) / us if us > 0 else most
    return most if ratio >= MIN_FULL_FRAC * most else ratio


_RECURRENCES = "RNN_block|persistRNN"
"""In the names of cuDNN's kernels that run a whole recurrent layer, whose steps wait for one another: 16 bits hardly
make them faster, and whether their products run on tensor cores is unknown."""


def _kinds(rows: pd.DataFrame) -> MatrixKinds:
    return matrix_kinds(rows["total_us"], rows["category"] == "attention")


def _slow(run: Run, ops: pd.DataFrame, basis: Basis, least_us: float) -> ProductSaving | None:
    """What slow products save: the larger of what they would at a good share of the peak and at the rate of smaller
    ones. `least_us`: what any kernel takes."""
    lower = slower_product(ops)
    found = [_far_below(run, ops, basis, basis.rates, least_us)] if basis.rates is not None else []
    found += [_lower_rate(lower, basis)] if lower is not None else []
    return max((one for one in found if one is not None), key=lambda one: one.saved_us, default=None)


def _far_below(run: Run, ops: pd.DataFrame, basis: Basis, rates: Rates, least_us: float) -> ProductSaving | None:
    """What products far below the peak would save at a good share of it; None if there are none. No call takes less
    than `least_us`."""
    ops = ops[(ops["tensor_core"] == "yes") & (ops["of_peak_frac"] < SLOW_PEAK_FRAC)]
    if ops.empty:
        return None
    best = [_possible_us(row, rates) for row in ops.to_dict("records")]
    floor_us = np.maximum(np.array(best), least_us * ops["count"].to_numpy(dtype=float))
    wins = (ops["total_us"] - floor_us).clip(lower=0.0)
    # Of the operator with most to win, not of one with few sizes, and of what padding helps or not.
    wins_here = wins[_most(wins, ops["op"].str.cat(gain_by_padding(ops).astype(str)))]
    worst = ops.loc[wins_here[_most(wins_here, ops["sizes"][wins_here.index])].idxmax()]
    alike = ops[(ops["op"] == worst["op"]) & (ops["sizes"] == worst["sizes"])]  # in other modules or layers
    its_frac = float((alike["of_peak_frac"] * alike["total_us"]).sum() / alike["total_us"].sum())
    # Products on several streams at a time take no longer together than their part of the step.
    of_step = min(1.0, float(basis.cost.us(*MATRIX_PARTS)) / max(basis.each_us(ops["total_us"]), MIN_KERNEL_US))
    total = basis.each_us(ops["total_us"]) * of_step
    kinds = matrix_kinds(ops["total_us"], ops["op"].str.contains("attention"))
    cores, _ = core_names(basis.cost.device_name)
    best_us = best[ops.index.get_loc(worst.name)]
    reach = float(worst["of_peak_frac"] * worst["total_us"] / best_us)  # of arithmetic that memory lets through
    # With little work per byte, moving the matrices once takes longer than the products.
    allowed = f", where memory allows {percent(reach)}" if reach < SLOW_PEAK_FRAC else ""
    what = (
        f"{kinds.subject} below {percent(SLOW_PEAK_FRAC)} of the peak of the {cores} {kinds.verb} "
        f"{basis.taken(total)}, {worst['op']} ({worst['sizes']}) runs at "
        f"{percent(its_frac)}{allowed}"
    )
    saved_us, ideal_us = basis.each_us(wins) * of_step, best_us / max(1.0, worst["count"])
    here = sizes_to_pad_to(worst.to_dict()) if gain_by_padding(ops)[worst.name] else ""
    blocks = blocks_of(run, worst.to_dict())
    return ProductSaving(
        "slow-products",
        saved_us,
        basis.cost.step_us,
        what,
        str(worst["op"]),
        here,
        others=others(ops, "op"),
        ideal_us=ideal_us,
        blocks_per_sm=blocks.per_unit if blocks is not None else None,
        slowest=product(str(worst["op"]), str(worst["in_shapes"])),
    )


def _most(wins: "pd.Series[float]", groups: "pd.Series[str]") -> "pd.Series[bool]":
    """Which rows are of the group with most to win."""
    return groups == wins.groupby(groups).sum().idxmax()


def gain_by_padding(ops: pd.DataFrame) -> "pd.Series[bool]":
    """Whether aligned sizes would let a faster kernel run. Rows of matrices, as tokens of a batch, lie one behind the
    other in memory: how many there are bars no kernel, except where backward has them as columns."""
    of_rows = ops["unaligned"].str.match(r"M \d+$") & (ops["phase"] != "backward")
    return (ops["padded"] != "") & (~of_rows | ops["kernel"].str.contains(_NARROW_LOADS))


def sizes_to_pad_to(row: Mapping[Hashable, Any]) -> str:
    """The sizes of a row of `matrix_ops` that gains by padding, with those rounded up in which elements lie side by
    side in memory: K and N, since M is the number of rows, except in backward, and where nothing else is unaligned."""
    of_rows_alone = _ROWS.fullmatch(str(row["unaligned"])) is not None
    m = _ROWS.search(str(row["sizes"]))
    if row["phase"] == "backward" or of_rows_alone or m is None:
        return str(row["padded"])
    return _ROWS.sub(m[0], str(row["padded"]))


_ROWS = re.compile(r"\bM \d+")
_NARROW_LOADS = r"align[124](?!\d)"
"""In the names of kernels of CUTLASS that load fewer elements at a time, as other sizes are not aligned for more."""


def _lower_rate(lower: SlowerProduct, basis: Basis) -> ProductSaving:
    """What a product would save at the rate that smaller ones of the same trace reach."""
    what = (
        f"{lower.op} ({lower.sizes}) takes {basis.taken(lower.us / basis.steps)} at "
        f"{lower.flops_per_s / 1e12:.3g} TFLOP/s, where smaller products reach {lower.others_per_s / 1e12:.3g} TFLOP/s"
    )
    each_us = (lower.us - lower.won_us) / max(1.0, lower.calls)
    saved_us = lower.won_us / basis.steps
    return ProductSaving("slow-products", saved_us, basis.cost.step_us, what, lower.op, ideal_us=each_us)


def _possible_us(row: Mapping[Hashable, Any], rates: Rates) -> float:
    """Time that the products of a row need at a good share of the rate, or to move their matrices once."""
    us, share = float(str(row["total_us"])), float(str(row["of_peak_frac"]))
    return max(us * share / GOOD_PEAK_FRAC, moved_bytes(row) / (rates.gb_per_s * 1e3))


def moved_bytes(row: Mapping[Hashable, Any]) -> float:
    """What the products of a row of `matrix_ops` read and write, each matrix once; 0 where sizes are not known."""
    made = product(str(row["op"]), str(row["in_shapes"]))
    if made is None:
        return 0.0
    bits = memory_bits_of(str(row["precision"])) or 16
    if made.kind == "gemm":
        m, n, k = (made.sizes[name] for name in "MNK")
        elements = (m * k + k * n + m * n) * made.batch
    else:  # the output of attention is as large as its first input; that of others is not recorded
        sizes = [math.prod(shape) for shape in tensor_shapes(str(row["in_shapes"]))]
        elements = sum(sizes) + (sizes[0] if made.kind == "attention" else 0)
        if made.rows is not None:  # rows reach no more experts than there are rows
            elements = round(elements * min(1.0, made.rows / made.batch))
    return elements * float(str(row["count"])) * bits / 8
