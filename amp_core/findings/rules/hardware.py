"""Rules on the GPU and its kernels: why 16-bit arithmetic is not faster."""

from dataclasses import replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import product as product_of
from amp_core.analysis.performance.gemm_shapes import unaligned
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.layouts import layout_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix, matrix_kinds
from amp_core.analysis.performance.product_savings import FP32_OF_THREE
from amp_core.analysis.performance.saving import Saving, longest_name, others
from amp_core.analysis.performance.savings import possible_savings
from amp_core.analysis.steps import autocast_dtype, recipe
from amp_core.findings.channels_last import for_miopen
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy, Severity
from amp_core.findings.registry import make_finding, paired_rule, rule
from amp_core.findings.signals import GEMM_LAYERS, facts, on_gpu
from amp_core.hardware.gpus import core_names
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words

MIN_OFF_TENSOR_CORE_FRAC = 0.1
"""Share of matrix time off tensor cores from which a gain is worthwhile: it is an upper bound (Amdahl)."""
MIN_REPORTED_FRAC = 0.05
"""Share of time or of weights below which nothing is reported: repeats of one program differ by more."""
MIN_TF32_FRAC = 0.01
"""Share of a trace's time below which its kernels in TF32 are no baseline's."""
ALIGNED_ELEMENTS = 8
"""Elements of 16 bits in 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", table 1)."""
IMAGE_CHANNELS = 4
"""Input channels up to which a convolution reads an image, whose channels nobody chooses."""


_TF32_BASELINE = Entry(
    code="tf32-baseline",
    severity="warning",
    family=SPEED_AND_MEMORY,
    order=490,
    what="The FP32 baseline run already uses TF32, which hides part of the gain from mixed precision.",
    signal="TF32 kernels in an FP32 run; torch's TF32 settings on a GPU that supports it.",
    threshold="One such kernel, or a setting that is on (compute capability 8.0 or newer). Informational for a "
    "trace, which does not record whether TF32 was intended: from 5 % of its kernel time, if as much is in GEMM/conv "
    "of another precision, or if it is the baseline of a trace without TF32.",
    advice="TF32 runs matrix products on tensor cores with 10 mantissa bits, on many GPUs faster than FP32. "
    "Turn it off for a fair baseline, or label the baseline TF32.",
    snippet="torch.backends.cuda.matmul.allow_tf32 = False\ntorch.backends.cudnn.allow_tf32 = False",
    frameworks={
        "Transformers Trainer": 'args = TrainingArguments(output_dir="out", tf32=False)',
        "Lightning": 'torch.set_float32_matmul_precision("highest")',
    },
    page="compare",
)


@rule(_TF32_BASELINE)
def tf32_baseline(run: Run) -> list[Finding]:
    """`tf32-baseline`: an FP32 run whose matrix products used TF32, or could."""
    if recipe(run) not in ("fp32", None) or autocast_dtype(run) is not None:
        return []
    rows = kernel_rows(run)
    tf32 = _tf32_kernels(rows)
    if len(tf32):
        longest = tf32.iloc[int(tf32["total_us"].to_numpy().argmax())]
        share = float(tf32["total_us"].sum() / rows["total_us"].sum())
        where = str(longest["module"]) or str(longest["name"])
        many = others(tf32, "module" if longest["module"] else "name")
        title = f"{100 * share:.0f} % of the kernel time of this FP32 run is in TF32 kernels"
        severity: Severity = "warning"
        if recipe(run) is None:  # a trace does not record the recipe: TF32 may be intended
            rest = rows[is_matrix(rows) & rows["precision"].isin(["fp32", "fp16", "bf16"])]
            if min(share, float(rest["total_us"].sum() / rows["total_us"].sum())) < MIN_REPORTED_FRAC:
                return []
            if tf32["total_us"].sum() < MIN_TF32_FRAC * window_rows(run)["wall_us"].sum():
                return []
            title, severity = (
                f"{100 * share:.0f} % of the kernel time is in TF32 kernels, so this is not a pure FP32 baseline",
                "info",
            )
        unit = f"share of kernel time{f', with {many} others' if many > 1 else ', with 1 other' if many else ''}"
        finding = make_finding("tf32-baseline", title, where, value=share, limit=0.0, unit=unit, severity=severity)
        return [finding if severity == "warning" else replace(finding, snippet=_tf32_switches(tf32))]
    flags = facts(run.head.environment, "flags")
    gpu = profiled_gpu(run, _device(run))
    if len(rows) or not on_gpu(run) or recipe(run) is None or not gpu.takes("tf32"):
        return []
    convolves = any("Conv" in str(kind) for kind in facts(run.head.model, "layers").values())
    if flags.get("tf32_matmul") is True:
        switch = "torch.backends.cuda.matmul.allow_tf32"
    elif flags.get("tf32_cudnn") is True and convolves:
        switch = "torch.backends.cudnn.allow_tf32"
    else:
        return []
    return [
        make_finding(
            "tf32-baseline", "This FP32 run allows TF32", switch, value=1.0, limit=0.0, unit="settings that are on"
        )
    ]


