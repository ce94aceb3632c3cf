"""What the first sentence says of products that read every weight for few rows, as those that decode.

>>> few_rows(run, savings)
'127 passes decode 1 token each: products in 16 bits take 71.9 % of the profiled window and read every weight for …'
"""

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import dtypes_of, product
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import counted_once, kernel_rows, numbers_of_import, window_rows
from amp_core.analysis.performance.late_launches import waits_early
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_KERNEL_US, longest_name
from amp_core.analysis.performance.savings import Savings
from amp_core.formats import element_bytes
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.kernel_names import SMALL_TYPES
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, number, percent

MAX_FEW_ROWS = 64
"""Rows up to which reading a weight takes longer than multiplying by it: GPUs of data centers compute 150 to 300
products in 16 bits per byte that they read (their data sheets), and each row needs one per byte."""
MIN_DECODING_FRAC = 0.75
"""Share of the device's work in passes that decode from which the trace is one of decoding."""
MIN_VECTOR_FRAC = 0.8
"""Share of the kernel time in products of a matrix and a vector from which they are told first."""
MIN_OF_STEP_FRAC = 0.5
"""Share of the step that such products take at least."""
MIN_OF_DECODING_FRAC = 0.4
"""The same of passes that the trace marks as decoding."""
MIN_WIDE_FRAC = 0.05
"""Share of the step in products of 16 bits from which they are named beside those of fewer bits."""
MIN_ALL_WIDE_FRAC = 0.95
"""Share of the products' time from which all are said to be in 16 bits."""
MIN_READ_FRAC = 0.5
"""Share of the memory's rate at which products read and write their matrices from which it bounds them."""
MIN_ALL_FRAC = 0.95
"""Share of the products' time in the passes that decode from which it is all theirs."""
_OF_EXPERTS = r"(?i)moe|expert|grouped"
"""In the names of products with the weights of those experts that tokens are sent to."""
_ROUTES = r"(?i)moe|(?<![a-z])expert"
"""In the names of kernels of models that send each token to a few experts, whose others' weights are not read."""
_MORE_ROWS = "more requests per pass or speculative decoding help"


def few_rows(run: Run, savings: Savings | None) -> str:
    """That products take most of the step and read every weight for few rows; else empty."""
    rows = kernel_rows(run)
    if savings is None or rows.empty:
        return ""
    return _decoding(run, savings) or _vectors(run, savings)


def _decoding(run: Run, savings: Savings) -> str:
    """The same of a serving engine's passes."""
    passes, tokens, frac, products_frac = numbers_of_import(run, "decoding", "passes", "rows", "frac", "products_frac")
    if not 0 < tokens <= MAX_FEW_ROWS or frac < MIN_DECODING_FRAC:
        return ""
    rows, wall_us = kernel_rows(run), float(window_rows(run)["wall_us"].sum())
    products = rows[is_matrix(rows) & (rows["category"] != "attention")]
    share = float(products["total_us"].sum()) / wall_us
    in_passes = share * (products_frac or 1.0)  # not in runs of older versions
    least, most = (rows or tokens for rows in numbers_of_import(run, "decoding", "least_rows", "most_rows"))
    each = f"{least:,.0f} to {most:,.0f} tokens" if least < most else f"{tokens:,.0f} token{'s' if tokens != 1 else ''}"
    if in_passes < MIN_OF_DECODING_FRAC:
        return _short_kernels(run, savings, passes, each)
    theirs = f", {percent(in_passes)} in these passes," if in_passes < MIN_ALL_FRAC * share else ""
    wide = _in_16_bits(products)
    wide_frac = float(wide["total_us"].sum()) / wall_us
    sizes = "in 16 bits " if wide_frac >= MIN_ALL_WIDE_FRAC * share else ""
    of_fewer = products["name"].str.contains(_OF_FEWER_BITS)
    already = float(products["total_us"][of_fewer].sum()) > float(products["total_us"].sum()) / 2
    read_frac = _read_frac(products, savings)
    if read_frac is None:
        remedies = f": {_MORE_ROWS}{'' if already else ', as do weights of fewer bits where memory bounds them'}"
    elif read_frac < MIN_READ_FRAC:
        remedies = f", at {percent(read_frac)} of the memory's rate: {_MORE_ROWS}, and other kernels may be faster"
    else:
        remedies = f", so memory bounds them, and {'' if already else 'weights of fewer bits, '}{_MORE_ROWS}"
    of_experts = float(products["total_us"][products["name"].str.contains(_OF_EXPERTS)].sum())
    routes = rows["name"].str.contains(_ROUTES).any() or of_experts >= float(products["total_us"].sum()) / 2
    weights = "weights" if routes else "every weight"
    left = _longest(products, wall_us) + _attention(rows, wall_us)
    if not sizes and wide_frac >= MIN_WIDE_FRAC and products["precision"].isin(SMALL_TYPES).any():
        left += f" Those in 16 bits take {percent(wide_frac)}, most in {kernel_in_words(longest_name(wide, 'name'))}."
    return (
        f"{_decode(passes, each)}: products {sizes}take {percent(share)} of the {savings.unit}{theirs} and read "
        f"{weights} for so few rows{remedies}.{left}"
    )


