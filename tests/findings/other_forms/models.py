"""Models, data and loops that faults and healthy trainings in other forms share.

@fault("clip-before-unscale", "gradients")
def lstm_data_clamp(into): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_core.record import watch

BF, H = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Form:
    """A training in another form than the zoo's: `train(into)` records it."""

    code: str
    """Codes of which one is right, separated by bars; empty for a healthy one."""
    where: str
    train: Callable[[Path], None]
    each_time: bool


FAULTS: list[Form] = []
HEALTHY: list[Form] = []


def fault(code: str, where: str = "", *, each_time: bool = False) -> Callable[[Callable[[Path], None]], Any]:
    """Register a training with a fault. `each_time`: not only with `--whole`."""

    def register(train: Callable[[Path], None]) -> Callable[[Path], None]:
        FAULTS.append(Form(code, where, train, each_time))
        return train

    return register


def healthy(*, each_time: bool = False) -> Callable[[Callable[[Path], None]], Any]:
    """Register a training that has no fault."""

    def register(train: Callable[[Path], None]) -> Callable[[Path], None]:
        HEALTHY.append(Form("", "", train, each_time))
        return train

    return register


class CNN(nn.Module):
    def __init__(self, ch=8, bn=True):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.bn = nn.BatchNorm2d(ch) if bn else nn.Identity()
        self.conv2 = nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1)
        self.fc = nn.Linear(2 * ch * 16, 10)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        return self.fc(F.relu(self.conv2(x)).flatten(1))


