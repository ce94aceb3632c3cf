"""Output gradients of zeros: underflow in forms that the zoo does not have, and sound code whose gradients are zero in
any format."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import ce, fp16
from tests.findings.other_forms.models import vectors

STEPS = 12


class Branch(nn.Module):
    """A residual branch of 64 features, whose output `after` changes, and a head."""

    def __init__(self, after):
        super().__init__()
        self.first, self.branch, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.after = after

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.after(self.branch(x)))


@fault("gradient-underflow", "branch")
def branch_scaled_in_fp32(into):
    fp16(Branch(lambda y: 1e-12 * y.float()), vectors(STEPS), into)


@fault("gradient-underflow", "branch")
def branch_times_a_narrow_projection(into):
    weight = torch.full((64, 64), 1e-6)
    fp16(Branch(lambda y: F.linear(F.linear(y, weight), weight)), vectors(STEPS), into)


@healthy()
def branch_scaled_by_a_thousandth(into):
    fp16(Branch(lambda y: 1e-3 * y.float()), vectors(STEPS), into)


@healthy()
def branch_whose_activation_is_dead(into):
    fp16(Branch(lambda y: F.relu(y - 100.0)), vectors(STEPS), into)


@healthy()
def auxiliary_head_whose_weight_is_zero(into):
    m = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 10), "auxiliary": nn.Linear(64, 10)})

    def loss(m, b):
        h = m["body"](b[0]).relu()
        return ce(m["head"](h), b[1]) + 0.0 * ce(m["auxiliary"](h), b[1])

    fp16(m, vectors(STEPS), into, loss=loss)


class Pooled(nn.Module):
    """Attention over `tokens` parts of the input; the first token alone is classified."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, width = tokens, 64 // tokens
        self.q, self.k, self.v = (nn.Linear(width, 32) for _ in range(3))
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = x.unflatten(1, (self.tokens, -1))
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 32**0.5).softmax(-1)
        return self.head(self.out(weights @ self.v(x))[:, 0])


@healthy()
def attention_to_one_key(into):
    fp16(Pooled(1), vectors(STEPS), into)


class Ends(nn.Module):
    """One token is classified; the last layer of the others gets a gradient of zeros."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.others = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h = self.body(x.unflatten(1, (4, -1))).relu()
        tokens = torch.cat([self.first(h[:, :1]), self.others(h[:, 1:])], 1)
        return self.head(tokens[:, 0])


@healthy()
def tokens_that_are_not_classified(into):
    fp16(Ends(), vectors(STEPS), into)


class Reduced(Pooled):
    """Attention by one fused operator, to one key that summarises all parts."""

    def forward(self, x):
        x = x.unflatten(1, (self.tokens, -1))
        key = x.mean(1, keepdim=True)
        heads = [y.unflatten(-1, (2, 16)).transpose(1, 2) for y in (self.q(x), self.k(key), self.v(key))]
        y = F.scaled_dot_product_attention(*heads)
        return self.head(self.out(y.transpose(1, 2).flatten(2)).mean(1))


@healthy()
def fused_attention_to_one_key(into):
    fp16(Reduced(4), vectors(STEPS), into)
