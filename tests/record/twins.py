"""A model trained twice, watched and unwatched, to compare everything that the program can observe."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_core.record import watch
from tests.record.loops import optimizer_step


def saved(thing: Any) -> dict[str, bytes]:
    """The records in the file that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    with zipfile.ZipFile(file) as records:
        return {name: records.read(name) for name in records.namelist()}


def trained(
    make: Callable[[], nn.Module],
    into: Path | None,
    *,
    each: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] = lambda *_: None,
    steps: int = 8,
    scaled: bool = True,
    every: int = 2,
    width: int = 8,
    wrap: Callable[[Any], Any] = lambda scaler: scaler,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[list[float], nn.Module, list[Any]]:
    """The losses, the model, and the results of `each(model, optimizer, scaler)` after every step. `into` None:
    unwatched."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    scaler = wrap(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)) if scaled else None
    options: dict[str, Any] = {"level": "full", "trace_ops": 1, "profile": (2, 3)}
    recorder = watch(model, optimizer, scaler=scaler, into=into, every=every, **options) if into is not None else None
    losses, results = [], []
    for _ in range(steps):
        x = torch.randn(6, 5, width)
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
            output = model(x)
        parts = output if isinstance(output, tuple) else (output,)
        loss = torch.stack([part.float().square().mean() for part in parts]).sum()
        (scaler.scale(loss) if scaler is not None else loss).backward()
        optimizer_step(optimizer, scaler)
        losses.append(loss.item())
        results.append(each(model, optimizer, scaler))
    if recorder is not None:
        recorder.close()
    return losses, model, results


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Every parameter and buffer, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
