"""Predictions for quantization recipes, from recorded blocks, beside really quantized tensors."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import RunError, load_run
from amp_core.analysis import what_if
from amp_core.analysis.numerics.quantized import product_errors
from amp_core.quantization import OPERANDS, RECIPES
from amp_core.record import fake_quantize, watch
from tests.analysis.numerics.test_what_if import at, row, run_of

BARS = {torch.float32: 0.001, torch.bfloat16: 0.002}
EXACT = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4-e2m1", "mxint8", "nvfp4", "nvfp4-2d")
EXACT += ("fp8-tensorwise", "fp8-rowwise", "fp8-block")
STEPS = 6


def recorded(folder, dtype):
    """A trained network's run, and its operands on the last step by name and kind."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    operands = {}
    with watch(net, optimizer, into=folder, every=1, blocks=True):
        for _ in range(STEPS):
            x = torch.exp(torch.randn(8, 40, 64))
            handles = []
            for name in ("0", "2", "4"):
                layer = net.get_submodule(name)
                operands[f"{name}.weight", "weight"] = layer.weight.detach().clone()
                handles.append(layer.register_forward_hook(keeping(operands, name)))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x).float().flatten(0, 1), torch.randint(10, (320,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for handle in handles:
                handle.remove()
    return load_run(folder), operands


def keeping(operands, name):
    def hook(module, args, output):
        operands[name, "activation"] = args[0].detach().flatten(0, -2)
        output.register_hook(lambda grad: operands.__setitem__((name, "output_grad"), grad.flatten(0, -2).clone()))

    return hook


@pytest.mark.parametrize("dtype", BARS, ids=["FP32", "BF16"])
def test_predictions_agree_with_really_quantized_operands(tmp_path, dtype):
    run, operands = recorded(tmp_path / "run", dtype)
    frame = what_if(run, tuple(RECIPES), step=STEPS - 1).set_index(["name", "kind", "product", "format"])
    assert len(operands) == 9 and len(frame) == 9 * 2 * len(RECIPES)
    errors = []
    for (name, kind), tensor in operands.items():
        values = tensor.float()
        nonzero = values != 0
        for product, axis in zip(OPERANDS[kind], (-1, 0), strict=True):
            for recipe in EXACT:
                held = fake_quantize(tensor, recipe, axis=axis, kind=kind)
                predicted = frame.loc[name, kind, product, recipe]
                lost = (held == 0) & nonzero
                assert predicted["underflow_frac"] == pytest.approx(float(lost.sum() / nonzero.sum()), abs=BARS[dtype])
                assert predicted["underflow_mass_frac"] == pytest.approx(
                    float(values[lost].abs().sum() / values.abs().sum()), abs=0.02
                )
                measured = 20 * np.log10(float((held - values).norm() / values.norm()))
                errors.append(abs(predicted["rel_error_db"] + measured))
    assert np.mean(np.array(errors) < 0.5) >= 0.9


def test_what_saturates_is_predicted(tmp_path):
    run, operands = recorded(tmp_path / "run", torch.float32)
    frame = what_if(run, ("mxfp4", "mxfp8-e4m3", "nvfp4"), step=STEPS - 1, kinds="weight")
    for name, largest in (("mxfp4-e2m1", 1.5), ("mxfp8-e4m3", 1.75)):
        blocks = operands["0.weight", "weight"].view(-1, 32).abs()
        scale = 2.0 ** (torch.frexp(blocks.amax(1, keepdim=True)).exponent - 1)
        beyond = float((blocks / scale > largest).float().mean())
        predicted = at(frame, name="0.weight", product="forward", format=name)
        assert predicted.saturated_frac == pytest.approx(beyond, abs=1e-6) and beyond > 0


def test_errors_of_operands_add_up_to_those_of_products(tmp_path):
    run, operands = recorded(tmp_path / "run", torch.float32)
    frame = what_if(run, ("mxfp4", "mxfp8-e4m3"), step=STEPS - 1)
    products = product_errors(frame).set_index(["name", "product", "format"])
    weight, inputs = operands["2.weight", "weight"], operands["2", "activation"]
    exact = inputs @ weight.T
    for name in ("mxfp4-e2m1", "mxfp8-e4m3"):
        held = fake_quantize(inputs, name) @ fake_quantize(weight, name).T
        measured = float((held - exact).norm() / exact.norm())
        predicted = products.loc[("2", "forward", name), "rel_error"]
        assert 0.4 < measured / predicted < 1.6
    assert set(products.index.get_level_values("product")) == {"forward", "input_grad", "weight_grad"}


def test_formats_and_recipes_stand_in_one_frame(tmp_path):
    run, _ = recorded(tmp_path / "run", torch.float32)
    frame = what_if(run, ("fp16", "nvfp4"), (0, 16))
    assert set(frame["format"]) == {"fp16", "nvfp4"} and (frame[frame["format"] == "nvfp4"]["log2_scale"] == 0).all()
    assert frame[frame["format"] == "fp16"]["rel_error"].isna().all()
    assert set(frame[frame["format"] == "nvfp4"]["kind"]) == set(OPERANDS)
    assert at(frame[frame["kind"] == "weight"], name="0.weight", product="forward").scaling == RECIPES["nvfp4"].scaling
    assert what_if(run, "nvfp4", kinds=("output_grad",))["kind"].unique().tolist() == ["output_grad"]
    assert what_if(run, "nvfp4", kinds=("weight_grad",)).empty


def test_all_steps_together_or_one(tmp_path):
    run, _ = recorded(tmp_path / "run", torch.float32)
    each = [what_if(run, "mxfp4", step=step, kinds=("weight",)) for step in range(STEPS)]
    together = what_if(run, "mxfp4", kinds=("weight",))
    assert len(together) == len(each[0]) == 6
    mean = np.mean([frame["underflow_frac"].to_numpy() for frame in each], axis=0)
    assert np.allclose(together["underflow_frac"], mean)
    assert what_if(run, "mxfp4", step=-1).empty


def test_delayed_scaling_saturates_where_the_amax_grows(tmp_path):
    net = nn.Sequential(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    torch.manual_seed(0)
    with watch(net, optimizer, into=tmp_path / "run", every=1, blocks=True):
        for factor in (1.0, 4.0, 1.0):
            net(factor * torch.rand(32, 16)).sum().backward()
            optimizer.step()
    run = load_run(tmp_path / "run")
    shares = [
        at(what_if(run, "fp8-delayed", step=step, kinds="activation"), product="forward").saturated_frac
        for step in range(3)
    ]
    assert shares[0] == shares[2] == 0.0 and shares[1] == pytest.approx(0.75, abs=0.05)


def test_a_recipe_that_is_added_is_recorded_and_predicted(tmp_path, monkeypatch):
    own = dataclasses.replace(RECIPES["mxfp4-e2m1"], name="mxfp4-64", block=64, aliases=())
    monkeypatch.setitem(RECIPES, own.name, own)
    run, operands = recorded(tmp_path / "run", torch.float32)
    predicted = at(what_if(run, "mxfp4-64", step=STEPS - 1, kinds="weight"), name="2.weight", product="forward")
    weight = operands["2.weight", "weight"]
    held = fake_quantize(weight, "mxfp4-64")
    assert predicted.underflow_frac == pytest.approx(float(((held == 0) & (weight != 0)).float().mean()), abs=1e-6)


def test_a_run_without_these_blocks_says_what_is_missing(tmp_path, monkeypatch):
    bare = run_of(tmp_path / "bare", [row("w", [5], 0)])
    for name, per in (("nvfp4", "block of 16 values"), ("fp8-rowwise", "row"), ("fp8-tensorwise", "tensor")):
        with pytest.raises(
            RunError, match=rf"^format='{name}' has a scale per {per}, but the run was recorded without blocks; record"
        ):
            what_if(bare, ("fp16", name))
    run, _ = recorded(tmp_path / "run", torch.float32)
    own = dataclasses.replace(RECIPES["mxfp4-e2m1"], name="mxfp4-64", block=64, aliases=())
    monkeypatch.setitem(RECIPES, own.name, own)
    with pytest.raises(
        RunError, match=r"^format='mxfp4-64' .* recorded blocks of 128, 128x128, 16, .*; record it again"
    ):
        what_if(run, "mxfp4-64")
    tiled = dataclasses.replace(RECIPES["fp8-block"], name="fp8-64", block=64)  # its weights' tiles were recorded
    monkeypatch.setitem(RECIPES, tiled.name, tiled)
    with pytest.raises(RunError, match=r"^format='fp8-64' has a scale per block of 64 values, but the run recorded"):
        what_if(run, ["mxfp8", "fp8-64"])


def test_fp8_is_scaled_by_its_largest_value_over_amax_or_by_a_power_of_two(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [400] * 30, -40, absmax=1.25 * 2.0**-11)])
    exact = at(what_if(run, "fp8-e4m3", 0), name="w")
    power = at(what_if(run, "fp8-e4m3", 0, scaling="tensor-pow2"), name="w")
    assert (exact.scaling, power.scaling) == ("tensor", "tensor-pow2")
    assert exact.own_scale == 448 / (1.25 * 2.0**-11) and power.own_scale == 2.0**19
    assert exact.own_log2_scale == power.own_log2_scale == 19
    # 448 / amax is 1.4 times the power of two, so 4/7 of an octave come up into the last that does not underflow.
    assert power.underflow_frac == pytest.approx(11 / 30)
    assert exact.underflow_frac == pytest.approx((11 - (2 - 2 / 1.4)) / 30)
    assert exact.overflow_frac == power.overflow_frac == 0.0
