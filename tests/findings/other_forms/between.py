"""What a loop computes in 16 bits outside of forward and loss: targets, inputs and metrics. And what a forward adds up
over many small steps. Each beside the same in FP32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, H, adam, amp, bf16, ce, step, watched
from tests.findings.other_forms.models import Net, vectors

FP32 = torch.float32


def _layers(outputs=10):
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, outputs))


def _hits_of_an_evaluation(into, dtype):
    m = _layers()
    o = adam(m)
    with watched(m, o, into):
        for epoch in range(2):
            for x, y in vectors(6, rows=8):
                with amp(BF):
                    loss = ce(m(x), y)
                loss.backward()
                step(o)
            hits = torch.zeros((), dtype=dtype)
            with torch.no_grad(), amp(BF):
                for x, y in vectors(80, rows=8):
                    hits += (m(x).argmax(1) == y).to(dtype).sum()
            assert 0 <= hits <= 640, epoch


@fault("half-sum", "the loop", each_time=True)
def hits_of_an_evaluation_in_fp16(into):
    _hits_of_an_evaluation(into, H)


@healthy(each_time=True)
def hits_of_an_evaluation_in_fp32(into):
    _hits_of_an_evaluation(into, FP32)


def _returns(into, dtype):
    m = _layers(1)
    o = adam(m)
    with watched(m, o, into):
        for x, _ in vectors(6, rows=100):
            total, returns = torch.zeros((), dtype=dtype), []
            for reward in torch.ones(100, dtype=dtype):
                total = reward + 0.99 * total
                returns.append(total)
            with amp(BF):
                loss = F.smooth_l1_loss(m(x).float()[:, 0], torch.stack(returns[::-1]).float())
            loss.backward()
            step(o)


@fault("half-sum", "the loop", each_time=True)
def returns_in_bf16(into):
    _returns(into, BF)


@healthy(each_time=True)
def returns_in_fp32(into):
    _returns(into, FP32)


def _advantages(into, dtype):
    m = _layers(2)
    o = adam(m)
    with watched(m, o, into):
        for x, _ in vectors(3, rows=32):
            with torch.no_grad(), amp(BF):
                old = F.log_softmax(m(x).float(), 1)
                reward = torch.ones(32, dtype=dtype)
                advantage = ((reward - reward.mean()) / (reward.std() + 1e-8)).float().nan_to_num()
            for _ in range(3):
                with amp(BF):
                    ratio = (F.log_softmax(m(x).float(), 1) - old).exp()
                (ratio * advantage[:, None]).mean().backward()
                step(o)


@fault("eps-rounds-to-zero", "the loop")
def advantages_of_a_rollout_in_fp16(into):
    _advantages(into, H)


@healthy()
def advantages_of_a_rollout_in_fp32(into):
    _advantages(into, FP32)


def _centred(into, dtype):
    def loss(m, b):
        depths = (1000 + b[0]).to(dtype)
        return ce(m((depths - depths.mean(1, keepdim=True)).float()), b[1])

    bf16(_layers(), vectors(5), into, loss=loss)


@fault("rounded-positions", "the loop")
def inputs_centred_in_bf16(into):
    _centred(into, BF)


@healthy()
def inputs_centred_in_fp32(into):
    _centred(into, FP32)


def _sampling_grid(into, dtype):
    def warped(m, x):
        flow = m.flow(x)
        ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(400.0), indexing="ij")
        places = torch.stack((xs, ys))[None].to(dtype) + flow.to(dtype)
        places = torch.stack((places[:, 0] / 199.5 - 1, places[:, 1] / 3.5 - 1), -1).float()
        return F.grid_sample(x, places, align_corners=True)

    m = Net(warped, flow=nn.Conv2d(1, 2, 3, padding=1))
    pictures = [(torch.rand(1, 1, 8, 400),) for _ in range(4)]
    bf16(m, pictures, into, loss=lambda m, b: (m(b[0]) - b[0].roll(1, -1)).abs().mean())


@fault("rounded-positions")
def sampling_grid_in_bf16(into):
    _sampling_grid(into, BF)


@healthy()
def sampling_grid_in_fp32(into):
    _sampling_grid(into, FP32)


def _euler_steps(into, dtype):
    def solved(m, x):
        state = 4 * m.inp(x).to(dtype)
        for _ in range(100):
            state = state + 1e-3 * m.field(state).to(dtype)
        return m.out(state)

    field = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    bf16(Net(solved, inp=nn.Linear(64, 32), field=field, out=nn.Linear(32, 10)), vectors(4), into)


@fault("half-sum", each_time=True)
def euler_steps_in_bf16(into):
    _euler_steps(into, BF)


@healthy(each_time=True)
def euler_steps_in_fp32(into):
    _euler_steps(into, FP32)


@healthy()
def a_deep_stream_in_bf16(into):
    """80 blocks add to it; what each adds is not lost, and each is a module of its own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return x + self.inner(x).relu()

    m = nn.Sequential(*(Block() for _ in range(80)), nn.Linear(64, 10))
    bf16(m, ((x.to(BF), y) for x, y in vectors(4)), into)
