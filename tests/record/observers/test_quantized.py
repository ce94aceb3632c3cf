"""The casts of real FP8 and MX training, against the same casts computed outside with the library's own functions."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from amp_core import load_run, watch
from amp_core.quantization import RECIPES
from amp_core.record import fake_quantize, quantized_linear
from amp_core.record.casts.cast import LOSSES, losses_plain
from amp_core.record.observers import time_cap
from amp_core.record.stats.numba.casts import losses_cpu
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.model_changes import changed
from tests.record.sharded import one_process

float8 = pytest.importorskip("torchao.float8")
float8_linear = pytest.importorskip("torchao.float8.float8_linear")

WIDTH = 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 96, bias=False), nn.GELU(), nn.Linear(96, 10))


def converted(recipe: str = "tensorwise", **changes: Any) -> nn.Module:
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)
    made: nn.Module = float8.convert_to_float8_training(
        network(), config=config, module_filter_fn=lambda module, name: name != "4"
    )
    return made


def in_mx() -> nn.Module:
    mx = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    preference = pytest.importorskip("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
    model = network()
    for index in (0, 2):
        plain = model[index]
        made = mx.MXFP8Linear(
            plain.in_features,
            plain.out_features,
            bias=plain.bias is not None,
            kernel_preference=preference.EMULATED,
            wgrad_with_hp=index == 2,
        )
        made.load_state_dict(plain.state_dict())
        model[index] = made
    return model


def train(
    model: nn.Module,
    into: Path | None,
    *,
    steps: int = 4,
    accumulate: int = 1,
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    **options: Any,
) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    recorder = watch(model, optimizer, into=into, **({"every": 2} | options)) if into else None
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            loss = forward(model, torch.randn(32, WIDTH)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recorder:
        recorder.close()
    return losses


class Seen:
    """The operands of each linear layer in the first step, by torch's own hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def on_grad(grad: torch.Tensor) -> None:
            self.tensors.setdefault((name, "output_grad"), grad.clone())

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.tensors.setdefault((name, "activation"), args[0].detach().clone())
            self.tensors.setdefault((f"{name}.weight", "weight"), module.weight.detach().clone())
            if output.requires_grad:
                output.register_hook(on_grad)

        return hook


def losses_of(values: torch.Tensor, held: torch.Tensor) -> dict[str, float]:
    """What a cast of FP32 values loses, in the words of the documentation."""
    wide, after = values.double(), held.double()
    nonzero = int((values != 0).sum())
    error = float((after - wide).square().sum())
    return {
        "nonzero": nonzero,
        "amax": float(values.abs().max()),
        "underflow_frac": int(((held == 0) & (values != 0)).sum()) / nonzero,
        "sq_error": error,
        "rel_error": math.sqrt(error / float(wide.square().sum())),
    }


def agrees(row: "pd.Series[Any]", expected: dict[str, float]) -> bool:
    return all(row[column] == value for column, value in expected.items())


def by_operand(run: Any, step: int = 0) -> dict[tuple[str, str, str | None], "pd.Series[Any]"]:
    frame = run.quantized
    frame = frame[frame["step"] == step]
    keys = zip(frame["name"], frame["kind"], frame["product"], strict=True)
    return {
        (name, kind, product if isinstance(product, str) else None): row
        for (name, kind, product), (_, row) in zip(keys, frame.iterrows(), strict=True)
    }


def test_tensorwise_casts_are_recorded_to_the_last_bit(tmp_path: Path) -> None:
    model = converted()
    seen = Seen(model)
    watched = train(model, tmp_path / "run")
    assert watched == train(converted(), None)
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    rows = by_operand(run)
    assert set(rows) == {(n, k, None) for n, k in seen.tensors if not n.startswith("4")}
    for (name, kind, _), row in rows.items():
        values = seen.tensors[name, kind]
        dtype = torch.float8_e5m2 if kind == "output_grad" else torch.float8_e4m3fn
        dtype = {"output_grad": model[0].config.cast_config_grad_output.target_dtype}.get(kind, dtype)
        cast = float8_linear.hp_tensor_to_float8_dynamic(values, dtype, None)
        expected = losses_of(values, cast._data.float() / cast._scale)
        assert agrees(row, expected | {"scale": float(cast._scale), "scale_max": float(cast._scale)}), (name, kind)
        assert (row["saturated_frac"], row["scale_age"], row["recipe"]) == (0, 0, "fp8-tensorwise")
        assert row["library"] == "torchao" and row["casts"] == 2 and row["calls"] == 1
    assert set(run.quantized["step"]) == {0, 2}


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_casts_are_recorded_for_each_product(recipe: str, tmp_path: Path) -> None:
    model = converted(recipe)
    seen = Seen(model)
    assert train(model, tmp_path / "run", steps=1) == train(converted(recipe), None, steps=1)
    rows = by_operand(load_run(tmp_path / "run"))
    products = {product for _, _, product in rows}
    assert products == (
        {"forward", "input_grad", "weight_grad"} if recipe == "rowwise" else {"forward", "input_grad", None}
    )
    axes = {"forward": -1, "input_grad": {"weight": 0, "output_grad": -1}, "weight_grad": 0}
    for (name, kind, product), row in rows.items():
        values, axis = seen.tensors[name, kind], axes.get(product or "")
        axis = axis[kind] if isinstance(axis, dict) else axis
        made = row["recipe"]
        assert row["block"] == ("tensor" if product is None else "row") == RECIPES[made].block
        held = fake_quantize(values, made, axis=-1 if axis is None else axis)
        assert agrees(row, losses_of(values, held)), (name, kind, product)


