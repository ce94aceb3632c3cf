"""Rules on products of matrices in imported traces: in FP32, and far below the rate of tensor cores."""

import re
from dataclasses import replace
from typing import Literal

import pandas as pd

from amp_core.analysis.performance.attention import SOFTMAX, has_attention_in_steps, softmax_of_scores_us
from amp_core.analysis.performance.blocks import MAX_FEW_BLOCKS, is_long_sum
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import ProductSaving, longest_name
from amp_core.findings.channels_last import for_miopen, on_amd
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, rule
from amp_core.findings.snippets import WITH_SCALER
from amp_core.findings.trace_findings import SAVING_THRESHOLD, guides_remedy, reported_saving, saving_finding, trains
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import Gpu, is_amd
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

_AUTOCAST = "with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)"
_MATMUL_TF32, _CUDNN_TF32 = (f"torch.backends.{of}.allow_tf32 = True" for of in ("cuda.matmul", "cudnn"))
_WITH_TF32 = f"{_MATMUL_TF32}\n{_AUTOCAST}"
_NUMBERS_STAY = "   # numbers of rows, as tokens, stay"
_IN_BF16 = (
    "model = model.to(torch.bfloat16)\nwith torch.inference_mode():\n"
    f"    y = model(x.to(torch.bfloat16)){_NUMBERS_STAY}"
)


@rule(
    Entry(
        code="fp32-products",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=436,
        what="GEMM/conv of an imported trace runs in FP32 or TF32, where 16 bits are faster.",
        signal="Time of such kernels, by name and by their operators' dtypes, and the data sheet's rates.",
        threshold=SAVING_THRESHOLD,
        advice="Run them in 16 bits under autocast, or allow TF32 on GPUs that support it (Ampere and later). BF16 "
        "needs no loss scaling; before Ampere, use FP16 with a GradScaler.",
        snippet=_WITH_TF32,
        page="tensor-cores",
    )
)
def fp32_products(run: Run) -> list[Finding]:
    """`fp32-products`: products and convolutions that 16 bits would speed up."""
    saving = reported_saving(run, "fp32-products", ProductSaving)
    if saving is None:
        return []
    gpu, rows = profiled_gpu(run, str(run.head.config.get("device") or "")), kernel_rows(run)
    types = _types_of(gpu, rows, can_gain_by_tf32=bool(_tf32_settings(run, gpu)) and not saving.memory_bounds)
    remedy = _in_types(run, gpu, types)
    if saving.is_emulated:
        remedy = replace(remedy, advice=remedy.advice.replace("would be", "is"))
    if types in _KNOWN_TYPES:
        remedy = _in_part(run, remedy)
    if _are_plain_products(rows):
        remedy = _without_model(remedy)
    takes_rows = rows["op"].str.contains(_EMBEDDING) | rows["top_op"].str.contains(_EMBEDDING)
    if types in _KNOWN_TYPES and takes_rows.any():  # numbers of rows, which 16 bits would change
        images = f"model(tokens, x.to(torch.\\1)){_NUMBERS_STAY}"
        inputs = images if (rows["category"] == "conv").any() else "model(x)"
        remedy = replace(remedy, snippet=_CAST_INPUT.sub(inputs, remedy.snippet))
    elif (rows["op"] != "").any():
        remedy = replace(remedy, snippet=remedy.snippet.replace(_NUMBERS_STAY, ""))
    return [saving_finding(run, saving, remedy)]


_Types = Literal["fp16 alone", "16 bits", "16 bits or tf32", "fp16", "unknown"]
_KNOWN_TYPES = ("fp16 alone", "16 bits", "16 bits or tf32")
"""Of GPUs that are known well enough to say what of a model to convert."""


def _types_of(gpu: Gpu, rows: pd.DataFrame, *, can_gain_by_tf32: bool) -> _Types:
    """The narrower types in which a GPU computes products faster."""
    names = rows["name"]
    is_ampere = names.str.contains(_SINCE_AMPERE).any()
    if gpu.takes("bf16") is False or (not gpu.name and not is_ampere and names.str.contains(_BEFORE_AMPERE).any()):
        return "fp16 alone"
    if is_amd(gpu.name) or not can_gain_by_tf32:
        return "16 bits"
    if gpu.takes("bf16") or is_ampere:
        return "16 bits or tf32"
    # Old ones compute with FP16, and neither with BF16 nor with TF32.
    return "fp16" if names.str.contains(_OF_OLD_GPUS).any() else "unknown"


