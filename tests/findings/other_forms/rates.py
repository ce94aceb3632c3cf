"""Learning rates that are too high: the loss rises without end, while every value is finite."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault
from tests.findings.other_forms.loops import bf16, fit, sgd
from tests.findings.other_forms.models import images, vectors


@fault("loss-diverged", "learning rate")
def bf16_denoiser_with_momentum(into):
    m = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1, bias=False))
    m[1].requires_grad_(False)  # linear in what is trained, so that it takes long to overflow
    o = sgd([m[0].weight, m[0].bias], lr=30.0, momentum=0.5)
    bf16(m, images(11), into, o=o, loss=lambda m, b: F.mse_loss(m(b[0]).float(), b[0]))


@fault("loss-diverged", "learning rate", each_time=True)
def fp32_rate_that_a_schedule_doubles(into):
    m = nn.Linear(64, 64)
    o = sgd(m, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 1.5)
    fit(m, o, vectors(20), into, None, None, lambda m, b: F.mse_loss(m(b[0]), b[0]), after=lambda i: schedule.step())
