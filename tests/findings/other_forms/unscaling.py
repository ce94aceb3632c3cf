"""Gradients that are unscaled twice, sums by index with a hub, masks and fresh scalers, in forms that the zoo lacks."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, adam, amp, bf16, scaled_backward, scaler, step, watched
from tests.findings.other_forms.models import GPT, Net, tokens


def _accumulated(into, divide):
    """`divide(m, s)` is called after each micro-batch."""
    m = GPT()
    o, s = (adam(m), scaler(2.0**12))
    with watched(m, o, into, s):
        for i, t in enumerate(tokens(24)):
            scaled_backward(m, t, s, of=3)
            divide(m, s)
            if i % 3 == 2:
                step(o, s)


@fault("unscale-per-microbatch", "gradients", each_time=True)
def gradients_divided_by_the_scale_and_by_the_scaler(into):
    def divide(m, s):
        for p in m.parameters():
            p.grad /= s.get_scale()

    _accumulated(into, divide)


def _clipped(into, divide):
    """`divide(m, s)` is called after `unscale_`, before a clip."""
    m = GPT()
    o, s = (adam(m), scaler(2.0**12))
    with watched(m, o, into, s):
        for t in tokens(12):
            scaled_backward(m, t, s)
            s.unscale_(o)
            divide(m, s)
            nn.utils.clip_grad_norm_(m.parameters(), 10.0)
            step(o, s)


@fault("unscale-per-microbatch", "gradients")
def gradients_divided_again_after_unscale(into):
    def divide(m, s):
        for p in m.parameters():
            p.grad.div_(s.get_scale())

    _clipped(into, divide)


@healthy()
def gradients_averaged_after_unscale(into):
    _clipped(into, lambda m, s: torch._foreach_div_([p.grad for p in m.parameters()], 8.0))


def _guarded(into, limit, unscales):
    """A guard that drops batches whose gradients have a norm above `limit`."""
    m = GPT()
    o, s = (adam(m), scaler(2.0**12))
    with watched(m, o, into, s):
        for t in tokens(40):
            o.zero_grad()
            scaled_backward(m, t, s)
            if unscales:
                s.unscale_(o)
            if torch.stack([p.grad.norm() for p in m.parameters()]).norm() < limit:
                s.step(o)
            elif not unscales:
                continue
            s.update()


@fault("frequent-skips", "gradients")
def guard_that_reads_scaled_gradients(into):
    _guarded(into, 3500.0, unscales=False)


@fault("recording-incomplete", "steps")
def guard_that_scaled_gradients_never_pass(into):
    _guarded(into, 20.0, unscales=False)


@healthy()
def guard_that_reads_unscaled_gradients(into):
    _guarded(into, 20.0, unscales=True)


@healthy()
def scale_that_is_only_logged(into):
    _accumulated(into, lambda m, s: s.get_scale())


@healthy()
def gradients_divided_by_the_number_of_tokens(into):
    def divide(m, s):
        torch._foreach_div_([p.grad for p in m.parameters()], 2.0)
        s.get_scale()

    _accumulated(into, divide)


def _star(into, dtype):
    """Every second node of a graph sends to node 0."""
    edges = torch.stack([torch.arange(2000), torch.where(torch.arange(2000) % 2 == 0, 0, torch.arange(2000))])

    def graph(m, x):
        h = F.relu(m.a(x)).to(dtype)
        index = edges[1, :, None].expand(-1, h.shape[1])
        return m.b(torch.zeros_like(h).scatter_add_(0, index, h[edges[0]]).float())

    m = Net(graph, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    data = ((torch.randn(2000, 8), torch.randint(8, (2000,))) for _ in range(3))
    bf16(m, data, into)


@fault("half-sum", each_time=True)
def hub_of_a_graph_in_bf16(into):
    _star(into, BF)


@healthy()
def hub_of_a_graph_in_fp32(into):
    _star(into, torch.float32)


@fault("half-sum", each_time=True)
def segments_summed_by_index_put(into):
    def pooled(m, x):
        h = m.a(x)
        segments = torch.randint(3, (len(x),))
        return m.b(torch.zeros(3, 16, dtype=h.dtype).index_put((segments,), h, accumulate=True) / 1000)

    m = Net(pooled, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    bf16(m, ((torch.rand(3000, 8), torch.randint(8, (3,))) for _ in range(3)), into)


@healthy()
def rows_replaced_by_index_put(into):
    def shuffled(m, x):
        h = m.a(x)
        return m.b(torch.zeros(len(x), 16, dtype=h.dtype).index_put((torch.zeros(len(x), dtype=torch.long),), h))

    m = Net(shuffled, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    bf16(m, ((torch.rand(600, 8), torch.randint(8, (600,))) for _ in range(3)), into)


@fault("fully-masked-row", each_time=True)
def empty_row_of_scores_from_the_first_layer(into):
    """The scores' layer gets the data themselves, so autograd does not save its weight."""

    def chosen(m, x, mask):
        scores = torch.where(mask, m.a(x), float("-inf"))
        return m.b(scores.softmax(-1).float())

    m = Net(chosen, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for i in range(8):
            mask = torch.ones(4, 8, dtype=torch.bool)
            mask[2] = i % 3 != 1
            with amp():
                value = F.cross_entropy(m(torch.randn(4, 8), mask).float(), torch.randint(8, (4,)))
            s.scale(value).backward()
            step(o, s)


@fault("scaler-state-not-restored", "GradScaler")
def resumed_with_another_initial_scale(into):
    m = GPT()
    o = adam(m)
    for s, more in ((scaler(2.0**8), {}), (scaler(2.0**16), {"resume": True})):
        with watched(m, o, into, s, **more):
            for t in tokens(6):
                scaled_backward(m, t, s)
                step(o, s)


@healthy()
def resumed_with_a_scale_that_had_just_grown(into):
    m = GPT()
    o, s = (adam(m), scaler(2.0**8, growth_interval=3))
    with watched(m, o, into, s):
        for t in tokens(6):
            scaled_backward(m, t, s)
            step(o, s)
    restored = scaler(2.0**16, growth_interval=3)
    restored.load_state_dict(s.state_dict())
    with watched(m, o, into, restored, resume=True):
        for t in tokens(6):
            scaled_backward(m, t, restored)
            step(o, restored)


@healthy(each_time=True)
def spectral_norm_with_small_batches(into):
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 8)]
    m = nn.Sequential(*layers)
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for _ in range(8):
            with amp():
                value = F.cross_entropy(m(torch.randn(3, 16)).float(), torch.randint(8, (3,)))
            s.scale(value).backward()
            step(o, s)


