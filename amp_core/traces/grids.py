"""The sizes with which a kernel was launched, as a trace gives them.

>>> sizes_of_launch({"grid": [64, 5, 1], "block": [256, 1, 1]})
(320.0, 256.0)
"""

import math
from collections.abc import Mapping
from typing import Any


def sizes_of_launch(arguments: Mapping[str, Any]) -> tuple[float, float]:
    """The product of a kernel's `grid`, in blocks or in threads as its call takes it, and the threads of its block; NaN
    where the trace lacks them."""
    grid, block = arguments.get("grid"), arguments.get("block")
    return _product(grid), _product(block)


def _product(sizes: Any) -> float:
    is_known = (
        isinstance(sizes, list) and len(sizes) == 3 and all(type(one) is int and 0 < one < 2**31 for one in sizes)
    )
    return float(min(math.prod(sizes), 2**62)) if is_known else math.nan