def _tf32_switches(tf32: pd.DataFrame) -> str:
    """Code that switches off what these kernels show to be on: products and cuDNN have settings of their own."""
    by_cudnn = (tf32["category"] == "conv") | tf32["op"].str.contains("_cudnn_rnn", regex=False)
    lines = [line for line, on in zip(_SWITCHES, ((~by_cudnn).any(), by_cudnn.any()), strict=True) if on]
    return "\n".join(lines)


_SWITCHES = ("torch.backends.cuda.matmul.allow_tf32 = False", "torch.backends.cudnn.allow_tf32 = False")


def _tf32_kernels(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["precision"] == "tf32") & ~rows["name"].astype(str).str.contains(FP32_OF_THREE)]


@paired_rule(_TF32_BASELINE)
def tf32_baseline_of(run: Run, baseline: Run) -> list[Finding]:
    """`tf32-baseline`, compared with a trace in TF32, by a run in another precision."""
    if recipe(baseline) is not None or autocast_dtype(baseline) is not None:
        return []
    rows, own = kernel_rows(baseline), kernel_rows(run)
    tf32 = _tf32_kernels(rows)
    of_baseline, of_run = (
        float(part["total_us"].sum() / max(whole["total_us"].sum(), 1e-3))
        for part, whole in ((tf32, rows), (_tf32_kernels(own), own))
    )
    if of_baseline < MIN_REPORTED_FRAC or of_run >= MIN_REPORTED_FRAC:
        return []
    title = f"{100 * of_baseline:.0f} % of the kernel time of the baseline, {baseline.name}, is in TF32 kernels"
    longest = tf32.iloc[int(tf32["total_us"].to_numpy().argmax())]
    where, unit = str(longest["module"]) or str(longest["name"]), "share of kernel time"
    return [make_finding("tf32-baseline", title, where, value=of_baseline, limit=0.0, unit=unit, severity="info")]


@rule(
    Entry(
        code="no-tensor-cores-on-device",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=430,
        what="The GPU has no tensor cores, so 16-bit matrix products are hardly faster.",
        signal="Compute capability and name of the GPU.",
        threshold="Capability below 7.0, or a Turing chip without them (GTX 16xx, T400 to T1200, MX450).",
        advice="On this GPU, mixed precision saves memory but little or no time. Stay in float32 unless memory is "
        "short, or use a GPU of the Volta generation or newer.",
        snippet="torch.cuda.get_device_capability()   # (7, 0) or more has tensor cores",
        page="",
    )
)
def no_tensor_cores_on_device(run: Run) -> list[Finding]:
    """`no-tensor-cores-on-device`: 16-bit autocast on a GPU without tensor cores."""
    if autocast_dtype(run) is None or not (on_gpu(run) or len(run.kernels)):
        return []
    rows = kernel_rows(run)
    if on_cpu(rows):
        return []
    gpu = profiled_gpu(run, str(rows["device"].iloc[0]) if len(rows) else _device(run))
    if gpu.has_tensor_cores is not False:
        return []
    major, minor = gpu.capability or (0, 0)
    return [
        make_finding(
            "no-tensor-cores-on-device",
            f"{gpu.name} has no tensor cores (compute capability {major}.{minor})",
            gpu.name,
            value=major + minor / 10,
            limit=7.0,
            unit="compute capability",
        )
    ]


