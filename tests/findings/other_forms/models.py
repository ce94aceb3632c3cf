"""Small models and their data, which the forms share."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """The modules `parts` by name, and `run(net, *inputs)` as the forward pass."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


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


def decorated_cnn(device, dtype):
    """A CNN whose forward is decorated with autocast."""

    class Decorated(CNN):
        forward = torch.autocast(device, dtype=dtype)(CNN.forward)

    return Decorated()


def images(n, rows=16, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(rows, 1, 8, 8, generator=g)
        yield (x, x[:, 0, 0].argmax(1))


def vectors(n, rows=16):
    """The same images, each as 64 numbers."""
    return ((x.flatten(1), y) for x, y in images(n, rows))


def sinusoids(t):
    """Sines and cosines of the times `t`, computed in their type: (n,) to (n, 32)."""
    angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(16, dtype=t.dtype) / 16)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Attention(nn.Module):
    """Causal attention. `mask` changes the scores before the causal mask does."""

    def __init__(self, d, heads=2, mask=None):
        super().__init__()
        self.qkv, self.proj, self.h, self.mask = (nn.Linear(d, 3 * d), nn.Linear(d, d), heads, mask)

    def scores(self, q, k):
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.mask(s) if self.mask else s

    def weights(self, s):
        return s.masked_fill(torch.ones(s.shape[-2:]).tril().logical_not(), float("-inf")).softmax(-1)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        w = self.weights(self.scores(q, k))
        return self.proj((w.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """A transformer block. `attn`, `mlp` and `norm` make its parts from the width."""

    def __init__(self, d, attn=Attention, mlp=None, norm=nn.LayerNorm):
        super().__init__()
        own = mlp and mlp(d)  # before the attention: the order decides the initial weights
        self.n1, self.attn, self.n2 = (norm(d), attn(d), norm(d))
        self.mlp = own or nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward; `options` are `checkpoint`'s."""

    def __init__(self, d, attn=Attention, **options):
        super().__init__()
        self.b, self.options = (Block(d, attn), options)

    def forward(self, x):
        return checkpoint(self.b, x, **self.options)


class GPT(nn.Module):
    """A small language model. `make(d, **parts)` makes each of its blocks."""

    def __init__(self, vocab=64, d=32, depth=2, length=16, make=Block, **parts):
        super().__init__()
        self.tok, self.pos = (nn.Embedding(vocab, d), nn.Embedding(length, d))
        self.blocks = nn.ModuleList(make(d, **parts) for _ in range(depth))
        self.norm, self.head = (nn.LayerNorm(d), nn.Linear(d, vocab, bias=False))

    def embedded(self, i):
        return self.tok(i) + self.pos(torch.arange(i.shape[1]))

    def forward(self, i):
        x = self.embedded(i)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def masked_gpt(mask, **k):
    """A GPT with `mask(scores)` in place of its attention scores."""
    return GPT(attn=lambda d: Attention(d, mask=mask), **k)


def tokens(n, rows=4, length=16, vocab=64, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        s = torch.randint(vocab, (rows, 1), generator=g)
        yield ((s + torch.arange(length + 1) * 3) % vocab)


class RNN(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.cell, self.out = (nn.GRUCell(8, d), nn.Linear(d, 8))
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


class MoE(nn.Module):
    """The two experts that `gate(x)` gives the highest shares."""

    def __init__(self, d, experts=4):
        super().__init__()
        self.router, self.ex = (nn.Linear(d, experts), nn.ModuleList(nn.Linear(d, d) for _ in range(experts)))
        self.aux = 0.0

    def gate(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.router(x.float()).softmax(-1)

    def chosen(self, p):
        """Shares and numbers of the chosen experts, each (..., experts chosen)."""
        return p.topk(2, -1)

    def forward(self, x):
        p = self.gate(x)
        w, i = self.chosen(p)
        self.aux = (p.float().mean((0, 1)) ** 2).sum()
        out = torch.stack([e(x) for e in self.ex], -2)
        return (out.gather(-2, i[..., None].expand(*i.shape, x.shape[-1])) * w[..., None]).sum(-2)
