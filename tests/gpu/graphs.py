"""Loops whose kernels are launched by CUDA graphs: watching neither breaks a capture nor changes a replay."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.torch_internals.captures import UNSEEN
from tests.gpu.checks import Place, Row
from tests.gpu.loops import scratch

STEPS = 12
WARM_UP = 3
WIDTH = 64


def graphs(place: Place) -> Iterator[Row]:
    """`make_graphed_callables`, and captures of whole steps."""
    with scratch() as folder:
        yield _row(place, "make_graphed_callables", _graphed, folder / "graphed", STEPS)
        yield _row(place, "whole steps in a CUDA graph", _captured, folder / "captured", WARM_UP, unseen=True)


def reduced(place: Place) -> Iterator[Row]:
    """`torch.compile(mode="reduce-overhead")`, which replays CUDA graphs on a CUDA device."""
    with scratch() as folder:
        yield _row(place, 'torch.compile(mode="reduce-overhead")', _compiled, folder / "run", STEPS)


def _row(
    place: Place,
    what: str,
    train: Callable[[Place, Path | None], list[float]],
    into: Path,
    steps: int,
    unseen: bool = False,
) -> Row:
    """Train bare and watched. The run must hold `steps` steps, and report the others if they are `unseen`."""
    bare, watched = train(place, None), train(place, into)
    run = load_run(into)
    wrong = []
    if bare != watched:
        wrong.append(f"{sum(a != b for a, b in zip(bare, watched, strict=True))} losses differ")
    if run.steps.step.tolist() != list(range(steps)):
        wrong.append(f"{len(run.steps)} steps recorded of {steps}")
    if not (run.steps.grad_norm.notna() & (run.steps.grad_norm > 0)).all():
        wrong.append("gradient norms are missing")
    sampled = run.tensors(kind="weight_grad").groupby("step").size()
    if sampled.nunique() != 1 or sampled.iloc[0] != len(list(_model(place).parameters())):
        wrong.append("gradients are missing on sampled steps")
    if unseen != bool((run.events.detail == UNSEEN).any()):
        wrong.append("no event reports what a graph hides" if unseen else "an event reports a hidden part")
    return Row(
        f"watching {what}",
        "losses equal bit for bit, every step that Python executes recorded",
        "; ".join(wrong) or f"{len(watched)} losses equal, {len(run.steps)} steps recorded",
        "FAIL" if wrong else "pass",
    )


def _model(place: Place) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)]
    return nn.Sequential(*layers).to(place.device)


def _batches(place: Place, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(32, WIDTH, generator=draw), torch.randint(0, 10, (32,), generator=draw)) for _ in range(number)
    ]
    return [(x.to(place.device), y.to(place.device)) for x, y in made]


def _loop(place: Place, model: Any, parameters: list[nn.Parameter], into: Path | None) -> list[float]:
    """Steps that are not captured; parts of the model may be replayed."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    recorder = watch(model, optimizer, into=into, every=3) if into is not None else None
    losses = []
    for x, y in _batches(place, STEPS):
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if recorder is not None:
            recorder.log(loss=loss)
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    if recorder is not None:
        recorder.close()
    return torch.stack(losses).tolist()


def _graphed(place: Place, into: Path | None) -> list[float]:
    model = _model(place)
    with torch.autocast(place.device.type, dtype=torch.bfloat16, cache_enabled=False):
        model = torch.cuda.make_graphed_callables(model, (_batches(place, 1)[0][0],))
    return _loop(place, model, list(model.parameters()), into)


def _compiled(place: Place, into: Path | None) -> list[float]:
    torch.compiler.reset()
    model = _model(place)
    return _loop(place, torch.compile(model, mode="reduce-overhead"), list(model.parameters()), into)


def _captured(place: Place, into: Path | None) -> list[float]:
    """As in PyTorch's notes on CUDA graphs: warm-up steps on a side stream, one capture, many replays."""
    model = _model(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    recorder = watch(model, optimizer, into=into, every=1) if into is not None else None
    x, y = (part.clone() for part in _batches(place, 1)[0])

    def forward_and_backward() -> torch.Tensor:
        with torch.autocast(place.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            optimizer.zero_grad(set_to_none=True)
            forward_and_backward()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_and_backward()
    losses = []
    for new_x, new_y in _batches(place, STEPS):
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        losses.append(loss.detach().clone())
    if recorder is not None:
        recorder.close()
    return torch.stack(losses).tolist()