@rule(
    Entry(
        code="kernels-off-tensor-cores",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=440,
        what="16-bit matrix products or convolutions run on kernels that do not use tensor cores.",
        signal="Names of the kernels of operators for which tensor-core kernels exist.",
        threshold="10 % of the time of all such operators, which by Amdahl's law bounds the possible gain; information "
        "in a trace of which they take less than 5 %.",
        advice="The library chose a kernel without tensor cores because of the shape, the layout or the library's "
        "age. Let cuDNN benchmark its algorithms, pad dimensions to multiples of 8, and use newer libraries.",
        snippet="torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
        page="tensor-cores",
    )
)
def kernels_off_tensor_cores(run: Run) -> list[Finding]:
    """`kernels-off-tensor-cores`: matrix kernels with 16-bit input that do not use tensor cores, on a GPU with them."""
    rows = kernel_rows(run)
    if rows.empty or on_cpu(rows) or no_tensor_cores_on_device(run):
        return []
    matrix, ops = rows[is_matrix(rows)], matrix_ops(run)
    never = ops[ops["reason"].isin(["vector", "depthwise"])]
    # Kernels of a captured graph name no operator, but a product with a vector gains nothing from tensor cores.
    matrix = matrix[~matrix["name"].isin(never["kernel"]) & ~matrix["name"].str.contains("gemv", regex=False)]
    total = float(matrix["total_us"].sum())
    off = matrix[(matrix["tensor_core"] == "no") & ~matrix["precision"].isin(["fp32", "tf32", "fp64"])]
    kinds = matrix_kinds(off["total_us"], off["category"] == "attention")
    if len(kinds.fracs) == 1:  # not beside the time of the other kind
        matrix = matrix[(matrix["category"] == "attention") == (kinds.text == "attention")]
        total = float(matrix["total_us"].sum())
    if autocast_dtype(run) is None and not off["precision"].isin(["fp16", "bf16"]).any():
        return []
    share = float(off["total_us"].sum()) / total if total > 0 else 0.0
    # Kernels that cannot be classified may multiply matrices, too.
    unknown_us = float(rows["total_us"][(rows["tensor_core"] == "unknown") & ~is_matrix(rows)].sum())
    if share < MIN_OFF_TENSOR_CORE_FRAC or off["total_us"].sum() < MIN_OFF_TENSOR_CORE_FRAC * (total + unknown_us):
        return []
    longest = off.iloc[int(off["total_us"].to_numpy().argmax())]
    where = str(longest["module"]) or str(longest["op"]) or str(longest["name"])
    product = longest["category"] != "conv"
    cores, _ = core_names(profiled_gpu(run, str(longest["device"])).name)
    remedy = _PADDED_PRODUCTS if product else _MIOPEN if "iopen" in longest["name"].lower() else None
    made = product_of(str(longest["op"]), str(longest["in_shapes"]))
    if remedy is None:
        of_signals = "conv1d" in longest["top_op"]
        remedy = _CONV1D if of_signals else None
        if made is not None and _unaligned_frac(off) < MIN_UNALIGNED_FRAC:
            remedy = _ALIGNED_CONV1D if of_signals else _ALIGNED_CONV
    elif product and longest["op"] in _OF_TWO_TENSORS and "linear" not in longest["top_op"]:
        is_aligned = made is not None and made.sizes.get("K", 1) % 8 == 0
        remedy = _NARROW_PRODUCTS if is_aligned else replace(_PADDED_PRODUCTS, snippet=_PADDED_TENSORS)
        if is_aligned and made is not None and made.batch > 1:
            has_few = min(made.sizes["M"], made.sizes["N"]) <= MAX_FEW_ROWS
            remedy = _FEW_ROWS_OF_BATCH if has_few else _ROWS_OF_BATCH
    if product and made is None and _FOR_FEW_ROWS in longest["name"]:
        remedy = _FEW_ROWS
    of_longest_us = float(off["total_us"][off["name"] == longest["name"]].sum())
    most = "most of it in" if of_longest_us > off["total_us"].sum() / 2 else "the largest part in"
    finding = make_finding(
        "kernels-off-tensor-cores",
        f"{100 * share:.0f} % of 16-bit {kinds.text} kernel time does not use {cores}, {most} "
        f"{kernel_in_words(str(longest['name']))}",
        where,
        steps=steps_of(off),
        value=share,
        limit=MIN_OFF_TENSOR_CORE_FRAC,
        unit="share of matrix time",
        remedy=remedy if remedy is None or product else for_miopen(run, remedy),
    )
    little = is_trace(run) and off["total_us"].sum() < MIN_REPORTED_FRAC * window_rows(run)["wall_us"].sum()
    return [replace(finding, severity="info") if little else finding]


