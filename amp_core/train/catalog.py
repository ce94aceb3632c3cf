"""The precision recipes and the workloads that can be chosen, as plain facts: what a form shows.

    >>> RECIPES["fp16"].autocast, RECIPES["fp16"].scaler
    ('float16', True)
    >>> WORKLOADS["text-gpt"].sizes["tiny"].parameters
    118528

`recipes.py` carries a recipe out, a module of `workloads` builds a workload; both follow these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A way to train with less precision than FP32, said in the terms of a PyTorch training loop."""

    name: str
    label: str
    """How people write it."""
    autocast: str | None
    """dtype of the autocast region (`float16`, `bfloat16`); None where there is no autocast region."""
    scaler: bool
    """Whether a GradScaler multiplies the loss."""
    weights: str
    """dtype in which the parameters are stored and updated."""
    tf32: bool
    """Whether FP32 matrix products and convolutions may use TF32 inside CUDA's matrix units."""
    description: str
    """One sentence for people."""


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "fp32",
            "FP32",
            None,
            False,
            "float32",
            False,
            "Everything in 32 bits with TF32 off: the reference that the others are set beside.",
        ),
        Recipe(
            "tf32",
            "TF32",
            None,
            False,
            "float32",
            True,
            "FP32 storage; CUDA matrix products round their inputs to 10 mantissa bits. On a CPU the same as fp32.",
        ),
        Recipe(
            "fp16",
            "FP16 AMP",
            "float16",
            True,
            "float32",
            False,
            "FP16 autocast with a GradScaler over FP32 weights: classic mixed precision.",
        ),
        Recipe(
            "bf16",
            "BF16 AMP",
            "bfloat16",
            False,
            "float32",
            False,
            "BF16 autocast over FP32 weights; FP32's range, so no loss scale is needed.",
        ),
        Recipe(
            "fp16-unscaled",
            "FP16 without scaling",
            "float16",
            False,
            "float32",
            False,
            "FP16 autocast without a loss scale: shows which gradients underflow when scaling is left out.",
        ),
        Recipe(
            "fp16-pure",
            "Pure FP16",
            None,
            False,
            "float16",
            False,
            "FP16 weights, gradients and optimizer state with no FP32 copy: small updates are rounded away, and Adam's "
            "epsilon of 1e-8 becomes 0, which ends in NaN.",
        ),
        Recipe(
            "bf16-pure",
            "Pure BF16",
            None,
            False,
            "bfloat16",
            False,
            "BF16 weights, gradients and optimizer state with no FP32 copy: updates below 1/256 of a weight are lost.",
        ),
    )
}
"""Every precision recipe, by name, the reference first."""


@dataclass(frozen=True)
class Size:
    """One size of a workload. `dims` are the model's own numbers; `parameters` is counted, not measured."""

    name: str
    dims: Mapping[str, int]
    batch_size: int
    """Samples of one micro-batch where none is asked for."""
    lr: float
    """Learning rate where none is asked for."""
    parameters: int
    description: str
    objective: str = "softmax"
    """What a text model is asked: `softmax`, which byte comes next; `logistic`, for each byte value whether it does."""


@dataclass(frozen=True)
class WorkloadSpec:
    """A model on real data that every machine already has, in several sizes, smallest first."""

    name: str
    label: str
    sample: str
    """What one sample is."""
    description: str
    sizes: Mapping[str, Size]


ONE_VS_ALL = "A yes or no for each byte value, averaged over all: FP16 fails to learn it without a loss scale."


def _gpt(name: str, layers: int, width: int, heads: int, context: int, batch: int, lr: float, text: str) -> Size:
    dims = {"layers": layers, "width": width, "heads": heads, "context": context}
    # each block: 12 width² in its four matrices, 9 width in biases and 4 width in its two norms; the head is tied
    parameters = layers * (12 * width**2 + 13 * width) + 256 * width + context * width + 2 * width
    return Size(name, dims, batch, lr, parameters, text)


def _lstm(
    name: str, layers: int, width: int, context: int, batch: int, lr: float, text: str, objective: str = "softmax"
) -> Size:
    dims = {"layers": layers, "width": width, "context": context}
    # each layer: four gates, each with two matrices and two biases; then the embedding and the head
    parameters = layers * (8 * width**2 + 8 * width) + 512 * width + 256
    return Size(name, dims, batch, lr, parameters, text, objective)


def _cnn(name: str, width: int, classes: int, batch: int, lr: float, text: str) -> Size:
    dims = {"width": width, "classes": classes}
    # three 3×3 convolutions without bias, each with a batch norm, then one linear layer over 2×2 positions
    convolutions = 9 * (width + width * 2 * width + 2 * width * 2 * width)
    parameters = convolutions + 2 * (width + 2 * width + 2 * width) + (4 * 2 * width + 1) * classes
    return Size(name, dims, batch, lr, parameters, text)


def _sizes(*sizes: Size) -> dict[str, Size]:
    return {s.name: s for s in sizes}


WORKLOADS: dict[str, WorkloadSpec] = {
    w.name: w
    for w in (
        WorkloadSpec(
            "digits-cnn",
            "Digits, convolutional network",
            "image of 8×8 pixels",
            "A small convolutional network with batch norm on scikit-learn's 1,797 handwritten digits.",
            _sizes(
                _cnn("tiny", 8, 10, 32, 2e-3, "Seconds on a CPU, FP16 included."),
                _cnn("small", 32, 10, 64, 2e-3, "A minute in FP16 on a CPU."),
            ),
        ),
        WorkloadSpec(
            "text-lstm",
            "Text, LSTM",
            "window of bytes",
            "An LSTM language model over the bytes of the Python standard library's own source.",
            _sizes(
                _lstm("tiny", 1, 64, 32, 8, 1e-2, "Seconds on a CPU, FP16 included."),
                _lstm("logistic", 1, 32, 32, 256, 1e-2, ONE_VS_ALL, objective="logistic"),
                _lstm("small", 2, 256, 128, 32, 3e-3, "Minutes on a CPU in FP32; FP16 wants a GPU."),
                _lstm("medium", 2, 1024, 256, 64, 1e-3, "Wants a GPU."),
            ),
        ),
        WorkloadSpec(
            "text-gpt",
            "Text, GPT",
            "window of bytes",
            "A GPT language model over the bytes of the Python standard library's own source.",
            _sizes(
                _gpt("tiny", 2, 64, 2, 32, 8, 2e-3, "Seconds on a CPU, FP16 included."),
                _gpt("mini", 4, 128, 4, 128, 16, 1e-3, "Minutes on a CPU in FP32; FP16 wants a GPU."),
                _gpt("small", 12, 768, 12, 1024, 8, 3e-4, "The shape of GPT-2 small over bytes; wants a GPU."),
                _gpt("medium", 24, 1024, 16, 1024, 4, 2e-4, "The shape of GPT-2 medium over bytes; wants a GPU."),
            ),
        ),
    )
}
"""Every built-in workload, by name."""
