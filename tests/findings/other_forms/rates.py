"""Learning rates that are too high, rounded to 16 bits, or scheduled by a loss that is still scaled."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, adam, bf16, fit, fp16, scaler, sgd
from tests.findings.other_forms.models import CNN, RNN, images, series, vectors


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


@fault("half-learning-rate", "AdamW")
def bf16_rate_under_an_exponential_schedule(into):
    m = CNN()
    o = adam(m, lr=torch.tensor(0.001, dtype=BF), foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.999)
    bf16(m, images(26), into, o=o, after=lambda i: schedule.step())


@fault("half-learning-rate", "SGD")
def bf16_rate_that_the_loop_warms_up(into):
    m = RNN()
    o = sgd(m, lr=torch.tensor(0.01, dtype=BF))

    def warm_up(number):
        o.param_groups[0]["lr"] = o.param_groups[0]["lr"] + 1e-5

    bf16(m, series(26), into, o=o, after=warm_up)


@healthy()
def fp32_rate_as_a_tensor(into):
    m = CNN()
    o = adam(m, lr=torch.tensor(0.001), foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.999)
    bf16(m, images(26), into, o=o, after=lambda i: schedule.step())


@healthy()
def bf16_rate_that_is_never_changed(into):
    m = CNN()
    bf16(m, images(26), into, o=adam(m, lr=torch.tensor(0.001, dtype=BF), foreach=False))


def _on_plateau(into, every, is_scaled):
    """A scheduler that gets the mean loss of `every` steps."""
    m = CNN()
    o, s = adam(m), scaler(2.0**12)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3)
    losses = []

    def keep(rec, value):
        losses.append(float(value) * (s.get_scale() if is_scaled else 1.0))

    def after(number):
        if number % every == every - 1:
            schedule.step(sum(losses) / len(losses))
            losses.clear()

    fp16(m, images(16), into, o, s, log=keep, after=after)


@fault("logged-scaled-values", "ReduceLROnPlateau")
def plateau_of_the_scaled_loss(into):
    _on_plateau(into, 1, is_scaled=True)


@fault("logged-scaled-values", "ReduceLROnPlateau")
def plateau_of_the_mean_of_scaled_losses(into):
    _on_plateau(into, 4, is_scaled=True)


@healthy()
def plateau_of_the_mean_loss(into):
    _on_plateau(into, 4, is_scaled=False)
