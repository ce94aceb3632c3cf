"""The findings of the rules in the fault zoo, and the cost of the signals behind them: `python -m
tests.benchmarks.zoo`.

The first table has a row per fault: whether it was reported, whether with the right tensor, module or call, and whether
its healthy twin had no findings. The second has the time that each observer of `watch` spends in a step of a healthy
`text-gpt` loop: the cost of its signals for users without such faults.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amp_core import load_run
from amp_core.findings import GUIDE, diagnose
from amp_core.record import watch
from amp_core.record.observers import defaults
from tests.benchmarks.measuring import machine
from tests.benchmarks.watching import Loop
from tests.findings.zoo import ZOO, Case

WATCHED_STEPS = 200


def row(case: Case, folder: Path) -> str:
    """One fault and its twin."""
    case.write(folder / "faulty", True)
    case.write(folder / "healthy", False)
    result = [f for f in diagnose(load_run(folder / "faulty")) if f.code == case.code]
    twin = diagnose(load_run(folder / "healthy"))
    right = bool(result) and case.where in result[0].where
    silent = not [f for f in twin if f.severity != "info" or f.code == case.code]
    answers = " | ".join("yes" if answer else "**no**" for answer in (bool(result), right, silent))
    where = result[0].where if result else ""
    return f"| {case.code} | {answers} | {where[:60]} | {GUIDE[case.code].signal} |"


def observers() -> list[type]:
    """The classes of observers that `watch` attaches by default."""
    made = [value for value in vars(defaults).values() if isinstance(value, type)]
    return [one for one in made if one is not defaults.Observer and issubclass(one, defaults.Observer)]


def timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with its time added to that of `name`; nested calls are not counted twice."""
    inside: list[bool] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return function(*args, **kwargs)
        inside.append(True)
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - began
            inside.clear()

    return call


def costs(size: str, precision: str) -> tuple[dict[str, float], float]:
    """Seconds that each observer spent over `WATCHED_STEPS` steps, and seconds of those steps."""
    spent = {one.__name__: 0.0 for one in observers()}
    for one in observers():
        for name, function in list(vars(one).items()):
            if callable(function) and not isinstance(function, type) and name != "__init__":
                setattr(one, name, timed(spent, one.__name__, function))
    loop = Loop(size, precision)
    scaler = loop.scaler if loop.scaler.is_enabled() else None
    with tempfile.TemporaryDirectory() as made, watch(loop.model, loop.optimizer, scaler=scaler, into=Path(made) / "r"):
        loop.run(20)
        spent.update(dict.fromkeys(spent, 0.0))
        began = time.perf_counter()
        loop.run(WATCHED_STEPS)
        return spent, time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini", help="of text-gpt, for the cost")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| code | found | attribution right | twin silent | where | signal |\n| --- | --- | --- | --- | --- | --- |")
    for fault in ZOO:
        with tempfile.TemporaryDirectory() as folder:
            print(row(fault, Path(folder)), flush=True)
    seconds, whole = costs(given.size, given.precision)
    print(f"\ntext-gpt {given.size}, {given.precision}, {whole / WATCHED_STEPS * 1e3:.1f} ms a step")
    print("\n| observer | a step | share of the step |\n| --- | --- | --- |")
    for observer, total in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"| {observer} | {total / WATCHED_STEPS * 1e6:.1f} µs | {total / whole:.3%} |")
    print(f"\n{machine()}; one thread.")
