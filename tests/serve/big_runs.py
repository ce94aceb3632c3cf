"""Runs of 100,000 steps and 10 million rows of `tensors`, and how fast the app is on them.

    python -m tests.serve.big_runs                    # a twentieth of that, and 300 runs in the library
    python -m tests.serve.big_runs --full             # all of it, 5,000 runs, TensorBoard beside it; ten minutes

The script prints the time from the start of a session to its first chart in a new server, the time of each later page,
the server's memory, the cost of a refresh of live runs of two lengths, and the time of listing the library.
"""

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from amp_core.store.writer import RunWriter
from tests.serve.running import run_async, serving
from tests.serve.viewer import Viewer

KINDS = ("weight_grad", "output_grad")
BINS = 24
PAGES = ("", "loss-scale", "number-ranges", "layer-detail", "memory", "tensor-cores", "step-cost", "precision-map")
SPIKE = 3
"""The tensor whose values overflow once."""


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    """Write steps `first` to before `last` of a training with falling loss and occasional skipped steps."""
    random = np.random.default_rng(first)
    at = np.arange(first, last)
    skipped = at % 997 == 996
    ones = np.ones(len(at))
    writer.append(
        "steps",
        {
            "step": at,
            "time_s": at * 0.05,
            "loss": 2 + 2 * np.exp(-at / 2e4) + random.normal(0, 0.02, len(at)),
            "loss_scale": np.where(skipped, 65536.0, 32768.0),
            "skipped": skipped,
            "growth_tracker": at % 997,
            "grad_norm": np.exp(random.normal(0, 0.2, len(at))),
            "lr": ones * 1e-3,
            "samples": np.full(len(at), 32),
            "step_ms": 50 + random.normal(0, 1, len(at)),
            "data_ms": ones * 2,
            "forward_ms": ones * 16,
            "backward_ms": ones * 24,
            "optimizer_ms": ones * 7,
            "watch_ms": ones,
            "memory_allocated_bytes": np.full(len(at), 3 * 2**30),
            "memory_peak_bytes": np.full(len(at), 4 * 2**30),
        },
    )


def write_tensors(writer: RunWriter, step: int, tensors: int, spike: bool = False) -> None:
    """Write a sampled step: gradients of `tensors` layers, of both kinds, distributed like real ones."""
    random = np.random.default_rng(step + 1)
    rows = tensors * len(KINDS)
    shape = np.exp(-0.5 * ((np.arange(BINS) - 14 + random.normal(0, 1, (rows, 1))) / 3) ** 2)
    counts = np.rint(shape / shape.sum(axis=1, keepdims=True) * 100_000).astype(np.int64)
    overflowed = np.zeros(rows, dtype=np.int64)
    if spike:
        overflowed[[SPIKE, tensors + SPIKE]] = 17
    normal = counts.sum(axis=1)
    writer.append(
        "tensors",
        {
            "step": np.full(rows, step),
            "name": [f"blocks.{i:03d}.linear.weight" for i in range(tensors)] * len(KINDS),
            "kind": np.repeat(KINDS, tensors),
            "dtype": ["float16"] * rows,
            "loss_scale": np.full(rows, 32768.0),
            "numel": normal + overflowed,
            "zero": np.zeros(rows, dtype=np.int64),
            "subnormal": np.zeros(rows, dtype=np.int64),
            "normal": normal,
            "inf": overflowed,
            "nan": np.zeros(rows, dtype=np.int64),
            "absmax": np.full(rows, 2.0**9),
            "rms": np.full(rows, 2.0),
            "exp_min": np.full(rows, -14),
            "exp_counts": pa.ListArray.from_arrays(np.arange(0, counts.size + 1, BINS, dtype=np.int32), counts.ravel()),
            "absmin": np.full(rows, 2.0**-14),
            "abs_sum": np.full(rows, 1e5),
        },
    )


