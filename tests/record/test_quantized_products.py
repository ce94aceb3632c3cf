"""`audit(…, precision="nvfp4")`: the three products of linear layers on quantized operands, and nothing else."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import RunError, load_run
from amp_core.quantization import RECIPES, find_recipe
from amp_core.record import fake_quantize, watch
from amp_core.record.quantized_products import QuantizedProducts


class Conv1D(nn.Module):
    """GPT-2's layer in transformers: its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def model(middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), middle or nn.Linear(48, 40), nn.LayerNorm(40), nn.Linear(40, 5))


def train(net, into, steps=3, **audits):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(1)
    losses = []
    with watch(net, optimizer, into=into) as rec:
        for step in range(steps):
            x = torch.randn(4, 9, 24)
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if audits and step == steps - 1:
                rec.audit(lambda x=x: net(x).square().mean(), **audits)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_is_that_of_its_quantized_operands(recipe):
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 24), torch.randn(6, 7, 40, requires_grad=True)
    weight, grad = layer.weight.detach(), torch.randn(6, 7, 24)
    with QuantizedProducts(find_recipe(recipe), layer) as products:
        out = layer(x)
    out.backward(grad)

    def held(tensor, axis, kind):
        return fake_quantize(tensor.detach(), recipe, axis=axis, kind=kind)

    rows, tokens = grad.flatten(0, 1), x.flatten(0, 1)
    assert products.reached == {""}
    assert torch.allclose(out, held(x, -1, "activation") @ held(weight, -1, "weight").T + layer.bias, atol=1e-6)
    assert torch.allclose(x.grad, held(grad, -1, "output_grad") @ held(weight, 0, "weight"), atol=1e-5)
    product = held(rows, 0, "output_grad").T @ held(tokens, 0, "activation")
    assert torch.allclose(layer.weight.grad, product, atol=1e-5)
    assert torch.allclose(layer.bias.grad, rows.sum(0), atol=1e-5)


def test_only_the_named_layers_are_quantized_and_each_forward_is_restored():
    net, x = model(), torch.randn(6, 24)
    before = net(x)
    with QuantizedProducts(find_recipe("nvfp4"), net, only=["4"]) as products:
        inner = net[3](net[2](net[1](net[0](x))))
        out = net(x)
    assert products.reached == {"4"} and not torch.equal(out, before)
    assert torch.equal(inner, net[3](net[2](net[1](net[0](x))))) and torch.equal(net(x), before)
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_forward_that_was_patched_before_is_called_and_restored():
    layer, x = nn.Linear(32, 16), torch.randn(8, 32)
    calls = []
    forward = layer.forward
    layer.forward = patched = lambda x: (calls.append(1), forward(x))[1]
    with QuantizedProducts(find_recipe("nvfp4"), layer) as products:
        layer(x)
    assert calls == [1] and products.reached == {""} and layer.forward is patched


def test_conv1d_lies_as_a_linear_layer_does():
    layer, x = Conv1D(32, 16), torch.randn(2, 8, 32)
    same = nn.Linear(32, 16)
    same.weight.data, same.bias.data = layer.weight.detach().T.clone(), layer.bias.detach().clone()
    outs = []
    for module in (layer, same):
        with QuantizedProducts(find_recipe("fp8-block"), module):
            out = module(x)
        out.square().sum().backward()
        outs.append(out.detach())
    assert torch.allclose(*outs, atol=1e-6)
    assert torch.allclose(layer.weight.grad.T, same.weight.grad, atol=1e-5)


def test_an_audit_measures_every_gradient_in_the_recipe(tmp_path):
    net = model(Conv1D(48, 40))
    train(net, tmp_path / "run", precision="mxfp8")
    audits = load_run(tmp_path / "run").audits
    assert set(audits["name"]) == {name for name, _ in net.named_parameters()}
    assert set(audits["precision"]) == {"mxfp8-e4m3"} and set(audits["loss_scale"]) == {1.0}
    weights = audits[audits["name"].isin(["0.weight", "2.weight", "4.weight"])]
    assert weights["rel_error"].between(0.005, 0.6).all() and (weights["cosine"] > 0.8).all()
    assert (audits["loss_change"] != 0).all() and audits["loss_change"].nunique() == 1


def test_fewer_bits_lose_more(tmp_path):
    errors = {}
    for recipe in ("nvfp4", "mxfp8", "fp8-rowwise"):
        train(model(), tmp_path / recipe, precision=recipe)
        audits = load_run(tmp_path / recipe).audits
        errors[recipe] = audits[audits["name"] == "0.weight"]["rel_error"].iloc[0]
    assert errors["nvfp4"] > 2 * errors["mxfp8"] > 0 and errors["nvfp4"] > 2 * errors["fp8-rowwise"] > 0


def test_training_is_the_same_bit_for_bit_with_such_an_audit(tmp_path):
    bare = train(model(), tmp_path / "a")
    net = model()
    assert train(net, tmp_path / "b", precision="nvfp4") == bare
    assert all(not m._forward_hooks and "forward" not in vars(m) for m in net.modules())


def test_layers_under_checkpointing_are_quantized_in_both_forwards(tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
    other = Checkpointed()
    other.inner.load_state_dict(plain.state_dict())
    rows = []
    for name, net in (("plain", plain), ("checkpointed", other)):
        train(net, tmp_path / name, steps=1, precision="nvfp4")
        rows.append(load_run(tmp_path / name).audits["rel_error"].tolist())
    assert rows[0] == rows[1]


def test_a_model_without_linear_layers_is_refused_in_a_sentence(tmp_path):
    net = nn.Sequential(nn.Conv1d(4, 3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=tmp_path / "run") as rec:
        net(torch.randn(2, 4, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(RunError, match=r"^precision='nvfp4' quantizes linear layers, but the closure ran none"):
            rec.audit(lambda: net(torch.randn(2, 4, 8)).sum(), precision="nvfp4")


def test_a_compiled_model_is_refused_in_a_sentence(tmp_path):
    net = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager")
    with pytest.raises(RunError, match=r"^precision='nvfp4' quantizes linear layers, which a compiled graph hides"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with watch(net, optimizer, into=tmp_path / "run") as rec:
            net(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            rec.audit(lambda: net(torch.randn(2, 8)).sum(), precision="nvfp4")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "nvfp5"}, r"^precision='nvfp5' cannot be audited; choose one of fp16, bf16, fp8-tensorwise,"),
        ({"precision": "nvfp4", "loss_scales": (1, 2)}, r"^loss_scales=\(1, 2\) has no effect with precision='nvfp4'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, options, sentence):
    with pytest.raises(RunError, match=sentence):
        train(model(), tmp_path / "run", **options)


def test_a_nan_in_the_batch_gives_nan_and_no_error(tmp_path):
    net = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=tmp_path / "run") as rec:
        net(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        rec.audit(lambda: net(torch.full((2, 16), math.nan)).sum(), precision="nvfp4")
    audits = load_run(tmp_path / "run").audits.set_index("name")
    assert math.isnan(audits.loc["weight", "rel_error"]) and math.isnan(audits.loc["weight", "loss_change"])


def test_outputs_too_are_compared_with_those_of_quantized_products(tmp_path):
    train(model(), tmp_path / "run", precision="nvfp4", forward=True)
    outputs = load_run(tmp_path / "run").forward_audits.set_index("name")
    assert set(outputs["precision"]) == {"nvfp4"}
    assert list(outputs.index) == ["0", "1", "2", "3", "4"]
    assert outputs["rel_error"].between(0.01, 0.5).all()
