"""Small real training loops for the tests of `watch`, with all that loops do around `scaler.step`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_core.record import Recorder, watch


@dataclass
class Done:
    """The results of a loop: its losses, gradient norms before clipping, and its objects after the training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    model: nn.Module | None = None
    recorder: Recorder | None = None


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 48), nn.ReLU(inplace=True), nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10)
    )


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """The end of an iteration: a step, through the scaler if there is one, and fresh gradients."""
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


def train(
    into: Path | None,
    dtype: torch.dtype | None = None,
    *,
    steps: int = 12,
    accumulate: int = 1,
    clip: float | None = None,
    fused: bool = False,
    init_scale: float = 2.0**16,
    growth_interval: int = 5,
    every: int = 3,
    log: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    **options: Any,
) -> Done:
    """Train the small model; fp16 takes a scaler. `into` None trains unwatched."""
    torch.manual_seed(0)
    model = wrap(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
    scaler = None
    if dtype == torch.float16:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    data = torch.Generator().manual_seed(1)
    done = Done(model=model)
    if into is not None:
        done.recorder = watch(model, optimizer, scaler=scaler, into=into, every=every, **options)
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulate):
            x = torch.randn(16, 24, generator=data)
            y = torch.randint(0, 10, (16,), generator=data)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(x), y) / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
            total += loss.item()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            done.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if scaler is not None:
            done.scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
            if done.recorder is not None and log:
                done.recorder.log(loss=total)
        optimizer.zero_grad()
        done.losses.append(total)
    if done.recorder is not None:
        done.recorder.close()
    return done
