"""Myths about mixed precision, and the part of a run's gradients that one of them is about.

>>> [myth.claim for myth in MYTHS if myth.rating == "true"][0]
'Keep a master copy of the weights in FP32 and update that'
>>> gradients_in_band(run).elements_frac  # of the gradients between 2^-27 and 2^-24
0.031
"""

from dataclasses import dataclass

import numpy as np

from amp_core.analysis.numerics.ranges import exponent_shares, kinds_present
from amp_core.store.run import Run

VANISHING_BAND = (-27, -24)
"""Exponents between which gradients allegedly matter and underflow in FP16 without a loss scale: Micikevicius et al.
2017, section 3.2."""


@dataclass(frozen=True)
class Myth:
    """A common claim about mixed precision, and its correction. The numbers are those of `amp_core.formats` and of
    torch.amp's documentation; what holds for a model, only its runs show."""

    key: str
    """Which aspect of a run it concerns."""
    claim: str
    rating: str
    """`true`, `imprecise` or `false`."""
    correction: str
    page: str
    """URL path of the page whose chart shows it for a run."""


MYTHS = (
    Myth(
        "weights",
        "Keep a master copy of the weights in FP32 and update that",
        "true",
        "Under autocast there is no second copy to keep: the parameters stay in FP32, and 16-bit casts of them live "
        "until the autocast region ends.",
        "memory",
    ),
    Myth(
        "operators",
        "Forward and backward run in FP16, the loss in FP32",
        "imprecise",
        "Each operator follows a list: matrix products and convolutions run in 16 bits; sums, norms and losses in "
        "FP32; operators in no list run in the dtype of their inputs. Backward follows forward.",
        "precision-map",
    ),
    Myth(
        "scaling",
        "Loss scaling is not entirely necessary; small gradients come towards the end of training",
        "imprecise",
        "FP16 needs it where gradients fall below 2⁻²⁴; BF16 and FP32 never do. When in training gradients are small "
        "differs between models: the safe window over time shows it.",
        "loss-scale",
    ),
    Myth(
        "band",
        "Gradients between 2⁻²⁷ and 2⁻²⁴ matter, and without scaling they vanish",
        "imprecise",
        "In FP16, values up to 2⁻²⁵ become 0, and those between 2⁻²⁵ and 2⁻²⁴ become 2⁻²⁴. Whether they matter "
        "depends on their share of the gradient's mass.",
        "number-ranges",
    ),
    Myth(
        "loop",
        "Scale the loss, call backward, let the scaler step and update, and clear the gradients",
        "true",
        "`scaler.step` unscales, and skips the optimizer step if a gradient is not finite. Code that reads gradients "
        "before that, such as clipping, has to call `scaler.unscale_(optimizer)` first. Only forward and loss belong "
        "inside `torch.autocast`; backward uses the dtypes of forward by itself.",
        "loss-scale",
    ),
    Myth(
        "frameworks",
        "`mixed_precision`, `fp16=True`, a precision argument or a mixed policy is all it takes",
        "imprecise",
        "Accelerate, Transformers and Lightning (`16-mixed`) then use autocast and a scaler; Keras casts in each layer "
        "and keeps its variables in FP32 (older tutorials rewrite TensorFlow's graph around the optimizer instead). "
        "But `16-true`, or a model loaded in 16 bits, stores the weights in 16 bits, and some frameworks accept FP16 "
        "on a CPU and silently train in FP32. The run records which precision was really used.",
        "precision-map",
    ),
    Myth(
        "flags",
        "The switches for TF32 and for cuDNN's benchmark belong to mixed precision",
        "imprecise",
        "They are independent of autocast. TF32 affects everything that stays in FP32, including the FP32 run that you "
        "compare with; benchmark mode lets cuDNN time its convolution algorithms first, so two runs may use different "
        "ones. Compare lists these settings if they differ.",
        "compare",
    ),
    Myth(
        "divergence",
        "Without scaling training diverges, with a scale of 128 it matches FP32",
        "imprecise",
        "That was measured for one language model in 2017. Small models often train without scaling; others need far "
        "more than 128. The preset “Loss-scale ablation” of Start a run trains a small LSTM in four ways and plots "
        "the four loss curves.",
        "compare",
    ),
    Myth(
        "speed",
        "Training becomes 1.5 to 5.5 times as fast, about half the time across the board; BERT-large near 6 times",
        "imprecise",
        "Only GEMM/conv on tensor cores becomes that much faster, so the speed-up is limited to 1 / (1 − its share of "
        "the step). NVIDIA's own examples (DeepLearningExamples, 2024) reach 1.3 to 5.5 × over FP32 on a V100 "
        "(BERT-large 3.9 to 4.5 ×), and 0.8 to 2.6 × over TF32 on an A100: compare with FP32 with TF32 on, too.",
        "step-cost",
    ),
    Myth(
        "memory",
        "It takes less memory, so models and batches can be larger",
        "imprecise",
        "Only the activations saved for backward are halved. Parameters, gradients and optimizer state stay in FP32, "
        "and autocast adds 16-bit copies of the weights, so a large model with a small batch gains nothing.",
        "memory",
    ),
    Myth(
        "quality",
        "The result is as good as with FP32",
        "imprecise",
        "Usually. One pair of runs cannot show it: compare the difference with the noise between seeds.",
        "compare",
    ),
    Myth(
        "hardware",
        "Use it on compute capability 7.0 and newer; older GPUs gain memory and bandwidth only",
        "true",
        "Tensor cores support FP16 from 7.0 on, BF16 and TF32 from 8.0 on, FP8 from 8.9 on. CPUs with AVX512-BF16 or "
        "AMX also support BF16.",
        "tensor-cores",
    ),
    Myth(
        "always",
        "On such GPUs automatic mixed precision should always be used",
        "imprecise",
        "It does not help if the GPU waits for Python, if little of the step is GEMM/conv, or if casts cost more than "
        "faster GEMMs save.",
        "step-cost",
    ),
)


@dataclass(frozen=True)
class Band:
    """The part of a run's gradients whose magnitudes lie in a band, without the loss scale."""

    kind: str
    elements_frac: float
    """Share (0–1) of the finite nonzero values."""
    mass_frac: float
    """Share (0–1) of the sum of magnitudes, each taken as the middle of its octave."""


def gradients_in_band(run: Run, low: int = VANISHING_BAND[0], high: int = VANISHING_BAND[1]) -> Band | None:
    """The gradients from 2^`low` to below 2^`high` as recorded; output gradients where there are any, since they flush
    first. None if the run sampled no finite nonzero gradient."""
    for kind in ("output_grad", "weight_grad"):
        if kind not in kinds_present(run):
            continue
        shares = exponent_shares(run, kind, true_exponents=True)
        if not len(shares):
            continue
        inside = shares["exponent"].between(low, high - 1)
        mass = shares["count"] * np.exp2(shares["exponent"].astype(float))
        count = shares["count"].sum()
        return Band(kind, float(shares["count"][inside].sum() / count), float(mass[inside].sum() / mass.sum()))
    return None
