"""What loops do to weights between steps: decay by hand against float64, and masters that are overwritten."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core import load_run, watch
from amp_core.findings import diagnose

STEPS = 12
BF16 = torch.bfloat16
Change = Callable[[list[torch.nn.Parameter], float], None]


def _assigned(weights: list[torch.nn.Parameter], rate: float) -> None:
    for p in weights:
        p.data = p.data * (1 - rate)


def _through_float32(weights: list[torch.nn.Parameter], rate: float) -> None:
    for p in weights:
        p.copy_(p.float() * (1 - rate))


def _subtracted(weights: list[torch.nn.Parameter], rate: float) -> None:
    for p in weights:
        p.data.add_(p.data, alpha=-rate)


SPELLINGS: dict[str, Change] = {
    "in place": lambda weights, rate: [p.mul_(1 - rate) for p in weights] and None,
    "lists": lambda weights, rate: torch._foreach_mul_(weights, 1 - rate),
    "assigned": _assigned,
    "through float32": _through_float32,
    "subtracted": _subtracted,
}


def network(dtype: torch.dtype = BF16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to(dtype)


def backward(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(16, 32).to(next(model.parameters()).dtype)
    ((model(x) - x) ** 2).mean().backward()


def events(folder: Path, kind: str) -> pd.DataFrame:
    found = load_run(folder).events
    assert found[(found["kind"] == "warning") & (found["name"] == "not recorded")].empty
    return found[found["kind"] == kind]


@pytest.mark.parametrize("rate", [1e-4, 3e-3, 0.05])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_lost_share_of_decay_by_hand_is_that_of_float64(spelling: str, rate: float, tmp_path: Path) -> None:
    model = network()
    weights = [model[0].weight, model[2].weight]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lost = {}
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            before = [p.detach().double() for p in weights]
            with torch.no_grad():
                SPELLINGS[spelling](weights, rate)
            made = sum(((b - p.detach().double()) * b.sign()).sum() for b, p in zip(before, weights, strict=True))
            lost[step] = 1 - float(made / (rate * sum(b.abs().sum() for b in before)))
    decays = events(tmp_path / "run", "decay by hand")
    assert len(decays) >= 3 and (decays["count"] == 2).all()
    assert decays["limit"].to_numpy() == pytest.approx(rate, rel=1e-3)
    expected = [min(max(lost[step], 0.0), 1.0) for step in decays["step"]]
    assert decays["value"].to_numpy() == pytest.approx(expected, abs=1e-3)


def test_nothing_of_a_loop_changes_while_its_updates_by_hand_are_inspected(tmp_path: Path) -> None:
    ends = []
    for watched in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        recorder = watch(model, optimizer, into=tmp_path / "run", every=1) if watched else None
        for step in range(STEPS):
            backward(model, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99).add_(torch.randn_like(p), alpha=1e-2)
        if recorder is not None:
            recorder.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(events(tmp_path / "run", "update by hand"))


def overwritten(folder: Path, every: int) -> pd.DataFrame:
    """A training whose FP32 weights are rounded before every `every`-th step; never if that is 0."""
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=folder):
        for step in range(STEPS):
            if every and step % every == every - 1:
                model.to(BF16).float()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return events(folder, "overwritten weights")


@pytest.mark.parametrize("every", [1, 4])
def test_weights_that_are_rounded_between_steps_are_counted(every: int, tmp_path: Path) -> None:
    last = overwritten(tmp_path / "run", every).iloc[-1]
    assert last["name"] in ("0.weight", "2.weight") and last["dtype"] == "bfloat16"
    assert (last["count"], last["limit"]) == (STEPS // every - (every == 1), STEPS - 1)
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "overwritten-masters"]
    often = "each step" if every == 1 else "3 of 11 compared steps"
    assert finding.title.startswith(f"Before {often}, FP32 weights were overwritten with their values rounded to bf")


def test_weights_that_are_left_alone_are_not_said_to_be_overwritten(tmp_path: Path) -> None:
    assert overwritten(tmp_path / "run", 0).empty


@pytest.mark.parametrize("when", ["before backward", "before the step", "after the step"])
def test_torch_works_on_after_evaluations_in_inference_mode(tmp_path: Path, when: str) -> None:
    """At the end of an inference mode torch restores the dispatch keys of its beginning, among them those of a mode
    that was left within it; without that mode, operators without tensors among their arguments fail."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate(now: str) -> None:
        if when == now:
            with torch.inference_mode():
                model(torch.zeros(4, 32, dtype=BF16))

    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(STEPS):
            optimizer.zero_grad()
            evaluate("before backward")
            backward(model, step)
            evaluate("before the step")
            optimizer.step()
            evaluate("after the step")
            assert torch.zeros(3).shape == (3,)
    assert torch.zeros(3).shape == (3,) and not _get_current_dispatch_mode_stack()
    assert len(load_run(tmp_path / "run").steps) == STEPS
