"""What kind of kernel runs an operator, and how often it moves its tensors.

>>> kernel_class("native_batch_norm").kind, kernel_class("native_batch_norm").passes
('norm', 1.5)

A trace gives the bytes of an operator's inputs and outputs, each once. A kernel that reduces before it normalizes reads
its input twice; `passes` is the traffic that results over the traffic of the trace.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class KernelClass:
    """How the kernels of an operator use a GPU."""

    kind: str
    """`product`, `depthwise`, or the key of `BANDWIDTH_SHARES`."""
    passes: float = 1.0
    """Bytes that its kernels move over the bytes of its inputs and outputs."""


BANDWIDTH_SHARES = {"elementwise": 1.0, "copy": 0.9, "norm": 0.75, "softmax": 0.85, "lookup": 0.6, "depthwise": 0.45}
"""Bandwidth that the kernels of a kind reach, over what elementwise kernels reach on the same GPU. Layer norm and
softmax: medians of the operators measured in NeuSight's artifact (sitar-lab/NeuSight, data/dataset, FP32, 64 MB to
1 GB), 0.55 to 0.80 and 0.65 to 1.0. The others: fitted to whole steps (tests/benchmarks/published_steps.py)."""

_CLASSES = {
    "native_layer_norm": KernelClass("norm"),
    "native_layer_norm_backward": KernelClass("norm"),  # the input's gradient; the weight's: `LAYER_NORM_ROW_US`
    "native_batch_norm": KernelClass("norm", 1.5),  # statistics first, then the normalization
    "native_batch_norm_backward": KernelClass("norm", 5 / 3),
    "native_group_norm": KernelClass("norm", 1.5),
    "native_group_norm_backward": KernelClass("norm", 5 / 3),
    "_log_softmax": KernelClass("softmax", 1.5),  # rows of a vocabulary do not fit into registers
    "_log_softmax_backward_data": KernelClass("softmax", 4 / 3),
    "_softmax": KernelClass("softmax"),
    "_softmax_backward_data": KernelClass("softmax"),
    "convolution_backward": KernelClass("product", 1.3),  # two kernels read the output's gradient
    **dict.fromkeys(("clone", "_to_copy", "copy_", "cat", "contiguous"), KernelClass("copy")),
    "roll": KernelClass("copy", 2.0),  # one copy for each of two dimensions (ATen/native/TensorTransformations.h)
    **dict.fromkeys(("embedding", "gather", "index_select", "index", "scatter_add"), KernelClass("lookup")),
    **dict.fromkeys(("embedding_dense_backward", "index_put_", "index_add"), KernelClass("lookup")),
}
LAYER_NORM_ROW_US = 0.0088
"""Time that the kernel of a layer norm's weight gradient takes for each row, at least: its threads are spread over the
columns and read row after row, so that many short rows leave most of a GPU idle. From pytorch/pytorch#87445, forward
and backward on A100 (8192 rows of 512, 1,024 and 1,536 less those of input gradients at the memory's bandwidth). That
is the kernel of PyTorch up to 2.7, with which the published steps were measured; that of 2.8 also splits the rows."""

DEPTHWISE_FLOP_PER_US = 15e3
"""Operations of one multiprocessor in a depthwise convolution in FP32, which loads each factor anew; in 16 bits twice
as many. PyTorch 1.9 ran 24 convolutions of 7 × 7 over (64, 384, R, R) in FP32 in 14.4, 54.8 and 228.6 ms for R = 16, 32
and 64 on the 68 of an RTX 2080 Ti, which is 1.03 to 1.08 TFLOP/s; 31 × 31 in 171.4, 734.8 and 3090.4 ms, 1.50 to 1.69
(Ding et al. 2022, arXiv:2203.06717; also table 1 of their later paper on UniRepLKNet). That is the forward pass, and
both directions in 16 bits, where cuDNN has kernels of its own."""
DEPTHWISE_BACKWARD_FRAC = 0.27
"""Speed of the two gradients of a depthwise convolution in FP32, over the forward's. PyTorch runs its own kernels: that
of the weight has one block for each channel and tap, which reads all images (ATen/native/cuda/DepthwiseConv2d.cu). The
two kernels took 16.6 times the forward on A100, a speed of 0.12 (pytorch/pytorch#18631), and by pytorch/pytorch#129609
it is 0.37 on a GPU that is not named; what whole steps of EfficientNet-B0 on A100 and V100
(NVIDIA/DeepLearningExamples) and of ConvNeXt-Base on TITAN RTX (XHMY/torch_benchmark) leave for them gives 0.23, 0.52
and 0.15. This is near the geometric mean of the five, 0.24."""

BATCH_NORM_US = 0.0017
"""Time that PyTorch's own batch norm takes for each element of a channel, at least, in each direction: its sums run in
one block for each channel (`batch_norm_collect_statistics_kernel` and `batch_norm_backward_kernel` in
ATen/native/cuda/Normalization.cuh), so that few channels of large images leave most of a GPU idle. cuDNN runs it
where the weights are in FP32. With batch norms, VGG-16 in FP16 took longer by 8.5 ms on A100, 9.1 on TITAN RTX and 9.3
on RTX 2080 Ti (ryujaehun/pytorch-gpu-benchmark), of which 5.2 to 6.8 are not traffic; a channel of them all has 1.65
million elements."""

WINOGRAD_TILE = 4
"""Outputs of a tile's edge in Winograd's algorithm for 3 × 3 convolutions, F(4 × 4, 3 × 3) (Lavin and Gray 2015,
arXiv:1509.09308): (4 + 2)² multiplications give 16 outputs, where the convolution takes 144. cuDNN uses it in FP32. Of
the 29 such convolutions that baidu-research/DeepBench measured on V100, each in three directions
(results/train/DeepBench_NV_V100.xlsx), the direct form would take 1.7 to 2.1 times as long in the median, and
`winograd_work` 1.02 to 1.05 times; on T4 1.9 to 2.4, and 1.16 to 1.19."""
WINOGRAD_POINTS = (WINOGRAD_TILE + 2) ** 2


def winograd_work(shapes: Sequence[tuple[int, ...]], sizes: Sequence[float], flops: float) -> tuple[float, float]:
    """Operations of the products, and bytes (FP32) that the transforms move, of a convolution in Winograd's form.

    `shapes` and `sizes` are those of its trace: input and weight, or gradient of the output, input and weight; batch,
    m, n, k and `flops` of the direct form. Zeros unless its filters are 3 × 3, its stride 1 and its groups one.
    """
    groups, positions, outputs, _ = sizes
    planes = [shape for shape in shapes if len(shape) == 4]
    if groups != 1 or len(planes) < 2 or planes[-1][2:] != (3, 3):
        return 0.0, 0.0
    batch, inputs, height, width = planes[-2]
    if 2 * positions < batch * height * width:
        return 0.0, 0.0
    tiles = batch * math.ceil(height / WINOGRAD_TILE) * math.ceil(width / WINOGRAD_TILE)
    products = 2.0 * WINOGRAD_POINTS * tiles * inputs * outputs
    per_point = tiles * (inputs + outputs) + inputs * outputs
    moved = 4.0 * (WINOGRAD_POINTS * per_point + positions * (inputs + outputs) + 9 * inputs * outputs)
    kernels = flops / (2 * positions * 9 * inputs * outputs)  # launches; a backward has two in each
    return kernels * products, kernels * moved


SCATTERED_PER_US = 1500.0
"""Elements that one multiprocessor writes where a kernel computes the place of each input element (PyTorch's
`elementwise_kernel` with an offset calculator, not its vectorized one): copies into another layout, and inputs that are
broadcast or of several dtypes. Few bytes of each element do not make it faster. On A100 the windows of Swin, 192 × 56 ×
56 × 96, took 2.63 ms in FP32 and 2.26 ms in FP16 for six such copies and one sum (microsoft/Swin-Transformer#233, of
kernels/window_process/unit_test.py)."""
REARRANGING_OPS = ("clone", "contiguous", "roll")
"""Operators that copy into another layout: autograd and `reshape` clone only what is not contiguous."""


def is_scattered(op: str, kind: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> bool:
    """Whether the kernel of an operator on these inputs computes the place of each element."""
    if op in REARRANGING_OPS:
        return True
    tensors = {math.prod(shape) for shape in shapes if math.prod(shape) > 1}
    return kind == "elementwise" and len(shapes) > 1 and (len(tensors) > 1 or len({*dtypes}) > 1)


_PRODUCT, _ELEMENTWISE = KernelClass("product"), KernelClass("elementwise")


def kernel_class(op: str, flops: float = 0.0) -> KernelClass:
    """The class of an operator; an unknown one is a product if it has `flops`, else elementwise."""
    return _CLASSES.get(op, _PRODUCT if flops > 0 else _ELEMENTWISE)


ATTENTION_SHARE = 0.7
"""Speed of fused attention over that of a large matrix product: FlashAttention-2 reaches 225 of 312 TFLOP/s in training
on A100 (Dao 2023, arXiv:2307.08691), where products reach 271. In FP32 there is no such kernel: PyTorch's
memory-efficient attention adds three products in TF32 for one (CUTLASS's `OpMultiplyAddFastF32`), whether TF32 is on or
off, which is about as fast as CUDA cores; BERT-base in TF32 on A100 took 1.4 times as long as with TF32 in it, and 1.0
times with CUDA cores (mila-iqia/milabench)."""

TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 128, 0.9), (64, 64, 0.8), (32, 32, 0.5))
"""Output tiles of a matrix product's kernels: rows, columns, and the share of the largest tile's speed. The library
takes the fastest. From the kernels that NeuSight's artifact names (`ampere_sgemm_128x64_tn`); shares fitted to it."""
PROLOGUE_K = 40
"""Length of K that fetching the first tiles and writing the last takes; fitted to the same measurements (14 to 90)."""

MIN_SPLIT_K = 256
"""Shortest part of K that a kernel takes where the output has fewer tiles than the GPU has room for. The gradient of a
weight is such a product: few outputs, and K as long as the batch has tokens."""

UNALIGNED_FLOP_PER_US = 0.7e6
"""Operations of one multiprocessor in a matrix product on tensor cores, for each element that one load takes, where
rows do not begin at multiples of `ALIGNED_BYTES`: then its loads bound the kernel, and not the tensor cores. So the
fastest GPUs lose most: a vocabulary of odd size leaves 0.35 of a product's speed on A100 in FP16, 0.14 on H100, and
0.62 on RTX A6000. NVIDIA's guide names the 16 bytes (docs.nvidia.com/deeplearning/performance, Matrix Multiplication
Background); before cuBLAS 11 such products did not run on tensor cores at all. Chosen from half of set 6 of
`tests/benchmarks/published_steps.py`, mostly Transformer-XL, whose softmax has 267,735 words; 0.6 to 0.8 fit it nearly
as well. By it, nanoGPT's 50,304 words instead of 50,257 save 24 of some 135 ms for 12 × 1,024 tokens on A100, where its
author saw a speed-up of about 25 %."""
ALIGNED_BYTES = 16
"""Bytes that one load of a matrix product's kernel takes, where every row begins at a multiple of them."""

_Floats = npt.NDArray[np.float64]


def aligned_elements(sizes: Sequence[float]) -> int:
    """Elements that one load takes of rows of these lengths: the largest power of 2 that divides them all, at most 8
    (16 bytes of 16-bit elements)."""
    return math.gcd(ALIGNED_BYTES // 2, *(round(size) for size in sizes))


def shape_share(batch: _Floats, m: _Floats, n: _Floats, k: _Floats, sms: int) -> _Floats:
    """The share (0–1) of a large product's speed that products of these sizes reach on `sms` multiprocessors.

    Tiles that reach beyond the matrix do no useful work, nor does a multiprocessor that has no tile while others have
    their last one. One that has fewer than the tiles that it holds at once takes as long. NaN sizes give 1.
    """
    best = np.zeros_like(m)
    for rows, columns, speed in TILES:
        slots = sms * 128 * 128 // (rows * columns)
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        parts = np.fmax(1.0, np.fmin(slots // tiles, k // MIN_SPLIT_K))
        computed = np.fmax(np.ceil(tiles * parts / sms) * sms, slots) * rows * columns
        share = speed * parts * batch * m * n / computed * k / (k + PROLOGUE_K * parts)
        best = np.fmax(best, share)
    return np.where(np.isnan(m), 1.0, best)
