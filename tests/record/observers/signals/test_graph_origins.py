"""The operator that made the first value that is not finite, from the graph of a loss."""

import math
from collections.abc import Callable

import pytest
import torch

from amp_core.record.observers.signals.graph_origins import origin_in_graph

HALF = torch.float16


def _leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def _softmax_by_hand(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x.to(HALF))
    return (e / e.sum()).sum()


def _likelihood(x: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(x.to(torch.bfloat16))
    return (torch.tensor([0.0, 1.0]) * torch.log(1 - p)).mean()


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x.to(HALF) ** 2).mean().sqrt()


@pytest.mark.parametrize(
    ("compute", "values", "op", "dtype"),
    [
        (_softmax_by_hand, (20.0, 1.0), "exp", HALF),
        (_likelihood, (9.0, 1.0), "log of 0", torch.bfloat16),
        (lambda x: (x[:2] / x[2:]).sum(), (1.0, 2.0, 0.0, 1.0), "div by 0", torch.float32),
        (_sum_of_squares, (400.0, 1.0), "pow", HALF),
        (lambda x: (x.to(HALF) * 2).float().relu().mean(), (1e5, 1.0), "cast", HALF),
        (lambda x: torch.sqrt(x).sum(), (-1.0, 1.0), "sqrt", torch.float32),
        (lambda x: (x.to(HALF) @ x.to(HALF)).float().exp(), (300.0, 300.0), "dot", HALF),
    ],
)
def test_the_operator_is_named(
    compute: Callable[[torch.Tensor], torch.Tensor], values: tuple[float, ...], op: str, dtype: torch.dtype
) -> None:
    origin = origin_in_graph(compute(_leaf(*values)))
    assert origin is not None and (origin.op, origin.dtype) == (op, dtype)


def test_the_largest_argument_is_told() -> None:
    origin = origin_in_graph(_softmax_by_hand(_leaf(20.0, 1.0)))
    assert origin is not None and origin.value is None  # an exponential saves its result alone
    origin = origin_in_graph(_sum_of_squares(_leaf(400.0, 1.0)))
    assert origin is not None and origin.value == 400.0


def test_a_mask_is_no_origin() -> None:
    """A row that is masked throughout has another finding."""
    scores = _leaf(1.0, 2.0).masked_fill(torch.tensor([True, True]), -math.inf)
    assert origin_in_graph(scores.softmax(-1).sum()) is None


def test_an_infinity_that_nothing_follows_from_is_no_origin() -> None:
    x = _leaf(0.0, 3.0)
    hidden = torch.exp(-torch.log(x).square())  # of -inf, 0
    origin = origin_in_graph((hidden + (x * torch.tensor([math.inf, 1.0]))).sum())
    assert origin is None or "log" not in origin.op


def test_what_is_before_a_finite_tensor_is_not_followed() -> None:
    hidden = _softmax_by_hand(_leaf(20.0, 1.0)) * 0
    logits = torch.nan_to_num(hidden)
    assert origin_in_graph(logits.exp() / 0, finite=[logits]) is not None
    assert origin_in_graph(logits, finite=[logits]) is None


def test_values_that_the_program_saved_under_hooks_are_left_alone() -> None:
    unpacked = []

    def unpack(value: torch.Tensor) -> torch.Tensor:
        unpacked.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        loss = _softmax_by_hand(_leaf(20.0, 1.0))
    assert origin_in_graph(loss) is None and not unpacked


def test_leaves_and_constants_have_no_origin() -> None:
    assert origin_in_graph(torch.tensor(math.nan)) is None
    assert origin_in_graph(_leaf(math.nan).sum()) is None


def test_a_tensor_that_was_changed_since_it_was_saved_is_left_alone() -> None:
    x = _leaf(20.0, 1.0)
    e = torch.exp(x.to(HALF))
    loss = (e / e.sum()).sum()
    with torch.no_grad():
        e.zero_()
    assert origin_in_graph(loss) is None
