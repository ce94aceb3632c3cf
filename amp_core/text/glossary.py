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
        "Inside `torch.autocast` each operator chooses its precision by a list: matrix products and convolutions in 16 "
        "bits, sums, norms and losses in FP32. Weights stay FP32; their 16-bit copies are made when first used and "
        "kept until the region ends.",
        "precision-map",
        "which operator ran in which precision, and why",
    ),
    Term(
        "Loss scaling",
        "The loss is multiplied by a number before backward, so that small gradients do not fall below what FP16 can "
        "hold; the optimizer divides by the same number. A dynamic scale doubles after many clean steps and halves at "
        "an overflow.",
        "loss-scale",
        "the scale at each step, inside the window in which nothing is lost",
    ),
    Term(
        "Skipped step",
        "Where a gradient is infinite or NaN, `GradScaler` leaves the weights alone and halves its scale. A few at the "
        "start, then about one in each growth interval, is how it works; more is wasted compute.",
        "loss-scale",
        "each skipped step as a cross, and which gradient caused it",
    ),
    Term(
        "Growth interval",
        "So many steps without a skip (2,000 unless set otherwise), and a dynamic loss scale is doubled. It is a "
        "probe: where the doubled scale is too large, the next step overflows, is skipped, and the scale halves again.",
        "loss-scale",
        "each growth as a step upwards of the trace",
    ),
    Term(
        "Backoff",
        "After a skipped step a dynamic loss scale is multiplied by the backoff factor, one half unless set otherwise.",
        "loss-scale",
        "each backoff as a step downwards, behind its cross",
    ),
    Term(
        "Safe window",
        "The loss scales at which no gradient overflows in FP16 and next to nothing of the gradient's mass underflows. "
        "It is predicted from recorded histograms, and moves while a model trains.",
        "loss-scale",
        "the window as a band behind the trace",
    ),
    Term(
        "Master weights",
        "The weights that the optimizer updates, in FP32. In 16 bits an update smaller than about a 2000th (FP16) or a "
        "256th (BF16) of its weight rounds away. Under autocast the parameters themselves are the master weights.",
        "memory",
        "parameters, and beside them autocast's 16-bit copies",
    ),
    Term(
        "Underflow",
        "A value that was not zero becomes zero, because the format has nothing so small: in FP16 all of magnitude "
        "2⁻²⁵ or less. A value that was zero before is no underflow.",
        "number-ranges",
        "how many values lie at each power of two, and what another scale would lose",
    ),
    Term(
        "Subnormal",
        "A value below a format's smallest normal one (FP16: 2⁻¹⁴, 6.1 × 10⁻⁵) but not yet zero. It has fewer "
        "significant bits the smaller it is.",
        "number-ranges",
        "the hatched share of each tensor",
    ),
    Term(
        "Overflow",
        "A value larger than the format's largest (FP16: 65504) becomes infinite, and what is computed from it is "
        "infinite or NaN.",
        "layer-detail",
        "the first step at which a tensor held infinities or NaN",
    ),
    Term(
        "Mass",
        "The sum of magnitudes. Half of a gradient's elements may carry a billionth of its mass: underflow "
        "is given in both, and mass is what matters to training.",
        "number-ranges",
        "what another loss scale would lose, in elements and in mass",
    ),
    Term(
        "Audit",
        "One batch is replayed with the same weights and random numbers in FP32 and in the run's recipe, and the "
        "gradients are compared: what was lost is measured then, not predicted.",
        "number-ranges",
        "prediction beside measurement, where a run was audited",
    ),
    Term(
        "FP16",
        "IEEE half precision: 5 exponent bits, 10 stored mantissa bits. Normal from 2⁻¹⁴ to 65504; it needs a loss "
        "scale because gradients are often smaller.",
        "number-ranges",
        "its limits as lines across your gradients",
    ),
    Term(
        "BF16",
        "FP32's 8 exponent bits with 7 stored mantissa bits: the same range, less precision. It needs no loss scale. "
        "NVIDIA GPUs from Ampere on multiply it on tensor cores; CPUs with AVX512-BF16 or AMX do too.",
        "compare",
        "its loss, speed and gradients beside FP16 and FP32",
    ),
    Term(
        "TF32",
        "FP32 values whose mantissa the tensor cores round to 10 bits before they multiply; sums stay FP32. It takes "
        "up 32 bits, so it saves time and no memory. PyTorch has it on for convolutions and off for other products.",
        "tensor-cores",
        "which GEMM/conv ran in TF32",
    ),
    Term(
        "FP8",
        "8-bit formats: E4M3 (up to 448) and E5M2 (up to 57344). They need a scale for each tensor. They are no IEEE "
        "formats, and autocast does not use them.",
        "layer-detail",
        "what either would lose of a tensor, each with a scale of its own",
    ),
    Term(
        "Block scale",
        "A factor that neighbouring values share: 16, 32 or 128 of them along the contraction of a matrix product, or "
        "a row. 8- and 4-bit formats hold few powers of two; a scale for each block puts its largest value at their "
        "top, so that an outlier hurts its block and not its tensor.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with the scale that it shares",
    ),
    Term(
        "E8M0",
        "The format of block scales in MX: 8 exponent bits and nothing else, so each scale is a power of two from "
        "2⁻¹²⁷ to 2¹²⁷.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with the scale that it shares",
    ),
    Term(
        "Two-level scaling",
        "In NVFP4 each block of 16 values has a scale in E4M3, and the whole tensor one in FP32 that brings the "
        "largest block scale to the top of E4M3.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with the scale that it shares",
    ),
    Term(
        "Saturation",
        "A value beyond a format's largest becomes that largest value, where overflow would make it infinite. In MX a "
        "block's largest value may saturate, because its scale is rounded down.",
        "format-lab",
        "a block of your own values in each 8- and 4-bit recipe, with the scale that it shares",
    ),
    Term(
        "Stochastic rounding",
        "A value is rounded to one of its two neighbours at random, the nearer the likelier, so that the mean is the "
        "value itself. NVFP4 training rounds gradients so: what is below half a unit is not always lost.",
        "compare",
        "the loss of an NVFP4 training with it beside one without",
    ),
    Term(
        "FP32 island",
        "A module that runs in FP32 inside of an autocast region, because an operator's list says so or somebody "
        "turned autocast off around it. Values are cast on the way in and on the way out.",
        "precision-map",
        "the islands, and the bytes that are cast for each",
    ),
    Term(
        "Cast",
        "Writing values again in another format. A weight is cast once in an autocast region and then taken from its "
        "cache; an activation is cast for each operator that reads it. Casts take memory traffic and no arithmetic.",
        "step-cost",
        "the share of a step that casts take",
    ),
    Term(
        "Launch-bound",
        "The GPU finishes its kernels sooner than Python can start new ones, so it waits. Then 16 bits gain nothing: "
        "larger batches, compiling or CUDA graphs do.",
        "step-cost",
        "the time in which the device was idle between kernels",
    ),
    Term(
        "Tensor core",
        "A unit of NVIDIA GPUs that multiplies small matrices in one go: in FP16 from compute capability 7.0 on, in "
        "BF16 and TF32 from 8.0 on, in FP8 from 8.9 on. Only GEMM/conv (matrix products and convolutions) gains from "
        "it, and only in those formats.",
        "tensor-cores",
        "the share of GEMM/conv time that ran on them, and why the rest did not",
    ),
)


def explained(name: str) -> str:
    """The definition of a term. Raises `KeyError` for an unknown one."""
    return TERMS[name].text