def _unaligned_frac(off: pd.DataFrame) -> float:
    """The share of their time in products of sizes that are no multiples of 8, of kernels whose sizes were recorded."""
    made = [product_of(str(op), str(shapes)) for op, shapes in zip(off["op"], off["in_shapes"], strict=True)]
    known = off[[one is not None for one in made]]["total_us"].sum()
    odd = off[[one is not None and bool(unaligned(one.sizes, ALIGNED_ELEMENTS)) for one in made]]["total_us"].sum()
    return float(odd / known) if known else 0.0


MIN_UNALIGNED_FRAC = 0.2
"""The same from which padding is advised."""


_MIOPEN = Remedy(
    "MIOpen chose kernels for vector units because of the shape, the layout, its age or its records of earlier "
    "searches. Let it search its kernels, use channels-last memory format, and a newer version.",
    'os.environ["MIOPEN_FIND_MODE"] = "NORMAL"   # before the first convolution\n'
    "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
)
_CONV1D = Remedy(
    "The library chose a kernel without tensor cores because of the shape or the library's age; there is no "
    "channels-last format for signals. Let cuDNN benchmark its algorithms, pad channels to multiples of 8, and use "
    "newer libraries.",
    "torch.backends.cudnn.benchmark = True\nlayer = torch.nn.Conv1d(-(-inputs // 8) * 8, -(-outputs // 8) * 8, size)",
)
_ALIGNED_CONV = Remedy(
    "The library chose a kernel without tensor cores, though the channels are multiples of 8, so padding gains "
    "nothing. Let cuDNN benchmark its algorithms, use channels-last memory format, and newer libraries.",
    "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
)
_ALIGNED_CONV1D = Remedy(
    "The library chose a kernel without tensor cores, though the channels are multiples of 8, so padding gains "
    "nothing; there is no channels-last format for signals. Let cuDNN benchmark its algorithms, and use newer "
    "libraries.",
    "torch.backends.cudnn.benchmark = True\nprint(torch.backends.cudnn.version())",
)
_PADDED_PRODUCTS = Remedy(
    "The library chose a kernel without tensor cores because of the shape, the layout or the library's age. Pad "
    "dimensions to multiples of 8, make operands contiguous, and use newer libraries.",
    "layer = torch.nn.Linear(-(-inputs // 8) * 8, -(-outputs // 8) * 8)",
)
_NARROW_PRODUCTS = Remedy(
    "The library chose a kernel without tensor cores because of the shape, the layout or the library's age. What the "
    "product sums over is aligned: give each call more rows and columns, use newer libraries, and look whether an "
    "operand is a view that is not contiguous.",
    "y = torch.cat(rows) @ x   # one call with more rows, where several share x",
)
MAX_FEW_ROWS = 16
"""Rows or columns of a product up to which most of a tile of tensor cores is empty, and reading bounds it."""
_FOR_FEW_ROWS = "gemmSN_"
"""In the names of kernels that cuBLAS takes for products of few rows or columns."""
_FEW_ROWS = Remedy(
    "cuBLAS took its kernel for products of few rows or columns, which padding does not make more. Join products that "
    "share an operand into one with more rows, as heads that share keys; of attention in steps, compute it in one "
    "kernel.",
    "y = torch.cat(rows) @ x   # one call with more rows, where several share x",
)
_FEW_ROWS_OF_BATCH = Remedy(
    "Each product of the batch has only a few rows, and a large operand of its own, so no rows can be joined, and "
    "reading these operands bounds it. Compute it as a multiplication and a sum, compiled into one kernel.",
    "product = torch.compile(lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2))   # instead of a @ b",
)
_ROWS_OF_BATCH = Remedy(
    "The library chose a kernel without tensor cores for products of a batch, which have operands of their own, so "
    "that none can be joined. If they are those of attention, compute it in one kernel; else pad rows and columns to "
    "multiples of 8.",
    "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)   # instead of baddbmm, softmax, bmm",
)
_OF_TWO_TENSORS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::matmul", "aten::dot")
"""Products of which neither factor needs to be a layer's weight."""
_PADDED_TENSORS = "x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))   # both factors; zeros change no sum"