def _in_types(run: Run, gpu: Gpu, types: _Types) -> Remedy:
    """What to advise on a GPU with these types, in training or in inference."""
    entry, in_training = GUIDE["fp32-products"], trains(run)
    if types == "fp16":
        snippet = entry.snippet if in_training else _IN_BF16
        return Remedy("Run the model in FP16.", snippet.replace("bfloat16", "float16"))
    if types == "unknown":
        return Remedy(entry.advice, entry.snippet) if in_training else _INFERENCE
    if types == "fp16 alone":
        return _FP16_ALONE if in_training else _FP16_ALONE_INFERENCE
    if types == "16 bits":
        return _SIXTEEN_BITS if in_training else _SIXTEEN_BITS_INFERENCE
    remedy, rates = _SIXTEEN_BITS_OR_TF32 if in_training else _SIXTEEN_BITS_OR_TF32_INFERENCE, dense_rates(gpu.name)
    gain = ""
    if rates and rates.tf32:
        gain = f" By the data sheet, TF32 is {number(rates.tf32 / rates.fp32, digits=2)} × as fast as FP32."
    settings = remedy.snippet.replace(_MATMUL_TF32, _tf32_settings(run, gpu))
    return Remedy(f"{remedy.advice}{gain}", settings)


def _are_plain_products(rows: pd.DataFrame) -> bool:
    """Whether a program does nothing but multiply tensors: no module, and no operator of a layer."""
    plain = is_matrix(rows) & rows[["op", "top_op"]].isin(_PLAIN).all(axis=1) & (rows["module"] == "")
    return bool(len(rows) and plain.all())


def _without_model(remedy: Remedy) -> Remedy:
    """The remedy for products of tensors, where a program has no model."""
    snippet = remedy.snippet
    for dtype in ("bfloat16", "float16"):
        product = f"c = a.to(torch.{dtype}) @ b.to(torch.{dtype})"
        snippet = snippet.replace(_IN_BF16.replace("bfloat16", dtype), product)
    return Remedy(_RUN_MODEL.sub(r"\1 the products", remedy.advice), snippet)


_RUN_MODEL = re.compile(r"([Rr]un) the model")
_PLAIN = ("aten::matmul", "aten::mm", "aten::bmm")
"""Operators that multiply tensors, and what calls them where no layer does."""
MIN_NARROW_FRAC = 0.2
"""Share of products in 16 or fewer bits in the time of all from which the others are told to be left over."""


def _in_part(run: Run, remedy: Remedy) -> Remedy:
    """The remedy; one for the rest alone where part of the products runs in 16 bits already."""
    rows = kernel_rows(run)
    rows = rows[is_matrix(rows)]
    wide, narrow = rows[rows["precision"].isin(["fp32", "tf32"])], rows[rows["precision"].isin(["fp16", "bf16"])]
    share = float(narrow["total_us"].sum() / rows["total_us"].sum())
    if share < MIN_NARROW_FRAC:
        return remedy
    op = longest_name(wide[wide["op"] != ""], "op")
    most = f", most of them in {op}" if op else ""
    dtype = "bfloat16" if longest_name(narrow, "precision") == "bf16" else "float16"
    advice = (
        f"{percent(share)} of the time of products is in 16 bits already. Find why the others are not{most}: they lie "
        "outside of autocast, where it is switched off, or in a part of the model that was not converted."
    )
    snippet = (
        f"with torch.autocast(device_type, dtype=torch.{dtype}):   # around all of it, and enabled=False nowhere inside"
    )
    return Remedy(advice, f"{snippet}\n    y = model(x)")


_EMBEDDING = "embedding"
_CAST_INPUT = re.compile(r"model\(x\.to\(torch\.(\w+)\)\).*")


_FP16_ALONE = Remedy(
    "The tensor cores of this GPU only support FP16: run these products in FP16 under autocast, with a GradScaler. "
    "BF16 would be emulated, and there is no TF32.",
    WITH_SCALER,
)
"""On Volta and Turing."""
_FP16_ALONE_INFERENCE = Remedy(
    "The tensor cores of this GPU only support FP16: run the model in FP16. BF16 would be emulated, and there is no "
    "TF32.",
    _IN_BF16.replace("bfloat16", "float16"),
)
_INFERENCE = Remedy("Run the model in 16 bits, or allow TF32 on GPUs that support it (Ampere and later).", _IN_BF16)
"""On a GPU that is not known."""


