"""Loops on one CUDA device, on two, and on a side stream; for the fake machine and for a GPU."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_core import Run, load_run
from amp_core.record import watch

STEPS = 6
KINDS = ("weight_grad", "output_grad", "activation", "weight")


class Split(nn.Module):
    """A model with its halves on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Dropout(0.1)).to(first)
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).to(second)
        self._devices = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self._devices
        return self.second(self.first(x.to(first)).to(second))


def losses(
    first: str,
    into: Path | None = None,
    *,
    second: str | None = None,
    stream: Callable[[], Any] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> list[float]:
    """Losses of a loop under FP16 autocast with a scaler, watched if `into` is given."""
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = Split(first, second or first)
    data = torch.randn(4, 6).to(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    result = []
    recorder = None
    if into is not None:
        recorder = watch(model, optimizer, scaler=scaler, into=into, every=2, kinds=KINDS, **options)
    for _ in range(steps):
        with ExitStack() as entered:
            if stream is not None:
                side, main = stream(), torch.cuda.current_stream(first)
                side.wait_stream(main)
                entered.callback(main.wait_stream, side)
                entered.enter_context(torch.cuda.stream(side))
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(data).square().mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result.append(loss.detach())
    if recorder is not None:
        recorder.close()
    return [float(loss) for loss in result]


def recorded(tmp_path: Path, *args: Any, steps: int = STEPS, **options: Any) -> Run:
    """The run of a watched loop. Its losses equal those of the unwatched loop, and no row is missing."""
    bare = losses(*args, steps=steps, **{k: v for k, v in options.items() if k in ("second", "stream")})
    watched = losses(*args, tmp_path / "run", steps=steps, **options)
    assert watched == bare
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == list(range(steps)) and np.allclose(run.steps.loss, bare, rtol=1e-6)
    times = run.steps[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]]
    assert (times >= 0).all().all() and (times.forward_ms > 0).all() and (times.backward_ms > 0).all()
    assert set(run.tensors()["kind"]) == set(KINDS)
    assert len(run.tensors(kind="weight_grad")) == steps // 2 * 8 and (run.tensors()["nan"] == 0).all()
    warnings = run.events[run.events.kind.isin(["warning", "non-finite output", "non-finite"])]
    missing = ("device samples", *run.device.columns)  # a GPU, driver or container may not tell everything
    assert [w for w in warnings.detail if not w.startswith(missing)] == []
    return run
