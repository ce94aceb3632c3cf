"""Predicted against measured order of linear layers: `python -m tests.benchmarks.layer_ranking [MODEL …] [--steps 40]`.

Each model is trained in FP32 with `watch(…, blocks=True)`. Then, on eight batches, each linear layer alone is quantized
in its three products (`QuantizedProducts`), and two things are measured: by how much all gradients together change,
relative to their norm, and by how much the loss does. For each recipe: the rank correlation (Spearman) of `harm` of
`layer_errors` with both (root mean square over batches), and whether the worst layer is named first.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from amp_core import load_run
from amp_core.analysis.numerics.layer_choice import layer_errors
from amp_core.quantization import RECIPES
from amp_core.record import watch
from amp_core.record.audit import Replay
from amp_core.record.quantized_products import QuantizedProducts
from tests.benchmarks.measuring import table
from tests.benchmarks.quantized import MODELS

BATCHES = 8


def ranked(model: str, recipes: list[str], steps: int) -> list[list[str]]:
    """One row per recipe."""
    net, loss_fn, batches = MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as made:
        with watch(net, optimizer, into=Path(made, "run"), every=max(1, steps - 1), blocks=True):
            for _ in range(steps):
                optimizer.zero_grad()
                loss_fn(net, next(batches)).backward()
                optimizer.step()
        errors = layer_errors(load_run(Path(made, "run")), [RECIPES[name] for name in recipes])
    net.eval()  # dropout would draw other numbers
    chosen = [next(batches) for _ in range(BATCHES)]
    rows = []
    for recipe in recipes:
        predicted = errors[errors["format"] == recipe].set_index("layer")["harm"]
        gradients, losses = measured(net, loss_fn, chosen, recipe, list(predicted.index))
        rows.append(
            [
                *(model, recipe, str(len(predicted))),
                *(f"{predicted.rank().corr(values.rank()):.2f}" for values in (gradients, losses)),
                *(predicted.idxmax(), gradients.idxmax(), losses.idxmax()),
            ]
        )
    return rows


def measured(net, loss_fn, batches, recipe: str, layers: list[str]) -> tuple[pd.Series, pd.Series]:
    """By layer: relative change of all gradients, and change of the loss."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    changes: dict[str, list[tuple[float, float]]] = {layer: [] for layer in layers}
    for batch in batches:
        replay = Replay(net, parameters, lambda batch=batch: loss_fn(net, batch), torch.device("cpu"), None)
        reference, loss = in_one(replay.in_fp32()), replay.loss
        for layer in layers:
            gradients = in_one(replay.in_fp32(QuantizedProducts(RECIPES[recipe], net, only=[layer])))
            change = (gradients - reference).norm() / reference.norm()
            changes[layer].append((float(change), replay.loss - loss))
    squares = pd.DataFrame({layer: np.square(pairs).mean(axis=0) for layer, pairs in changes.items()})
    return np.sqrt(squares.loc[0]), np.sqrt(squares.loc[1])


def in_one(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([g.flatten() for g in gradients if g is not None])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["text-gpt", "gpt2", "vit"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipes", default="nvfp4,mxfp8-e4m3,fp8-tensorwise")
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = ["model", "recipe", "layers", "gradient", "loss", "named first", "worst by gradient", "worst by loss"]
    print(table(heads, [row for name in given.models for row in ranked(name, given.recipes.split(","), given.steps)]))