def _tf32_settings(run: Run, gpu: Gpu) -> str:
    """Code that allows products in TF32 where that would be faster: most are in FP32 where TF32 is not allowed, and the
    data sheet gives it a higher rate, as it does not for GeForce. Of GPUs without one here, those whose compute
    capability ends with 0, the large chips of a generation, have a higher rate. TF32 is allowed for convolutions, and
    for other products, by a setting of its own; where one of them runs in TF32, the library chose FP32 for the rest."""
    rows, rates = kernel_rows(run), dense_rates(gpu.name)
    rows = rows[is_matrix(rows) & ~rows["name"].str.contains(_NEVER_IN_TF32)]
    us = rows.groupby([rows["category"] == "conv", "precision"])["total_us"].sum()
    fp32, tf32 = ([us.get((conv, precision), 0.0) for conv in (False, True)] for precision in ("fp32", "tf32"))
    gaining = [slow if fast == 0 else 0.0 for slow, fast in zip(fp32, tf32, strict=True)]
    if rates is not None and rates.tf32 is not None:
        faster = rates.tf32 >= MIN_TF32_RATIO * rates.fp32
    else:
        faster = gpu.capability is None or not gpu.known or gpu.capability[1] == 0
    if not faster or sum(gaining) <= max(sum(fp32) / 2, sum(tf32)):
        return ""
    settings = zip((_MATMUL_TF32, _CUDNN_TF32), gaining, strict=True)
    return "\n".join(line for line, us in settings if us >= MIN_OF_GAIN_FRAC * sum(gaining))


_NEVER_IN_TF32 = "gemv|depthwise|grouped_direct"
"""In the names of kernels of matrix-vector products and of depthwise convolutions, which have none in TF32."""
MIN_OF_GAIN_FRAC = 0.1
"""Share of the products that TF32 would speed up from which the setting for their kind is told."""
MIN_TF32_RATIO = 1.2
_SINCE_AMPERE = r"(?:ampere|ada|hopper|blackwell)_|sm(?:8\d|9\d|1\d\d)_|cutlass_?(?:3x_sm)?(?:8\d|9\d|1\d\d)_|nvjet_"
"""In the names of kernels that GPUs before Ampere do not have."""
_BEFORE_AMPERE = r"(?:volta|turing)_"
"""In the names of kernels that cuBLAS and cuDNN take on Volta and Turing."""
_OF_OLD_GPUS = r"maxwell_"
"""In the names of kernels that cuBLAS takes on GPUs before Volta."""
_SIXTEEN_BITS = Remedy("Run them in 16 bits under autocast. BF16 needs no loss scaling.", _AUTOCAST)
_SIXTEEN_BITS_INFERENCE = Remedy("Run the model in 16 bits.", _IN_BF16)
_SIXTEEN_BITS_OR_TF32 = Remedy(
    "Run them in 16 bits under autocast, or allow TF32. BF16 needs no loss scaling.", _WITH_TF32
)
_SIXTEEN_BITS_OR_TF32_INFERENCE = Remedy(
    "Run the model in 16 bits, or allow TF32.", f"{_MATMUL_TF32}   # or\n{_IN_BF16}"
)


@rule(
    Entry(
        code="slow-products",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=437,
        what="Tensor-core GEMMs of an imported trace reach only a small share of the peak rate.",
        signal="Operations from the recorded shapes over kernel time, and the data sheet's dense rate.",
        threshold=f"{SAVING_THRESHOLD} Below 30 % of the peak rate, and slower than moving the matrices once.",
        advice="Unaligned sizes underuse tensor cores. Pad them to multiples of 16 bytes (8 elements in 16 bits), and "
        "merge small products.",
        snippet="n = -(-n // 8) * 8   # pad to a multiple of 8",
        page="tensor-cores",
    )
)
def slow_products(run: Run) -> list[Finding]:
    """`slow-products`: products on tensor cores far below their rate."""
    saving = reported_saving(run, "slow-products", ProductSaving)
    return [] if saving is None else [saving_finding(run, saving, _slow_remedy(run, saving))]


def _slow_remedy(run: Run, slow: ProductSaving) -> Remedy:
    """What to advise for products far below their rate, by the slowest operator."""
    if slow.gathered_us:
        return _SHARED if slow.are_shared else _GATHERED
    made, few_blocks = slow.slowest, slow.blocks_per_sm is not None and slow.blocks_per_sm < MAX_FEW_BLOCKS
    if "bmm" in slow.where and has_attention_in_steps(kernel_rows(run)):
        return attention_in_steps(run)
    if slow.here:  # sizes to pad to
        return guides_remedy(slow)
    if "attention" in slow.where and made is not None and 0 < (made.keys or 0) < MIN_OF_TILE:
        return _PARTS_OF_TILES
    if made is not None and few_blocks and is_long_sum(made):
        return _SPLIT_SUM
    return _large(run, slow) if _is_large(slow) else _small(run, slow)


