"""The cost of the update ledger at its default interval: `python -m tests.benchmarks.updates [--width 512] …`.

The same loop of BF16 weights under AdamW, watched with the ledger and without it, by turns of ten steps: one interval.
The first row has the first three intervals, in which the ledger compares whatever that costs; the second row the rest,
in which it keeps to its share of the time. Ratios are of the processor's time, which other processes hardly change.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch, watching
from amp_core.record.observer import Observer
from amp_core.record.updates import ledger
from tests.benchmarks.measuring import REST_S, machine, ratio, say, table

EVERY = 10


class Loop:
    """A transformer in BF16 that trains ten steps at a time."""

    def __init__(self, given: argparse.Namespace, into: Path) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(given.width, 8, 4 * given.width, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.x = torch.randn(given.batch, 64, given.width, dtype=torch.bfloat16)
        self.recorder = watch(self.model, self.optimizer, into=into, every=EVERY)
        self.seconds: list[float] = []

    def run(self) -> None:
        """One interval."""
        time.sleep(REST_S)
        start = time.process_time()
        for _ in range(EVERY):
            self.model(self.x).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seconds.append(time.process_time() - start)


@contextlib.contextmanager
def without_ledger() -> Iterator[None]:
    """`watch` attaches neither ledger."""
    with (
        mock.patch.object(watching, "UpdateLedger", return_value=Observer()),
        mock.patch.object(watching, "AverageLedger", return_value=Observer()),
    ):
        yield


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # The ledger keeps to a share of the time of its own loop, not of the other one's turns.
        mock.patch.object(ledger, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() - away)).start()
        away = 0.0
        loop = Loop(given, Path(folder, "with"))
        with without_ledger():
            bare = Loop(given, Path(folder, "without"))
        say(f"{sum(p.numel() for p in loop.model.parameters()):,} parameters in BF16")
        for _ in range(given.turns):
            loop.run()
            start = time.perf_counter()
            bare.run()
            away += time.perf_counter() - start
        for each in (loop, bare):
            each.recorder.close()
        compared = load_run(Path(folder, "with")).updates["step"].nunique()
    rows = []
    for name, part in (
        ("first intervals", slice(ledger.MIN_STEPS)),
        ("later intervals", slice(ledger.MIN_STEPS, None)),
    ):
        alone, both = np.array(bare.seconds[part]), np.array(loop.seconds[part])
        step_ms = f"{np.median(alone) / EVERY * 1e3:.0f} ms"
        rows.append([name, step_ms, ratio(both, alone), f"{both.sum() / alone.sum():.3f}"])
    print(table(["intervals", "step", "with ÷ without", "of the sums"], rows))
    print(f"\n{compared} of {given.turns} sampled steps were compared. {machine()}")


if __name__ == "__main__":
    main()
