"""Factors of losses that are zero in 16 bits, and twins of them that are not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import H, amp, ce, fp16
from tests.findings.other_forms.models import vectors


def mlp():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _penalised(into, factor, cast):
    weight = torch.tensor(factor)

    def loss(m, b):
        penalty = m(b[0]).float().square().mean()
        return ce(m(b[0]), b[1]) + weight.to(cast) * penalty

    fp16(mlp(), vectors(3), into, loss=loss)


@fault("eps-rounds-to-zero", "loss")
def weight_of_a_penalty_in_float16(into):
    _penalised(into, 1e-9, H)


@healthy()
def weight_of_a_penalty_in_float32(into):
    _penalised(into, 1e-9, torch.float32)


@healthy()
def weight_of_a_penalty_that_float16_holds(into):
    _penalised(into, 1e-3, H)


def _classes(into, rare):
    weights = torch.tensor([1.0] * 9 + [rare])

    def loss(m, b):
        with amp(enabled=False):
            return F.cross_entropy(m(b[0]).half(), b[1], weight=weights.half()).float()

    fp16(mlp(), vectors(3), into, loss=loss)


@fault("eps-rounds-to-zero", "loss")
def weight_of_a_rare_class_in_float16(into):
    _classes(into, 1e-8)


@healthy()
def weights_of_classes_that_float16_holds(into):
    _classes(into, 1e-2)


@fault("eps-rounds-to-zero", "loss")
def a_constant_times_a_loss_in_float16(into):
    def loss(m, b):
        output = m(b[0])
        return ce(output, b[1]) + (output.square().mean() * 1e-9).float()

    fp16(mlp(), vectors(3), into, loss=loss)


@healthy()
def a_schedule_of_a_weight_that_begins_at_zero(into):
    weights = iter([0.0, 1e-3, 2e-3, 3e-3])

    def loss(m, b):
        output = m(b[0])
        return ce(output, b[1]) + (output.square().mean() * next(weights)).float()

    fp16(mlp(), vectors(4), into, loss=loss)
