"""Faults of training in 8 bits, in forms that the zoo does not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault
from tests.findings.other_forms.loops import adam, step, watched
from tests.findings.zoo.quantized import by_hand, cast_rows, to_float8
from tests.record import transformer_engine_stand_in as te
from tests.record.sharded import one_process

WIDTH = 64


class Residual(nn.Module):
    """A stem, two residual layers, and a head. `between(x)` changes what flows between the two."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.stem, self.a, self.b, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x):
        h = F.silu(self.stem(x))
        h = h + self.between(self.a(h))
        return self.head(h + self.b(h))


def inner(name):
    return name in ("stem", "head")


def regress(into, m, steps=9, micro=1, lr=1e-3, weights=None, before=None):
    """Learns to give back its input; `weights`: of the samples, `before(i)` comes before each step's forward."""
    o = adam(m, lr, foreach=False)
    source = torch.Generator().manual_seed(2)
    with watched(m, o, into, every=1):
        for i in range(steps):
            if before:
                before(i)
            for _ in range(micro):
                x = torch.randn(16, WIDTH, generator=source)
                errors = (m(x) - x).square().mean(-1) / micro
                (errors.mean() if weights is None else (errors * weights).sum()).backward()
            step(o)


@fault("quantized-edge-layers", "head")
def every_layer_converted(into):
    regress(into, to_float8(Residual(), keep=lambda name: False))


@fault("quantized-edge-layers", "stem")
def first_layer_converted(into):
    regress(into, to_float8(Residual(), keep=lambda name: name == "head"))


@fault("quantized-gradient-underflow")
def one_sample_with_all_the_weight(into):
    weights = torch.full((16,), 1e-9)
    weights[0] = 1.0
    regress(into, to_float8(Residual(), keep=inner), lr=0.0, weights=weights)


@fault("quantized-gradient-underflow")
def importance_weights_over_many_powers(into):
    regress(into, to_float8(Residual(), keep=inner), lr=0.0, weights=2.0 ** -torch.arange(0.0, 64, 4))


def _narrow_gradients(into, **options):
    from torchao.float8 import CastConfig

    cast = CastConfig(target_dtype=torch.float8_e4m3fn)
    regress(into, to_float8(Residual(), keep=inner, cast_config_grad_output=cast), lr=0.0, **options)


@fault("e4m3-gradients")
def gradients_in_e4m3_with_a_dominant_sample(into):
    pytest.importorskip("torchao")
    weights = torch.full((16,), 2.0**-20)
    weights[0] = 1.0
    _narrow_gradients(into, weights=weights)


@fault("e4m3-gradients")
def gradients_in_e4m3_over_many_powers(into):
    pytest.importorskip("torchao")
    _narrow_gradients(into, weights=2.0 ** -torch.arange(0.0, 32, 2))


@fault("jumping-scale", "a")
def batches_of_two_magnitudes(into):
    m = Residual()
    regress(into, to_float8(m, keep=inner), steps=12, lr=1e-5, before=lambda i: _scale_bias(m, i))


def _scale_bias(m, i):
    """Every second step, one large activation."""
    with torch.no_grad():
        m.stem.bias[0] = 200.0 if i % 2 else 0.0


@fault("jumping-scale", "a")
def rare_large_batches(into):
    m = Residual()
    regress(into, to_float8(m, keep=inner), steps=15, lr=1e-5, before=lambda i: _scale_bias(m, i % 5 == 4))


def _gathered_in_float8(into, lr, after_write):
    """FSDP2's all-gather in FP8 with precomputed scales; `after_write(i, m, compute)` decides when."""
    pytest.importorskip("torchao")
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with one_process():
        m = to_float8(Residual(), keep=inner, enable_fsdp_float8_all_gather=True)
        fully_shard(m)
        regress(into, m, lr=lr, before=lambda i: after_write(i, m, lambda: precompute_float8_dynamic_scale_for_fsdp(m)))


