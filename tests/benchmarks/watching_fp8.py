"""The cost of watching FP8 training: `python -m tests.benchmarks.watching_fp8 [--size tiny] [--recipe tensorwise] …`.

`text-gpt` with torchao's `Float8Linear` (emulated on a CPU), unwatched and watched at every tenth step, in one process
on one thread. The loops take turns of ten steps; their processor time is compared turn by turn, which other work on
the machine affects less. The cap on the time of measuring sees the processor time of its own loop alone, as it would
if that loop trained alone. "without casts" watches all but the casts; the difference is what the table `quantized`
costs. A second unwatched loop shows the noise.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from amp_core.record.observers import quantized, time_cap
from amp_core.schema import KINDS
from tests.benchmarks.measuring import by_turns, machine, ratio, table
from tests.benchmarks.watching import Loop, ampscope


def fp8_loop(size: str, recipe: str) -> Loop:
    """The loop with its linear layers but the head in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    loop = Loop(size, "bf16")
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    layers = [name for name, module in loop.model.named_modules() if isinstance(module, torch.nn.Linear)]
    convert_to_float8_training(loop.model, config=config, module_filter_fn=lambda module, name: name in layers[:-1])
    return loop


class OwnTime:
    """Stands for the module `time` of the cap: `perf_counter` is the processor time of the loop that runs now."""

    thread_time = staticmethod(time.thread_time)

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}
        self._loop, self._began = 0, time.process_time()

    def perf_counter(self) -> float:
        return self._spent.get(self._loop, 0.0) + time.process_time() - self._began

    def turn_of(self, number: int, run: Callable[[int], None]) -> Callable[[int], None]:
        """`run` as a turn of this loop."""

        def turn(steps: int) -> None:
            self._loop, self._began = number, time.process_time()
            run(steps)
            self._spent[number] = self.perf_counter()
            self._began = time.process_time()

        return turn


def without_casts(loop: Loop, folder: Path) -> None:
    """Watched as usual, but for the casts."""
    with mock.patch.object(quantized, "LIBRARIES", ()):
        ampscope(loop, folder, 10, KINDS)
    run = loop.run

    def run_without(steps: int) -> None:
        with mock.patch.object(quantized, "LIBRARIES", ()):
            run(steps)

    loop.run = run_without  # type: ignore[method-assign]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", default="tiny")
    options.add_argument("--recipe", default="tensorwise", choices=("tensorwise", "rowwise"))
    options.add_argument("--turns", type=int, default=30)
    given = options.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Loop, Path], None]] = {
        "bare": lambda loop, into: None,
        "bare, once more": lambda loop, into: None,
        "watched, every 10th step": lambda loop, into: ampscope(loop, into, 10, KINDS),
        "watched without casts, every 10th step": without_casts,
    }
    clock = OwnTime()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(time_cap, "time", clock):
        loops = {name: fp8_loop(given.size, given.recipe) for name in ways}
        for number, (name, loop) in enumerate(loops.items()):
            ways[name](loop, Path(folder) / str(number))
            loop.run = clock.turn_of(number, loop.run)  # type: ignore[method-assign]
        for loop in loops.values():
            loop.run(30)
        turns = {name: functools.partial(loop.run, 10) for name, loop in loops.items()}
        seconds = by_turns(turns, given.turns, clock=time.process_time)
        for loop in loops.values():
            loop.close()
    rows = [
        [name, f"{np.median(took) / 10 * 1e3:.2f} ms", ratio(took, seconds["bare"])] for name, took in seconds.items()
    ]
    print(f"text-gpt {given.size}, FP8 {given.recipe} emulated, {given.turns} turns of 10 steps, processor time\n")
    print(table(["loop", "a step", "÷ bare"], rows))
    both = seconds["watched, every 10th step"], seconds["watched without casts, every 10th step"]
    print(f"\nwatching the casts: × {ratio(*both)}. {machine()}")


if __name__ == "__main__":
    main()
