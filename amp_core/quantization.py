"""Every recipe by which training in 8 or 4 bits quantizes a tensor, and the formats of the values inside.

    >>> from amp_core.quantization import RECIPES
    >>> RECIPES["mxfp4-e2m1"].element.max_value, RECIPES["mxfp4-e2m1"].block, RECIPES["mxfp4-e2m1"].scale.label
    (6.0, 32, 'E8M0')

A quantized tensor holds one element per value and one scale per block of values; what is stored for x is about
element × scale. A recipe says which element, which values share a scale, in which format the scale is stored, and how
the scale follows from the block's largest magnitude (amax). To add a recipe, add an entry to `RECIPES`;
`fake_quantize`, `what_if` and the commands take it from there.

Sources: OCP Microscaling Formats (MX) 1.0 (FP8, FP6, FP4, INT8 elements, E8M0 scales, the `floor` rule), NVIDIA's
cuBLAS documentation, "1D block scaling for FP8 and FP4 data types" (`rceil`, NVFP4), torchao 0.18 (FP8 tensorwise and
rowwise, NVFP4 in two levels), DeepSeek-V3 (FP8 in blocks of 128), Transformer Engine (delayed scaling; powers of two).
"""

import math
from dataclasses import dataclass

from amp_core.formats import FORMATS, Format, Scaling
from amp_core.schema import RunError

_MX = Scaling("block", block=32, scale_format="e8m0")

ELEMENTS: dict[str, Format] = {
    f.name: f
    for f in (
        FORMATS["fp32"],
        FORMATS["fp8-e4m3"],
        FORMATS["fp8-e5m2"],
        Format("fp6-e3m2", "FP6 E3M2", None, 3, 2, 28.0, False, scaling=_MX),
        Format("fp6-e2m3", "FP6 E2M3", None, 2, 3, 7.5, False, scaling=_MX),
        Format("fp4-e2m1", "FP4 E2M1", None, 2, 1, 6.0, False, scaling=_MX),
        # Fixed point with 6 fractional bits: all values are spaced as subnormals are. OCP MX 1.0 leaves -2 out.
        Format("int8", "INT8", None, 0, 7, 127 / 64, False, scaling=_MX),
        Format("e8m0", "E8M0", None, 8, 0, 2.0**127, False),
    )
}
"""Formats of single values in quantized tensors, and of their scales, by name. E8M0 is a power of two without sign."""

OPERANDS = {
    "weight": ("forward", "input_grad"),
    "activation": ("forward", "weight_grad"),
    "output_grad": ("input_grad", "weight_grad"),
}
"""The operands of the three products of a linear layer. Of each, as a matrix [rows, columns], the product whose
contraction its columns are, and that whose contraction its rows are. Weights are [outputs, inputs], the others [tokens,
features]; an activation is the layer's input."""

EIGHTHS, FINE_OCTAVES, OCTAVES = 8, 4, 48
"""How runs count distances below twice the top of a block: in eighths of the four highest octaves, then in octaves;
what lies below the last is counted there."""
BINS = EIGHTHS * FINE_OCTAVES + OCTAVES - FINE_OCTAVES

RULES = ("amax", "amax-pow2", "floor", "rceil")
TENSOR, ROW = "tensor", "row"

Block = int | str | tuple[int, int]
"""Which values share a scale: a number of neighbours, a whole `row`, the whole `tensor`, or a tile of rows ×
columns."""


@dataclass(frozen=True)
class Recipe:
    """How a tensor is quantized; blocks lie along the contraction of the matrix product that the tensor enters."""

    name: str
    label: str
    """How people write it, e.g. `NVFP4`."""
    element: Format
    block: Block
    scale: Format
    """Format of each block's scale."""
    rule: str
    """How the scale follows from a block's amax, for an element whose largest value is `max`:
    `amax`: amax / max, rounded to the scale's format (FP32 keeps max / amax, as torchao does).
    `amax-pow2`: max / amax is rounded down to a power of two.
    `floor`: 2^(floor(log2 amax) − emax), emax being the exponent of `max` (OCP MX 1.0).
    `rceil`: amax / max rounded up to a power of two (NVIDIA)."""
    levels: int = 1
    """2: a scale of the whole tensor in FP32 brings the largest block scale to the top of its format."""
    gradient_element: Format | None = None
    """Element of output gradients where it differs."""
    weight_block: Block | None = None
    """Block of weights where it differs."""
    history_steps: int = 0
    """Steps from whose largest amax the scale follows; 0: the tensor's own amax."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is unknown; choose one of {', '.join(RULES)}")
        wanted = {"floor": "e8m0", "rceil": "e8m0", "amax-pow2": "fp32"}.get(self.rule, self.scale.name)
        if self.scale.name != wanted or (self.rule == "amax" and self.scale.name == "e8m0"):
            raise ValueError(f"rule={self.rule!r} gives no {self.scale.label} scale")
        if self.levels not in (1, 2) or (self.levels == 2 and self.scale.name in ("fp32", "e8m0")):
            raise ValueError(f"levels={self.levels!r} is not 1, or 2 with block scales of a narrow format such as E4M3")
        for block in (self.block, self.weight_block):
            _check(block)

    def element_of(self, kind: str) -> Format:
        """The element of a tensor of that kind: `activation`, `weight` or `output_grad`."""
        return self.gradient_element if self.gradient_element and kind == "output_grad" else self.element

    def block_of(self, kind: str) -> Block:
        """The block of a tensor of that kind."""
        return self.weight_block if self.weight_block and kind == "weight" else self.block

    @property
    def by_tensor(self) -> bool:
        """Whether all values of a tensor share one scale."""
        return self.block == TENSOR

    @property
    def key(self) -> str:
        """How a run names the scaling under which it recorded blocks, e.g. `e8m0 floor` or `fp32 amax 1.75`: the
        scale's format, the rule and, with `amax`, the element's largest value over its power of two. Rules that round
        to another power of two are predicted from what was recorded under these two."""
        if self.scale.name == "e8m0":
            return "e8m0 floor"
        return f"{self.scale.name} amax {self.top:g}" + (", 2 levels" if self.levels == 2 else "")

    @property
    def top(self) -> float:
        """The element's largest value over its power of two, e.g. 1.75 for E4M3."""
        return math.ldexp(self.element.max_value, -self.element.max_exponent)

    @property
    def scaling(self) -> str:
        """The scaling in words, e.g. `E8M0 per 32 values, amax rounded down to a power of two`."""
        top = f"{self.element.max_value:g}"
        how = {
            "amax": f"{top} / amax",
            "amax-pow2": f"{top} / amax rounded down to a power of two",
            "floor": f"2^(floor(log2 amax) − {self.element.max_exponent})",
            "rceil": f"amax / {top} rounded up to a power of two",
        }[self.rule]
        if self.gradient_element:
            how += f" ({self.gradient_element.max_value:g} for output gradients)"
        per = {TENSOR: "per tensor", ROW: "per row"}.get(str(self.block), f"per {block_name(self.block)} values")
        if self.weight_block:
            per += f" (weights {block_name(self.weight_block)})"
        levels = ", over an FP32 scale of the tensor" if self.levels == 2 else ""
        history = f", amax of {self.history_steps} steps" if self.history_steps else ""
        return f"{self.scale.label} {per}: {how}{levels}{history}"


