"""FP32 masters that a loop steps beside its model are compared with the model's weights."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from amp_core import load_run, watch

STEPS = 40
BF16 = torch.bfloat16


def reported(folder: Path, train: Callable[[nn.Module, list[torch.Tensor], int], nn.Module]) -> list[int]:
    """The number of weights in each event. `train(model, masters, step)` gets a model of two weights after the masters
    have stepped, and returns the model of the next step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 10).to(BF16)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with watch(model, optimizer, into=folder):
        for step in range(STEPS):
            model(torch.randn(8, 64, dtype=BF16)).float().square().mean().backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
            optimizer.step()
            model = train(model, masters, step)
    events = load_run(folder).events
    return [int(n) for n in events[events["kind"] == "uncopied masters"]["count"]]


def copied(model: nn.Module, masters: list[torch.Tensor]) -> None:
    for master, p in zip(masters, model.parameters(), strict=True):
        p.data.copy_(master)


def test_masters_that_are_never_copied_are_reported_while_they_are_not(tmp_path: Path) -> None:
    assert reported(tmp_path / "run", lambda model, masters, step: model) == [2, 2, 2]


def test_a_later_copy_takes_the_report_back(tmp_path: Path) -> None:
    def train(model: nn.Module, masters: list[torch.Tensor], step: int) -> nn.Module:
        if step == 25:
            copied(model, masters)
        return model

    assert reported(tmp_path / "run", train) == [2, 0]


def test_a_model_that_is_made_anew_in_each_step_is_not_reported(tmp_path: Path) -> None:
    def train(model: nn.Module, masters: list[torch.Tensor], step: int) -> nn.Module:
        made = copy.deepcopy(model)
        copied(made, masters)
        return made

    assert reported(tmp_path / "run", train) == []


def test_weights_that_are_replaced_in_each_step_are_not_reported(tmp_path: Path) -> None:
    def train(model: nn.Module, masters: list[torch.Tensor], step: int) -> nn.Module:
        model.weight, model.bias = (nn.Parameter(master.detach().to(BF16)) for master in masters)
        return model

    assert reported(tmp_path / "run", train) == []
