"""A recipe is applied as its table says, and the flags of the process are restored."""

import pytest
import torch

from amp_core.settings.training import RECIPES, TrainConfig
from amp_core.train.engine.recipes import Precision, backend_flags

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_region_and_scaler_are_the_recipes(name):
    recipe = RECIPES[name]
    precision = Precision(TrainConfig(precision=name), CPU)
    assert precision.scaler.is_enabled() == recipe.scaler
    with precision.autocast():
        assert torch.is_autocast_enabled("cpu") == (recipe.autocast is not None)
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert str(product.dtype) == f"torch.{recipe.autocast or 'float32'}"
    assert not torch.is_autocast_enabled("cpu")


def test_the_scaler_gets_every_setting():
    scaler = Precision(TrainConfig(init_scale=512, growth_factor=4, backoff_factor=0.25, growth_interval=7), CPU).scaler
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (512, 4)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)


def flags():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        cuda.allow_tf32,
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"precision": "fp32"}, (False, False, False, False, False)),
        ({"precision": "tf32"}, (True, True, False, False, False)),
        ({"precision": "fp32", "tf32": True}, (True, True, False, False, False)),
        ({"precision": "fp16", "cudnn_benchmark": True}, (False, False, True, False, False)),
        ({"precision": "fp16", "deterministic": True}, (False, False, False, True, True)),
    ],
)
def test_backend_flags_are_set_and_restored(settings, expected, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = flags()
    with backend_flags(TrainConfig(**settings)):
        assert flags() == expected
    assert flags() == before


def test_the_precision_of_matrix_products_is_put_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with backend_flags(TrainConfig(precision="tf32")):
            pass
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_backend_flags_are_put_back_after_an_exception():
    def fail():
        with backend_flags(TrainConfig(precision="tf32")):
            raise ZeroDivisionError

    before = flags()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert flags() == before