@rule(
    Entry(
        code="unaligned-dims",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=480,
        what=(
            "Dimensions of large matrix products are not multiples of 8, as tensor cores prefer for 16-bit operands."
        ),
        signal="Weight shapes of linear layers and convolutions.",
        threshold="5 % of the weights of such layers. NVIDIA's matrix multiplication guide recommends multiples of "
        "16 bytes. It affects efficiency only: newer libraries use tensor cores anyway. Informational on a CPU.",
        advice="Such products are padded internally or run on slower kernels. Round vocabulary, channels and widths "
        "up to a multiple of 8.",
        snippet="vocabulary = -(-vocabulary // 8) * 8\nhead = torch.nn.Linear(width, vocabulary)",
        frameworks={"Transformers Trainer": "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)"},
        page="tensor-cores",
    )
)
def unaligned_dims(run: Run) -> list[Finding]:
    """`unaligned-dims`: dimensions of large weights that are not multiples of 8. An info on a CPU, where it does not
    matter until the model moves to a GPU."""
    if autocast_dtype(run) is None:
        return []
    ops = matrix_ops(run) if len(run.kernels) else pd.DataFrame()
    if len(ops) and not (ops["tensor_core"] == "").all():
        bad = ops[ops["unaligned"].astype(str).ne("") & ops["unaligned"].notna() & ~ops["reason"].eq("vector")]
        share = float(bad["time_frac"].sum())
        if share < MIN_REPORTED_FRAC:
            return []
        worst = bad.iloc[0]
        where, sizes_text = str(worst["module"]) or str(worst["op"]), f"{worst['unaligned']} of {worst['op']}"
        return [_unaligned(run, where, sizes_text, share, "share of kernel time")]
    model = run.head.model
    layers = facts(model, "layers")
    weights: dict[str, tuple[int, list[int]]] = {}
    for name, shape in facts(model, "shapes").items():
        kind = str(layers.get(name.rpartition(".")[0], ""))
        if isinstance(shape, list) and len(shape) > 1 and any(k in kind for k in GEMM_LAYERS):
            own = shape[:1] if "Conv" in kind and shape[1] <= IMAGE_CHANNELS else shape[:2]
            odd = [int(n) for n in own if n % ALIGNED_ELEMENTS]
            weights[name] = (int(np.prod(shape)), odd)
    total = sum(size for size, _ in weights.values())
    odd_ones = {n: (size, odd) for n, (size, odd) in weights.items() if odd}
    share = sum(size for size, _ in odd_ones.values()) / total if total else 0.0
    if share < MIN_REPORTED_FRAC:
        return []
    where = max(odd_ones, key=lambda n: odd_ones[n][0])
    return [_unaligned(run, where, f"{odd_ones[where][1][0]} in {where}", share, "share of matrix weights")]


