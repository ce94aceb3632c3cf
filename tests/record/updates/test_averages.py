"""Averaged copies of the weights, as loops keep them, in 16 bits and in FP32."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_core import load_run, watch

STEPS = 12


def network(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to(dtype)


class Averager:
    """Keeps a list of tensors, as torch_ema and diffusers do."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow_params = [p.detach().clone() for p in model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for average, p in zip(self.shadow_params, model.parameters(), strict=True):
            average.lerp_(p.detach(), 1 - self.decay)


def by_name(model: torch.nn.Module, averages: dict[str, torch.Tensor], decay: float) -> None:
    for name, p in model.named_parameters():
        averages[name].mul_(decay).add_(p.detach(), alpha=1 - decay)


def with_averaged_model(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    return average, lambda: average.update_parameters(model)


def with_a_list(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    average = Averager(model, decay)
    return average, lambda: average.update(model)


def with_a_dictionary(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    return average, lambda: by_name(model, average, decay)


def with_a_deep_copy(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    average = copy.deepcopy(model).requires_grad_(False)
    return average, lambda: by_name(model, dict(average.named_parameters()), decay)


def with_new_data(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    average = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data = a.data * decay + p.data * (1 - decay)

    return average, update


def with_data_in_place(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    """Writing through `.data` leaves the version of a tensor as it was."""
    average = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.mul_(decay).add_(p.data, alpha=1 - decay)

    return average, update


KEPT = [with_averaged_model, with_a_list, with_a_dictionary, with_a_deep_copy, with_new_data, with_data_in_place]


def averages(
    keep: Callable[[torch.nn.Module, float], tuple[Any, Callable[[], None]]],
    decay: float,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> pd.DataFrame:
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept, update = keep(model, decay)
    with watch(model, optimizer, into=folder, every=5):
        for seed in range(STEPS):
            torch.manual_seed(seed)
            x = torch.randn(16, 32).to(dtype)
            ((model(x) - x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                update()
    assert kept is not None
    return load_run(folder).averages


@pytest.mark.parametrize("keep", KEPT)
def test_a_16_bit_average_that_stands_still_is_found_however_it_is_kept(keep: Any, tmp_path: Path) -> None:
    rows = averages(keep, 0.9999, tmp_path / "run")
    assert set(rows["name"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(rows["step"]) >= {5, 10}
    assert rows[rows["step"] > 0]["unchanged_frac"].min() > 0.9


@pytest.mark.parametrize("keep", KEPT)
def test_an_average_that_follows_shows_its_decay(keep: Any, tmp_path: Path) -> None:
    rows = averages(keep, 0.5, tmp_path / "run")
    last = rows[rows["step"] == 10]
    assert last["decay"].iloc[0] == pytest.approx(0.5, abs=0.05)
    assert last["unchanged_frac"].max() < 0.5


def test_an_average_in_fp32_is_not_compared(tmp_path: Path) -> None:
    assert averages(with_a_deep_copy, 0.9999, tmp_path / "run", torch.float32).empty


def test_each_of_two_averages_has_its_own_decay(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    slow, fast = Averager(model, 0.9999), Averager(model, 0.5)
    with watch(model, optimizer, into=tmp_path / "run", every=5):
        for seed in range(STEPS):
            torch.manual_seed(seed)
            x = torch.randn(16, 32).to(torch.bfloat16)
            ((model(x) - x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                slow.update(model)
                fast.update(model)
    rows = load_run(tmp_path / "run").averages
    unchanged = rows[(rows["step"] == 10) & (rows["name"] == "0.weight")]["unchanged_frac"]
    assert sorted(unchanged > 0.5) == [False, True]


def frozen(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    return copy.deepcopy(model).requires_grad_(False), lambda: None


def gradients(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    kept = [torch.zeros_like(p) for p in model.parameters()]
    return kept, lambda: [g.add_(torch.randn_like(g)) for g in kept] and None


def cleared(model: torch.nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    kept = [torch.zeros_like(p) for p in model.parameters()]

    def use() -> None:
        for total in kept:
            total.add_(torch.randn_like(total)).zero_()

    return kept, use


@pytest.mark.parametrize("keep", [frozen, gradients, cleared])
def test_a_teacher_and_other_tensors_of_the_same_shapes_are_no_averages(keep: Any, tmp_path: Path) -> None:
    assert averages(keep, 0.0, tmp_path / "run").empty
