"""Which layers of stock models can run in 8 and 4 bits: `python -m tests.benchmarks.layer_decision [MODEL …]`.

Each model is trained in FP32 with `watch(…, blocks=True, trace_ops=2)`, as a user would record it, and `ampscope
what-if` decides from the run: for each recipe and limit, how many linear layers go, their share of the GEMM FLOPs, and
the layers that stay in BF16.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from amp_core import load_run
from amp_core.analysis.numerics.layer_choice import choose, in_db, layer_errors
from amp_core.quantization import find_recipe
from amp_core.record import watch
from amp_core.text import formatting
from tests.benchmarks.measuring import table
from tests.benchmarks.quantized import MODELS

FORMATS = ("mxfp8", "fp8-tensorwise", "nvfp4", "mxfp4")
LIMITS = (0.15, 0.1, 0.05)
"""Of the relative error of a product. The first is the default of `ampscope what-if`."""


def decisions(model: str, steps: int) -> list[list[str]]:
    """One row per recipe and limit."""
    net, loss_fn, batches = MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    recipes = [find_recipe(name) for name in FORMATS]
    with tempfile.TemporaryDirectory() as made:
        how = {"every": max(1, steps // 4 - 1), "blocks": True, "trace_ops": 2}
        with watch(net, optimizer, into=Path(made, "run"), **how) as recorder:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = loss_fn(net, next(batches))
                loss.backward()
                optimizer.step()
                recorder.log(loss=loss)
        errors = layer_errors(load_run(Path(made, "run")), recipes)
    rows = []
    for recipe in recipes:
        for limit in LIMITS:
            choice = choose(errors, recipe, limit)
            count = f"{len(choice.go)} of {len(choice.go) + len(choice.stay)}"
            kept = ", ".join(choice.stay[:3]) + (" …" if len(choice.stay) > 3 else "")
            share = formatting.percent(choice.flops_frac)
            rows.append([model, recipe.label, f"{limit:g} ({in_db(limit):.0f} dB)", count, share, kept])
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["gpt2", "vit"])
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = ["model", "recipe", "limit", "layers that go", "of GEMM FLOPs", "stay in BF16, the most harmful first"]
    print(table(heads, [row for name in given.models for row in decisions(name, given.steps)]))