def test_mx_casts_are_recorded_for_each_product(tmp_path: Path) -> None:
    model = in_mx()
    seen = Seen(model)
    assert train(model, tmp_path / "run", steps=1) == train(in_mx(), None, steps=1)
    rows = by_operand(load_run(tmp_path / "run"))
    assert {(n, p) for n, k, p in rows if k == "activation"} == {
        ("0", "forward"),
        ("0", "weight_grad"),
        ("2", "forward"),
    }
    for (name, kind, product), row in rows.items():
        values = seen.tensors[name, kind]
        assert (row["recipe"], row["block"]) == ("mxfp8-e4m3-rceil", "32")
        axis = 0 if product == "weight_grad" or (kind, product) == ("weight", "input_grad") else -1
        turned = values.t().contiguous() if axis == 0 else values
        held = fake_quantize(turned, row["recipe"])
        assert agrees(row, losses_of(turned, held)), (name, kind, product)


def test_blockwise_casts_are_recorded_for_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's own layer; its Triton kernels are replaced by torchao's references, as they need a GPU."""
    linear = pytest.importorskip("torchao.prototype.blockwise_fp8_training.linear")
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    by_rows, by_tiles = kernels.torch_blockwise_scale_act_quant_lhs, kernels.torch_blockwise_scale_weight_quant

    def transposed(both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(t.t() for t in both)

    def product(*, mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, **_: Any) -> torch.Tensor:
        return torch.ones(mat_a.shape[0], mat_b.shape[1], dtype=out_dtype)

    name = "triton_fp8_blockwise_"
    for function, reference in {
        "act_quant_lhs": lambda x, block_size: by_rows(x),
        "act_quant_transposed_lhs": lambda x, block_size: by_rows(x.t().contiguous()),
        "act_quant_rhs": lambda x, block_size: transposed(by_rows(x.t().contiguous())),
        "weight_quant_rhs": lambda x, block_size: by_tiles(x),
        "weight_quant_transposed_rhs": lambda x, block_size: transposed(by_tiles(x)),
    }.items():
        monkeypatch.setattr(linear, name + function, reference)
    monkeypatch.setattr(linear, "_run_blockwise_mm", product)
    monkeypatch.setattr(linear, "is_sm_at_least_90", lambda: True)
    torch.manual_seed(0)
    model = nn.Sequential(linear.Float8BlockwiseLinear(128, 256, bias=False, dtype=torch.bfloat16))
    nn.init.normal_(model[0].weight)
    weight = model[0].weight.detach().clone()
    x = torch.randn(128, 128, dtype=torch.bfloat16)
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run", every=1):
        model(x).float().square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    rows = by_operand(run)
    products = {"activation": ("forward", "weight_grad"), "output_grad": ("input_grad", "weight_grad")}
    products["weight"] = ("forward", "input_grad")
    assert set(rows) == {("0.weight" if k == "weight" else "0", k, p) for k, both in products.items() for p in both}
    for key, values, (data, scale) in [
        (("0", "activation", "forward"), x, by_rows(x)),
        (("0", "activation", "weight_grad"), x.t().contiguous(), by_rows(x.t().contiguous())),
        (("0.weight", "weight", "input_grad"), weight, by_tiles(weight)),
    ]:
        rows_of, columns = (s // b for s, b in zip(data.shape, scale.shape, strict=True))
        held = data.float() * scale.repeat_interleave(rows_of, 0).repeat_interleave(columns, 1)
        expected = losses_of(values.float(), held)
        row = rows[key]
        assert row["recipe"] == "fp8-block" and row["block"] == ("128x128" if key[1] == "weight" else "128")
        assert {n: row[n] for n in expected} == pytest.approx(expected, rel=1e-12)


def test_layers_whose_casts_cannot_be_seen_are_counted_by_their_classes(tmp_path: Path) -> None:
    class NVFP4Linear(nn.Linear):
        """Stands in for torchao's, whose kernels need a GPU."""

    model = nn.Sequential(NVFP4Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    train(model, tmp_path / "run", steps=8)
    events = load_run(tmp_path / "run").events
    assert events["kind"].tolist().count("not recorded") or "not recorded" in events["name"].tolist()
    layers = events[events["kind"] == "quantized layers"]
    assert (layers["count"].tolist(), layers["value"].tolist()) == ([1], [0.5])


@pytest.mark.parametrize(("precision", "stochastic"), [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)])
def test_the_engines_own_recipes_are_watched(precision: str, stochastic: bool, tmp_path: Path) -> None:
    def model() -> nn.Module:
        options = {"stochastic_rounding": True, "hadamard": True} if stochastic else {}
        config = TrainConfig(precision=precision, keep_bf16=("4",), **options)
        return changed(network(), config, generator=torch.Generator().manual_seed(0))

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    made = model()
    seen = Seen(made)
    assert train(made, tmp_path / "run", steps=1, forward=forward) == train(model(), None, steps=1, forward=forward)
    rows = by_operand(load_run(tmp_path / "run"))
    assert {(n, k, p) for n, k, p in rows if n.startswith("2")} == {
        ("2", "activation", "forward"),
        ("2", "activation", "weight_grad"),
        ("2.weight", "weight", "forward"),
        ("2.weight", "weight", "input_grad"),
        ("2", "output_grad", "input_grad"),
        ("2", "output_grad", "weight_grad"),
    }
    for (name, kind, product), row in rows.items():
        assert row["library"] == "ampscope"
        if stochastic:
            transformed = product == "weight_grad"
            assert pd.isna(row["underflow_frac"]) == transformed == pd.isna(row["saturated_frac"])
            continue
        values = seen.tensors[name, kind]
        values = values if kind == "weight" else values.bfloat16()
        axis = 0 if product == "weight_grad" or (kind, product) == ("weight", "input_grad") else -1
        held = fake_quantize(values, row["recipe"], axis=axis, kind=kind)
        assert agrees(row, losses_of(values.float(), held)), (name, kind, product)


