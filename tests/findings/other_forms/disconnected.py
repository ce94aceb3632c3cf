"""Trainings that learn nothing, or end, because something is not connected as the loop believes: a loss wrapped anew, a
dead output, a rollout in another precision, an exception that the loop catches; and sound ones beside them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import (
    BF,
    OwnOptimizer,
    adam,
    amp,
    bf16,
    ce,
    fp16,
    scaled_backward,
    scaler,
    step,
    watched,
)
from tests.findings.other_forms.models import Net, vectors


def _wrapped(into, wrap):
    m = nn.Linear(64, 10)
    o = adam(m)
    with watched(m, o, into):
        for b in vectors(6):
            (wrap(ce(m(b[0]), b[1])) / 2).backward()
            step(o)


@fault("no-gradients", "loss", each_time=True)
def loss_in_a_new_tensor(into):
    _wrapped(into, lambda loss: torch.tensor(loss.item(), requires_grad=True))


@fault("no-gradients", "loss")
def detached_loss_that_requires_gradients(into):
    _wrapped(into, lambda loss: loss.detach().requires_grad_())


def _clamped(into, bias):
    m = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(m[2].bias, bias)
    s = scaler(2.0**16, growth_interval=5)
    fp16(m, vectors(60), into, s=s, loss=lambda m, b: F.mse_loss(m(b[0]).float().clamp(0, 1)[:, 0], b[1] / 10))


@fault("scale-unbounded", "loss", each_time=True)
def output_outside_of_its_clamp(into):
    _clamped(into, 118.0)


def _policy(into, act, learn):
    """A policy whose rollout runs in `act`, and its update in `learn`."""
    m = Net(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(64, 32), b=nn.Linear(32, 4))
    o = adam(m)
    with watched(m, o, into):
        for x, _ in vectors(6):
            with torch.inference_mode(), act:
                old = m(x).float().log_softmax(-1)[:, 0]
            for _ in range(2):
                with learn:
                    new = m(x).float().log_softmax(-1)[:, 0]
                (-(new - old.clone()).exp() * torch.randn(16)).mean().backward()
                step(o)


@fault("half-logits", "Net", each_time=True)
def rollout_under_autocast_alone(into):
    _policy(into, amp(BF), contextlib.nullcontext())


@fault("half-logits", "Net")
def update_under_autocast_alone(into):
    _policy(into, contextlib.nullcontext(), amp(BF))


@healthy(each_time=True)
def rollout_and_update_under_autocast(into):
    _policy(into, amp(BF), amp(BF))


def _assigned(into, dtype):
    """Writes predictions into a buffer by index."""

    def loss(m, b):
        out = m(b[0])
        chosen = torch.zeros(4, 10, dtype=dtype or out.dtype)
        chosen[torch.arange(4)] = out[:4]
        return ce(chosen.float(), b[1][:4])

    with contextlib.suppress(RuntimeError):
        fp16(nn.Linear(64, 10), vectors(4), into, loss=loss)


@fault("custom-function-dtype", each_time=True)
def half_values_assigned_to_a_wide_buffer(into):
    _assigned(into, torch.float32)


@healthy()
def half_values_assigned_to_a_buffer_of_their_dtype(into):
    _assigned(into, None)


@fault("missing-scaler-update", "scaler.update", each_time=True)
def update_left_out_and_the_exception_caught(into):
    m, s = nn.Linear(64, 10), scaler()
    o = adam(m)
    with watched(m, o, into, s):
        for i, b in enumerate(vectors(8)):
            try:
                scaled_backward(m, b, s)
                s.unscale_(o)
            except RuntimeError:
                break
            s.step(o)
            if i != 5:
                s.update()
            o.zero_grad()


class _Packed:
    """A state in an object of the program's own."""

    def __init__(self, values, dtype):
        self.stored = values.to(dtype)

    def values(self):
        return self.stored.float()


def _packed_adam(into, dtype):
    def update(p, state, lr):
        old = [state[key].values() if key in state else torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")]
        m, v = 0.9 * old[0] + 0.1 * p.grad, 0.99 * old[1] + 0.01 * p.grad.square()
        state["exp_avg"], state["exp_avg_sq"] = _Packed(m, dtype), _Packed(v, dtype)
        p.sub_(lr * m / (state["exp_avg_sq"].values().sqrt() + 1e-8))

    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    bf16(m, vectors(6), into, o=OwnOptimizer(m, 1e-4, update))


@fault("vanishing-second-moments", each_time=True)
def moments_in_8_bit_floats_without_a_scale(into):
    _packed_adam(into, torch.float8_e4m3fn)


@healthy()
def moments_in_objects_in_fp32(into):
    _packed_adam(into, torch.float32)


@healthy(each_time=True)
def fisher_information_of_unscaled_losses(into):
    """Unscaled gradients that the loop reads and throws away."""
    m, s = nn.Linear(64, 10), scaler()
    o = adam(m)
    with watched(m, o, into, s):
        for b in vectors(4):
            scaled_backward(m, b, s)
            step(o, s)
        fisher = torch.zeros_like(m.weight)
        for x, y in vectors(2):
            o.zero_grad()
            with amp():
                loss = ce(m(x), y)
            loss.backward()
            fisher += m.weight.grad.square()
        o.zero_grad()
        for b in vectors(4):
            scaled_backward(m, b, s)
            step(o, s)


class MasterSGD(torch.optim.Optimizer):
    """Gives its masters their gradients within its own step."""

    def __init__(self, model, lr):
        self.pairs = [(p, p.detach().float().clone().requires_grad_()) for p in model.parameters()]
        super().__init__([master for _, master in self.pairs], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p, master in self.pairs:
            master.grad = p.grad.float()
            master.sub_(self.param_groups[0]["lr"] * master.grad)
            p.copy_(master)
            p.grad = None


@healthy(each_time=True)
def masters_that_get_their_gradients_within_the_step(into):
    m = nn.Linear(64, 10).to(BF)
    o = MasterSGD(m, 1e-3)
    with watched(m, o, into):
        for x, y in vectors(8):
            ce(m(x.to(BF)).float(), y).backward()
            o.step()


@healthy(each_time=True)
def teacher_in_fp32_under_the_autocast_of_its_student(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    teacher = copy.deepcopy(m).requires_grad_(False)

    def loss(m, b):
        with torch.no_grad(), amp(BF, False):
            wanted = teacher(b[0]).softmax(-1)
        return F.cross_entropy(m(b[0]).float(), wanted)

    bf16(m, vectors(6), into, loss=loss)


@fault("fp16-parameters", "latents", each_time=True)
def half_latents_and_the_exception_caught(into):
    """The scaler raises in the first step, so that no step is recorded."""
    m, s = Net(lambda m, x: m.head(x + m.latents.float()), head=nn.Linear(64, 10)), scaler()
    m.latents = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    o = adam(m)
    with watched(m, o, into, s):
        for b in vectors(3):
            try:
                scaled_backward(m, b, s)
                s.step(o)
            except ValueError:
                break
            s.update()


@fault("autocast-not-in-thread", "tower", each_time=True)
def frozen_part_in_a_thread_without_gradients(into):
    m = Net(lambda m, x: m.head(x), tower=nn.Linear(64, 32), head=nn.Linear(32, 10))
    m.tower.requires_grad_(False)

    def encoded(x):
        with torch.no_grad(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(_without_gradients, m.tower, x).result()

    bf16(m, vectors(6), into, o=adam(m.head), loss=lambda m, b: ce(m(encoded(b[0])), b[1]))


def _without_gradients(part, x):
    with torch.no_grad():  # as autocast, it is of this thread alone
        return part(x)
