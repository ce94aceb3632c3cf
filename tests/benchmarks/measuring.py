"""Shared by the benchmarks: repeats in turns, and the table of results.

Any drift of the machine (its clock, other processes) affects all competitors equally if they take turns, so ratios are
taken within a turn and summarised by their median and quartiles.
"""

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

REST_S = 0.02


def by_turns(
    competitors: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, np.ndarray]:
    """Seconds of each competitor in each turn, by `clock`; the first competitor changes from turn to turn.

    There is a pause between two competitors: torch's OpenMP threads keep a core busy for some milliseconds after their
    work, which would count for the next competitor.
    """
    names = list(competitors)
    seconds = {name: np.zeros(turns) for name in names}
    for turn in range(turns):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            time.sleep(REST_S)
            start = clock()
            competitors[name]()
            seconds[name][turn] = clock() - start
    return seconds


def ratio(seconds: np.ndarray, base: np.ndarray) -> str:
    """Median of the ratios turn by turn, and their quartiles."""
    low, middle, high = np.quantile(seconds / base, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine() -> str:
    """A description of the machine, for the line under the table."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads; median (quartiles)."
    )


def say(text: str) -> None:
    """Print progress, which is not part of the table."""
    print(text, file=sys.stderr, flush=True)