@pytest.mark.parametrize("precomputed", [False, True])
def test_fsdps_float8_all_gather_is_recorded_with_the_scale_in_use(precomputed: bool, tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = converted(enable_fsdp_float8_all_gather=True)
        fully_shard(made)
        return made

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if precomputed and not hasattr(model, "scaled"):  # once, though the weights change with each step
            model.scaled = True
            float8.precompute_float8_dynamic_scale_for_fsdp(model)
        out: torch.Tensor = model(x)
        return out

    with one_process():
        watched = train(model(), tmp_path / "run", steps=9, forward=forward, every=4)
        assert watched == train(model(), None, steps=9, forward=forward)
    weights = load_run(tmp_path / "run").quantized.query("kind == 'weight'")
    assert set(weights["name"]) == {"0.weight", "2.weight"}
    first, last = (weights[(weights["name"] == "0.weight") & (weights["step"] == step)].iloc[0] for step in (0, 8))
    assert first["casts"] == 1
    if precomputed:
        assert last["scale"] == first["scale"] and last["scale_age"] == 8
        assert last["amax"] * last["scale"] > 448 * (1 + 2**-20) and last["saturated_frac"] > 0
    else:
        assert last["scale"] != first["scale"] and last["scale_age"] == 0 == last["saturated_frac"]


def test_layers_that_are_not_converted_are_listed_with_a_reason(tmp_path: Path) -> None:
    train(converted(), tmp_path / "run", steps=1)
    events = load_run(tmp_path / "run").events
    (whole,) = events[events["kind"] == "quantized layers"].to_dict("records")
    weights = [WIDTH * 128, 128 * 96, 96 * 10]
    assert whole["value"] == sum(weights[:2]) / sum(weights) and (whole["count"], whole["limit"]) == (2, 3)
    (left,) = events[events["kind"] == "not quantized"].to_dict("records")
    assert (left["name"], left["detail"], left["op"], left["count"]) == ("4", "sizes", "Linear", 32)
    assert left["value"] == weights[2] / sum(weights)


def test_casts_of_all_micro_batches_are_counted(tmp_path: Path) -> None:
    train(converted("rowwise"), tmp_path / "run", steps=1, accumulate=3)
    rows = by_operand(load_run(tmp_path / "run"))
    assert {(row["casts"], row["calls"]) for row in rows.values()} == {(3, 3)}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_recorded_once(reentrant: bool, tmp_path: Path) -> None:
    model = converted()
    seen = Seen(model)
    watched = train(Checkpointed(model, reentrant=reentrant), tmp_path / "run", steps=1)
    assert watched == train(Checkpointed(converted(), reentrant=reentrant), None, steps=1)
    rows = by_operand(load_run(tmp_path / "run"))
    operands = {("0", "activation"), ("0", "output_grad"), ("0.weight", "weight")}
    operands |= {(name.replace("0", "2"), kind) for name, kind in operands}
    assert {(name.removeprefix("inner."), kind) for name, kind, _ in rows} == operands
    for (name, kind, _), row in rows.items():
        assert row["amax"] == float(seen.tensors[name.removeprefix("inner."), kind].abs().max())


def test_a_compiled_model_says_that_its_casts_are_not_seen(tmp_path: Path) -> None:
    model = converted()
    model.compile(backend="eager")
    assert train(model, tmp_path / "run", steps=1)
    run = load_run(tmp_path / "run")
    assert run.quantized.empty
    warnings = run.events.loc[run.events["kind"] == "warning", "detail"]
    assert any("quantized: hooks do not reach" in detail for detail in warnings)
    assert run.events.loc[run.events["kind"] == "quantized layers", "count"].item() == 2


@pytest.mark.parametrize("every", [1, 2])
def test_sampled_steps_are_left_out_where_measuring_takes_too_much_of_the_time(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**9))  # each look at the clock takes a second, so that measuring is almost all there is
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time_cap.time, name, lambda: float(next(clock)))
    train(converted(), tmp_path / "run", steps=8, every=every)
    monkeypatch.undo()
    run = load_run(tmp_path / "run")
    events = run.events[run.events["name"] == "quantized"].reset_index(drop=True)
    if every == 1:
        assert sorted(run.quantized["step"].unique()) == list(range(8)) and events.empty
        return
    assert run.quantized["step"].unique().tolist() == [0]
    assert events["kind"].tolist() == ["phase change"] * 2 and events["step"][0] == 2
    assert "1%" in events["detail"][0] and "1 of 4" in events["detail"][1]


