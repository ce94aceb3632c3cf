"""The text that the workloads `text-…` read: the source of the Python standard library, byte by byte.

Every machine with Python has it, so nothing is downloaded. It is the same for every run on one Python installation;
another Python version has another text and another `sha256`.

    >>> corpus = load_corpus(limit_bytes=2**20)
    >>> corpus.train.dtype, len(corpus.train) + len(corpus.held_out)
    (torch.uint8, 1048576)
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import ShuffledBatches, Workload

VOCABULARY = 256
"""One token per byte value."""

HELD_OUT_WINDOWS = 64
"""Windows of the held-out text that the final evaluation reads."""

_HELD_OUT_EVERY = 10  # whole files, so that no window is in both parts
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # not the library's own code


@dataclass(frozen=True)
class Corpus:
    """Two texts as bytes (uint8, 1-D), and the hash of both."""

    train: torch.Tensor
    held_out: torch.Tensor
    sha256: str


def load_corpus(limit_bytes: int, library: Path | None = None) -> Corpus:
    """Read `*.py` under `library` (the running Python's standard library) in sorted order, up to `limit_bytes`."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for number, path in enumerate(_sources(library)):
        if total >= limit_bytes:
            break
        text = path.read_bytes()[: limit_bytes - total]
        total += len(text)
        (held_out if number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 else train).append(text)
    texts = b"".join(train), b"".join(held_out)
    if not all(texts):
        raise RunError(
            f"the text workloads read the standard library's *.py files, but {library} does not contain them"
        )
    digest = hashlib.sha256(texts[0] + texts[1]).hexdigest()
    first, second = (torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()) for text in texts)
    return Corpus(first, second, digest)


def _sources(folder: Path) -> Iterator[Path]:
    """The files as they are sorted by the parts of their paths; folders behind the limit are not listed."""
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.name in _EXCLUDED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _sources(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


def language_model(model: nn.Module, config: TrainConfig, limit_bytes: int) -> Workload:
    """The workload of predicting each next byte in windows of the size's context length."""
    size = config.spec
    assert size is not None
    context = size.dims["context"]
    return text_workload(
        model,
        config,
        limit_bytes,
        batch_of=lambda text, starts, _: windows(text, starts, context),
        loss_fn=OBJECTIVES[size.objective],
        accuracy_fn=accuracy,
    )


def text_workload(
    model: nn.Module,
    config: TrainConfig,
    limit_bytes: int,
    *,
    batch_of: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    accuracy_fn: Callable[[nn.Module, Any], torch.Tensor],
) -> Workload:
    """A workload on windows of the size's context length.

    `batch_of(text, starts, seed)` makes a batch of the windows that begin at `starts`. Training passes the run's seed,
    the evaluation always 0, so that its data does not vary.
    """
    size = config.spec
    assert size is not None
    context = size.dims["context"]
    corpus = load_corpus(limit_bytes)
    held_out = _spread(corpus.held_out, context)
    return Workload(
        model=model,
        batches=ShuffledBatches(
            (len(corpus.train) - 1) // context,
            config.batch_size or size.batch_size,
            config.seed,
            lambda chosen: batch_of(corpus.train, chosen * context, config.seed),
        ),
        loss_fn=loss_fn,
        held_out=[batch_of(corpus.held_out, starts, 0) for starts in held_out.split(size.batch_size)],
        accuracy_fn=accuracy_fn,
        data={
            "name": "bytes of the Python standard library's source",
            "sha256": corpus.sha256,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
        },
    )


def _spread(text: torch.Tensor, context: int) -> torch.Tensor:
    """Starts of windows spread evenly over the whole text, so that a few of them cover many files."""
    count = min(HELD_OUT_WINDOWS, (len(text) - 1) // context)
    return torch.linspace(0, len(text) - 1 - context, count, dtype=torch.float64).long()


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [N, context] that begin at `starts` [N], and the targets: the same windows one byte later."""
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def logistic_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean binary cross-entropy over all positions and byte values, in nats: whether that byte comes next.

    One classifier per class, as in multi-label models and in negative sampling, which replaces the softmax over a large
    vocabulary, with the default reduction of `BCEWithLogitsLoss`. Each logit's gradient is its error divided by batch ×
    time × 256. For a probability below batch × time × 256 / 2^25 it underflows in FP16, because half the smallest
    subnormal is 2^-25. With 256 windows of 32 bytes that bound is 1/16. The 255 wrong answers then stop becoming less
    likely, and the loss rises; the gradients that the head propagates are as small. A loss scale of 128 lowers the
    bound to 1/2048, well below the initial probability of 1/256. A softmax hides this: its classes share one
    normaliser, so raising the right one lowers the others.
    """
    tokens, following = batch
    logits = model(tokens)
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(following, VOCABULARY).to(logits.dtype))


OBJECTIVES = {"softmax": loss, "logistic": logistic_loss}
"""Loss of each `Size.objective`."""


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Share of next bytes predicted correctly."""
    tokens, following = batch
    right: torch.Tensor = model(tokens).argmax(-1) == following
    return right.float().mean()
