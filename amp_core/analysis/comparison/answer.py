"""One line on a recipe: speed, memory, convergence.

>>> in_one_line(comparison.recipes.iloc[1].to_dict())
'BF16: 2.31 × faster, 38 % less memory, same loss within noise'
"""

import math
from collections.abc import Mapping
from typing import Any

from amp_core.text import formatting

SAME_MEMORY_FRAC = 0.02
"""Peaks that differ by less than this share count as equal."""

_LEARNED = {
    "within noise": "same loss within noise",
    "worse": "higher final loss",
    "better": "lower final loss",
    "not comparable": "trains a different task",
}


def in_one_line(row: Mapping[str, Any]) -> str:
    """The sentence for a row of `Comparison.recipes`."""
    name, precision = str(row["recipe"]), str(row["precision"])
    name = name.upper() if name == precision else name
    costs = f"{speed_in_words(row)}, {_memory(float(row['memory_ratio']))}"
    if str(row["speed_verdict"]) == "emulated":
        costs = "emulated, so speed and memory are not compared"
    return f"{name}: {costs}, {_parity(row)}"


def parity_in_words(parity: str) -> str:
    """A recipe's `parity` with its evidence as users read it: `unknown: run more seeds (…)`."""
    return parity.replace("cannot tell", "unknown")


def _parity(row: Mapping[str, Any]) -> str:
    """The parity of convergence in a few words."""
    parity = str(row["parity"])
    if parity.startswith("cannot tell"):
        seeds = f" ({formatting.plural(int(row['seeds']), 'seed')})" if "seeds" in row else ""
        return f"convergence parity unknown{seeds}"
    return next((text for start, text in _LEARNED.items() if parity.startswith(start)), parity)


def speed_in_words(row: Mapping[str, Any]) -> str:
    """How fast a recipe is against the baseline, from its row of `Comparison.recipes`: `1.22 × slower`."""
    ratio, speed = float(row["speed_ratio"]), str(row["speed_verdict"])
    if speed == "faster":
        return f"{formatting.number(ratio)} × faster" if ratio >= 1.1 else f"{formatting.percent(ratio - 1)} faster"
    if speed == "slower":
        return (
            f"{formatting.number(1 / ratio)} × slower"
            if ratio <= 1 / 1.1
            else f"{formatting.percent(1 / ratio - 1)} slower"
        )
    if speed == "no difference seen":
        return "no significant difference in speed"
    if speed == "not measured":
        return "speed not measured"
    return "speed unknown (too few or too uneven steps)"


def _memory(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "memory not measured"
    if abs(ratio - 1) < SAME_MEMORY_FRAC:
        return "the same memory"
    if ratio >= 2:
        return f"{formatting.number(ratio)} × the memory"
    return f"{formatting.percent(abs(ratio - 1))} {'less' if ratio < 1 else 'more'} memory"
