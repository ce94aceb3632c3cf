"""Faults of masks, attention scores and positions, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault
from tests.findings.other_forms.loops import bf16, fp16
from tests.findings.other_forms.models import GPT, Attention, Checkpointed, Net, masked_gpt, tokens, vectors


@fault("rounded-positions")
def alibi_arange_bf16(into):
    def alibi(z):
        pos = torch.arange(z.shape[-1], dtype=z.dtype)
        return z - 0.1 * (pos[:, None] - pos[None]).abs()

    bf16(masked_gpt(alibi, length=600, depth=1), tokens(2, rows=1, length=600), into)


def empty_row(z):
    return z + torch.zeros(z.shape[-2:], dtype=z.dtype).index_fill_(0, torch.tensor([3]), -torch.inf)


@fault("fully-masked-row", "attn", each_time=True)
def additive_mask_with_an_empty_row(into):
    fp16(masked_gpt(empty_row), tokens(12), into)


@fault("fully-masked-row", "attn")
def own_softmax_of_an_empty_row(into):
    class A(Attention):
        def weights(self, s):
            e = empty_row(s)
            e = (e - e.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)

    bf16(GPT(attn=A), tokens(4), into)


@fault("fully-masked-row", "attn")
def empty_row_within_checkpointing(into):
    bf16(masked_gpt(empty_row, make=Checkpointed, use_reentrant=False), tokens(4), into)


@fault("fully-masked-row", "loss")
def no_legal_action(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 6))

    def loss(m, b):
        turn, (x, _) = b
        legal = torch.rand(16, 6) < 0.7
        legal[:, 0] = True
        legal[3] &= turn != 5
        logits = m(x).float().masked_fill(~legal, -torch.inf)
        chosen = torch.distributions.Categorical(logits=logits, validate_args=False)
        return -(chosen.log_prob(legal.float().argmax(-1)) * torch.randn(16)).mean()

    bf16(m, enumerate(vectors(8)), into, loss=loss)


@fault("activation-overflow", "blocks")
def attention_scores_overflow(into):
    class A(Attention):
        def scores(self, q, k):
            return q * 60 @ (k * 60).transpose(-1, -2)

    m = GPT(attn=A)
    with torch.no_grad():
        for b in m.blocks:
            b.attn.qkv.weight.mul_(8)
    fp16(m, tokens(8), into)


@fault("mask-constant-overflow|loss-nonfinite", "blocks", each_time=True)
def additive_mask_half(into):
    class A(Attention):
        def weights(self, s):
            mask = (1.0 - torch.ones(s.shape[-2:]).triu(1)) * -1000000000.0
            return (s + mask.to(s.dtype)).softmax(-1)

    fp16(GPT(attn=A), tokens(4), into)


@fault("mask-constant-overflow")
def finfo32_min_in_half(into):
    def mask(z):
        return z.masked_fill(torch.rand(z.shape[-1]) < 0.2, torch.finfo(torch.float32).min)

    with contextlib.suppress(RuntimeError):
        fp16(masked_gpt(mask), tokens(3), into)


@fault("mask-constant-overflow")
def key_padding_bias_half(into):
    class G(GPT):
        def embedded(self, i):
            bias = torch.zeros(i.shape[1]).masked_fill(torch.arange(i.shape[1]) > 12, -1000000000000.0).half()
            x = super().embedded(i)
            w = (x.mean(-1) + bias).softmax(-1)
            return x + (w[..., None] * x).sum(1, keepdim=True)

    fp16(G(), tokens(3), into)


@fault("fully-masked-row", each_time=True)
def graph_attention_of_an_isolated_node(into):
    def attention(m, x, neighbours):
        h = m.w(x)
        e = F.leaky_relu(m.a(h) + m.b(h).T).float().masked_fill(~neighbours, -torch.inf)
        return m.out(e.softmax(1).to(h.dtype) @ h)

    def graphs():
        for turn in range(6):
            neighbours = torch.rand(12, 12) < 0.4
            neighbours |= torch.eye(12, dtype=torch.bool)
            neighbours[5] &= turn != 3
            yield torch.randn(12, 8), neighbours

    layers = {"w": nn.Linear(8, 16), "a": nn.Linear(16, 1), "b": nn.Linear(16, 1), "out": nn.Linear(16, 4)}
    bf16(Net(attention, **layers), graphs(), into, loss=lambda m, b: m(*b).float().square().mean())
