"""What the benchmarks share: repeats that take turns, and the table they end in.

Whatever drifts on a machine (its clock, its neighbours) hits all competitors alike when they take turns, so ratios are
taken within a turn and summed up by their median and quartiles.
"""

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

REST_S = 0.02


def by_turns(competitors: Mapping[str, Callable[[], object]], turns: int) -> dict[str, np.ndarray]:
    """Seconds each competitor took in each turn; who begins changes from turn to turn.

    Between two of them everybody rests: torch's OpenMP threads keep a core busy for some milliseconds after they have
    worked, which would be charged to whoever comes next.
    """
    names = list(competitors)
    seconds = {name: np.zeros(turns) for name in names}
    for turn in range(turns):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            time.sleep(REST_S)
            start = time.perf_counter()
            competitors[name]()
            seconds[name][turn] = time.perf_counter() - start
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
    """Where this ran, for the line under the table."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads; median (quartiles)."
    )


def say(text: str) -> None:
    """Progress, which does not belong in the table."""
    print(text, file=sys.stderr, flush=True)
