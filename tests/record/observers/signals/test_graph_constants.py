"""A non-finite number without a gradient is found in the graph of a loss, and nothing else is taken for one."""

import pytest
import torch
from torch.nn import functional as F

from amp_core.record.observers.signals.graph_constants import Constant, constant_in_graph

INF, NAN = float("inf"), float("nan")


def output() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator).requires_grad_() * 2.0


def target(bad: float, size: float = 0.3) -> torch.Tensor:
    values = torch.full((6, 4), size)
    values[2, 1] = bad
    return values


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (F.mse_loss, "mse_loss"),
        (F.smooth_l1_loss, "smooth_l1_loss"),
        (F.huber_loss, "huber_loss"),
        (F.binary_cross_entropy_with_logits, "binary_cross_entropy_with_logits"),
    ],
)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_the_target_of_a_loss_is_named(loss, op, bad) -> None:
    prediction = output()
    expected = Constant(op, "target", torch.float32, pytest.approx(0.3))
    assert constant_in_graph(loss(prediction, target(bad)), [prediction]) == expected


def test_a_target_that_was_rounded_to_float16_is_told() -> None:
    prediction = output()
    found = constant_in_graph(F.mse_loss(prediction, target(1e5, size=1000.0).half().float()), [prediction])
    assert found == Constant("mse_loss", "target", torch.float16, 1000.0)


@pytest.mark.parametrize("loss", [F.l1_loss, lambda p, y: (p - y).abs().mean(), lambda p, y: (y - p).pow(2).sum()])
def test_a_number_that_is_not_saved_is_known_by_the_result(loss) -> None:
    prediction = output()
    view = prediction.bfloat16().flatten()[::1].float().view(6, 4)
    found = constant_in_graph(loss(view, target(NAN)), [view])
    assert found is not None
    assert (found.op, found.argument) == ("sub", "constant")


def test_a_weight_of_the_loss_is_named() -> None:
    prediction = output()
    assert constant_in_graph((prediction * target(INF)).sum(), [prediction]) == Constant(
        "mul", "constant", torch.float32, pytest.approx(0.3)
    )


def test_an_overflow_in_float16_is_no_constant() -> None:
    prediction = (output() * 3e4).half()
    loss = (prediction - torch.full((6, 4), -6e4).half()).abs().float().mean()
    assert not loss.isfinite()
    assert constant_in_graph(loss, [prediction]) is None


def test_a_mask_is_no_constant() -> None:
    prediction = output()
    mask = torch.zeros(6, 4)
    mask[:, 2:] = -INF
    loss = (prediction + mask).logsumexp(-1).mean() + (prediction.sum() * 0.0).log()
    assert not loss.isfinite()
    assert constant_in_graph(loss, [prediction]) is None


def test_a_prediction_that_is_not_finite_blames_no_target() -> None:
    prediction = output() * torch.full((6, 4), 1e38) * 1e10
    assert constant_in_graph(F.mse_loss(prediction, target(0.3)), []) is None
