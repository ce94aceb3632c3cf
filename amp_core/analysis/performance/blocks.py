"""How many blocks of threads the kernel of a product has for the multiprocessors of its GPU.

>>> blocks_of(run, matrix_ops(run).iloc[0].to_dict())
Blocks(per_unit=0.21, units=38, gpu='gfx942')
"""

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from amp_core.analysis.performance.gemm_shapes import Product, product
from amp_core.store.run import Run

MAX_FEW_BLOCKS = 0.25
"""Blocks per multiprocessor below which most of the GPU has no work."""
ATTENTION_TILE = 128
"""Queries of a head for which one block of a kernel of attention computes (FlashAttention: 64 to 128)."""
MAX_UNITS = 1024
"""More multiprocessors has no GPU: some traces have another number in that place, and reckon with it."""
MIN_LONG_SUM_RATIO = 8
"""K over the larger one of M and N from which a product has more work than the tiles of its result show."""
_TENSILE = re.compile(r"Cijk_\w*?_MT(\d+)x(\d+)x\d+_\w*?_GSU([1-9]\d*)_(?!\w*_SK[1-9])")
"""Tensile's names: the tile of the result for which a block computes, and in how many parts each sum is split, with a
block for each. Stream-K (`SK`) divides the work otherwise."""
_ISA = re.compile(r"_ISA(90a|908|942|950)(?:_|$)")
_IGEMM, _OF_IGEMM = re.compile(r"igemm_\w*_gtcx([23]?)_"), {"": "gfx908", "2": "gfx90a", "3": "gfx942"}
"""Names of MIOpen's convolutions by implicit products, and for what each generation of these is written."""
_LEAST_UNITS = {"gfx908": 120, "gfx90a": 104, "gfx942": 38, "gfx950": 32}
"""By the architecture in such a name, the compute units of its smallest GPU: MI100, MI210, and a part (CPX mode) of an
MI300X and of an MI350X (AMD CDNA white papers and partitioning guide)."""
WHOLE_GPUS = {"gfx908": "MI100", "gfx90a": "MI250X", "gfx942": "MI300X", "gfx950": "MI355X"}
"""The same with the largest GPU, whole."""


def architecture(kernel: str) -> str:
    """The architecture that a kernel of Tensile or MIOpen is compiled for, `gfx942`; empty where its name has none."""
    if (found := _IGEMM.search(kernel)) is not None:
        return _OF_IGEMM[found[1]]
    found = _ISA.search(kernel)
    return f"gfx{found[1]}" if found is not None else ""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a kernel."""

    per_unit: float
    """By multiprocessor, the mean over the kernel's time."""
    units: int
    """Multiprocessors of the GPU, at least so many where `gpu` is not empty; 0 if not known."""
    gpu: str = ""
    """The architecture that the kernel is compiled for, where the GPU itself is not known."""


def is_long_sum(made: Product) -> bool:
    """Whether a product makes few values, each the sum of many."""
    return made.kind == "gemm" and made.sizes["K"] >= MIN_LONG_SUM_RATIO * max(made.sizes["M"], made.sizes["N"])


def blocks_of(run: Run, row: Mapping[Hashable, Any]) -> Blocks | None:
    """The blocks of the kernels of a row of `matrix_ops`: as recorded, or from the input shapes for attention and for
    kernels of Tensile; None if neither is known."""
    kernel, gpus = str(row["kernel"]), run.head.environment.get("gpus")
    first = gpus[0] if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else {}
    given = first.get("multiprocessors")
    units = given if isinstance(given, int) and given > 0 else 0
    if units > MAX_UNITS:
        return None
    frame = run.timeline
    frame = frame[(frame["name"] == kernel) & (frame["op"].fillna("") == row["op"]) & frame["blocks_per_sm"].notna()]
    us = frame["total_us"].astype(float)
    if us.sum() > 0:
        return Blocks(float((frame["blocks_per_sm"].astype(float) * us).sum() / us.sum()), units)
    made, compiled_for = product(str(row["op"]), str(row["in_shapes"])), architecture(kernel)
    count, gpu = _count(kernel, made) if made is not None else 0, ""
    if not units and compiled_for:
        units, gpu = _LEAST_UNITS[compiled_for], compiled_for
    return Blocks(count / units, units, gpu) if count and units else None


def _count(kernel: str, made: Product) -> int:
    """The blocks for one product by its sizes; 0 if they do not tell it."""
    if made.kind == "attention" and made.queries:
        return made.batch * -(-made.queries // ATTENTION_TILE)
    tile = _TENSILE.search(f"{kernel}_")
    if made.kind != "gemm" or tile is None:
        return 0
    high, wide, parts = map(int, tile.groups())
    sides = made.sizes["M"], made.sizes["N"]  # in which order, the layout of the result decides
    most = max(math.ceil(m / high) * math.ceil(n / wide) for m, n in (sides, sides[::-1]))
    return made.batch * most * parts
