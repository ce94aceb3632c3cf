"""Devices and streams: marks, copies and measurements use the device of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core.record.backends.cuda import Cuda
from amp_core.record.observers.profile import ProfileWindow
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.store.writer import RunWriter
from tests.fake_cuda import tensors
from tests.fake_cuda.loops import losses, recorded


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_model_on_a_device_that_is_or_is_not_the_current_one(device: str, tmp_path: Path) -> None:
    run = recorded(tmp_path, device)
    assert run.head.config["device"] == device and torch.cuda.current_device() == 0


@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_a_model_that_is_split_over_two_devices(first: str, second: str, tmp_path: Path) -> None:
    run = recorded(tmp_path, first, second=second)
    names = set(run.tensors(kind="output_grad")["name"])
    assert names == {"first.0", "first.1", "first.2", "second.0", "second.1", "second.2"}


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_loop_on_a_stream_of_its_own(device: str, tmp_path: Path) -> None:
    streams = [torch.cuda.Stream(device)]
    recorded(tmp_path, device, stream=lambda: streams[0])


def test_each_step_on_another_stream(tmp_path: Path) -> None:
    recorded(tmp_path, "cuda:1", stream=lambda: torch.cuda.Stream("cuda:1"))


def test_watching_waits_for_no_device(tmp_path: Path) -> None:
    losses("cuda:0")
    bare = list(tensors.waits)
    tensors.waits.clear()
    losses("cuda:0", tmp_path / "run", steps=6)
    watched = list(tensors.waits)
    assert [w for w in watched if not w.startswith("event")] == bare
    # Only `close` makes the host wait: for pending transfers of steps, and for a few of observers.
    assert watched.count("event.synchronize") <= 12


def test_a_transfer_is_ready_when_its_own_device_has_copied() -> None:
    transfer = HostTransfer()
    busy = torch.ones(8, device="cuda:1")
    for _ in range(50):
        busy = busy + 1
    transfer.put("busy", busy)
    transfer.send()
    assert not transfer.ready()
    assert transfer.ready(wait=True) and transfer.values("busy").tolist() == [51.0] * 8


def test_tensors_of_two_devices_come_in_one_transfer() -> None:
    transfer = HostTransfer()
    for index in (1, 0):
        transfer.put(f"{index}", torch.full((3,), float(index), device=f"cuda:{index}"))
    transfer.send()
    assert transfer.ready(wait=True) and transfer.joined(["1", "0"]).tolist() == [1, 1, 1, 0, 0, 0]


def test_times_between_marks_that_are_not_passed_are_waited_for() -> None:
    clock = Cuda(torch.device("cuda:1")).clock()
    start = clock.mark()
    torch.ones(4, device="cuda:1").add_(1)
    assert clock.ms(start, clock.mark()) > 0


def test_a_profiler_window_opens_when_the_models_device_has_done_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def profile_on_cpu(activities: Any, **options: Any) -> Any:
        done.append(torch.cuda.current_stream("cuda:1").query())
        return torch.profiler.profile(activities=activities[:1], **options)

    monkeypatch.setattr("amp_core.record.observers.profile.profile", profile_on_cpu)
    model = torch.nn.Linear(4, 2).to("cuda:1")
    x = torch.ones(3, 4, device="cuda:1")
    for _ in range(20):
        x = x * 1.0
    assert not torch.cuda.current_stream("cuda:1").query()
    with RunWriter(tmp_path / "run") as writer:
        window = ProfileWindow(writer, model, 1, 2)
        window.step_ended(0)
        model(x).sum().backward()
        window.step_ended(1)
    assert done == [True]


def test_memory_is_that_of_the_models_device(tmp_path: Path) -> None:
    held = torch.zeros(1_000_000, device="cuda:0")
    steps = recorded(tmp_path, "cuda:1").steps
    assert (steps.memory_allocated_bytes > 0).all() and (steps.memory_peak_bytes < held.nbytes).all()