@contextlib.contextmanager
def big_run(folder: Path, steps: int, rows: int, tensors: int = 500, **options: int) -> Iterator[RunWriter]:
    """A run with that many steps and rows, still open, with a spike in the middle. `options` are those of
    `RunWriter`."""
    sampled = max(1, rows // (tensors * len(KINDS)))
    every = max(1, steps // sampled)
    layers = {f"blocks.{i:03d}.linear": "Linear" for i in range(tensors)}
    shapes = {f"{name}.weight": [256, 256] for name in layers}
    with RunWriter(
        folder,
        config={"precision": "fp16", "workload": "made up", "steps": steps, "autocast_dtype": "float16"},
        model={"class": "Model", "layers": layers, "shapes": shapes, "parameters": tensors * 65536},
        **options,  # type: ignore[arg-type]
    ) as writer:
        for first in range(0, steps, every):
            write_steps(writer, first, min(steps, first + every))
            if first // every < sampled:
                write_tensors(writer, first, tensors, spike=first // every == sampled // 2)
        yield writer


def write_library(runs: Path, number: int) -> None:
    """Make `number` small runs: one is written, the others are copies under their own names."""
    with big_run(runs / "made-00000", 40, 40, tensors=4):
        pass
    head = (runs / "made-00000" / "run.json").read_text()
    for i in range(1, number):
        folder = runs / f"made-{i:05d}"
        shutil.copytree(runs / "made-00000", folder)
        (folder / "run.json").write_text(head.replace("made-00000", folder.name))


async def pages(base: str, run: str) -> dict[str, tuple[float, float | None]]:
    """For each page the seconds until it was complete and until its first chart, in one session."""
    result = {}
    async with Viewer(base) as viewer:
        for page in PAGES:
            shown = await viewer.open(page, run=run)
            assert not shown.errors, (page, shown.errors)
            result[page or "overview"] = (shown.seconds, shown.first_chart_s)
    return result


async def refresh_live(base: str, run: str, writer: RunWriter, first: int, refreshes: int = 12) -> float:
    """Median seconds of a refresh of a live run, with new steps and a sampled step before each."""
    took = []
    async with Viewer(base) as viewer:
        await viewer.open("", run=run)
        for look in range(refreshes):
            write_steps(writer, first + 10 * look, first + 10 * look + 10)
            write_tensors(writer, first + 10 * look, 500)
            took.append((await viewer.tick()).seconds)
    return float(np.median(took))


def live_tail(home: Path, lengths: list[tuple[int, int]]) -> list[float]:
    """The median refresh time of live runs with these numbers of steps and rows."""
    result = []
    with serving(home / "live") as server:
        for steps, rows in lengths:
            with big_run(home / "live" / f"of-{steps}", steps, rows) as writer:
                result.append(run_async(refresh_live(server.base, f"run/of-{steps}", writer, steps)))
    return result


async def library(base: str) -> tuple[float, float]:
    """Seconds until the Library is drawn for the first time, and again."""
    async with Viewer(base) as viewer:
        first = await viewer.open("library")
        assert not first.errors, first.errors
        return first.seconds, (await viewer.again()).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--home", type=Path, help="keep the runs there, and take those that are there already")
    arguments = parser.parse_args()
    steps, rows = (100_000, 10_000_000) if arguments.full else (5_000, 500_000)
    with tempfile.TemporaryDirectory(prefix="ampscope-big-") as aside:
        home = arguments.home or Path(aside)
        if not (home / "runs" / "big").exists():
            began = time.perf_counter()
            with big_run(home / "runs" / "big", steps, rows):
                pass
            print(f"written in {time.perf_counter() - began:.0f} s: {steps:,} steps, {rows:,} rows of tensors")
        with serving(home / "runs") as server:
            for page, (seconds, chart) in run_async(pages(server.base, "run/big")).items():
                print(f"{page}: {seconds:.2f} s, first chart {'none' if chart is None else f'{chart:.2f} s'}")
            print(f"server: {server.rss_bytes() / 2**20:.0f} MiB resident")
        short, long = live_tail(home, [(steps // 50, rows // 50), (steps, rows)])
        print(f"a look at a live run: {short:.2f} s at {steps // 50:,} steps, {long:.2f} s at {steps:,}")
        number = 5000 if arguments.full else 300
        if not (home / "library").exists():
            write_library(home / "library", number)
        with serving(home / "library") as server:
            first, again = run_async(library(server.base))
        print(f"library of {number:,} runs: {first:.2f} s in a server that has just begun, {again:.2f} s again")


if __name__ == "__main__":
    main()