def _longest(products: pd.DataFrame, wall_us: float) -> str:
    """The product that takes longest, with the variants of its kernel, as a sentence; empty where it takes little."""
    base = products["name"].str.replace(_VARIANT, r"\1", regex=True).map(kernel_in_words)
    us = products["total_us"].groupby(base).sum()
    its = products[base == us.idxmax()]
    frac, name = float(us.max()) / wall_us, kernel_in_words(longest_name(its, "name"))
    variants = its["name"].nunique() - 1
    more = f" with {variants} variant{'s' if variants > 1 else ''} of it" if variants else ""
    return f" The longest, {name}{more}, takes {percent(frac)}." if frac >= MIN_LONGEST_FRAC else ""


_VARIANT = r"^((?!nvjet_)\w+?)_(?:[NT]{2,4}_)?(?:[a-z]*\d+x)+.*$"
"""The name of a kernel that is compiled for several types, tiles and functions applied to the result, and what follows
it: `_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu`. cuBLAS names all of its kernels `nvjet`."""


def _attention(rows: pd.DataFrame, wall_us: float) -> str:
    """What attention takes, as a sentence; empty where that is little."""
    frac = float(rows["total_us"][rows["category"] == "attention"].sum()) / wall_us
    return f" Attention takes another {percent(frac)}." if frac >= MIN_ATTENTION_FRAC else ""


MIN_ATTENTION_FRAC = 0.15
"""Share of the step in attention from which it is named beside such products."""


def _read_frac(products: pd.DataFrame, savings: Savings) -> float | None:
    """The share of the memory's rate at which products read and write their matrices; None where the sizes of most of
    them, by time, or the rate are not known."""
    rates = dense_rates(savings.cost.device_name)
    shapes = products["in_shapes"].where(products["in_dtypes"] != "", "")
    made = [product(op, sizes) for op, sizes in zip(products["op"], shapes, strict=True)]
    known = [one is not None and one.kind == "gemm" for one in made]
    us = float(products["total_us"][known].sum())
    if rates is None or us < MIN_KNOWN_FRAC * float(products["total_us"].sum()):
        return None
    moved = 0.0
    for one, dtypes, count in zip(made, products["in_dtypes"], products["count"], strict=True):
        if one is not None and one.kind == "gemm":
            m, n, k = (one.sizes[name] for name in "MNK")
            width = max((element_bytes(dtype) or 0 for dtype in dtypes_of(dtypes)), default=0) or _WIDEST_BYTES
            moved += (m * k + k * n + m * n) * one.batch * width * count
    return moved / (rates.gb_per_s * 1e3 * us)


MIN_KNOWN_FRAC = 0.5
"""Share of the products' time in those of known sizes from which their rate tells what bounds them."""
_WIDEST_BYTES = 8
"""Of an element whose type is not known."""


MIN_LONGEST_FRAC = 0.25
"""Share of the step from which the longest of these products is named."""


def _decode(passes: float, each: str) -> str:
    """`127 passes decode 4 tokens each`; `each`: the tokens of one."""
    return f"{passes:,.0f} passes decode {each} each" if passes > 1 else f"1 pass decodes {each}"


_OF_FEWER_BITS = r"(?i)fp4|nf4|int4|i4x|w4a|awq|gptq|marlin|fp8|e4m3|int8|w8a"
"""In the names of kernels that multiply by weights of fewer bits, in whatever precision they compute."""


