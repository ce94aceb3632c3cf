"""Averages, states and updates that a loop makes by hand in 16 bits, each beside the same in FP32."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, OwnOptimizer, adam, bf16, ce, pure, sgd
from tests.findings.other_forms.models import CNN, Net, images, vectors

FP32 = torch.float32


def _layers():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def _momentum_encoder(into, dtype):
    online = _layers()
    target = copy.deepcopy(online).requires_grad_(False).to(dtype)
    m = Net(lambda m, x: m.online(x), online=online, target=target)

    @torch.no_grad()
    def after(i):
        for t, p in zip(target.parameters(), online.parameters(), strict=True):
            t.mul_(0.999).add_(p.to(dtype), alpha=0.001)

    bf16(m, vectors(20), into, adam(online), after=after)


@fault("average-stands-still", "0.weight", each_time=True)
def momentum_encoder_within_the_model(into):
    _momentum_encoder(into, BF)


@healthy(each_time=True)
def momentum_encoder_in_fp32(into):
    _momentum_encoder(into, FP32)


def _target_of_the_critic(into, dtype):
    m = nn.ModuleDict({"actor": _layers(), "critic": _layers()})
    target = copy.deepcopy(m["critic"]).to(dtype)

    @torch.no_grad()
    def after(i):
        for t, p in zip(target.parameters(), m["critic"].parameters(), strict=True):
            t.copy_(0.995 * t + 0.005 * p.to(dtype))

    bf16(m, vectors(20), into, loss=lambda m, b: ce(m["actor"](b[0]) + m["critic"](b[0]), b[1]), after=after)


@fault("average-stands-still", "critic.0.weight", each_time=True)
def target_of_a_part_of_the_model(into):
    _target_of_the_critic(into, BF)


@healthy(each_time=True)
def target_of_a_part_in_fp32(into):
    _target_of_the_critic(into, FP32)


def _own_adam(into, dtype, second, count=FP32):
    """Adam of the program's own, whose second moments are called `second` and have `dtype`."""

    def update(p, state, lr):
        step = state.setdefault("step", torch.zeros((), dtype=count))
        step += 1
        moment = state.setdefault(second, torch.zeros_like(p, dtype=dtype))
        moment.mul_(0.999).add_(p.grad.square().to(dtype), alpha=0.001)
        p.addcdiv_(p.grad, (moment.float() / (1 - 0.999 ** float(step))).sqrt() + 1e-8, value=-lr)

    m = CNN(bn=False)
    bf16(m, images(8), into, OwnOptimizer(m, 1e-3, update))


@fault("vanishing-second-moments", "weight", each_time=True)
def second_moments_of_an_own_optimizer(into):
    _own_adam(into, BF, "nu")


@fault("average-stands-still", each_time=True)
def average_of_squares_under_another_name(into):
    _own_adam(into, BF, "preconditioner")


@fault("half-accumulation", "step", each_time=True)
def steps_counted_in_bf16(into):
    _own_adam(into, FP32, "nu", count=BF)


@healthy(each_time=True)
def own_adam_in_fp32(into):
    _own_adam(into, FP32, "nu")


@fault("overwritten-masters", "weight", each_time=True)
def masters_overwritten_within_the_step(into):
    def update(p, state, lr):
        master = state.setdefault("master", torch.empty_like(p, dtype=FP32))
        master.copy_(p)
        master.add_(p.grad.float(), alpha=-lr)
        p.copy_(master)

    m = CNN(bn=False).to(BF)
    pure(m, OwnOptimizer(m, 0.3, update), images(10), into)


@fault("lost-weight-decay", "weight", each_time=True)
def decay_added_to_gradients_in_bf16(into):
    m = CNN(bn=False).to(BF)

    @torch.no_grad()
    def before(i):
        for p in m.parameters():
            p.grad.add_(p, alpha=1e-5)

    pure(m, sgd(m, 0.5), images(8), into, before=before)


def _pulled_to_the_start(into, dtype):
    m = _layers().to(dtype)
    start = [p.detach().clone() for p in m.parameters()]

    @torch.no_grad()
    def after(i):
        for p, q in zip(m.parameters(), start, strict=True):
            p.add_(q - p, alpha=1e-4)

    pure(m, sgd(m, 0.5), vectors(10), into, after=after)


@fault("lost-weight-updates", "weight", each_time=True)
def pull_to_the_first_weights_in_bf16(into):
    _pulled_to_the_start(into, BF)


@healthy(each_time=True)
def pull_to_the_first_weights_in_fp32(into):
    _pulled_to_the_start(into, FP32)


@healthy(each_time=True)
def sharpness_aware_in_bf16(into):
    """Two backward passes, and gradients cleared between them: nothing is accumulated."""
    m = _layers().to(BF)
    o = sgd(m, 1.0)

    def loss(m, b):
        ce(m(b[0]), b[1]).backward()
        kept = [p.detach().clone() for p in m.parameters()]
        with torch.no_grad():
            for p in m.parameters():
                p.add_(p.grad, alpha=0.05)
        o.zero_grad()
        value = ce(m(b[0]), b[1])
        with torch.no_grad():
            for p, k in zip(m.parameters(), kept, strict=True):
                p.data = k
        return value

    pure(m, o, vectors(8), into, loss=loss)


def _slopes(into, dtype):
    def attend(m, x):
        return m.head((m.query(x) + m.alibi[:, : x.shape[1]].float().mean(0)).softmax(-1))

    m = Net(attend, query=nn.Linear(64, 64), head=nn.Linear(64, 10))
    m.register_buffer("alibi", (-(2.0 ** -torch.arange(1, 5))[:, None] * torch.arange(512)).to(dtype))
    bf16(m, vectors(4), into)


