"""Trainings whose loss breaks on a target or another number that it is given, and sound ones beside them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import bf16, fp16
from tests.findings.other_forms.models import vectors


def _prices(n, spread=1e5):
    """Vectors with a target beyond float16's largest number in some rows."""
    for x, y in vectors(n):
        yield x, y.float() * spread / 10 + 100.0


def _regression(into, train, loss):
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    train(m, _prices(8), into, loss=lambda m, b: loss(m(b[0]).float()[:, 0], b[1]))


@fault("loss-nonfinite", "loss", each_time=True)
def targets_stored_in_half(into):
    _regression(into, bf16, lambda p, y: F.mse_loss(p, y.half().float()))


@fault("loss-nonfinite", "loss")
def own_distance_to_targets_in_half(into):
    _regression(into, fp16, lambda p, y: (p - y.half()).abs().mean())


@fault("loss-nonfinite", "loss")
def infinite_weight_of_a_class(into):
    weight = torch.tensor([1e2, 1e5]).half()
    _regression(
        into, bf16, lambda p, y: F.binary_cross_entropy_with_logits(p, (y > 5e4).float(), pos_weight=weight[1].float())
    )


@healthy(each_time=True)
def targets_in_fp32(into):
    _regression(into, bf16, lambda p, y: F.mse_loss(p, y / 1e5))


@healthy()
def targets_of_rows_that_a_mask_leaves_out(into):
    def loss(p, y):
        known = y < 5e4
        return F.mse_loss(p[known], (y[known] / 1e5).half().float())

    _regression(into, bf16, loss)
