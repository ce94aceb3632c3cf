"""Losses, optimizers and training loops that the forms share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.record import watch

BF, H = torch.bfloat16, torch.float16


def amp(dtype=H, enabled=True):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def scaler(s=2.0**10, **k):
    return torch.amp.GradScaler("cpu", init_scale=s, **k)


def adam(m, lr=0.001, **k):
    return torch.optim.AdamW(m.parameters() if isinstance(m, nn.Module) else m, lr=lr, **k)


def sgd(m, lr=0.01, **k):
    return torch.optim.SGD(m.parameters() if isinstance(m, nn.Module) else m, lr=lr, **k)


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer that torch does not have: `update(p, state, lr)` changes each parameter."""

    def __init__(self, m, lr, update):
        super().__init__(m.parameters(), {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                self.update(p, self.state[p], g["lr"])


def watched(m, o, into, s=None, every=3, **k):
    return watch(m, o, scaler=s, into=into, every=every, **k)


def ce(o, y):
    return F.cross_entropy(o.float(), y)


def lm_loss(m, t):
    return ce(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())


def usual_loss(m, b):
    """Cross-entropy: of the next token where the batch is one tensor, else of the labels `b[1]`."""
    return lm_loss(m, b) if torch.is_tensor(b) else ce(m(b[0]), b[1])


def scaled_backward(m, b, s, of=1):
    """Backward in FP16 for batch `b`, one of `of` that are accumulated; returns its unscaled loss."""
    with amp():
        value = usual_loss(m, b) / of
    s.scale(value).backward()
    return value


def step(o, s=None):
    """Step, update the scaler and clear the gradients."""
    if s:
        s.step(o)
        s.update()
    else:
        o.step()
    o.zero_grad()


def fit(m, o, data, into, s, dtype, loss=usual_loss, before=None, after=None, log=None, **k):
    """Record a training with scaler `s` under autocast to `dtype`, each of them if it is not None.

    `before(i)` and `after(i)` surround each step; `log(rec, loss)` comes before it too.
    """
    with watched(m, o, into, s, **k) as rec:
        for i, b in enumerate(data):
            with amp(dtype or BF, dtype is not None):
                value = loss(m, b)
            (s.scale(value) if s else value).backward()
            if log:
                log(rec, value)
            if before:
                before(i)
            step(o, s)
            if after:
                after(i)


def fp16(m, data, into, o=None, s=None, **k):
    """Record a training in FP16 with a scaler; `k` as for `fit`."""
    fit(m, o or adam(m), data, into, s or scaler(), H, **k)


def bf16(m, data, into, o=None, **k):
    """Record a training under BF16 autocast; `k` as for `fit`."""
    fit(m, o or adam(m), data, into, None, BF, **k)


def pure(m, o, data, into, **k):
    """Record a training without autocast, on inputs of the weights' type; `k` as for `fit`."""
    dtype = next(m.parameters()).dtype
    cast = (b if torch.is_tensor(b) else (b[0].to(dtype), b[1]) for b in data)
    fit(m, o, cast, into, None, None, **k)


class Trainer:
    """A loop in methods of a class; `clip` gets the parameters whose gradients are still scaled."""

    def __init__(self, model, opt, s, clip=None):
        self.model, self.opt, self.scaler, self.clip = (model, opt, s, clip)

    def training_step(self, b):
        self.opt.zero_grad()
        scaled_backward(self.model, b, self.scaler)
        if self.clip:
            self.clip(self.model.parameters())
        self.scaler.step(self.opt)
        self.scaler.update()

    def fit(self, data, into, **k):
        with watched(self.model, self.opt, into, self.scaler, **k):
            for b in data:
                self.training_step(b)


def gan(into, per_update, gp=None, steps=12):
    """`per_update`: also after the discriminator's step. `gp(scaler, dis, real, fake)`: a penalty."""
    gen, dis = (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)),
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    )
    m = nn.ModuleDict({"g": gen, "d": dis})
    og, od, s = (adam(gen), adam(dis), scaler())
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
            s.scale(value).backward()
            s.step(og)
            s.update()


def gradient_norm(s, dis, real, fake):
    """Norm per sample of the critic's scaled gradient between real and fake samples."""
    x = (real + fake.float()).div(2).requires_grad_()
    with amp():
        c = dis(x)
    (g,) = torch.autograd.grad(s.scale(c.float().sum()), x, create_graph=True)
    return g.norm(dim=1)