def images(n, rows=16, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(rows, 1, 8, 8, generator=g)
        yield (x, x[:, 0, 0].argmax(1))


class Attention(nn.Module):
    def __init__(self, d, heads=2, mask=None):
        super().__init__()
        self.qkv, self.proj, self.h = (nn.Linear(d, 3 * d), nn.Linear(d, d), heads)

    def scores(self, q, k):
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        s = self.scores(q, k)
        s = s.masked_fill(torch.ones(t, t).tril().logical_not(), float("-inf"))
        return self.proj((s.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, attn=None, mlp=None, norm=nn.LayerNorm):
        super().__init__()
        self.n1, self.attn, self.n2 = (norm(d), attn or Attention(d), norm(d))
        self.mlp = mlp or nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab=64, d=32, depth=2, length=16, make=Block):
        super().__init__()
        self.tok, self.pos = (nn.Embedding(vocab, d), nn.Embedding(length, d))
        self.blocks = nn.ModuleList(make(d) for _ in range(depth))
        self.norm, self.head = (nn.LayerNorm(d), nn.Linear(d, vocab, bias=False))

    def forward(self, i):
        x = self.tok(i) + self.pos(torch.arange(i.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def tokens(n, rows=4, length=16, vocab=64, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        s = torch.randint(vocab, (rows, 1), generator=g)
        yield ((s + torch.arange(length + 1) * 3) % vocab)


def lm_loss(m, t):
    o = m(t[:, :-1])
    return F.cross_entropy(o.float().flatten(0, 1), t[:, 1:].flatten())


class RNN(nn.Module):
    def __init__(self, d=24, kind=nn.GRUCell):
        super().__init__()
        self.cell, self.out = (kind(8, d), nn.Linear(d, 8))
        self.d = d

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.d)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h.to(x.dtype))
        return self.out(h)


def series(n, rows=16, length=6, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(rows, length, 8, generator=g)
        yield (x, x.sum(1).argmax(1))


def amp(dtype=H, enabled=True):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def scaler(s=2.0**10, **k):
    return torch.amp.GradScaler("cpu", init_scale=s, **k)


def adam(m, lr=0.001, **k):
    return torch.optim.AdamW(m.parameters() if isinstance(m, nn.Module) else m, lr=lr, **k)


def sgd(m, lr=0.01, **k):
    return torch.optim.SGD(m.parameters() if isinstance(m, nn.Module) else m, lr=lr, **k)


def watched(m, o, into, s=None, every=3, **k):
    return watch(m, o, scaler=s, into=into, every=every, **k)


class Trainer:
    def __init__(self, model, opt, s, clip=None):
        self.model, self.opt, self.scaler, self.clip = (model, opt, s, clip)

    def compute_loss(self, b):
        with amp():
            return F.cross_entropy(self.model(b[0]).float(), b[1])

    def training_step(self, b):
        self.opt.zero_grad(set_to_none=True)
        loss = self.compute_loss(b)
        self.scaler.scale(loss).backward()
        if self.clip:
            self.clip(self.model.parameters())
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss

    def fit(self, data, into, **k):
        with watched(self.model, self.opt, into, self.scaler, **k):
            for b in data:
                self.training_step(b)


class MoE(nn.Module):
    def __init__(self, d, gate=None, experts=4):
        super().__init__()
        self.router, self.ex = (nn.Linear(d, experts), nn.ModuleList(nn.Linear(d, d) for _ in range(experts)))
        self.gate = gate
        self.aux = 0.0

    def forward(self, x):
        p = self.gate(self, x) if self.gate else self.wide(x)
        w, i = p.topk(2, -1)
        self.aux = (p.float().mean((0, 1)) ** 2).sum()
        out = torch.stack([e(x) for e in self.ex], -2)
        return (out.gather(-2, i[..., None].expand(*i.shape, x.shape[-1])) * w[..., None]).sum(-2)

    def wide(self, x):
        with amp(enabled=False):
            return self.router(x.float()).softmax(-1)


class OwnLion(torch.optim.Optimizer):
    def __init__(self, ps, lr):
        super().__init__(ps, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                m = st.setdefault("m", torch.zeros_like(p))
                p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-g["lr"])
                m.lerp_(p.grad, 0.01)


def gan(into, per_update, gp=None, two=False, steps=12):
    gen, dis = (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)),
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    )
    m = nn.ModuleDict({"g": gen, "d": dis})
    og, od, s = (adam(gen), adam(dis), scaler())
    s2 = scaler() if two else s
    with watched(m, [og, od], into, s):
        for _i in range(steps):
            real, z = (torch.randn(16, 16), torch.randn(16, 8))
            od.zero_grad()
            with amp():
                fake = gen(z).detach()
                value = F.softplus(-dis(real).float()).mean() + F.softplus(dis(fake).float()).mean()
            if gp is not None:
                value = value + gp(s, dis, real, fake)
            s.scale(value).backward()
            s.step(od)
            if per_update:
                s.update()
            og.zero_grad()
            with amp():
                value = F.softplus(-dis(gen(z)).float()).mean()
            s2.scale(value).backward()
            s2.step(og)
            s2.update()
            if two and (not per_update):
                s.update()


class FP32MM(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g @ w, g.flatten(0, -2).T @ x.flatten(0, -2))


def ce(o, y):
    return F.cross_entropy(o.float(), y)


def fit(m, o, data, into, s=None, dtype=H, before=None, after=None, loss=None, log=False, **k):
    with watched(m, o, into, s, **k) as rec:
        for i, b in enumerate(data):
            with amp(dtype or BF, dtype is not None):
                value = loss(m, b) if loss else ce(m(b[0]), b[1])
            if log:
                rec.log(loss=value)
            (s.scale(value) if s else value).backward()
            if before:
                before(i)
            if s:
                s.step(o)
                s.update()
            else:
                o.step()
            o.zero_grad()
            if after:
                after(i)


def masked_attention(into, dtype, mask, steps=12):
    """Train a GPT whose scores are masked by `mask(scores)`."""

    class A(Attention):
        def scores(self, q, k):
            return mask(super().scores(q, k))

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    fit(m, adam(m), tokens(steps), into, scaler() if dtype is H else None, dtype, loss=lm_loss)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = (nn.LSTMCell(8, 24), nn.Linear(24, 8))

    def forward(self, x):
        h = c = x.new_zeros(len(x), 24)
        for t in range(x.shape[1]):
            h, c = self.rnn(x[:, t], (h.to(x.dtype), c.to(x.dtype)))
        return self.out(h)


class CK(nn.Module):
    def __init__(self, d, re=True):
        super().__init__()
        self.b, self.re = (Block(d), re)

    def forward(self, x):
        return checkpoint(self.b, x, use_reentrant=self.re)


class STE(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return g


class Lora(nn.Module):
    def __init__(self, b, dt=torch.float32):
        super().__init__()
        self.base = b.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(4, 32) * 0.1), nn.Parameter(torch.zeros(32, 4)))

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)) + F.linear(F.linear(x, self.a), self.b)


def lightning(into, precision, module=None):
    import lightning as L

    from amp_core.record.lightning import WatchCallback

    class M(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = CNN(bn=False)

        def training_step(self, b, i):
            return ce(self.net(b[0]), b[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.001 if "mixed" in precision else 1e-05)

    rows = [(x[0], y[0]) for x, y in images(48, rows=1)]
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[WatchCallback(into, every=3)],
    ).fit(M(), torch.utils.data.DataLoader(rows, batch_size=4))
