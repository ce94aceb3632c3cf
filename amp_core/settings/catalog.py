"""The precision recipes and the built-in workloads, as data that a form can show.

    >>> RECIPES["fp16"].autocast, RECIPES["fp16"].scaler
    ('float16', True)
    >>> WORKLOADS["text-gpt"].sizes["tiny"].parameters
    118528

`recipes.py` applies a recipe, and the modules of `workloads` build the workloads; both follow these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A precision recipe, in the terms of a PyTorch training loop."""

    name: str
    label: str
    """The name as displayed."""
    autocast: str | None
    """dtype of the autocast region (`float16`, `bfloat16`); None without one."""
    scaler: bool
    """Whether a GradScaler multiplies the loss."""
    weights: str
    """dtype in which the parameters are stored and updated."""
    tf32: bool
    """Whether FP32 matrix products and convolutions may use TF32 inside CUDA's matrix units."""
    description: str
    """A one-sentence description."""
    quantization: str | None = None
    """Recipe of `amp_core.quantization` for the operands of linear layers inside the autocast region; None quantizes
    none."""
    in_hardware: str | None = None
    """What a GPU's tensor cores must take (`Gpu.takes`) for quantized products to run there; None: they are emulated on
    every device."""


EMULATED = "emulated: the numerics are valid, times and memory are not"
"""Describes trainings in 8 and 4 bits whose products are computed in FP32 from values rounded to the format."""

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
            "Everything in 32 bits with TF32 off: the baseline for the others.",
        ),
        Recipe(
            "tf32",
            "TF32",
            None,
            False,
            "float32",
            True,
            "FP32 storage; CUDA matrix products round their inputs to 10 mantissa bits. On a CPU, the same as fp32.",
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
            "BF16 autocast over FP32 weights; it has FP32's range, so no loss scale is needed.",
        ),
        Recipe(
            "fp16-unscaled",
            "FP16 without scaling",
            "float16",
            False,
            "float32",
            False,
            "FP16 autocast without a loss scale: shows which gradients underflow without loss scaling.",
        ),
        Recipe(
            "fp16-pure",
            "Pure FP16",
            None,
            False,
            "float16",
            False,
            "FP16 weights, gradients and optimizer state without an FP32 copy: small updates are rounded away, and "
            "Adam's epsilon of 1e-8 becomes 0, which ends in NaN.",
        ),
        Recipe(
            "bf16-pure",
            "Pure BF16",
            None,
            False,
            "bfloat16",
            False,
            "BF16 weights, gradients and optimizer state without an FP32 copy: updates below 1/256 of a weight are "
            "lost.",
        ),
        Recipe(
            "fp8",
            "FP8",
            "bfloat16",
            False,
            "float32",
            False,
            "BF16 AMP with linear layers in FP8 with tensorwise scales, by torchao: native on GPUs that support "
            f"FP8, elsewhere {EMULATED}.",
            "fp8-tensorwise",
            "fp8",
        ),
        Recipe(
            "mxfp8",
            "MXFP8",
            "bfloat16",
            False,
            "float32",
            False,
            f"BF16 AMP with linear layers in FP8 E4M3 with a power-of-two scale per 32 values, {EMULATED}.",
            "mxfp8-e4m3",
        ),
        Recipe(
            "nvfp4",
            "NVFP4",
            "bfloat16",
            False,
            "float32",
            False,
            f"BF16 AMP with linear layers in FP4 with an FP8 scale per 16 values and one per tensor, {EMULATED}.",
            "nvfp4",
        ),
    )
}
"""Every precision recipe, by name, the baseline first."""


@dataclass(frozen=True)
class Size:
    """One size of a workload. `dims` are the model's own numbers; `parameters` is counted, not measured."""

    name: str
    dims: Mapping[str, int]
    batch_size: int
    """Default number of samples of a micro-batch."""
    lr: float
    """Default learning rate."""
    parameters: int
    activations: int
    """Approximate number of values that forward saves per sample for backward in FP32; a test counts them."""
    description: str
    objective: str = "softmax"
    """What a text model predicts: `softmax`, the next byte; `logistic`, for each byte value whether it comes next."""

    @property
    def state_bytes(self) -> int:
        """Memory that training always needs: FP32 weights, gradients and the two moments of Adam, 16 bytes each."""
        return 16 * self.parameters

    def memory_bytes(self, batch_size: int | None = None) -> int:
        """Approximate memory of training in FP32 with Adam; autocast at best halves the activations."""
        return self.state_bytes + 4 * self.activations * (batch_size or self.batch_size)


@dataclass(frozen=True)
class WorkloadSpec:
    """A model on real data that every machine already has, in several sizes, smallest first."""

    name: str
    label: str
    sample: str
    """A description of one sample."""
    description: str
    sizes: Mapping[str, Size]


QUICK = "Seconds on a CPU, FP16 included."
MINUTES = "Minutes on a CPU in FP32; FP16 needs a GPU."
GPU = "needs a GPU."
ONE_VS_ALL = "A yes or no for each byte value, averaged over all: FP16 fails to learn it without a loss scale."


def _transformer(
    name: str,
    layers: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int,
    *,
    masked: bool = False,
    batch: int,
    lr: float,
    activations: int,
    text: str,
) -> Size:
    dims = {"layers": layers, "width": width, "heads": heads, "context": context, "vocabulary": vocabulary}
    # each block: 12 width² in its four matrices, 9 width in biases and 4 width in its two norms; the head is tied
    parameters = layers * (12 * width**2 + 13 * width) + (vocabulary + context + 2) * width
    if masked:  # before the head one more matrix with bias and norm, and the head has a bias
        parameters += width**2 + 3 * width + vocabulary
    return Size(name, dims, batch, lr, parameters, activations, text)