@fault("stale-amax", ".weight")
def scales_computed_every_fifth_step(into):
    _gathered_in_float8(into, 1e-2, lambda i, m, compute: compute() if i in (1, 6) else None)


@fault("stale-amax", ".weight")
def scales_computed_in_the_first_steps_alone(into):
    _gathered_in_float8(into, 1e-2, lambda i, m, compute: compute() if i in (1, 2) else None)


def _grow(m, factor):
    with torch.no_grad():
        m.a.weight.mul_(factor)


@fault("quantized-saturation", "a.weight")
def weights_rescaled_after_their_scale(into):
    def computed(i, m, compute):
        if i:
            compute()
            _grow(m, 1.3)

    _gathered_in_float8(into, 1e-5, computed)


@fault("quantized-saturation", "a.weight")
def normalisation_undone_after_the_scales(into):
    def computed(i, m, compute):
        if i:
            _grow(m, 0.25)
            compute()
            _grow(m, 4.0)

    _gathered_in_float8(into, 1e-5, computed)


@fault("requantized-weights", "a")
def weights_cast_for_two_micro_batches(into):
    regress(into, to_float8(Residual(), keep=inner), micro=2)


@fault("requantized-weights", "b")
def one_layer_cast_for_three_micro_batches(into):
    regress(into, to_float8(Residual(), keep=lambda name: name != "b"), micro=3)


@fault("small-quantized-layers")
def small_products_with_a_scale_per_row(into):
    rows = [r | {"recipe": "fp8-rowwise", "block": "row"} for r in cast_rows("mlp.fc1", 1024, 4096)]
    by_hand(into, rows)


@fault("small-quantized-layers", "experts.0.up")
def many_small_experts(into):
    names = [f"experts.{i}.{part}" for i in range(4) for part in ("up", "down")]
    by_hand(into, [row for name in names for row in cast_rows(name, 768, 768)])


@fault("rank-amax-mismatch")
def delayed_scales_of_activations_drift(into):
    rows = []
    for rank in (0, 1):
        for row in cast_rows("decoder.proj", 8192, 8192, rank=rank):
            delayed = row | {"recipe": "fp8-delayed", "library": "transformer-engine", "scale_age": 1}
            if row["kind"] == "activation" and rank:
                delayed |= {"scale": 100.0, "scale_max": 100.0}
            rows.append(delayed)
    by_hand(into, rows)


@fault("rank-amax-mismatch", "experts.0.up")
def third_rank_with_a_scale_of_its_own(into):
    rows = []
    for rank in range(3):
        for row in cast_rows("experts.0.up", 8192, 8192, rank=rank):
            own = {"scale": 64.0, "scale_max": 64.0} if rank == 2 and row["kind"] == "weight" else {}
            rows.append(row | own)
    by_hand(into, rows)


def _resumed(into, m, quantized, optimizer):
    """Trains, replaces the states of the quantizers by new ones, and goes on, watched."""
    source = torch.Generator().manual_seed(1)

    def one():
        x = torch.randn(16, 16, generator=source)
        F.mse_loss(m(x), x[:, :8]).backward()
        step(optimizer)
        for layer in quantized:
            layer.update()

    for _ in range(4):
        one()
    for layer in quantized:
        layer.fp8_meta = te.Linear(layer.weight.shape[1], layer.weight.shape[0]).fp8_meta
    with watched(m, optimizer, into, every=2):
        for _ in range(8):
            one()


@fault("missing-quantizer-state", "1")
def one_layer_resumed_without_its_history(into):
    m = nn.Sequential(nn.Linear(16, 16), te.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    _resumed(into, m, [m[1]], torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9))


@fault("missing-quantizer-state", "up")
def residual_layers_resumed_without_histories(into):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.out = (te.Linear(16, 32), te.Linear(32, 16), nn.Linear(16, 8))

        def forward(self, x):
            return self.out(x + self.down(F.gelu(self.up(x))))

    m = Block()
    _resumed(into, m, [m.up, m.down], torch.optim.Adam(m.parameters(), lr=1e-3))
