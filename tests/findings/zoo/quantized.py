"""Faults of FP8 training: conversion, scales, casts. torchao trains for real, emulated on the CPU."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import Loop, case
from tests.record import transformer_engine_stand_in as te
from tests.record.sharded import one_process

WIDTH, STEPS = 64, 12


class Layers(nn.Module):
    """An embedding, two linear layers with a norm between them, and a head."""

    def __init__(self, middle: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.middle = middle if middle is not None else nn.Identity()
        self.down = nn.Linear(2 * WIDTH, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(self.down(self.middle(nn.functional.gelu(self.up(x)))))
        out: torch.Tensor = self.head(x.mean(1))
        return out


def to_float8(
    model: nn.Module, keep: Callable[[str], bool] = lambda name: name == "head", **settings: Any
) -> nn.Module:
    """The model with torchao's Float8Linear, except for the layers that `keep` names."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    made: nn.Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True, **settings),
        module_filter_fn=lambda module, name: (
            not keep(name) and not (module.in_features % 16 or module.out_features % 16)
        ),
    )
    return made


def train(
    into: Path,
    model: nn.Module,
    *,
    steps: int = STEPS,
    micro: int = 1,
    tamper: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, loss: loss,
    after: Callable[[int], None] = lambda step: None,
    lr: float = 1e-3,
    every: int = 1,
) -> None:
    """A loop with FP32 weights and quantized products, of `micro` micro-batches per step."""
    loop = Loop(into, model, dtype=None, options={"every": every}, lr=lr)
    loop.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    source = torch.Generator().manual_seed(1)
    with loop.watched() as rec:
        for step in range(steps):
            for _ in range(micro):
                tokens = torch.randint(32, (8, 6), generator=source)
                loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 8)
                (tamper(step, loss) / micro).backward()
            rec.log(loss=loss)
            loop.step()
            after(step)