def _unaligned(run: Run, where: str, sizes: str, share: float, unit: str) -> Finding:
    return make_finding(
        "unaligned-dims",
        f"Dimensions are not multiples of {ALIGNED_ELEMENTS}: {sizes}",
        where,
        severity=None if on_gpu(run) or len(run.kernels) else "info",
        value=share,
        limit=MIN_REPORTED_FRAC,
        unit=unit,
    )


_TURNED_IMAGES = Remedy(
    "Tensor-core convolutions need channels-last memory format, but the model uses channels first. Convert the model "
    "and its inputs once.",
    "model = model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)",
)


@rule(
    Entry(
        code="layout-transposes",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=470,
        what="Convolutions convert their inputs from NCHW to NHWC and back on every call.",
        signal="Layout conversion kernels.",
        threshold="5 % of total kernel time.",
        advice=_TURNED_IMAGES.advice,
        snippet=_TURNED_IMAGES.snippet,
        page="step-cost",
    )
)
def layout_transposes(run: Run) -> list[Finding]:
    """`layout-transposes`: kernels that convert NCHW to NHWC and back take a noticeable part of the time."""
    rows = kernel_rows(run)
    if on_cpu(rows) or rows.empty:
        return []
    turned = layout_rows(rows)
    us = float(turned["total_us"].sum())
    share = us / float(rows["total_us"].sum())
    savings = possible_savings(run)
    saving = savings.of("layout-transposes", Saving) if savings is not None else None
    if share < MIN_REPORTED_FRAC or (saving is not None and saving.share < MIN_STEP_FRAC):
        return []
    saved = f"; could save {saving.how_much()}" if saving else ""
    longest = turned.iloc[int(turned["total_us"].to_numpy().argmax())]
    module, column = longest_name(turned, "module"), "op" if longest["op"] else "name"
    its_us = float(turned["total_us"][turned["module"] == module].sum())
    if module and its_us >= MIN_OF_MODULE_FRAC * us:
        column = "module"
    beside = others(turned, column)
    return [
        make_finding(
            "layout-transposes",
            f"{100 * share:.0f} % of kernel time goes to layout conversions for convolutions{saved}",
            longest_name(turned, column),
            steps=steps_of(turned),
            value=share,
            limit=MIN_REPORTED_FRAC,
            unit=f"share of kernel time, with {beside} other{'s' if beside > 1 else ''}" if beside else _OF_KERNELS,
            remedy=for_miopen(run, _TURNED_SIGNALS if "conv1d" in longest["top_op"] else _TURNED_IMAGES),
        )
    ]


_OF_KERNELS = "share of kernel time"
MIN_OF_MODULE_FRAC = 0.5
"""Share of the layout conversions from which the module that makes most of them is their place."""
MIN_STEP_FRAC = 0.01
"""Share of the step of a trace below which kernel time is not worth a change, whatever its share of all kernel time."""


_TURNED_SIGNALS = Remedy(
    "Tensor-core convolutions need channels last, and there is no such memory format for signals. As a convolution of "
    "images of height 1, the model can have it.",
    "conv = torch.nn.Conv2d(inputs, outputs, (1, size)).to(memory_format=torch.channels_last)\n"
    "y = conv(x.unsqueeze(2).to(memory_format=torch.channels_last)).squeeze(2)   # instead of Conv1d",
)


def _device(run: Run) -> str:
    """The device of the model; of a run that does not say, the first GPU."""
    return str(run.head.config.get("device") or "cuda:0")


def steps_of(rows: pd.DataFrame) -> tuple[int, int] | None:
    """First and last step of these rows; None if none has a step."""
    known = rows["step"].dropna()
    return (int(known.min()), int(known.max())) if len(known) else None
