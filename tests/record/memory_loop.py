"""A small training that notifies an observer as the recorder does, and the bytes of its tensors by arithmetic."""

import torch
from torch import nn

from amp_core import load_run
from amp_core.record.observer import Observer
from amp_core.record.observers.memory import MemoryWatch, sampled
from amp_core.store.writer import RunWriter

CPU = torch.device("cpu")
WIDTH, HIDDEN, BATCH, CLASSES = 32, 64, 16, 10
FP32, BF16 = 4, 2
PARAMETERS = WIDTH * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * CLASSES + CLASSES
BUFFERS = 2 * HIDDEN * FP32 + 8
"""Running mean and variance, and a counter of 64 bits."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))


def train(observer: Observer | None, net: nn.Module, optimizer, *, steps=2, dtype=None, micro=1, forward=None):
    """Train, and notify an observer as the recorder does; returns the losses."""
    losses = []
    data = torch.Generator().manual_seed(1)
    tell = observer or Observer()
    for step in range(steps):
        for i in range(micro):
            x = torch.randn(BATCH, WIDTH, generator=data)
            y = torch.randint(0, CLASSES, (BATCH,), generator=data)
            if i == 0:
                tell.step_began(step)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = (forward or net)(x)
                tell.forward_ended(out)
                loss = nn.functional.cross_entropy(out, y)
            out.register_hook(lambda grad: tell.backward_began())
            loss.backward()
            tell.backward_ended()
            losses.append(loss.item())
        tell.called("optimizer.step", 0)
        optimizer.step()
        tell.step_ended(step)
        optimizer.zero_grad()
    return losses


def recorded(tmp_path, *, dtype=None, net=None, due=sampled, **options):
    net = net or model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [optimizer], CPU, due)
        losses = train(observer, net, optimizer, dtype=dtype, **options)
        observer.close()
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    return run, losses, net
