"""A recipe changes the dtype that a model computes in, never the names or values of its parameters."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.model_changes import changed, keep_in_fp32, pad_linears


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 30), nn.ReLU(), nn.Linear(30, 10, bias=False))


def test_an_island_computes_in_fp32_inside_autocast():
    net, x = model(), torch.randn(4, 13)
    dtypes = {}
    for name, module in net.named_children():
        module.register_forward_hook(lambda m, i, out, name=name: dtypes.update({name: out.dtype}))
    keep_in_fp32(net, ["0"])
    with torch.autocast("cpu", dtype=torch.float16):
        net(x)
    assert dtypes == {"0": torch.float32, "1": torch.float32, "2": torch.float16}


def test_an_island_computes_values_beyond_fp16():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.full((2, 4), 6e4)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[1].weight.fill_(1e-6)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not torch.isfinite(net(x)).all()
    keep_in_fp32(net, ["0", "1"])
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.isfinite(net(x)).all()


def test_padding_changes_no_number_and_no_gradient_beyond_rounding():
    plain, padded, x = model(), model(), torch.randn(4, 13)
    pad_linears(padded, 8)
    out = padded(x)
    torch.testing.assert_close(out, plain(x))
    out.square().sum().backward()
    plain(x).square().sum().backward()
    for (name, one), (other_name, other) in zip(plain.named_parameters(), padded.named_parameters(), strict=True):
        assert name == other_name and one.shape == other.shape
        torch.testing.assert_close(one.grad, other.grad)


def test_aligned_sizes_are_unchanged():
    net = nn.Linear(16, 8)
    pad_linears(net, 8)
    assert "forward" not in vars(net)


def test_torchao_converts_the_suitable_layers_to_fp8(monkeypatch):
    calls = {}

    def convert(module, *, module_filter_fn, config):
        calls.update({name: module_filter_fn(part, name) for name, part in module.named_modules() if name})
        return module

    torchao, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    float8.convert_to_float8_training, float8.Float8LinearConfig = convert, lambda emulate: emulate
    monkeypatch.setitem(sys.modules, "torchao", torchao)
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    changed(net, TrainConfig(precision="bf16", fp8=True))
    assert calls == {"0": True, "1": False, "2": False}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"islands": "a", "precision": "fp32"}, "islands has no effect with precision='fp32'"),
        ({"islands": 3}, "islands=3 lists no modules"),
        ({"pad_to": 0}, "pad_to=0 is not possible"),
        ({"fp8": True, "precision": "fp16"}, "fp8=True requires precision='bf16', not 'fp16'"),
    ],
)
def test_an_option_without_effect_is_refused(wrong, message):
    with pytest.raises(RunError) as error:
        TrainConfig(**wrong)
    assert message in str(error.value)


def test_an_unknown_island_is_refused_by_name():
    with pytest.raises(RunError, match=r"islands='nine' is not a module of the model; its first ones are 0, 1, 2"):
        changed(model(), TrainConfig(islands="0,nine"))
