"""Loops with a loss scale of their own that do not undo it, and sound ones."""

from __future__ import annotations

import torch
from torch import nn

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import adam, amp, sgd, usual_loss, watched
from tests.findings.other_forms.models import vectors

STEPS = 12


class Scaled:
    """A loop that multiplies its loss by `scale` and halves that after an overflow; `undo` gets the gradients."""

    def __init__(self, undo, optimizer=adam, scale=2.0**14, skips=True, micro=1):
        self.undo, self.optimizer, self.scale, self.skips, self.micro = undo, optimizer, scale, skips, micro

    def run(self, into):
        m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        o = self.optimizer(m)
        with watched(m, o, into):
            for number, b in enumerate(vectors(STEPS * self.micro)):
                with amp():
                    value = usual_loss(m, b) / self.micro
                (value * self.scale).backward()
                if (number + 1) % self.micro:
                    continue
                grads = [p.grad for p in m.parameters()]
                if self.skips and not all(g.isfinite().all() for g in grads):
                    self.scale /= 2
                else:
                    self.undo(m, grads, self.scale)
                    o.step()
                o.zero_grad()


def divide(m, grads, scale):
    torch._foreach_div_(grads, scale)


@fault("own-loss-scale", "AdamW")
def own_scale_divided_twice(into):
    Scaled(lambda *given: (divide(*given), divide(*given))).run(into)


@fault("own-loss-scale", "SGD")
def own_scale_multiplied_once_more(into):
    Scaled(lambda m, grads, scale: torch._foreach_mul_(grads, scale), sgd, scale=128.0).run(into)


@fault("own-loss-scale", "AdamW")
def own_scale_undone_for_one_layer(into):
    Scaled(lambda m, grads, scale: divide(m, [p.grad for p in m[0].parameters()], scale)).run(into)


def clip(m, grads, scale):
    nn.utils.clip_grad_norm_(m.parameters(), 0.3)


@fault("own-loss-scale", "SGD", each_time=True)
def own_scale_clipped_and_never_divided(into):
    Scaled(clip, sgd).run(into)


@healthy(each_time=True)
def own_scale_divided_and_clipped(into):
    Scaled(lambda *given: (divide(*given), clip(*given)), sgd).run(into)


@fault("own-loss-scale", "AdamW")
def own_scale_kept_over_micro_batches(into):
    Scaled(lambda *given: None, micro=2).run(into)


@fault("own-loss-scale", "SGD")
def own_scale_that_overflows_without_a_check(into):
    Scaled(divide, sgd, scale=2.0**26, skips=False).run(into)


@fault("own-loss-scale", "AdamW")
def own_scale_whose_infinities_are_replaced(into):
    def undo(m, grads, scale):
        divide(m, grads, scale)
        for g in grads:
            g.nan_to_num_(0.0, 1.0, -1.0)

    Scaled(undo, scale=2.0**24, skips=False).run(into)


@fault("own-loss-scale", "AdamW")
def own_scale_that_grows_between_micro_batches(into):
    loop = Scaled(divide, micro=2)
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o = adam(m)
    with watched(m, o, into):
        for number, b in enumerate(vectors(2 * STEPS)):
            with amp():
                value = usual_loss(m, b) / 2
            scale = loop.scale * (1 + number % 2)
            (value * scale).backward()
            if number % 2:
                divide(m, [p.grad for p in m.parameters()], scale)
                o.step()
                o.zero_grad()


class Growing:
    """A loop whose own loss scale doubles every three steps; `finite` decides by all gradients whether it steps."""

    def __init__(self, finite, scale=2.0**12, steps=36):
        self.finite, self.scale, self.steps = finite, scale, steps

    def run(self, into):
        m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        o = adam(m)
        with watched(m, o, into):
            for number, b in enumerate(vectors(self.steps)):
                with amp():
                    value = usual_loss(m, b)
                (value * self.scale).backward()
                grads = [p.grad for p in m.parameters()]
                if self.finite(grads):
                    divide(m, grads, self.scale)
                    o.step()
                    self.scale *= 2 if number % 3 == 2 else 1
                else:
                    self.scale /= 2
                o.zero_grad()


@fault("own-loss-scale", "AdamW")
def own_scale_that_grows_without_a_check(into):
    Growing(lambda grads: True).run(into)


@fault("own-loss-scale", "AdamW")
def own_scale_that_checks_the_first_gradient(into):
    Growing(lambda grads: grads[0].isfinite().all()).run(into)


@healthy()
def own_scale_that_grows_and_falls(into):
    Growing(lambda grads: all(g.isfinite().all() for g in grads)).run(into)


@healthy()
def own_scale_that_falls_until_it_fits(into):
    Scaled(divide, scale=2.0**22).run(into)


@healthy()
def own_scale_over_micro_batches(into):
    Scaled(divide, micro=3).run(into)


@healthy()
def own_scale_with_a_clip_behind(into):
    def undo(m, grads, scale):
        divide(m, grads, scale)
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)

    Scaled(undo).run(into)


@healthy()
def own_scale_in_the_learning_rate(into):
    Scaled(lambda *given: None, lambda m: sgd(m, 0.05 / 2.0**14)).run(into)


@healthy()
def own_scale_undone_on_copies_for_the_optimizer(into):
    def undo(m, grads, scale):
        for p in m.parameters():
            p.grad = p.grad.float() / scale

    Scaled(undo).run(into)
