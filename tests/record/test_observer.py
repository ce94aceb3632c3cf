"""Notifications of observers in a training loop; an observer that fails does no harm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core import load_run, watch
from amp_core.record.loop.sampling import Sampling
from amp_core.record.observer import Observer
from amp_core.record.recorder import Recorder
from amp_core.store.writer import RunWriter


class Diary(Observer):
    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.own: list[bool] = []

    def step_began(self, step: int) -> None:
        self.entries.append(("began", step))
        self.own.append(self.at_own_work())

    def forward_ended(self, output: Any) -> None:
        self.entries.append(("forward ended",))

    def backward_began(self) -> None:
        self.entries.append(("backward began",))

    def backward_ended(self) -> None:
        self.entries.append(("backward ended",))

    def called(self, what: str, optimizer: int | None) -> None:
        self.entries.append((what, optimizer))

    def step_ended(self, step: int) -> None:
        self.entries.append(("ended", step))

    def close(self) -> None:
        self.entries.append(("close",))


class Failing(Observer):
    def step_ended(self, step: int) -> None:
        raise ValueError("no paper left\nAutogradCPU: registered somewhere")  # torch names every backend


def record(model: torch.nn.Module, optimizer: Any, scaler: Any, into: Path, observers: list[Observer]) -> Recorder:
    return Recorder(
        model,
        [optimizer],
        scaler,
        RunWriter(into),
        sampling=Sampling(1),
        kinds=frozenset({"weight_grad"}),
        wanted=lambda name: True,
        observers=observers,
    )


def loop(into: Path, observers: list[Observer], scaler: Any, clip: bool, steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with record(model, optimizer, scaler, into, observers):
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            losses.append(loss.item())
            if scaler is None:
                loss.backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return losses


def test_moments_of_a_plain_loop_come_in_order(tmp_path: Path) -> None:
    diary = Diary()
    loop(tmp_path / "run", [diary], None, clip=True)
    step = [("forward ended",), ("backward began",), ("backward ended",), ("clip", 0), ("optimizer.step", 0)]
    assert diary.entries == [("began", 0), *step, ("ended", 0), ("began", 1), *step, ("ended", 1), ("close",)]
    assert diary.own == [True, True]
    assert not diary.at_own_work()


def test_observers_are_notified_of_every_call_of_a_loop_with_a_scaler(tmp_path: Path) -> None:
    diary = Diary()
    loop(tmp_path / "run", [diary], torch.amp.GradScaler("cpu", init_scale=8.0), clip=True, steps=1)
    assert [e for e in diary.entries if len(e) == 2] == [
        ("began", 0),
        ("scale", None),
        ("unscale_", 0),
        ("clip", 0),
        ("scaler.step", 0),
        ("optimizer.step", 0),
        ("update", None),
        ("ended", 0),
    ]


def test_phases_are_tracked_only_if_an_observer_overrides_phase_entered(tmp_path: Path) -> None:
    class Follower(Observer):
        def __init__(self) -> None:
            self.phases: list[str] = []

        def phase_entered(self, phase: str) -> None:
            self.phases.append(phase)

    follower = Follower()
    loop(tmp_path / "run", [follower], None, clip=False, steps=1)
    without_watching = [p for p in follower.phases if p != "watch"]
    in_order = [p for i, p in enumerate(without_watching) if i == 0 or without_watching[i - 1] != p]
    assert in_order == ["forward", "backward", "after_backward", "optimizer", "data"]


def test_an_observer_that_is_not_awake_is_notified_only_of_the_begin_of_steps(tmp_path: Path) -> None:
    class Sleeper(Diary):
        def step_began(self, step: int) -> None:
            super().step_began(step)
            self.awake = step == 1

    sleeper, diary = Sleeper(), Diary()
    loop(tmp_path / "run", [sleeper, diary], None, clip=False, steps=3)
    steps = [e for e in diary.entries if e[0] in ("began", "ended")]
    assert [e for e in steps if e[0] == "ended"] == [("ended", 0), ("ended", 1), ("ended", 2)]
    began = [i for i, e in enumerate(diary.entries) if e[0] == "began"]
    assert sleeper.entries == [("began", 0), *diary.entries[began[1] : began[2]], ("began", 2), ("close",)]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_failing_observer_is_dropped_and_named_and_the_training_continues(tmp_path: Path, scaled: bool) -> None:
    diary = Diary()
    losses = loop(tmp_path / "a", [], torch.amp.GradScaler("cpu") if scaled else None, clip=False)
    watched_losses = loop(
        tmp_path / "b", [Failing(), diary], torch.amp.GradScaler("cpu") if scaled else None, clip=False
    )
    assert watched_losses == losses
    events = load_run(tmp_path / "b").events
    reports = events[events["name"] == "not recorded"]["detail"].tolist()
    assert reports == ["Failing stopped at step_ended: ValueError: no paper left"]
    assert ("ended", 1) in diary.entries
    assert len(load_run(tmp_path / "b").steps) == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_watching_leaves_no_dispatch_mode_behind(tmp_path: Path, scaled: bool) -> None:
    """Autograd restores the modes with which a backward began, so a mode that is still active inside it would stay
    forever."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", trace_ops=1):
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            assert _get_current_dispatch_mode_stack() == []
    run = load_run(tmp_path / "run")
    assert set(run.ops["step"]) == {1}
