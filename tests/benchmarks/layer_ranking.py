"""Predicted against measured order of linear layers: `python -m tests.benchmarks.layer_ranking [MODEL …]`.

Each model is trained in FP32 with `watch(…, blocks=True)`. Then, on other batches, each linear layer alone is quantized
in its three products (`QuantizedProducts`), and two things are measured: by how much all gradients together change,
relative to their norm, and by how much the loss does (root mean squares over batches). For each recipe: the rank
correlation (Spearman) of `harm` of `layer_errors` with both, with the quartiles over resampled batches; that of two
halves of the batches with each other, which is what the noise of the measurement leaves to a perfect prediction; and
the layer that is named first.
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

BATCHES = 12
RESAMPLES = 200


def ranked(model: str, recipes: list[str], steps: int) -> list[list[str]]:
    """One row per recipe."""
    net, loss_fn, batches = MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as made:
        with watch(net, optimizer, into=Path(made, "run"), every=max(1, steps // 4 - 1), blocks=True):
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
        changes = measured(net, loss_fn, chosen, recipe, list(predicted.index))
        worst = (predicted.index[root_mean_square(of_batches).argmax()] for of_batches in changes)
        rows.append(
            [
                *(model, recipe, str(len(predicted))),
                *(text for of_batches in changes for text in correlations(predicted.to_numpy(), of_batches)),
                *(predicted.idxmax(), *worst),
            ]
        )
    return rows


def measured(net, loss_fn, batches, recipe: str, layers: list[str]) -> np.ndarray:
    """[2, batches, layers]: relative change of all gradients, and change of the loss."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    changes = np.zeros((2, len(batches), len(layers)))
    for i, batch in enumerate(batches):
        replay = Replay(net, parameters, lambda batch=batch: loss_fn(net, batch), torch.device("cpu"), None)
        reference, loss = in_one(replay.in_fp32()), replay.loss
        for j, layer in enumerate(layers):
            gradients = in_one(replay.in_fp32(QuantizedProducts(RECIPES[recipe], net, only=[layer])))
            changes[:, i, j] = (gradients - reference).norm() / reference.norm(), replay.loss - loss
    return changes


def root_mean_square(of_batches: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(of_batches).mean(axis=0))


def correlations(predicted: np.ndarray, of_batches: np.ndarray) -> tuple[str, str]:
    """Of the prediction with all batches, with quartiles; and of two halves of the batches."""
    draw = np.random.default_rng(0)
    resampled, halves = [], []
    for _ in range(RESAMPLES):
        some = draw.integers(len(of_batches), size=len(of_batches))
        resampled.append(spearman(predicted, root_mean_square(of_batches[some])))
        one, other = np.array_split(draw.permutation(len(of_batches)), 2)
        halves.append(spearman(*(root_mean_square(of_batches[half]) for half in (one, other))))
    low, high = np.quantile(resampled, (0.25, 0.75))
    return f"{spearman(predicted, root_mean_square(of_batches)):.2f} ({low:.2f}–{high:.2f})", f"{np.mean(halves):.2f}"


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    return float(pd.Series(one).rank().corr(pd.Series(other).rank()))


def in_one(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([g.flatten() for g in gradients if g is not None])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["text-gpt", "gpt2", "vit"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--recipes", default="nvfp4,mxfp4-e2m1,mxfp8-e4m3,fp8-tensorwise")
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = ["model", "recipe", "layers", "gradient", "its halves", "loss", "its halves"]
    heads += ["named first", "worst by gradient", "worst by loss"]
    print(table(heads, [row for name in given.models for row in ranked(name, given.recipes.split(","), given.steps)]))
