"""Trainings of compiled models, whose graph calls no hooks, and sound ones beside them."""

from __future__ import annotations

import torch
from torch import nn

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import adam, fit, fp16, scaler, usual_loss
from tests.findings.other_forms.models import Net, vectors


def _attention(x, m, first):
    q, k, v = m.qkv(x.view(len(x), 8, 8) * 16).chunk(3, -1)
    q = q / (64 * 2.0) if first else q
    scores = (q @ k.transpose(-2, -1)).float()
    return m.out((scores if first else scores / (64 * 2.0)).softmax(-1).to(v.dtype) @ v)


def _model(first):
    attention = Net(lambda m, x: _attention(x, m, first), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
    nn.init.normal_(attention.qkv.weight, std=4.0)
    return Net(
        lambda m, x: m.head(m.dropout(m.norm(m.attention(x).float())).flatten(1)),
        attention=attention,
        norm=nn.LayerNorm(8),
        dropout=nn.Dropout(0.1),
        head=nn.Linear(64, 10),
    )


@fault("activation-overflow", "attention", each_time=True)
def scores_of_a_compiled_model_are_divided_after_their_product(into):
    fp16(torch.compile(_model(first=False), backend="eager"), vectors(8), into)


@fault("activation-overflow", "attention")
def scores_in_a_part_that_is_compiled(into):
    m = _model(first=False)
    m.attention.compile(backend="eager")
    fp16(m, vectors(8), into)


@fault("loss-nonfinite", "loss")
def loss_of_a_compiled_model_overflows(into):
    m = torch.compile(nn.Linear(64, 10), backend="eager")
    s = scaler()
    loss = lambda m, b: (m(b[0]) * 1e4).square().mean().half()  # noqa: E731
    fit(m, adam(m), vectors(8), into, s, torch.float16, loss=loss)


@healthy(each_time=True)
def scores_of_a_compiled_model_are_divided_before(into):
    fp16(torch.compile(_model(first=True), backend="eager"), vectors(8), into)


@healthy()
def compiled_model_skips_a_broken_batch(into):
    m = torch.compile(_model(first=True), backend="eager")

    def loss(m, b):
        value = usual_loss(m, b)
        return value if value.isfinite() else value * 0.0

    fp16(m, vectors(8), into, loss=loss)