def _is_large(slow: ProductSaving) -> bool:
    """Whether one call has enough work to fill the device: blocks of attention each do that of some 100 queries, while
    those of a small product may do next to none, unless they need some time together even at a good rate."""
    blocks = slow.blocks_per_sm or 0.0
    fills = ("attention" in slow.where and blocks >= 1) or (blocks >= MIN_WAVE and slow.ideal_us >= MIN_FILLING_US)
    return fills or slow.ideal_us >= MIN_LARGE_US


def _large(run: Run, slow: ProductSaving) -> Remedy:
    """What to advise for large products."""
    is_on_amd = on_amd(run)
    remedy = next((r for word, r in _LARGE.items() if word in slow.where), _LARGE_PRODUCTS)
    if remedy is _LARGE_PRODUCTS:
        return _LARGE_ON_AMD if is_on_amd else remedy
    if remedy is not _LARGE["attention"]:
        return for_miopen(run, remedy)
    if is_on_amd:
        return _ATTENTION_ON_AMD
    if _is_in_fp32(run, slow.where):
        return _FP32_ATTENTION
    if slow.slowest is not None and slow.slowest.sizes.get("D") in _USUAL_HEADS:
        return remedy
    return replace(remedy, advice=f"{remedy.advice} Many are only fast for head sizes of 64 and 128.")


def _small(run: Run, slow: ProductSaving) -> Remedy:
    """What to advise for products of aligned sizes that do not fill the device."""
    remedy = next((r for word, r in _ALIGNED.items() if word in slow.where), _SMALL)
    if remedy is not _ALIGNED["bmm"] or _has_softmax(run, slow.where):
        return for_miopen(run, remedy)
    return _SMALL_BATCHES


def _has_softmax(run: Run, op: str) -> bool:
    """Whether a softmax of scores takes a share of the time of that operator's products that it does in attention."""
    rows = kernel_rows(run)
    products_us = float(rows["total_us"][rows["op"] == op].sum())
    return softmax_of_scores_us(rows) >= MIN_SOFTMAX_FRAC * products_us > 0


MIN_SOFTMAX_FRAC = 0.1
"""Time of a softmax over that of the products from which these may be those of attention."""


def _is_in_fp32(run: Run, op: str) -> bool:
    """Whether most time of an operator is in FP32 or TF32."""
    rows = kernel_rows(run)
    return longest_name(rows[rows["op"] == op], "precision") in ("fp32", "tf32")


def attention_in_steps(run: Run) -> Remedy:
    """Advice for attention in steps: the model's own, or torch's where it has no fused kernel for the inputs."""
    rows = kernel_rows(run)
    outer = longest_name(rows[rows["op"] == SOFTMAX], "top_op")
    return _MATH_BACKEND if "scaled_dot_product_attention" in outer else _IN_STEPS