def block_name(block: Block) -> str:
    """A block as recorded and written: `32`, `row`, `tensor`, `128x128`."""
    return "x".join(map(str, block)) if isinstance(block, tuple) else str(block)


def _check(block: Block | None) -> None:
    sides = block if isinstance(block, tuple) else (block,)
    if block in (None, ROW, TENSOR) or all(isinstance(side, int) and side > 0 for side in sides):
        return
    raise ValueError(f"block={block!r} is not a number of values, row, tensor or (rows, columns)")


def _mx(name: str, label: str, element: str, rule: str = "floor", aliases: tuple[str, ...] = ()) -> Recipe:
    return Recipe(name, label, ELEMENTS[element], 32, ELEMENTS["e8m0"], rule, aliases=aliases)


_E4M3, _E5M2, _E2M1, _FP32 = (ELEMENTS[name] for name in ("fp8-e4m3", "fp8-e5m2", "fp4-e2m1", "fp32"))
_TILE = (128, 128)

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("fp8-tensorwise", "FP8 tensorwise", _E4M3, TENSOR, _FP32, "amax", gradient_element=_E5M2),
        Recipe("fp8-tensorwise-pow2", "FP8 tensorwise 2ᵏ", _E4M3, TENSOR, _FP32, "amax-pow2", gradient_element=_E5M2),
        Recipe("fp8-delayed", "FP8 delayed", _E4M3, TENSOR, _FP32, "amax", gradient_element=_E5M2, history_steps=1024),
        Recipe("fp8-rowwise", "FP8 rowwise", _E4M3, ROW, _FP32, "amax"),
        Recipe("fp8-rowwise-pow2", "FP8 rowwise 2ᵏ", _E4M3, ROW, _FP32, "amax-pow2"),
        Recipe("fp8-block", "FP8 block", _E4M3, 128, _FP32, "amax", weight_block=_TILE),
        Recipe("fp8-block-pow2", "FP8 block 2ᵏ", _E4M3, 128, _FP32, "amax-pow2", weight_block=_TILE),
        _mx("mxfp8-e4m3", "MXFP8 E4M3", "fp8-e4m3", aliases=("mxfp8",)),
        _mx("mxfp8-e4m3-rceil", "MXFP8 E4M3 RCEIL", "fp8-e4m3", "rceil", aliases=("mxfp8-rceil",)),
        _mx("mxfp8-e5m2", "MXFP8 E5M2", "fp8-e5m2"),
        _mx("mxfp6-e3m2", "MXFP6 E3M2", "fp6-e3m2"),
        _mx("mxfp6-e2m3", "MXFP6 E2M3", "fp6-e2m3"),
        _mx("mxfp4-e2m1", "MXFP4", "fp4-e2m1", aliases=("mxfp4",)),
        _mx("mxint8", "MXINT8", "int8"),
        Recipe("nvfp4", "NVFP4", _E2M1, 16, _E4M3, "amax", levels=2),
        Recipe("nvfp4-2d", "NVFP4 2D", _E2M1, 16, _E4M3, "amax", levels=2, weight_block=(16, 16)),
    )
}
"""All recipes by name. `nvfp4-2d` has weights in tiles of 16 × 16, as NVIDIA's pretraining recipe."""


def scalings(kind: str) -> dict[tuple[str, str], Recipe]:
    """The ways of scaling a tensor of that kind that a run records, by block and key, each with one of its recipes."""
    result: dict[tuple[str, str], Recipe] = {}
    for recipe in RECIPES.values():
        if recipe.rule in ("amax", "floor"):
            result.setdefault((block_name(recipe.block_of(kind)), recipe.key), recipe)
    return result


def is_recipe(name: object) -> bool:
    """Whether a recipe has that name or alias."""
    return any(name in (recipe.name, *recipe.aliases) for recipe in RECIPES.values())


def find_recipe(name: object) -> Recipe:
    """The recipe of that name or alias. Raises `RunError` for an unknown one."""
    for recipe in RECIPES.values():
        if name in (recipe.name, *recipe.aliases):
            return recipe
    raise RunError(f"recipe={name!r} is unknown; choose one of {', '.join(RECIPES)}")
