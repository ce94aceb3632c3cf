"""Models and a plain loop for the tests of operator traces, and a query of a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import Run, load_run, watch

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Attention(nn.Module):
    """A block of GPT, with or without dropout; without it, the CPU has a fused kernel."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.fc = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout, self.checkpointed, self.reentrant = dropout, checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self._forward, x, use_reentrant=self.reentrant)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + F.gelu(self.fc(y.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    """One of each: a linear layer as embedding, two blocks, an LSTM, a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList([Attention(**options), Attention(**options)])
        self.lstm, self.head = nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lstm(x)[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x[:, None])), inplace=True).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt-lstm": Model,
    "dropout": lambda: Model(dropout=0.2),
    "checkpointed": lambda: Model(dropout=0.2, checkpointed=True),
    "checkpointed-reentrant": lambda: Model(checkpointed=True, reentrant=True),
    "convolutions": Convolutions,
}


def loops_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU())


def train(
    make: Callable[[], nn.Module],
    into: Path | None,
    dtype: torch.dtype | None,
    *,
    steps: int = 4,
    trace_ops: int | None = 2,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> list[float]:
    """A plain loop, with a scaler for fp16; watched if `into` is given."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype == torch.float16 else None
    recorder = None
    if into is not None:
        recorder = watch(model, optimizer, scaler=scaler, into=into, every=2, trace_ops=trace_ops)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), torch.arange(out.flatten(0, -2).shape[0]) % 5)
        between(model, step)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return losses


def traced(
    make: Callable[[], nn.Module], into: Path, dtype: torch.dtype | None = torch.bfloat16, **options: Any
) -> Run:
    train(make, into, dtype, **options)
    return load_run(into)


def calls(run: Run, **of: Any) -> int:
    """The number of calls of operators with these properties."""
    rows = run.ops
    for column, value in of.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return int(rows["count"].sum())