def _in_16_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """The products that compute in 16 bits, with weights in 16 bits."""
    return rows[rows["precision"].isin(["fp16", "bf16"]) & ~rows["name"].str.contains(_OF_FEWER_BITS)]


MIN_KERNELS_OF_PASS, MAX_SHORT_US, MIN_IDLE_FRAC = 100.0, 10.0, 0.1
"""Kernels of a pass, their mean length, and share of the step between them, from which short kernels are what a pass
that decodes is made of."""


def _short_kernels(run: Run, savings: Savings, passes: float, each: str) -> str:
    """That passes that decode are made of short kernels, with the device idle between them; else empty."""
    windows, rows = window_rows(run), kernel_rows(run)
    ranks = max(1, windows["rank"].nunique())
    count, us = (
        float(rows["count"].sum()) / ranks / passes,
        float(rows["total_us"].sum() / max(1.0, rows["count"].sum())),
    )
    idle_frac = float(windows["idle_us"].fillna(0.0).sum() / windows["wall_us"].sum())
    if count < MIN_KERNELS_OF_PASS or us > MAX_SHORT_US or idle_frac < MIN_IDLE_FRAC or waits_early(windows):
        return ""
    return (
        f"{_decode(passes, each)}, in {count:,.0f} kernels of {number(us)} µs on average, and between "
        f"these the device is idle for {percent(idle_frac)} of the {savings.unit}: more requests per pass make them "
        "longer, and fused kernels make them fewer."
    )


MIN_HALVED_US = 10.0
"""Mean time of a product from which it may take half as long: to start any kernel takes some microseconds."""
INT8_RATIO = 2.0
"""How many times as fast as FP16 the tensor cores of Turing and Ampere multiply INT8, at least."""
MAX_OTHER_FRAC = 0.2
"""Share of the step that another change saves from which that alone is told."""


def in_8_bits(run: Run, savings: Savings | None) -> str:
    """That FP8, or INT8 where there is no FP8, would take products of a model that does not train half as long, where
    nothing else saves much; empty where they are few, train, or run on a GPU that multiplies neither."""
    if savings is None or savings.trains:
        return ""
    rates = dense_rates(savings.cost.device_name)
    gpu = profiled_gpu(run, str(run.head.config.get("device") or ""), savings.cost.device_name)
    if rates is None or (rates.fp8 is None and not gpu.takes("int8")):
        return ""
    if any(one.share >= MAX_OTHER_FRAC for one in savings.ranked):
        return ""
    rows = counted_once(kernel_rows(run))
    rows = rows[is_matrix(rows) & (rows["category"] != "attention") & (rows["tensor_core"] == "yes")]
    wide = _in_16_bits(rows[rows["total_us"] >= MIN_HALVED_US * rows["count"]])
    share = float(wide["total_us"].sum()) / float(window_rows(run)["wall_us"].sum())
    if share < MIN_OF_STEP_FRAC:
        return ""
    dtype, ratio = ("INT8", INT8_RATIO) if rates.fp8 is None else ("FP8", rates.fp8 / rates.half)
    return (
        f"No training runs: in {dtype}, which this GPU multiplies {number(ratio, digits=2)} × as fast by "
        f"the data sheet, products that take {percent(share)} in 16 bits may take about half as long."
    )


def _vectors(run: Run, savings: Savings) -> str:
    """The same of a trace without such marks, in which they are products of a matrix and a vector."""
    rows = kernel_rows(run)
    vectors = rows[rows["name"].str.contains("gemv", regex=False)]
    us = float(vectors["total_us"].sum())
    share = us / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    if share < MIN_VECTOR_FRAC or us < MIN_OF_STEP_FRAC * float(window_rows(run)["wall_us"].sum()):
        return ""
    remedies = "so memory bounds them, and larger batches or weights of fewer bits help"
    read_frac = _read_frac(vectors, savings)
    if read_frac is not None and read_frac < MIN_READ_FRAC:
        remedies = f"at {percent(read_frac)} of the memory's rate: larger batches help, and other kernels may be faster"
    return (
        f"Products of a matrix and a vector take {percent(share)} of the kernel time: they read every weight for one "
        f"row, {remedies}."
    )