def layers(**settings: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(**settings)


@case("unconverted-layers", "down")
def sizes_that_are_no_multiples_of_16(into: Path, faulty: bool) -> None:
    train(into, to_float8(layers(width=72 if faulty else 80)))


@case("unconverted-layers", "up")
def names_that_a_filter_catches(into: Path, faulty: bool) -> None:
    caught = ("head", "up") if faulty else ("head",)
    train(into, to_float8(layers(), lambda name: name in caught))


class Attention(nn.Module):
    """torch's own attention, whose products do not call its linear layer; or one of four linear layers."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        if own:
            self.attention: nn.Module = nn.MultiheadAttention(2 * WIDTH, 4, batch_first=True)
        else:
            self.attention = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.attention, nn.MultiheadAttention):
            out: torch.Tensor = self.attention(x, x, x)[0]
            return out
        assert isinstance(self.attention, nn.ModuleList)
        q, k, v = (layer(x) for layer in list(self.attention)[:3])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        projected: torch.Tensor = self.attention[3](mixed)
        return projected


@case("unconverted-layers", "middle.attention.out_proj")
def a_module_that_uses_the_weight_itself(into: Path, faulty: bool) -> None:
    train(into, to_float8(layers(middle=Attention(own=faulty)), lambda name: "head" in name))


@case("quantized-edge-layers", "head")
def head_in_fp8(into: Path, faulty: bool) -> None:
    model = layers()
    model.head = nn.Linear(WIDTH, 16)
    train(into, to_float8(model, lambda name: not faulty and name == "head"))


class Outliers(nn.Module):
    """Passes x on, and its gradient with one value of each tensor many times larger."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return x
        scale = torch.ones_like(x)
        scale[0, 0, 0] = self.factor
        out: torch.Tensor = _ScaledGradient.apply(x, scale)
        return out


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


@case("e4m3-gradients", "up")
def gradients_in_e4m3(into: Path, faulty: bool) -> None:
    from torchao.float8 import CastConfig

    dtype = torch.float8_e4m3fn if faulty else torch.float8_e5m2
    train(
        into, to_float8(layers(middle=Outliers(2.0**22)), cast_config_grad_output=CastConfig(target_dtype=dtype)), lr=0
    )


@case("quantized-gradient-underflow", "up")
def an_outlier_above_all_gradients(into: Path, faulty: bool) -> None:
    train(into, to_float8(layers(middle=Outliers(2.0**36 if faulty else 2.0**4))), lr=0)


class Bursts(nn.Module):
    """Multiplies x in some steps."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.faulty, self.calls = faulty, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 64 if self.faulty and self.calls % 3 == 0 else x


@case("jumping-scale", "down")
def bursts_of_large_activations(into: Path, faulty: bool) -> None:
    train(into, to_float8(layers(middle=Bursts(faulty=faulty))), lr=1e-4)


@case("stale-amax", ".weight")
def scales_computed_once(into: Path, faulty: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with one_process():
        model = to_float8(layers(), enable_fsdp_float8_all_gather=True)
        fully_shard(model)

        def after(step: int) -> None:
            if step == 0 or not faulty:
                precompute_float8_dynamic_scale_for_fsdp(model)

        train(into, model, after=after, lr=1e-2)


@case("quantized-saturation", "up.weight")
def scales_behind_growing_weights(into: Path, faulty: bool) -> None:
    """Scales computed before the last change of the weights instead of after it."""
    from torch.distributed.fsdp import fully_shard

    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with one_process():
        model = to_float8(layers(), enable_fsdp_float8_all_gather=True)
        fully_shard(model)

        def after(step: int) -> None:
            if faulty:
                precompute_float8_dynamic_scale_for_fsdp(model)
            with torch.no_grad():
                model.up.weight.mul_(1.2)
            if not faulty:
                precompute_float8_dynamic_scale_for_fsdp(model)

        train(into, model, after=after, lr=1e-5)


@case("requantized-weights", "up", benign=True)
def weights_cast_for_each_micro_batch(into: Path, faulty: bool) -> None:
    train(into, to_float8(layers()), micro=4 if faulty else 1)


def by_hand(into: Path, rows: list[dict[str, Any]], *, device: str = "cuda:0", **head: Any) -> None:
    """A run of 20 steps with these rows of `quantized`."""
    config = {"precision": "fp8", "autocast_dtype": "bfloat16", "device": device, "optimizers": ["AdamW"]}
    ranks = sorted({row.get("rank", 0) for row in rows})
    for rank in ranks:
        mine = [{k: v for k, v in row.items() if k != "rank"} for row in rows if row.get("rank", 0) == rank]
        options = {"config": config | head.get("config", {}), "world_size": len(ranks)} if not rank else {"rank": rank}
        with RunWriter(into, **options) as writer:
            steps = list(range(20))
            writer.append("steps", {"step": steps, "loss": [1 / (1 + s) for s in steps], "step_ms": [10.0] * 20})
            writer.append("quantized", {c: [row.get(c) for row in mine] for c in mine[0]})


def cast_rows(name: str, k: int, n: int, m: int = 4096, **more: Any) -> list[dict[str, Any]]:
    """The three operands of one layer with dynamic scaling by tensor, in two sampled steps."""
    row = {"library": "torchao", "recipe": "fp8-tensorwise", "block": "tensor", "dtype": "bfloat16", "scale_age": 0}
    row |= {"saturated_frac": 0.0, "underflow_frac": 0.0, "underflow_mass_frac": 0.0, "rel_error": 0.03, "casts": 2}
    operands = {"weight": (f"{name}.weight", k * n), "activation": (name, m * k), "output_grad": (name, m * n)}
    rows = []
    for step in (0, 10):
        for kind, (of, numel) in operands.items():
            element, top = ("fp8-e5m2", 57344.0) if kind == "output_grad" else ("fp8-e4m3", 448.0)
            own = {"step": step, "name": of, "kind": kind, "product": None, "element": element, "numel": numel}
            own |= {"nonzero": numel, "amax": 2.0, "scale": top / 2, "scale_max": top / 2, "sq_error": 1.0, "calls": 1}
            rows.append(row | own | more)
    return rows


@case("small-quantized-layers", "blocks.0.up")
def small_products_on_a_gpu(into: Path, faulty: bool) -> None:
    width = 512 if faulty else 8192
    by_hand(into, [*cast_rows("blocks.0.up", width, width), *cast_rows("blocks.0.down", width, width)])


@case("rank-amax-mismatch", "blocks.0.up")
def ranks_with_scales_of_their_own(into: Path, faulty: bool) -> None:
    rows = []
    for rank in (0, 1):
        scale = 448 / (3.0 if rank and faulty else 2.0)
        mine = cast_rows("blocks.0.up", 8192, 8192, rank=rank)
        rows += [row | {"scale": scale, "scale_max": scale} if row["kind"] == "weight" else row for row in mine]
    by_hand(into, rows)


@case("missing-quantizer-state", "1")
def resumed_without_amax_histories(into: Path, faulty: bool) -> None:
    """A checkpoint of weights and optimizer, with or without the modules' extra state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), te.Linear(16, 32), te.Linear(32, 16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(1)

    def step() -> torch.Tensor:
        x = torch.randn(16, 16, generator=source)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in list(model)[1:3]:
            layer.update()
        return loss

    for _ in range(4):
        step()
    if faulty:
        for layer, (inputs, outputs) in zip(list(model)[1:3], ((16, 32), (32, 16)), strict=True):
            layer.fp8_meta = te.Linear(inputs, outputs).fp8_meta
    with Loop(into, model, dtype=None, optimizer=optimizer, options={"every": 2}).watched() as rec:
        for _ in range(STEPS):
            rec.log(loss=step())
