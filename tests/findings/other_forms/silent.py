"""Faults that nothing shows in the loss curve: batches dropped, gradients cleared, integers and differences rounded."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, H, adam, amp, bf16, ce, fp16, scaler, sgd, step, watched
from tests.findings.other_forms.models import Net, vectors


def _layers(inputs=64):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 10))


def _batches_dropped(into, dtype):
    def run(m, x):
        return m.head((m.body(x).to(dtype) * 30).square().sum(1, keepdim=True) / 1e4)

    m = Net(run, body=nn.Linear(64, 64), head=nn.Linear(1, 10))
    o, s = adam(m), scaler()
    with watched(m, o, into, s):
        for i, (x, y) in enumerate(vectors(16)):
            with amp():
                loss = ce(m(x * (20 if i % 4 == 1 else 0.1)), y)
            if not loss.isfinite():
                continue
            o.zero_grad()
            s.scale(loss).backward()
            s.step(o)
            s.update()


@fault("activation-overflow", "head", each_time=True)
def batches_of_infinite_loss_dropped(into):
    _batches_dropped(into, torch.float16)


@healthy(each_time=True)
def sums_in_fp32_so_that_no_batch_is_dropped(into):
    _batches_dropped(into, torch.float32)


@fault("no-gradients", "zero_grad", each_time=True)
def gradients_zeroed_before_the_step(into):
    m = _layers()
    o = sgd(m)
    fp16(m, vectors(8), into, o, before=lambda i: o.zero_grad(set_to_none=False))


@fault("unscale-per-microbatch", "scaler.scale", each_time=True)
def loss_scaled_twice(into):
    m, s = _layers(), scaler(2.0**4)
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in vectors(8):
            with amp():
                loss = s.scale(ce(m(x), y))
            s.scale(loss).backward()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(o)
            s.update()
            o.zero_grad()


def _weighted(into, weighted):
    m, s = _layers(), scaler(2.0**8)
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in vectors(8):
            with amp():
                loss = weighted(ce(m(x), y), s.get_scale())
            s.scale(loss).backward()
            step(o, s)


@fault("unscale-per-microbatch", "scaler.scale", each_time=True)
def loss_multiplied_by_the_scale_and_scaled(into):
    _weighted(into, lambda loss, scale: loss * scale / 2)


@healthy(each_time=True)
def loss_multiplied_by_a_weight_and_scaled(into):
    _weighted(into, lambda loss, scale: loss * 2.0)


@healthy()
def two_losses_scaled_and_added(into):
    m, s = _layers(), scaler()
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in vectors(8):
            with amp():
                first, second = ce(m(x), y), ce(m(x.flip(0)), y.flip(0))
            (s.scale(first) + s.scale(second)).backward()
            s.step(o)
            s.update()
            o.zero_grad()


def _years(into, shift, scale):
    def batches():
        for x, y in vectors(4, rows=64):
            year = torch.randint(1990, 2026, (64, 1)).float()
            yield torch.cat([(year - shift) / scale, x], 1), y

    bf16(_layers(65), batches(), into)


@fault("rounded-positions", "0", each_time=True)
def years_as_they_are_in_bf16(into):
    _years(into, 0.0, 1.0)


@healthy(each_time=True)
def years_that_are_normalised(into):
    _years(into, 2007.0, 10.0)


def _ids(into, cast):
    m = Net(lambda m, i: m.head(m.table(i.long()).mean(1)), table=nn.Embedding(8008, 16), head=nn.Linear(16, 10))

    def batches():
        for _ in range(4):
            ids = torch.randint(8000, (16, 5))
            yield cast(ids), ids[:, 0] % 10

    fp16(m, batches(), into)


@fault("rounded-positions", "", each_time=True)
def ids_cast_with_the_batch(into):
    _ids(into, torch.Tensor.half)


@healthy()
def ids_that_stay_integers(into):
    _ids(into, torch.Tensor.long)


def _preferences(into, dtype):
    m = Net(lambda m, i: m.head(torch.tanh(m.table(i))), table=nn.Embedding(50, 16), head=nn.Linear(16, 50))
    reference = copy.deepcopy(m).requires_grad_(False)

    def likelihood(net, ids):
        return net(ids[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].to(dtype).sum(-1)

    def loss(m, batch):
        good, bad = ((likelihood(m, ids) - likelihood(reference, ids)) for ids in batch)
        return -F.logsigmoid(0.1 * (good - bad).float()).mean()

    bf16(m, ((torch.randint(50, (4, 600)), torch.randint(50, (4, 600))) for _ in range(4)), into, loss=loss)


@fault("half-sum", "", each_time=True)
def log_likelihoods_subtracted_in_bf16(into):
    _preferences(into, BF)


@healthy()
def log_likelihoods_subtracted_in_fp32(into):
    _preferences(into, torch.float32)


@healthy(each_time=True)
def masters_whose_gradients_a_loop_collects_in_fp32(into):
    m = _layers().to(BF)
    masters = [nn.Parameter(p.detach().float()) for p in m.parameters()]
    o = adam(masters)
    with watched(m, o, into):
        for i, (x, y) in enumerate(vectors(16)):
            ce(m(x.to(BF)), y).backward()
            for master, p in zip(masters, m.parameters(), strict=True):
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad.float())
                p.grad = None
            if i % 4 == 3:
                o.step()
                o.zero_grad()
                with torch.no_grad():
                    for master, p in zip(masters, m.parameters(), strict=True):
                        p.copy_(master)


def _flat_masters(into, back, rate=0.1):
    m = _layers().to(H)
    weights = list(m.parameters())
    flat = nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in weights]))
    o = torch.optim.SGD([flat], lr=rate, momentum=0.9)
    with watched(m, o, into):
        for i, (x, y) in enumerate(vectors(40)):
            (ce(m(x.half()), y) * 1024.0).backward()
            flat.grad = torch.cat([p.grad.float().reshape(-1) for p in weights]) / 1024.0
            m.zero_grad()
            o.step()
            if back(i):
                start = 0
                for p in weights:
                    p.data.copy_(flat.data[start : start + p.numel()].view_as(p))
                    start += p.numel()


@fault("uncopied-masters", "0.weight", each_time=True)
def flat_masters_never_copied_back(into):
    _flat_masters(into, lambda i: False)


@healthy(each_time=True)
def flat_masters_copied_back_now_and_then(into):
    _flat_masters(into, lambda i: i % 20 == 19)


@healthy()
def flat_masters_at_a_tiny_rate(into):
    _flat_masters(into, lambda i: True, rate=1e-8)


def _offloaded(into, copied):
    m = _layers()
    masters = [p.detach().clone() for p in m.parameters()]
    groups = [{"params": [q for q in masters if q.dim() == d], "weight_decay": 0.1 * (d > 1)} for d in (2, 1)]
    o = adam(groups)
    with watched(m, o, into):
        for x, y in vectors(12):
            with amp(BF):
                loss = ce(m(x), y)
            loss.backward()
            for q, p in zip(masters, m.parameters(), strict=True):
                q.grad, p.grad = p.grad, None
            o.step()
            for q, p in zip(masters, m.parameters(), strict=True):
                if copied or p.dim() == 1:
                    p.data.copy_(q)


@fault("uncopied-masters", "0.weight")
def biases_alone_copied_from_offloaded_weights(into):
    _offloaded(into, False)


@healthy()
def offloaded_weights_copied_back(into):
    _offloaded(into, True)
