"""Whatever fails in watching or around the training, training continues with the same losses, and the run reports it
once."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import load_run
from amp_core.record import watch, watching
from amp_core.record.backends.cuda import NvmlSource
from amp_core.record.loop import error_budget
from amp_core.record.loop.autocast_regions import PrecisionDetector
from amp_core.record.loop.hooks import Hooks
from amp_core.record.loop.steps import Steps
from amp_core.record.observer import MOMENTS, Observer
from amp_core.record.observers import profile
from amp_core.record.observers.device import DeviceSampler
from amp_core.record.stats import module_outputs
from amp_core.record.stats.numba.measure import PassingTensors
from amp_core.store import shutdown
from amp_core.store.resilient_writer import TrainingWriter
from tests.record import fake_nvml
from tests.robustness.trained import STEPS, Disk, message, program_said, trained
from tests.waiting import wait_for

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("owner", "name"), [(module_outputs, "measure_together"), (PassingTensors, "add")], ids=["gradients", "outputs"]
)
def test_a_statistic_that_runs_out_of_memory_is_omitted_and_tried_again_later(
    error: Exception,
    owner: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured, calls = getattr(owner, name), 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise error
        return measured(*args)

    monkeypatch.setattr(owner, name, sometimes)
    run = trained(tmp_path / "a", steps=60)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(60))
    (detail,) = [d for d in message(run, "not recorded") if "watching failed" in d]
    assert type(error).__name__ in detail and caplog.text.count("watching failed") == 1
    assert 57 in set(run.tensors()["step"])


def test_watching_that_always_fails_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake in AMPscope")

    monkeypatch.setattr(error_budget, "PAUSE_STEPS", 0)
    monkeypatch.setattr(module_outputs, "measure_together", fail)
    attach: list[Hooks] = []
    install = Hooks._install

    def record_hooks(hooks: Hooks) -> None:
        attach.append(hooks)
        install(hooks)

    monkeypatch.setattr(Hooks, "_install", record_hooks)
    counts = []
    run = trained(tmp_path / "a", lambda step, _: counts.append(len(attach[0])), every=1)
    assert counts[0] > 0 and counts[-1] == 0
    assert run.status == "finished" and len(run.steps) < STEPS
    assert "and nothing is recorded" in message(run, "not recorded")[-1]


CALLED = [(Steps, m) for m in ("finish_pending", "observe", "_due", "may_be_sampled", "begin")]
CALLED += [(PrecisionDetector, "forward_began"), (PrecisionDetector, "_update_head")]


@pytest.mark.parametrize(("owner", "method"), CALLED)
def test_an_error_in_any_hook_does_not_reach_the_training(
    owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, calls = getattr(owner, method), 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 20):
            raise KeyError("a mistake in AMPscope")
        return works(*args)

    monkeypatch.setattr(owner, method, sometimes)
    run = trained(tmp_path / "a", clip=None)
    assert run.status == "finished" and len(run.steps) >= STEPS - 2


RARE = ("loss_nonfinite", "gradients_vanished")


# `scaler_found` is tested in tests/record/observers/signals/test_unknown_scaler.py and `optimizer_found` in
# tests/record/loop/test_adoption.py: here scaler and optimizer are passed to `watch`.
@pytest.mark.parametrize(
    "moment",
    [m for m in MOMENTS if m not in ("scaler_found", "optimizer_found", "closure_repeated", *RARE)],
)
def test_an_observer_that_fails_is_dropped(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise MemoryError

    kind = type("Failing", (Observer,), {moment: fail})
    monkeypatch.setattr(watching, "default_signals", lambda *_: [kind()])
    run = trained(tmp_path / "a")
    assert run.status == "finished" and len(run.steps) == STEPS
    assert [d for d in message(run, "not recorded") if f"Failing stopped at {moment}: MemoryError" in d] != []


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(x) + 0.0 * self.unused(x)


@pytest.mark.parametrize("moment", RARE)
def test_an_observer_that_fails_at_a_rare_moment_is_dropped(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(watching, "default_signals", lambda *_: [type("Failing", (Observer,), {moment: fail})()])
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "a", every=1):
        for factor in (1.0, float("inf"), 1.0):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(4, 2)).sum() * factor
            loss.backward()
            optimizer.step()
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and len(run.steps) == 3
    assert [d for d in message(run, "not recorded") if f"Failing stopped at {moment}: MemoryError" in d] != []


def test_an_observer_that_fails_at_a_repeated_closure_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Observer):
        def closure_repeated(self, optimizer: int) -> None:
            raise MemoryError

    monkeypatch.setattr(watching, "default_signals", lambda *_: [Failing()])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.steps) == 3
    assert [d for d in message(run, "not recorded") if "Failing stopped at closure_repeated: MemoryError" in d] != []


@pytest.mark.parametrize("broken", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"])
def test_a_profiler_that_fails_is_reported(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = getattr(torch.profiler.profile, broken)

    def fail(self: Any, *args: Any) -> None:
        if broken == "stop_trace":
            works(self, *args)  # else torch would continue profiling
        raise RuntimeError("Kineto is not available")

    monkeypatch.setattr(profile.profile, broken, fail)
    run = trained(tmp_path / "a", profile=(5, 8))
    assert run.status == "finished" and len(run.kernels) == 0
    assert [d for d in message(run, "not recorded") if "Kineto is not available" in d] != []


def test_losing_nvml_during_a_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml.FakeNvml(fake_nvml.HOPPER)

    def sampler(writer: Any, device: Any) -> DeviceSampler:
        source = NvmlSource([fake_nvml.HOPPER.uuid], library=nvml)
        return DeviceSampler(writer, torch.device("cuda:0"), 0.2, source=source, retry_s=0.05)

    def between(step: int, folder: Path) -> None:
        if step == 5:
            wait_for(lambda: len(load_run(folder).device) > 0)
            nvml.lose()
        elif step == 15:
            wait_for(lambda: len(message(load_run(folder), "not recorded")) > 0)
            nvml.find_again()
        elif step == 25:
            wait_for(lambda: len(message(load_run(folder), "device samples")) > 0)

    monkeypatch.setattr(watching, "DeviceSampler", sampler)
    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and "the GPU is lost" in message(run, "not recorded")[0]


def test_kernels_work_if_their_cache_is_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(x):\n    return 2 * x\n")
    program = """
        import pathlib, resource, sys
        sys.path.insert(0, sys.argv[1])
        from amp_core.record.stats.numba.compiled import kept
        import mine
        for most in (100, 1_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            print(kept(mine.twice)(21), len(list(pathlib.Path(sys.argv[1]).rglob("*.nb?"))))
        for file in pathlib.Path(sys.argv[1]).rglob("*.nb?"):
            file.write_bytes(b"")                            # a power cut
        print(kept(mine.twice)(21))
    """
    assert program_said(program, str(tmp_path)).split() == ["42", "0", "42", "2", "42"]


# ---- around the training --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_data_workers_leave_the_run_alone(tmp_path: Path) -> None:
    program = """
        import sys, torch
        from amp_core.record import watch
        for how in ("bare", "direct", "thread"):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.utils.data.TensorDataset(torch.randn(24, 4))
            if how != "bare":
                recorder = watch(model, optimizer, into=f"{sys.argv[1]}/{how}", every=2)
                recorder.writer._direct = how == "direct"
            losses = []
            for _ in range(2):
                for (x,) in torch.utils.data.DataLoader(data, 4, num_workers=2, multiprocessing_context="fork"):
                    loss = model(x).square().sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            print(losses)
            if how != "bare":
                recorder.close()
    """
    bare, direct, thread = program_said(program, str(tmp_path)).strip().splitlines()
    assert bare == direct == thread
    for how in ("direct", "thread"):
        run = load_run(tmp_path / how)
        assert run.status == "finished" and run.steps["step"].tolist() == list(range(12))


def test_ctrl_c_during_a_write_ends_the_training_as_without_watching(disk: Disk, tmp_path: Path) -> None:
    def interrupt() -> None:
        disk.works()
        raise KeyboardInterrupt

    def between(step: int, folder: Path) -> None:
        if step == 10:
            disk.befall = interrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", between)
    (writer,) = [w for w in shutdown._open if isinstance(w, TrainingWriter)]
    writer.close("stopped", "interrupted from the keyboard")
    run = load_run(tmp_path / "a")
    assert run.status == "stopped" and run.steps["step"].tolist()[:9] == list(range(9))