def test_nothing_stays_patched(tmp_path: Path) -> None:
    product, own_product = float8_linear.matmul_with_hp_or_float8_args, quantized_linear._QuantizedLinear
    owners = [(product, "forward"), (product, "backward"), (float8_linear, "hp_tensor_to_float8_dynamic")]
    owners += [(own_product, "forward"), (own_product, "backward"), (quantized_linear, "fake_quantize")]
    before = [vars(owner)[name] for owner, name in owners]
    model = converted()
    recorder = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run", every=1)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert vars(float8_linear)["hp_tensor_to_float8_dynamic"] is not before[2]
    recorder.close()
    assert all(vars(owner)[name] is value for (owner, name), value in zip(owners, before, strict=True))


def test_a_failure_of_measuring_never_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cast: Any) -> Any:
        raise ValueError("a cast that cannot be read")

    expected = train(converted(), None)
    monkeypatch.setattr("amp_core.record.observers.quantized.measure_cast", broken)
    assert train(converted(), tmp_path / "run") == expected
    assert any("a cast that cannot be read" in detail for detail in load_run(tmp_path / "run").events["detail"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transformed", [False, True])
def test_the_kernel_computes_what_plain_torch_does(dtype: torch.dtype, transformed: bool) -> None:
    torch.manual_seed(0)
    values = (torch.randn(100, 37) * torch.exp2(torch.randint(-30, 3, (100, 37)))).to(dtype)
    values[0, :4] = torch.tensor([float("inf"), float("nan"), 0.0, -5.0])
    scale = torch.tensor(448.0 / 4.0)  # below the largest: some values saturate
    data = (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    given = values, data / scale, None if transformed else data, 448 * (1 - 2.0**-20)
    plain, compiled = losses_plain(*given), losses_cpu(*given)
    names = dict(zip(LOSSES, zip(plain.tolist(), compiled.tolist(), strict=True), strict=True))
    for mass in ("mass", "lost_mass"):  # shares of these are ratios, and their sums have an order of their own
        one, other = names.pop(mass)
        assert one == pytest.approx(other, rel=1e-12, nan_ok=True)
    assert all(one == other or (one != one and other != other) for one, other in names.values()), names
    assert names["nonzero"][0] == values.numel() - 3 and (transformed or names["saturated"][0] > 0)