@fault("rounded-positions", "alibi", each_time=True)
def slopes_by_head_in_bf16(into):
    _slopes(into, BF)


@healthy(each_time=True)
def slopes_by_head_in_fp32(into):
    _slopes(into, FP32)


def _diffusion(into, dtype):
    def denoise(m, x):
        share = m.alphas_cumprod[torch.randint(1000, (len(x), 1))].to(x.dtype)
        return m.net(share.sqrt() * x + (1 - share).sqrt() * torch.randn_like(x))

    m = Net(denoise, net=_layers())
    m.register_buffer("alphas_cumprod", (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0).to(dtype))
    bf16(m, vectors(4), into)


@fault("rounded-positions", "alphas_cumprod", each_time=True)
def noise_schedule_in_bf16(into):
    _diffusion(into, BF)


@healthy(each_time=True)
def noise_schedule_in_fp32(into):
    _diffusion(into, FP32)


def _counts_by_class(into, dtype):
    m, counts = _layers(), torch.zeros(10, 10, dtype=dtype)

    def after(i):
        counts[i % 10, 3] += 1
        counts[3].add_(torch.ones(10, dtype=dtype))

    bf16(m, vectors(8), into, adam(m), after=after)


@fault("half-accumulation", "running sum", each_time=True)
def counts_of_a_metric_in_half(into):
    _counts_by_class(into, torch.float16)


@healthy(each_time=True)
def counts_of_a_metric_in_fp32(into):
    _counts_by_class(into, FP32)


@fault("half-accumulation", "running sum")
def gradients_of_each_batch_added_up_in_bf16(into):
    m = _layers()
    total = [torch.zeros_like(p, dtype=BF) for p in m.parameters()]

    def before(i):
        for t, p in zip(total, m.parameters(), strict=True):
            t.add_(p.grad)

    bf16(m, vectors(8), into, adam(m), before=before)


@healthy(each_time=True)
def scratch_in_bf16_that_each_step_clears(into):
    m, scratch = _layers(), torch.zeros(64, 16, dtype=BF)

    def after(i):
        scratch.zero_().add_(m[0].weight.detach().T)

    bf16(m, vectors(8), into, adam(m), after=after)


def _centred(into, decay):
    """A self-supervised head that subtracts a running centre, a buffer that forward makes anew."""

    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.ones(10))

        def forward(self, z):
            with torch.no_grad():
                self.centre = self.centre * decay + z.mean(0) * (1 - decay)
            return z - self.centre

    m = nn.Sequential(nn.Linear(64, 10), Centre()).to(BF)
    pure(m, sgd(m, 0.3), vectors(8), into)


@fault("average-stands-still", "1.centre", each_time=True)
def centre_with_a_decay_that_rounds_to_one(into):
    _centred(into, 0.999)


@healthy(each_time=True)
def centre_with_a_decay_of_nine_tenths(into):
    _centred(into, 0.9)


def _leaky(into, dtype, decay):
    """A recurrent state that forgets a part of itself at each of 80 positions."""

    def scanned(m, x):
        values, kept = m.body(x).to(dtype), torch.exp(-torch.exp(m.log_rate).to(dtype))
        state = torch.zeros_like(values)
        for shift in range(80):
            state = kept * state + values.roll(shift, -1) * 0.1
        return m.head(state.to(BF))

    m = Net(scanned, body=nn.Linear(64, 16), head=nn.Linear(16, 10))
    m.log_rate = nn.Parameter(torch.full((16,), math.log(decay)))
    bf16(m, vectors(4), into)


@fault("average-stands-still", "Net", each_time=True)
def state_whose_decays_are_one_in_bf16(into):
    _leaky(into, BF, 0.001)


@healthy(each_time=True)
def state_that_forgets_a_tenth_in_bf16(into):
    _leaky(into, BF, 0.1)


@healthy(each_time=True)
def state_and_decays_in_fp32(into):
    _leaky(into, FP32, 0.001)


def _cast_decays(into, dtype):
    """Constant decays, a buffer in float32 that is cast to the type of the state."""

    def scanned(m, x):
        values = m.body(x).to(dtype)
        state, kept = torch.zeros_like(values), m.decays.to(dtype)
        for shift in range(80):
            state = kept * state + values.roll(shift, -1) * 0.1
        return m.head(state.to(BF))

    m = Net(scanned, body=nn.Linear(64, 16), head=nn.Linear(16, 10))
    m.register_buffer("decays", torch.full((16,), 0.9985))
    bf16(m, vectors(4), into)


@fault("average-stands-still", "Net")
def buffer_of_decays_that_is_cast_to_bf16(into):
    _cast_decays(into, BF)


@healthy()
def buffer_of_decays_in_fp32(into):
    _cast_decays(into, FP32)


def _summary(into, dtype):
    """A codebook whose averages are buffers that forward updates in place."""

    def counted(m, x):
        hidden = m.body(x)
        m.used.mul_(0.999).add_(hidden.detach().abs().mean(0).to(dtype), alpha=0.001)
        return m.head(hidden / (m.used.to(hidden.dtype) + 0.1))

    m = Net(counted, body=nn.Linear(64, 16), head=nn.Linear(16, 10))
    m.register_buffer("used", torch.ones(16, dtype=dtype))
    bf16(m, vectors(6), into)


@fault("average-stands-still", "used", each_time=True)
def buffer_that_decays_in_place_in_bf16(into):
    _summary(into, BF)


@healthy(each_time=True)
def buffer_that_decays_in_place_in_fp32(into):
    _summary(into, FP32)
