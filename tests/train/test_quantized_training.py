"""FP8, MXFP8 and NVFP4 train: in the numbers of the format, on any device, and so that a resumed run is the same."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_core import RunError, diagnose, load_run
from amp_core.analysis import compare
from amp_core.cli.train import in_words
from amp_core.quantization import RECIPES as QUANTIZATION
from amp_core.record.quantized_linear import Rounding, quantized_linear
from amp_core.settings.combinations import taken
from amp_core.settings.training import RECIPES, TrainConfig
from amp_core.train import train
from amp_core.train.engine import recipes
from amp_core.train.engine.model_changes import changed, layers_to_quantize
from amp_core.train.workloads import build

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantization]


def needs(precision):
    if precision == "fp8":
        pytest.importorskip("torchao")


def run_of(folder, **settings):
    train(TrainConfig(**{"device": "cpu", "steps": 4, "evaluate": False} | settings), folder)
    return load_run(folder)


def losses(folder, **settings):
    return run_of(folder, **settings).steps["loss"].tolist()


def test_the_recipes_of_the_issue_are_there():
    assert QUANTIZED == ["fp8", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("precision", QUANTIZED)
def test_each_recipe_trains_beside_bf16_and_says_that_it_is_emulated(tmp_path, precision):
    needs(precision)
    plain, run = (run_of(tmp_path / p, precision=p, steps=8, trace_ops=2) for p in ("bf16", precision))
    assert (run.head.config["precision"], run.head.config["autocast_dtype"]) == (precision, "bfloat16")
    assert run.head.config["emulated"] is True and plain.head.config["emulated"] is False
    ours, theirs = (r.steps["loss"].tolist() for r in (run, plain))
    assert all(map(math.isfinite, ours)) and ours != theirs
    assert ours[0] == pytest.approx(theirs[0], rel=0.02) and ours[-1] < ours[0]
    # products in FP32 are how emulation works, and no fault of the loop
    assert "autocast-inactive" not in {finding.code for finding in diagnose(run)}
    comparison = compare([plain, run])
    assert comparison.recipes["speed_verdict"].tolist() == ["reference", "emulated"]
    assert math.isnan(comparison.recipes["speed_ratio"][1]) and math.isnan(comparison.table["memory_ratio"][1])
    assert "emulated, so speed and memory are not compared" in comparison.answers[precision]
    assert f"{precision} is emulated: the numerics are valid, times and memory are not" in " ".join(comparison.notes)


def test_the_command_says_that_it_is_emulated(tmp_path):
    config = TrainConfig(precision="mxfp8", device="cpu", steps=2, evaluate=False)
    words = in_words(train(config, tmp_path / "r"))
    assert "emulated: the numerics are valid, times and memory are not" in words


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_a_converted_layer_multiplies_quantized_operands_inside_autocast_alone(precision):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    x, grad = torch.randn(16, 64), torch.randn(16, 32).bfloat16()
    plain = net[0](x)
    changed(net, TrainConfig(precision=precision))
    assert torch.equal(net[0](x), plain)  # e.g. in the FP32 replay of an audit
    weight, bias = (p.detach().clone().requires_grad_() for p in (net[0].weight, net[0].bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net[0](x)
    out.backward(grad)
    expected = quantized_linear(x.bfloat16(), weight, Rounding(QUANTIZATION[RECIPES[precision].quantization]))
    expected = expected + bias.bfloat16()
    expected.backward(grad)
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16
    assert torch.equal(net[0].weight.grad, weight.grad) and torch.equal(net[0].bias.grad, bias.grad)
    assert not torch.equal(weight.grad, grad.float().T @ x)


def test_emulated_fp8_multiplies_what_the_format_holds():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 10))
    x, grad = torch.randn(16, 64), torch.randn(16, 32).bfloat16()
    plain, weight = net[0](x), net[0].weight.detach().clone().requires_grad_()
    net = changed(net, TrainConfig(precision="fp8"))
    assert torch.equal(net[0](x), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net[0](x)
    out.backward(grad)
    expected = quantized_linear(x.bfloat16(), weight, Rounding(QUANTIZATION["fp8-tensorwise"]))
    expected.backward(grad)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(net[0].weight.grad, weight.grad, rtol=1e-2, atol=1e-2)  # torchao's in BF16
    assert not torch.allclose(net[0].weight.grad, grad.float().T @ x, rtol=1e-2, atol=1e-2)


def test_all_linear_layers_convert_but_the_head_and_those_that_are_kept():
    model = build(TrainConfig().resolved()).model
    inside = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "fc", "proj")]
    assert layers_to_quantize(model, None, 32) == inside
    assert layers_to_quantize(model, (), 32) == [*inside, "head"]
    assert layers_to_quantize(model, ("blocks.1", "blocks.0.fc"), 32) == [
        *(name for name in inside[:4] if name != "blocks.0.fc"),
        "head",
    ]
    odd = nn.Sequential(nn.Linear(48, 30), nn.Linear(30, 64), nn.Linear(64, 48), nn.Linear(48, 8))
    assert layers_to_quantize(odd, None, 16) == ["2"] and layers_to_quantize(odd, None, 32) == []


def test_padding_and_islands_go_with_quantized_layers():
    net = nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    x = torch.randn(4, 64)
    net = changed(net, TrainConfig(precision="nvfp4", pad_to=32, islands=("1",)))
    dtypes = []
    for module in net:
        module.register_forward_hook(lambda m, i, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_resumed_run_rounds_as_the_run_would_have(tmp_path):
    settings = {"precision": "nvfp4", "checkpoint_every": 3, "stochastic_rounding": True, "hadamard": True}
    whole = losses(tmp_path / "whole", **settings, steps=7)
    train(TrainConfig(device="cpu", evaluate=False, steps=4, **settings), tmp_path / "parts")
    train(TrainConfig(device="cpu", evaluate=False, steps=7, **settings), tmp_path / "parts", resume=True)
    assert load_run(tmp_path / "parts").steps["loss"].tolist() == whole


def test_each_switch_of_nvfp4_has_an_effect_and_a_seed_repeats_it(tmp_path):
    chosen = [{}, {"stochastic_rounding": True}, {"hadamard": True}, {"stochastic_rounding": True, "hadamard": True}]
    curves = [losses(tmp_path / str(i), precision="nvfp4", **one) for i, one in enumerate(chosen)]
    assert len({tuple(curve) for curve in curves}) == 4
    assert losses(tmp_path / "again", precision="nvfp4", **chosen[3]) == curves[3]
    assert len({curve[0] for curve in curves}) == 1  # forward is the same in all


def test_stochastic_rounding_leaves_the_random_numbers_of_dropout_alone(tmp_path):
    (tmp_path / "task.py").write_text(
        "import torch\n"
        "drawn = []\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)\n"
        "    def forward(self, x):\n"
        "        drawn.append(torch.rand(()).item())\n"
        "        return self.b(self.a(x))\n"
        "def build():\n"
        "    batches = [torch.ones(8, 16)] * 3\n"
        "    return Net(), batches, lambda model, x: (drawn, model(x).float().square().mean())[1]\n"
    )
    seen = []
    for switch in (False, True):
        config = TrainConfig(
            workload=f"{tmp_path}/task.py:build",
            precision="nvfp4",
            stochastic_rounding=switch,
            device="cpu",
            steps=3,
        )
        workload = build(config)
        net = changed(workload.model, config, generator=torch.Generator().manual_seed(1) if switch else None)
        torch.manual_seed(0)
        for batch in workload.batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                workload.loss_fn(net, batch).backward()
        seen.append(torch.rand(3).tolist())
    assert seen[0] == seen[1]


def test_audits_measure_the_quantized_recipe_against_plain_fp32(tmp_path):
    audits = {p: run_of(tmp_path / p, precision=p, steps=2, audit_every=1).audits for p in ("bf16", "nvfp4")}
    errors = {p: a[a["name"] == "blocks.0.fc.weight"]["rel_error"].iloc[0] for p, a in audits.items()}
    assert errors["bf16"] < 0.02 and 0.05 < errors["nvfp4"] < 0.5


@pytest.mark.parametrize(
    ("name", "capability", "emulated"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0", False),
        ("NVIDIA A100-SXM4-80GB", "8.0", True),
        ("AMD Instinct MI300X", "", True),
    ],
)
def test_fp8_is_real_on_gpus_whose_tensor_cores_take_it(monkeypatch, name, capability, emulated):
    gpus = [{"name": name, "capability": capability}]
    monkeypatch.setattr(recipes, "backend_of", lambda device: SimpleNamespace(gpus=lambda: gpus))
    here = {p: recipes.is_emulated(RECIPES[p], torch.device("cuda:0")) for p in ("bf16", *QUANTIZED)}
    assert here == {"bf16": False, "fp8": emulated, "mxfp8": True, "nvfp4": True}


def test_what_one_of_several_precisions_takes_is_left_out_for_the_others():
    given = {"steps": 5, "hadamard": True, "loss_scale": 8, "keep_bf16": "head"}
    assert taken(given, "bf16") == {"steps": 5}
    assert taken(given, "fp16") == {"steps": 5, "loss_scale": 8}
    assert taken(given, "mxfp8") == {"steps": 5, "keep_bf16": "head"}
    assert taken(given, "nvfp4") == {"steps": 5, "hadamard": True, "keep_bf16": "head"}


def test_precision_bf16_with_fp8_is_precision_fp8():
    config = TrainConfig(precision="bf16", fp8=True)
    assert config == TrainConfig(precision="fp8") and config.precision == "fp8"
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "bf16", "hadamard": True}, "hadamard=True requires precision='nvfp4', not 'bf16'"),
        (
            {"precision": "mxfp8", "stochastic_rounding": True},
            "stochastic_rounding=True requires precision='nvfp4', not 'mxfp8'",
        ),
        (
            {"precision": "fp16", "keep_bf16": "head"},
            "keep_bf16='head' has no effect with precision='fp16', which quantizes no layer; choose precision fp8, "
            "mxfp8, nvfp4 or leave it out",
        ),
        ({"precision": "nvfp4", "loss_scale": 8}, "loss_scale=8.0 has no effect with precision='nvfp4'"),
        ({"precision": "nvfp4", "hadamard": 1}, "hadamard=1 is not a switch"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(wrong, message):
    with pytest.raises(RunError) as refused:
        TrainConfig(**wrong)
    assert str(refused.value).startswith(message)


def test_a_layer_to_keep_that_does_not_exist_is_refused():
    with pytest.raises(RunError, match="keep_bf16='hed' is not a module of the model; its first ones are 0, 1"):
        changed(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), TrainConfig(precision="mxfp8", keep_bf16="hed"))


def test_a_model_without_a_layer_to_quantize_is_refused(tmp_path):
    with pytest.raises(RunError) as refused:
        run_of(tmp_path / "r", workload="digits-cnn", precision="mxfp8")
    assert str(refused.value) == (
        "precision='mxfp8' quantizes linear layers with sizes that are multiples of 32, but the model has none (kept "
        "in BF16: the head); choose bf16"
    )


def test_fp8_without_torchao_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RunError) as refused:
        changed(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), TrainConfig(precision="fp8"))
    assert str(refused.value) == (
        "precision='fp8' needs torchao, which is not installed; install the extra fp8, or pip install torchao"
    )