def _lstm(
    name: str,
    layers: int,
    width: int,
    context: int,
    *,
    batch: int,
    lr: float,
    activations: int,
    text: str,
    objective: str = "softmax",
) -> Size:
    dims = {"layers": layers, "width": width, "context": context}
    # each layer: four gates, each with two matrices and two biases; then the embedding and the head
    parameters = layers * (8 * width**2 + 8 * width) + 512 * width + 256
    return Size(name, dims, batch, lr, parameters, activations, text, objective)


def _cnn(name: str, width: int, classes: int, *, batch: int, lr: float, activations: int, text: str) -> Size:
    dims = {"width": width, "classes": classes}
    # three 3×3 convolutions without bias, each with a batch norm, then one linear layer over 2×2 positions
    convolutions = 9 * (width + width * 2 * width + 2 * width * 2 * width)
    parameters = convolutions + 2 * (width + 2 * width + 2 * width) + (4 * 2 * width + 1) * classes
    return Size(name, dims, batch, lr, parameters, activations, text)


def _resnet(
    name: str,
    depth: int,
    width: int,
    pixels: int,
    classes: int,
    *,
    parameters: int,
    batch: int,
    lr: float,
    activations: int,
    text: str,
) -> Size:
    dims = {"depth": depth, "width": width, "pixels": pixels, "classes": classes}
    return Size(name, dims, batch, lr, parameters, activations, text)


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
                _cnn("tiny", 8, 10, batch=32, lr=2e-3, activations=5_850, text=QUICK),
                _cnn("small", 32, 10, batch=64, lr=2e-3, activations=23_200, text="A minute in FP16 on a CPU."),
            ),
        ),
        WorkloadSpec(
            "text-lstm",
            "Text, LSTM",
            "window of bytes",
            "An LSTM language model over the bytes of the Python standard library's own source.",
            _sizes(
                _lstm("tiny", 1, 64, 32, batch=8, lr=1e-2, activations=26_600, text=QUICK),
                _lstm(
                    "logistic", 1, 32, 32, batch=256, lr=1e-2, activations=25_600, text=ONE_VS_ALL, objective="logistic"
                ),
                _lstm("small", 2, 256, 128, batch=32, lr=3e-3, activations=590_000, text=MINUTES),
                _lstm("medium", 2, 1024, 256, batch=64, lr=1e-3, activations=4_520_000, text="Needs a GPU."),
            ),
        ),
        WorkloadSpec(
            "text-gpt",
            "Text, GPT",
            "window of bytes",
            "A GPT language model over the bytes of the Python standard library's own source.",
            _sizes(
                _transformer("tiny", 2, 64, 2, 32, 256, batch=8, lr=2e-3, activations=65_900, text=QUICK),
                _transformer("mini", 4, 128, 4, 128, 256, batch=16, lr=1e-3, activations=969_000, text=MINUTES),
                _transformer(
                    "small",
                    *(12, 768, 12, 1024, 50304),
                    batch=8,
                    lr=3e-4,
                    activations=204_000_000,
                    text=f"The shape of GPT-2 small, its vocabulary padded from 50,257; {GPU}",
                ),
                _transformer(
                    "medium",
                    *(24, 1024, 16, 1024, 50304),
                    batch=4,
                    lr=2e-4,
                    activations=405_000_000,
                    text=f"The shape of GPT-2 medium, its vocabulary padded from 50,257; {GPU}",
                ),
            ),
        ),
        WorkloadSpec(
            "text-bert",
            "Text, BERT",
            "window of bytes",
            "A BERT that predicts masked bytes of the Python standard library's own source.",
            _sizes(
                _transformer("tiny", 2, 64, 2, 32, 264, masked=True, batch=32, lr=3e-3, activations=60_300, text=QUICK),
                _transformer(
                    "base",
                    *(12, 768, 12, 512, 30528),
                    masked=True,
                    batch=16,
                    lr=1e-4,
                    activations=78_900_000,
                    text=f"The shape of BERT base, its vocabulary padded from 30,522; {GPU}",
                ),
                _transformer(
                    "large",
                    *(24, 1024, 16, 512, 30528),
                    masked=True,
                    batch=8,
                    lr=1e-4,
                    activations=205_000_000,
                    text=f"The shape of BERT large, its vocabulary padded from 30,522; {GPU}",
                ),
            ),
        ),
        WorkloadSpec(
            "image-resnet",
            "Images, ResNet",
            "image",
            "ResNets at their usual sizes, for throughput, on scikit-learn's digits enlarged to the size they expect.",
            _sizes(
                _resnet("tiny", 10, 8, 32, 10, parameters=78_962, batch=32, lr=2e-3, activations=12_800, text=QUICK),
                _resnet(
                    "resnet18",
                    *(18, 64, 224, 1000),
                    parameters=11_689_512,
                    batch=64,
                    lr=1e-3,
                    activations=5_150_000,
                    text=f"ResNet-18 at 224×224 pixels; {GPU}",
                ),
                _resnet(
                    "resnet50",
                    *(50, 64, 224, 1000),
                    parameters=25_557_032,
                    batch=64,
                    lr=1e-3,
                    activations=21_100_000,
                    text=f"ResNet-50 at 224×224 pixels; {GPU}",
                ),
            ),
        ),
    )
}
"""Every built-in workload, by name."""
