"""The terms of mixed precision, each in a sentence or two, and the page that shows it on the user's own run.

    >>> TERMS["underflow"].page
    'number-ranges'

Tooltips, the Format lab and the Findings guide all take them from here. Facts about formats are those of
`amp_core.formats`; what `GradScaler` and `autocast` do is as PyTorch documents it (torch.amp).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One term."""

    name: str
    """As written in a sentence."""
    text: str
    """The definition; Markdown without links."""
    page: str
    """Address of the page that shows it on the user's own run."""
    shows: str
    """What to look at there."""


def _terms(*terms: Term) -> dict[str, Term]:
    return {term.name.lower(): term for term in terms}


TERMS: dict[str, Term] = _terms(
    Term(
        "Autocast",
        "Inside `torch.autocast`, each operator chooses its precision from a list: matrix products and convolutions "
        "in 16 bits; sums, norms and losses in FP32. Weights stay FP32; their 16-bit copies are made at first use "
        "and cached until the region ends.",
        "precision-map",
        "which operator ran in which precision, and why",
    ),
    Term(
        "Loss scaling",
        "The loss is multiplied by a factor before backward, so that small gradients do not underflow in FP16; the "
        "optimizer step divides by the same factor. A dynamic scale doubles after many clean steps and halves at an "
        "overflow.",
        "loss-scale",
        "the scale at each step, over the window in which neither overflow nor underflow is expected",
    ),
    Term(
        "Skipped step",
        "If a gradient is infinite or NaN, `GradScaler` skips the optimizer step and halves its scale. A few skips "
        "at the start, and later about one per growth interval, are normal; more waste compute.",
        "loss-scale",
        "each skipped step as a cross, and which gradient caused it",
    ),
    Term(
        "Growth interval",
        "After this many steps without a skip (2,000 by default), a dynamic loss scale doubles. This is a probe: if "
        "the doubled scale is too large, the next step overflows, is skipped, and the scale halves again.",
        "loss-scale",
        "each growth as a step up in the chart",
    ),
    Term(
        "Backoff",
        "After a skipped step, a dynamic loss scale is multiplied by the backoff factor, one half by default.",
        "loss-scale",
        "each backoff as a step down, after its cross",
    ),
    Term(
        "Safe window",
        "The loss scales at which no gradient overflows in FP16 and almost none of the gradient's mass underflows. "
        "It is predicted from recorded histograms, and moves during training.",
        "loss-scale",
        "the window as a band behind the loss scale",
    ),
    Term(
        "Master weights",
        "The weights that the optimizer updates, in FP32. In 16 bits, an update smaller than about 1/2000 (FP16) or "
        "1/256 (BF16) of its weight is rounded away. Under autocast, the parameters themselves are the master "
        "weights.",
        "memory",
        "parameters, and next to them autocast's 16-bit copies",
    ),
    Term(
        "Underflow",
        "A nonzero value becomes zero because it is too small for the format: in FP16, any magnitude up to 2⁻²⁵. A "
        "value that was already zero is not an underflow.",
        "number-ranges",
        "how many values have each exponent, and what another scale would lose",
    ),
    Term(
        "Subnormal",
        "A nonzero value below a format's smallest normal number (FP16: 2⁻¹⁴, 6.1 × 10⁻⁵). The smaller it is, the "
        "fewer significant bits it has.",
        "number-ranges",
        "the hatched share of each tensor",
    ),
    Term(
        "Overflow",
        "A finite value above the format's maximum (FP16: 65504) becomes infinite, and results computed from it are "
        "infinite or NaN.",
        "layer-detail",
        "the first step at which a tensor contained infinities or NaN",
    ),
    Term(
        "Mass",
        "The sum of magnitudes. Half of a gradient's elements may carry a billionth of its mass: underflow is given "
        "as both shares, and mass is what matters for training.",
        "number-ranges",
        "what another loss scale would lose, by elements and by mass",
    ),
    Term(
        "Audit",
        "One batch is replayed with the same weights and random numbers in FP32 and in the run's recipe, and the "
        "gradients are compared. The loss of precision is then measured rather than predicted.",
        "number-ranges",
        "prediction next to measurement, if a run was audited",
    ),
    Term(
        "FP16",
        "IEEE half precision: 5 exponent bits, 10 stored mantissa bits. Normal numbers from 2⁻¹⁴ to 65504; it needs "
        "a loss scale because gradients are often smaller.",
        "number-ranges",
        "its limits as lines across your gradients",
    ),
    Term(
        "BF16",
        "FP32's 8 exponent bits with 7 stored mantissa bits: the same range, less precision. It needs no loss "
        "scale. NVIDIA GPUs support it on tensor cores from Ampere on; so do CPUs with AVX512-BF16 or AMX.",
        "compare",
        "its loss, speed and gradients compared with FP16 and FP32",
    ),
    Term(
        "TF32",
        "FP32 values whose mantissa tensor cores round to 10 bits before they multiply; sums stay FP32. Values "
        "still take 32 bits, so it saves time but no memory. PyTorch enables it for convolutions but not for matmul "
        "by default.",
        "tensor-cores",
        "which GEMM/conv ran in TF32",
    ),
    Term(
        "FP8",
        "8-bit formats: E4M3 (up to 448) and E5M2 (up to 57344). They need a scale per tensor or block. They are "
        "not IEEE formats, and autocast does not use them.",
        "layer-detail",
        "what either would lose of a tensor, each with its own scale",
    ),
    Term(
        "Block scale",
        "A factor shared by neighbouring values: 16, 32 or 128 of them along the contraction of a matrix product, "
        "or a row. 8- and 4-bit formats have few exponents; a scale per block maps the block's largest value to the "
        "top of the format, so that an outlier affects only its block.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with its shared scale",
    ),
    Term(
        "E8M0",
        "The format of block scales in MX: only 8 exponent bits, so each scale is a power of two from 2⁻¹²⁷ to 2¹²⁷.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with its shared scale",
    ),
    Term(
        "Two-level scaling",
        "In NVFP4, each block of 16 values has a scale in E4M3, and the whole tensor has one in FP32 that maps the "
        "largest block scale to the top of E4M3.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with its shared scale",
    ),
    Term(
        "Saturation",
        "A value beyond a format's maximum becomes that maximum, instead of infinity. In MX a block's largest value "
        "may saturate, because its scale is rounded down.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with its shared scale",
    ),
    Term(
        "Stochastic rounding",
        "A value is rounded to one of its two neighbours at random, more likely to the nearer one, so that the mean "
        "equals the value. NVFP4 training rounds gradients this way, so values below half a unit are not always "
        "lost.",
        "compare",
        "the loss of an NVFP4 training with and without it",
    ),
    Term(
        "FP32 island",
        "A module that runs in FP32 inside an autocast region, because an operator is on autocast's FP32 list or "
        "the code turns autocast off around it. Values are cast on the way in and out.",
        "precision-map",
        "the islands, and the bytes cast for each",
    ),
    Term(
        "Cast",
        "Converting values to another dtype. A weight is cast once per autocast region and then read from the "
        "cache; an activation is cast for each operator that reads it. Casts cost memory traffic but no arithmetic.",
        "step-cost",
        "the share of a step spent in casts",
    ),
    Term(
        "Launch-bound",
        "The GPU finishes kernels faster than Python launches new ones, so it waits. 16 bits then gain nothing; "
        "larger batches, compilation or CUDA graphs help.",
        "step-cost",
        "the time in which the device was idle between kernels",
    ),
    Term(
        "Tensor core",
        "A unit of NVIDIA GPUs that multiplies small matrices in one instruction: FP16 from compute capability 7.0 "
        "on, BF16 and TF32 from 8.0, FP8 from 8.9. Only GEMM/conv (matrix products and convolutions) benefits, and "
        "only in those formats.",
        "tensor-cores",
        "the share of GEMM/conv time on tensor cores, and the reasons for the rest",
    ),
)


def explained(name: str) -> str:
    """The definition of a term. Raises `KeyError` for an unknown one."""
    return TERMS[name].text