MIN_OF_TILE = 32
"""Keys below which most of a tile of attention is empty: kernels compute 64 to 128 of them at a time."""
_PARTS_OF_TILES = Remedy(
    "Kernels of attention compute tiles of 64 to 128 queries and keys, of which few are used here, so padding gains "
    "nothing. Give each call more of them, or compute it as multiplications and sums, compiled together: of products, "
    "the compiler makes the same kernel again.",
    "scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / q.size(-1) ** 0.5   # in a compiled function\n"
    "y = (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)",
)
_USUAL_HEADS = (64, 128)
"""Head sizes for which every kernel of attention is fast."""
_IN_STEPS = Remedy(
    "Softmax takes long beside products of batches: attention is computed in steps, and each writes and reads all "
    "scores. Compute it in one kernel, which keeps them on the chip; models of transformers that "
    'have it take attn_implementation="sdpa".',
    "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of bmm, softmax, bmm",
)
_MATH_BACKEND = Remedy(
    "scaled_dot_product_attention computes attention in steps here, in its math backend, and each writes and reads all "
    "scores. Find what keeps its fused kernels from these inputs, as their dtype, mask or head size.",
    "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
    "with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):   # warns why it does not take the inputs\n    y = model(x)",
)
MIN_LARGE_US = 100.0
"""A call that would take this long at a good rate has enough work for any GPU: some ten times a launch."""
MIN_WAVE, MIN_FILLING_US = 0.9, 10.0
"""Blocks by multiprocessor, nearly all of which then have work, and what a call needs at a good rate, several times
what a kernel takes to start, from which the size of a call is no reason for a low rate."""
_LARGE_PRODUCTS = Remedy(
    "The sizes are aligned and large, so neither padding nor larger batches help: the library's choice of a kernel is "
    "slow here. Let a compiler time others beside it, update the library, or try another layout of the inputs.",
    'model = torch.compile(model, mode="max-autotune")   # times kernels of Triton beside those of the library',
)
_LARGE_ON_AMD = Remedy(
    "The sizes are aligned and large, so neither padding nor larger batches help: the library's choice of a kernel is "
    "slow here. Let it time its kernels, update it, or try another layout of the inputs.",
    "torch.cuda.tunable.enable()   # times the kernels of each product once, in a warm-up",
)
"""TunableOp times the kernels of rocBLAS and hipBLASLt; on NVIDIA's GPUs it has only cuBLAS's own choice."""
_LARGE = {
    "attention": Remedy(
        "The calls have enough work for this GPU, so the kernel itself is slow. Time the other implementations, or "
        "update the library.",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
        "with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):   # or FLASH_ATTENTION, CUDNN_ATTENTION\n"
        "    y = model(x)",
    ),
    "conv": Remedy(
        "The channels are aligned and the calls are large, so padding gains nothing. Let the library time its "
        "algorithms, and use channels-last memory format.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
    ),
}
"""Advice by the operator where one call has enough work."""
_ATTENTION_ON_AMD = Remedy(
    "The calls have enough work for this GPU, so the kernel itself is slow. Time the implementation of Composable "
    "Kernel beside AOTriton's, or update ROCm.",
    'torch.backends.cuda.preferred_rocm_fa_library("ck")   # from PyTorch 2.7 on; flash and efficient attention',
)
"""On ROCm, flash and efficient attention are the same kernels, and cuDNN's does not exist."""
_FP32_ATTENTION = Remedy(
    "A fused kernel of attention runs already, in FP32, which the faster ones do not take. Compute attention in 16 "
    "bits.",
    "y = torch.nn.functional.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())",
)
"""FlashAttention and cuDNN's attention take FP16 and BF16 alone."""
_SMALL = Remedy(
    "There is too little work in one call for this GPU, and padding gains nothing. Use larger batches, or merge "
    "several products into one.",
    "qkv = torch.nn.functional.linear(x, torch.cat([wq, wk, wv]))   # one product instead of three",
)
_ALIGNED = {
    "attention": Remedy(
        "Few heads, short sequences or one query per sequence leave most of the GPU without work, and padding gains "
        "nothing. Use larger batches; for decoding, use a kernel that splits the keys.",
        "y = model(torch.cat(inputs))   # one call for several batches",
    ),
    "conv": Remedy(
        "The channels are aligned, so padding gains nothing. Let the library time its algorithms, use channels-last "
        "memory format, and use larger batches.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
    ),
    "bmm": Remedy(
        "The products of a batch are too small for this GPU. If they are those of attention, compute it in one kernel; "
        "otherwise merge them into larger products.",
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of bmm, softmax, bmm",
    ),
}
"""Advice by the operator where no size needs padding."""
_SMALL_BATCHES = Remedy(
    "The products of a batch are too small for this GPU, and padding gains nothing. Merge those that share a matrix "
    "into one larger product.",
    "y = x.flatten(0, 1) @ weight   # one product, instead of one for each of the batch",
)
"""Without a softmax about as long, they are none of attention."""
_GROUPED = "y = torch.nn.functional.grouped_mm(rows, weights, offs=ends)   # rows in the order of their matrices"
_GATHERED = Remedy(
    "The matrices of these products are copies that are gathered for them, and written and read once more each. Use a "
    "grouped product, which reads the matrices where they are.",
    _GROUPED,
)
_SHARED = Remedy(
    "The matrices of these products are copies that are gathered for them, several of each matrix. Sort the rows by "
    "matrix, and multiply each group by its own once, in a grouped product.",
    _GROUPED,
)
_SPLIT_SUM = Remedy(
    "The result is small and each of its values is a long sum, so few blocks compute it all. Split the sums: multiply "
    "parts of them as a batch, and add the results.",
    "parts = torch.bmm(a.unflatten(1, (64, -1)).transpose(0, 1), b.unflatten(0, (64, -1)))   # of a @ b\n"
    "y = parts.sum(0)",
)
