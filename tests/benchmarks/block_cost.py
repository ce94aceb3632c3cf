"""What recording blocks costs: `python -m tests.benchmarks.block_cost [--steps 300]`.

First the block pass over a tensor, in units of the statistics kernel's time on the same tensor, taken by turns. Then
training of `text-gpt` and of a larger model, watched with blocks at the default interval, in units of the same watched
without: whole runs of so many steps, by turns.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

from amp_core.record import watch
from amp_core.record.stats.blocks import measure_blocks
from amp_core.record.stats.measure import measure_together
from tests.benchmarks.measuring import by_turns, machine, ratio, table
from tests.benchmarks.quantized import MODELS

SHAPES = ((512, 256), (1024, 1024), (2048, 2048))


def wide() -> tuple:
    """Three layers of 512 × 512 on 512 tokens."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(512, 512), nn.GELU())))

    def batches():
        while True:
            yield torch.randn(512, 512)

    return net, lambda model, batch: model(batch).square().mean(), batches()


def train(model: str, steps: int, blocks: bool) -> None:
    net, loss_fn, batches = wide() if model == "wide" else MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as made, watch(net, optimizer, into=Path(made, "run"), blocks=blocks):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_fn(net, next(batches)).backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = (torch.exp(torch.randn(shape)) * torch.randn(shape)).to(dtype)
            competitors = {
                "measure": lambda tensor=tensor: measure_together([tensor]),
                "blocks": lambda tensor=tensor: measure_blocks(tensor, "activation"),
            }
            by_turns(competitors, 1)
            taken = by_turns(competitors, 7)
            rows.append(
                [f"{shape[0]} × {shape[1]} {dtype}".replace("torch.", ""), ratio(taken["blocks"], taken["measure"])]
            )
    print(table(["tensor", "block pass ÷ statistics kernel"], rows), flush=True)
    rows = []
    for model in ("text-gpt", "wide"):
        runs = {str(blocks): lambda m=model, b=blocks: train(m, given.steps, b) for blocks in (False, True)}
        train(model, 2, True)
        taken = by_turns(runs, given.turns)
        rows.append([model, ratio(taken["True"], taken["False"])])
    print(f"\n{table(['training, default interval', 'with blocks ÷ without'], rows)}\n\n{machine()}")
