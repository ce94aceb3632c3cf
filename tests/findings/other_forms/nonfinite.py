"""Trainings whose NaN begins in a backward, between two modules, or in weights that the loop changes itself."""

from __future__ import annotations

import torch
from torch import nn

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import bf16, fp16, scaled_backward, scaler, sgd, step, watched
from tests.findings.other_forms.models import Net, vectors


class OwnSwish(torch.autograd.Function):
    """x * sigmoid(x), whose derivative divides exponentials: infinity by infinity in FP16 for x below -11."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        e = torch.exp(-x)
        return g * (1 / (1 + e) + x * e / (1 + e).pow(2))


def _own_swish(into, widen):
    m = Net(
        lambda n, x: n.c(n.act(n.b(torch.relu(n.a(x))))),
        a=nn.Linear(64, 32),
        b=nn.Linear(32, 32),
        act=Net(lambda _, x: OwnSwish.apply(x.float() if widen else x)),
        c=nn.Linear(32, 10),
    )
    nn.init.normal_(m.b.weight, std=3.0)
    fp16(m, vectors(30), into, o=sgd(m, 1e-4))


@fault("scale-collapse", "act", each_time=True)
def own_backward_that_divides_infinities(into):
    _own_swish(into, widen=False)


@healthy(each_time=True)
def own_backward_in_fp32(into):
    _own_swish(into, widen=True)


def _sampled(into, wide):
    """Gumbel noise between two parts of the model; in FP16 the uniform number 0.9999 is 1, and the noise infinite."""

    def run(m, x):
        logits = m.enc(x)
        u = torch.rand(logits.shape).to(torch.float32 if wide else logits.dtype)
        noise = -torch.log(-torch.log(u.clamp(0.01)))
        return m.dec((logits + noise).softmax(-1))

    dec = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))
    fp16(Net(run, enc=nn.Linear(64, 512), dec=dec), vectors(8), into)


@fault("activation-overflow|loss-nonfinite", "Net", each_time=True)
def noise_between_two_parts_in_half(into):
    _sampled(into, wide=False)


@healthy()
def noise_between_two_parts_in_fp32(into):
    _sampled(into, wide=True)


def _ascent(into, guarded):
    """Sharpness-aware minimization by hand, with scaled gradients that overflow in the first steps."""
    m, s = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), scaler(2.0**20)
    o = sgd(m)
    with watched(m, o, into, s):
        for b in vectors(24):
            scaled_backward(m, b, s)
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
                size = 0.05 / norm if norm.isfinite() or not guarded else 0.0
                moves = [(p.grad * size).nan_to_num(0.0) if guarded else p.grad * size for p in m.parameters()]
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.add_(move)
            o.zero_grad()
            scaled_backward(m, b, s)
            with torch.no_grad():
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.sub_(move)
            step(o, s)


@fault("loss-nonfinite|scale-collapse", each_time=True)
def ascent_by_gradients_that_overflowed(into):
    _ascent(into, guarded=False)


@healthy(each_time=True)
def ascent_by_finite_gradients_alone(into):
    _ascent(into, guarded=True)


class Expert(nn.Module):
    """A mixture whose router has a softmax by hand: `exp` without subtracting the maximum."""

    def __init__(self, by_hand):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(64, 4), nn.Linear(64, 64), nn.Linear(64, 64)
        self.by_hand = by_hand
        nn.init.normal_(self.router.weight, std=8.0)

    def forward(self, x):
        scores = self.router(x)
        e = torch.exp(scores) if self.by_hand else None
        p = e / e.sum(-1, keepdim=True) if self.by_hand else scores.softmax(-1)
        return x + p[:, :1] * self.down(torch.relu(self.up(x)))


def _mixture(into, by_hand):
    fp16(nn.Sequential(nn.Linear(64, 64), Expert(by_hand), nn.Linear(64, 10)), vectors(12), into)


@fault("activation-overflow", "1", each_time=True)
def exponential_of_scores_in_fp16(into):
    _mixture(into, by_hand=True)


@healthy()
def softmax_of_scores_in_fp16(into):
    _mixture(into, by_hand=False)


class Likelihood(nn.Module):
    """Returns the loss of black and white pixels, as a model of a trainer does."""

    def __init__(self, wide):
        super().__init__()
        self.dec, self.wide = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), wide
        nn.init.constant_(self.dec[2].bias, 8.0)

    def forward(self, x):
        logits = self.dec(x)
        p = torch.sigmoid(logits.double() if self.wide else logits)
        white = torch.ones_like(p)
        return -(white * torch.log(p) + (1 - white) * torch.log(1 - p)).mean()


def _pixels(into, wide):
    bf16(Likelihood(wide), vectors(6), into, loss=lambda m, b: m(b[0]).float())


@fault("loss-nonfinite", "Likelihood", each_time=True)
def logarithm_of_one_minus_a_rounded_probability(into):
    """All later weights are NaN: the step itself must name the operator."""
    _pixels(into, wide=False)


@healthy()
def logarithm_of_one_minus_a_probability(into):
    _pixels(into, wide=True)


def _advantages(into, wide):
    """Normalized by their variance, which exceeds 65504: the loss stays finite, and nothing is learned."""
    m = Net(lambda m, x: (m.policy(x), m.value(x)), policy=nn.Linear(64, 4), value=nn.Linear(64, 1))

    def loss(m, b):
        policy, value = m(b[0])
        value = value.float() if wide else value
        gain = (1000 * torch.randn(16, 1).to(value.dtype) - value).detach()
        gain = (gain - gain.mean()) / (gain.var() + 1e-3).sqrt()
        return (policy.float().log_softmax(-1)[:, :1] * gain).mean()

    fp16(m, vectors(12), into, loss=loss)


@fault("activation-overflow", "loss", each_time=True)
def variance_of_advantages_in_fp16(into):
    _advantages(into, wide=False)


@healthy()
def variance_of_advantages_in_fp32(into):
    _advantages(into, wide=True)


class ClickRates(nn.Module):
    """Takes the logit of rates near 1, of the data alone: no graph shows it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, rates):
        return self.out(torch.log(rates / (1 - rates)).to(self.out.weight.dtype))


def _rates(into, dtype):
    torch.manual_seed(0)
    batches = [((0.9985 - 0.5 * torch.rand(16, 64)).clamp(min=0.4), y) for _, y in vectors(8)]
    batches[5][0][3, 7] = 0.9995
    bf16(ClickRates(), [(x.to(dtype), y) for x, y in batches], into)


@fault("loss-nonfinite", "ClickRates", each_time=True)
def logit_of_rates_that_the_data_rounds(into):
    _rates(into, torch.bfloat16)


@healthy(each_time=True)
def logit_of_rates_in_fp32(into):
    _rates(into, torch.float32)