def _overflowing(into, clear):
    """FP16 from a loss scale that overflows at first; `clear(o, made)` is called after each step."""
    m = GPT()
    o, s = (adam(m), scaler(2.0**28))
    with watched(m, o, into, s):
        for t in tokens(20):
            scaled_backward(m, t, s)
            before = s.get_scale()
            s.step(o)
            s.update()
            clear(o, s.get_scale() >= before)


@fault("unscale-per-microbatch", "zero_grad", each_time=True)
def gradients_kept_after_a_skipped_step(into):
    _overflowing(into, lambda o, made: o.zero_grad() if made else None)


@healthy(each_time=True)
def gradients_cleared_after_skipped_steps_too(into):
    _overflowing(into, lambda o, made: o.zero_grad(set_to_none=not made))


@healthy(each_time=True)
def gradients_set_to_zero_through_their_data(into):
    def clear(o, made):
        for p in o.param_groups[0]["params"]:
            p.grad.data.zero_()

    _overflowing(into, clear)


def _validated(into, cast):
    """`cast(m)` is the model that a validation after five steps runs."""
    m = GPT()
    o = adam(m)
    with contextlib.suppress(RuntimeError), watched(m, o, into):
        for i, t in enumerate(tokens(8)):
            if i == 5:
                with torch.no_grad():
                    cast(m)(t[:, :-1])
            with amp(BF):
                value = F.cross_entropy(m(t[:, :-1]).float().flatten(0, 1), t[:, 1:].flatten())
            value.backward()
            step(o)


@fault("custom-function-dtype", "optimizer.step", each_time=True)
def model_cast_by_its_validation(into):
    _validated(into, lambda m: m.to(BF))


@healthy(each_time=True)
def copy_of_the_model_cast_by_its_validation(into):
    _validated(into, lambda m: copy.deepcopy(m).to(BF))
