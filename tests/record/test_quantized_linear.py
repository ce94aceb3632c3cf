"""The three products of a linear layer multiply quantized operands, each along its own contraction."""

import math

import pytest
import torch

from amp_core.quantization import RECIPES
from amp_core.record.fake_quantize import fake_quantize
from amp_core.record.quantized_linear import Rounding, quantized_linear

TOKENS, INPUTS, OUTPUTS = 40, 64, 96


def operands(dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS // 2, INPUTS, generator=random) * torch.logspace(-2, 2, INPUTS)
    weight, grad = (torch.randn(*size, generator=random) for size in ((OUTPUTS, INPUTS), (2, TOKENS // 2, OUTPUTS)))
    return x.to(dtype).requires_grad_(), weight.requires_grad_(), grad.to(dtype)


def mxfp8(matrix):
    """E4M3 with a power-of-two scale for each 32 values of a row, block by block, after OCP MX 1.0."""
    rows = []
    for row in matrix.tolist():
        held = []
        for start in range(0, len(row), 32):
            block = torch.tensor(row[start : start + 32])
            scale = 2.0 ** (math.floor(math.log2(block.abs().max())) - 8)
            held.append((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        rows.append(torch.cat(held))
    return torch.stack(rows)


def test_forward_and_both_backward_products_are_those_of_a_reference_written_out():
    x, weight, grad = operands()
    y = quantized_linear(x, weight, Rounding(RECIPES["mxfp8-e4m3"]))
    y.backward(grad)
    tokens, rows, w = x.detach().reshape(-1, INPUTS), grad.reshape(-1, OUTPUTS), weight.detach()
    assert torch.equal(y.reshape(-1, OUTPUTS), mxfp8(tokens) @ mxfp8(w).T)
    assert torch.equal(x.grad.reshape(-1, INPUTS), mxfp8(rows) @ mxfp8(w.T).T)
    assert torch.equal(weight.grad, mxfp8(rows.T) @ mxfp8(tokens.T).T)
    assert not torch.allclose(weight.grad, rows.T @ tokens, rtol=1e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_quantizes_each_operand_by_its_kind(name):
    x, weight, grad = operands()
    quantized_linear(x, weight, Rounding(RECIPES[name])).backward(grad)
    rows, tokens = grad.reshape(-1, OUTPUTS), x.detach().reshape(-1, INPUTS)
    held = fake_quantize(rows, name, axis=0, kind="output_grad"), fake_quantize(tokens, name, axis=0)
    torch.testing.assert_close(weight.grad, held[0].T @ held[1])
    held = fake_quantize(rows, name, kind="output_grad"), fake_quantize(weight, name, axis=0, kind="weight")
    torch.testing.assert_close(x.grad.reshape(-1, INPUTS), held[0] @ held[1])


def test_results_have_the_dtypes_of_the_operands_and_are_multiplied_in_fp32_under_autocast():
    x, weight, grad = operands(torch.bfloat16)
    outside = quantized_linear(x, weight, Rounding(RECIPES["nvfp4"]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = quantized_linear(x, weight, Rounding(RECIPES["nvfp4"]))
        inside.backward(grad)
    assert torch.equal(inside, outside)
    assert (inside.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_stochastic_rounding_is_of_output_gradients_alone_and_right_in_the_mean():
    x, weight, grad = operands()
    plain = quantized_linear(x, weight, Rounding(RECIPES["nvfp4"]))
    plain.backward(grad)
    nearest, sums = x.grad.clone(), torch.zeros_like(x)
    for seed in range(200):
        random = torch.Generator().manual_seed(seed)
        y = quantized_linear(x, weight, Rounding(RECIPES["nvfp4"], stochastic=True, generator=random))
        assert torch.equal(y, plain)
        x.grad = None
        y.backward(grad)
        sums += x.grad
    exact = grad @ fake_quantize(weight, "nvfp4", axis=0, kind="weight")

    def error(mean):
        return float((mean - exact).norm() / exact.norm())

    assert error(sums / 200) < error(nearest) / 3


def test_the_hadamard_transform_changes_the_weight_gradient_alone():
    x, weight, grad = operands()
    results = []
    for hadamard in (False, True):
        x.grad = weight.grad = None
        y = quantized_linear(x, weight, Rounding(RECIPES["nvfp4"], hadamard=hadamard))
        y.backward(grad)
        results.append((y.detach(), x.grad, weight.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][2], results[1][2])
    rows, tokens = grad.reshape(-1, OUTPUTS), x.detach().reshape(-1, INPUTS)
    held = [
        fake_quantize(t, "nvfp4", axis=0, hadamard=True, kind=k)
        for t, k in ((rows, "output_grad"), (tokens, "activation"))
    ]
    torch.testing.assert_close(results[1][2], held[0].T @ held[1])
