"""Values that were rounded before they are used: predictions, old log-probabilities, moments, sums of many tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, OwnOptimizer, adam, amp, bf16, step, watched
from tests.findings.other_forms.models import GPT, tokens


class Head(nn.Module):
    """A regression near 100, whose last layer computes in `dtype`."""

    def __init__(self, dtype, mean):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.last, self.dtype = nn.Linear(64, 1), dtype
        nn.init.constant_(self.last.bias, mean)

    def forward(self, x):
        h = self.body(x)
        with amp(BF, enabled=self.dtype is BF):
            return self.last(h.to(self.dtype))


def _regression(into, dtype, mean=100.0):
    def loss(m, x):
        return F.mse_loss(m(x).float(), mean + x.sum(1, keepdim=True).sin() / 4)

    bf16(Head(dtype, mean), (torch.rand(64, 4) for _ in range(6)), into, loss=loss)


@fault("half-logits", "loss", each_time=True)
def predictions_coarser_than_their_targets(into):
    _regression(into, BF)


@healthy(each_time=True)
def predictions_of_an_fp32_layer(into):
    _regression(into, torch.float32)


@healthy()
def predictions_of_standardized_targets(into):
    _regression(into, BF, mean=0.0)


def _policy(into, dtype):
    """Old log-probabilities of a copy of the policy in `dtype`, cast to FP32."""
    m = GPT()
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(6):
            with torch.no_grad():
                copy = GPT().to(dtype)
                copy.load_state_dict(m.state_dict())
                old = copy(t[:, :-1]).log_softmax(-1).gather(-1, t[:, 1:, None])[..., 0].float()
            new = m(t[:, :-1]).log_softmax(-1).gather(-1, t[:, 1:, None])[..., 0]
            ratio = (new - old).exp()
            (-torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()).backward()
            step(o)


@fault("half-logits", "loss", each_time=True)
def old_log_probabilities_of_a_bf16_copy(into):
    _policy(into, BF)


@healthy(each_time=True)
def old_log_probabilities_of_an_fp32_copy(into):
    _policy(into, torch.float32)


def _offloaded(into, dtype):
    """Moments that are stored in `dtype` between two steps."""
    m = GPT()
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(6):
            F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
            for state in o.state.values():
                state |= {key: state[key].float() for key in ("exp_avg", "exp_avg_sq")}
            step(o)
            for state in o.state.values():
                state |= {key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}


@fault("vanishing-second-moments", each_time=True)
def moments_in_bf16_between_steps(into):
    _offloaded(into, BF)


@healthy(each_time=True)
def moments_in_fp32_between_steps(into):
    _offloaded(into, torch.float32)


def _in_8_bits(into, bits8):
    """Adam whose moments have one scale for each tensor, of int8."""

    def stored(x):
        scale = x.abs().max().clamp_min(1e-30) / 127
        return ((x / scale).round().to(torch.int8), scale) if bits8 else (x, 1.0)

    def update(p, state, lr):
        for key, beta, value in (("m", 0.9, p.grad), ("v", 0.999, p.grad.square())):
            old = state[key].float() * state[f"{key}_scale"] if key in state else torch.zeros_like(p)
            state[key], state[f"{key}_scale"] = stored(beta * old + (1 - beta) * value)
        m, v = (state[key].float() * state[f"{key}_scale"] for key in ("m", "v"))
        p.sub_(lr * m / (v.sqrt() + 1e-3))

    m = GPT()
    bf16(m, tokens(6), into, o=OwnOptimizer(m, 1e-4, update))


@fault("vanishing-second-moments", each_time=True)
def moments_in_int8_of_one_scale(into):
    _in_8_bits(into, bits8=True)


@healthy()
def moments_of_an_own_optimizer_in_fp32(into):
    _in_8_bits(into, bits8=False)


class RunningSum(nn.Module):
    """Divides by the sum of all tokens so far, as linear attention does."""

    def __init__(self, dtype):
        super().__init__()
        self.emb, self.key, self.head, self.dtype = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64), dtype

    def forward(self, t):
        k = (F.elu(self.key(self.emb(t))) + 1).to(self.dtype)
        total, out = torch.zeros_like(k[:, 0]), []
        for i in range(k.shape[1]):
            total = total + k[:, i]
            out.append(k[:, i] / total)
        return self.head(torch.stack(out, 1).to(self.emb.weight.dtype))


@fault("half-sum", "RunningSum")
def sum_of_all_tokens_in_bf16(into):
    bf16(RunningSum(BF), tokens(2, rows=2, length=600), into)


@healthy()
def sum_of_all_tokens_in_fp32(into):
    bf16(RunningSum(torch.float32), tokens(2, rows=2, length=600), into)
