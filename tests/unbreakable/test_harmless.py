"""Whatever befalls the watching, the training goes on with the same losses, the run says so once, and it recovers."""

import errno
import functools
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import _sealing, load_run, runlog
from amp_core.record import _guard, _stumbles, _watch, measure, outputs, profile, tensors
from amp_core.record._guard import TrainingWriter
from amp_core.record.device import DeviceSampler
from amp_core.record.hooks import Hooks
from amp_core.record.observers import MOMENTS, Observer
from amp_core.record.regions import PrecisionSeen
from amp_core.record.steps import Steps
from amp_core.run import Run
from tests.record import fake_nvml
from tests.record.loops import train

ROOT = Path(runlog.__file__).parent.parent
STEPS = 30


@functools.cache
def unwatched(steps: int = STEPS) -> list[float]:
    return train(None, torch.float16, steps=steps).losses


def trained(into: Path, between: Callable[[int, Path], None] | None = None, steps: int = STEPS, **options: Any) -> Run:
    """Train as `unwatched` does, watched, with `between(step, folder)` before each forward; the losses are the same."""
    step = 0

    def with_hook(model: torch.nn.Module) -> torch.nn.Module:
        def before(*_: Any) -> None:
            nonlocal step
            if between is not None:
                between(step, into)
            step += 1

        model.register_forward_pre_hook(before)
        return model

    done = train(into, torch.float16, steps=steps, wrap=with_hook, **options)
    assert done.losses == unwatched(steps)
    return load_run(into)


def said(run: Run, name: str) -> list[str]:
    """The details of the events of that name."""
    return run.events[run.events["name"] == name]["detail"].tolist()


class Disk:
    """Stands between the writer and its files: `befall` is called before each write of rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.befall: Callable[[], None] = lambda: None
        put, opened = _sealing.OpenSegment._put, _sealing.OpenSegment.__init__

        def before_put(segment: Any, data: bytes) -> None:
            self.befall()
            put(segment, data)

        def before_open(segment: Any, *args: Any) -> None:
            self.befall()
            opened(segment, *args)

        monkeypatch.setattr(_sealing.OpenSegment, "_put", before_put)
        monkeypatch.setattr(_sealing.OpenSegment, "__init__", before_open)
        monkeypatch.setattr(_guard, "RETRY_S", 0.01)

    def fails(self, number: int) -> None:
        def fail() -> None:
            raise OSError(number, os.strerror(number))

        self.befall = fail

    def works(self) -> None:
        self.befall = lambda: None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


# ---- the folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_rows_wait_while_nothing_can_be_written(
    number: int, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def between(step: int, folder: Path) -> None:
        if step == 5:
            disk.fails(number)
        elif step == 20:
            disk.works()

    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    assert sorted(set(run.tensors()["step"])) == list(range(0, STEPS, 3))
    (detail,) = said(run, "writing")
    assert os.strerror(number) in detail and "all rows were kept" in detail
    assert caplog.text.count("the training goes on, and rows wait in memory") == 1


def test_disk_that_stays_full_costs_the_rows_and_nothing_else(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path / "a", lambda step, _: disk.fails(errno.ENOSPC) if step == 10 else None)
    assert run.steps["step"].tolist() == list(range(9))  # a step is written when the next begins
    assert caplog.text.count("No space left on device") >= 1


def test_half_a_row_is_cut_off_when_the_disk_fills_in_its_middle(tmp_path: Path) -> None:
    """`RLIMIT_FSIZE` lets a write put down a part; every new segment has room again."""
    program = """
        import resource, sys, torch
        from amp_core.record import _guard, measure
        from tests.record.loops import train
        _guard.RETRY_S = 0.01
        torch.set_num_threads(int(sys.argv[2]))  # sums come out otherwise with another number
        measure.measure([torch.zeros(1)])  # numba keeps what it compiles, which is longer
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        print(train(sys.argv[1], torch.float16, steps=60).losses)
    """
    assert _program(program, str(tmp_path / "a"), str(torch.get_num_threads())).strip() == str(unwatched(60))
    run = load_run(tmp_path / "a")
    assert run.steps["step"].tolist() == list(range(60)) and set(run.tensors()["step"]) == set(range(0, 60, 3))
    assert all("File too large" in detail for detail in said(run, "writing")) and len(said(run, "writing")) > 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a file system")
def test_file_system_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "RETRY_S", 0.01)
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", small], check=False).returncode:
        pytest.skip("this container may not mount a file system")
    try:

        def between(step: int, folder: Path) -> None:
            if step == 5:
                with pytest.raises(OSError, match="No space left"):
                    (small / "checkpoint").write_bytes(b"x" * 2**20)
            elif step == 25:
                (small / "checkpoint").unlink()

        run = trained(small / "a", between)
        assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
        assert "No space left on device" in said(run, "writing")[0]
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_folder_that_vanishes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sealing, "LOOK_S", 0.0)
    monkeypatch.setattr(_guard, "RETRY_S", 0.01)

    def between(step: int, folder: Path) -> None:
        if step == 10:
            shutil.rmtree(folder)
        elif step == 20:
            folder.mkdir()

    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(9, STEPS))
    assert "the run's files were removed" in said(run, "writing")[0]


def test_another_run_in_the_same_place_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sealing, "LOOK_S", 0.0)
    monkeypatch.setattr(_guard, "RETRY_S", 0.01)
    monkeypatch.setattr(_guard, "END_S", 1.0)

    def between(step: int, folder: Path) -> None:
        if step == 10:
            shutil.rmtree(folder)
            with runlog.RunWriter(folder, name="the new one") as other:
                other.append("steps", {"step": [77]})

    run = trained(tmp_path / "a", between)
    assert (run.name, run.status, run.steps["step"].tolist()) == ("the new one", "finished", [77])


def test_slow_disk_is_left_to_a_thread(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "SLOW_S", 0.005)
    threads = set()

    def slow() -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.01)

    disk.befall = slow
    run = trained(tmp_path / "a")
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    assert threads == {"MainThread", "ampscope-write"}


@pytest.mark.parametrize("answers_at_the_end", [True, False])
def test_file_system_that_hangs_never_holds_the_loop(
    answers_at_the_end: bool,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_guard, "CAN_HANG", ("",))  # as on a file system of a network
    monkeypatch.setattr(_guard, "END_S", 5.0 if answers_at_the_end else 0.1)
    answers = threading.Event()

    def between(step: int, folder: Path) -> None:
        if step == 5:
            disk.befall = lambda: (answers.wait(), None)[1]
        elif step == STEPS - 1 and answers_at_the_end:
            answers.set()  # that the loop came here while a write hangs is what is tested

    try:
        run = trained(tmp_path / "a", between)
        steps = run.steps["step"].tolist()
    finally:
        answers.set()
    if answers_at_the_end:
        assert run.status == "finished" and steps == list(range(STEPS))
    else:
        assert run.head.status == "running" and steps == list(range(4))
        assert "the end of the run could not be written within 0.1 s" in caplog.text


def test_back_pressure_drops_sampling_and_is_bounded(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "MOST_BYTES", 200_000)
    held = []

    def between(step: int, folder: Path) -> None:
        writers = [w for w in runlog._ending._open if isinstance(w, TrainingWriter)]
        held.append(writers[0]._held)
        if step == 5:
            disk.fails(errno.ENOSPC)
        elif step == 50:
            disk.works()

    run = trained(tmp_path / "a", between, steps=80, every=1)
    assert run.steps["step"].tolist() == list(range(80))
    sampled = set(run.tensors()["step"])
    assert {0, 79} <= sampled and not {30, 40} & sampled
    assert 50_000 < max(held) <= 200_000


def test_rows_that_find_no_room_are_counted(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "MOST_BYTES", 5_000)

    def between(step: int, folder: Path) -> None:
        if step == 5:
            disk.fails(errno.ENOSPC)
        elif step == 25:
            disk.works()
            time.sleep(0.1)

    run = trained(tmp_path / "a", between)
    steps = run.steps["step"].tolist()
    detail = next(d for d in said(run, "not recorded") if "memory had no room" in d)
    assert f"{STEPS - len(steps)} of steps" in detail and steps[:4] == [0, 1, 2, 3] and steps[-1] == STEPS - 1


def test_network_file_systems_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    def mounts(all: bool) -> list[Any]:  # noqa: A002 - psutil's name
        return [SimpleNamespace(mountpoint=p, fstype=t) for p, t in (("/", "ext4"), (str(tmp_path), "nfs4"))]

    monkeypatch.setattr(_guard.psutil, "disk_partitions", mounts)
    assert _guard.can_hang(tmp_path / "runs" / "a") and not _guard.can_hang(Path("/elsewhere/a"))


# ---- watching itself ------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", [tensors, outputs], ids=lambda m: m.__name__.rsplit(".")[-1])
def test_statistic_without_memory_is_left_out_and_tried_again_later(
    error: Exception, where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise error
        return measure.measure_together(*args)

    monkeypatch.setattr(where, "measure_together", sometimes)
    run = trained(tmp_path / "a", steps=60)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(60))
    (detail,) = [d for d in said(run, "not recorded") if "watching failed" in d]
    assert type(error).__name__ in detail and caplog.text.count("watching failed") == 1
    assert 57 in set(run.tensors()["step"])


def test_watching_that_always_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake in AMPscope")

    monkeypatch.setattr(_stumbles, "PAUSE_STEPS", 0)
    monkeypatch.setattr(tensors, "measure_together", fail)
    put_on: list[Hooks] = []
    install = Hooks._install

    def noted(hooks: Hooks, model: Any) -> None:
        put_on.append(hooks)
        install(hooks, model)

    monkeypatch.setattr(Hooks, "_install", noted)
    counts = []
    run = trained(tmp_path / "a", lambda step, _: counts.append(len(put_on[0])), every=1)
    assert counts[0] > 0 and counts[-1] == 0
    assert run.status == "finished" and len(run.steps) < STEPS
    assert "and nothing is recorded" in said(run, "not recorded")[-1]


CALLED = [(Steps, m) for m in ("finish_pending", "observe", "_due", "may_be_sampled", "begin")]
CALLED += [(PrecisionSeen, "forward_began"), (PrecisionSeen, "_tell")]


@pytest.mark.parametrize(("owner", "method"), CALLED)
def test_mistake_in_any_hook_stays_in_it(
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


class Failing(Observer):
    """Raises at one of its moments."""

    error: Exception = RuntimeError("of an observer")


@pytest.mark.parametrize("moment", MOMENTS)
def test_observer_that_fails_is_dropped(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise MemoryError

    kind = type("Failing", (Observer,), {moment: fail})
    monkeypatch.setattr(_watch, "default_notices", lambda *_: [kind()])
    run = trained(tmp_path / "a")
    assert run.status == "finished" and len(run.steps) == STEPS
    assert [d for d in said(run, "not recorded") if f"Failing stopped at {moment}: MemoryError" in d] != []


@pytest.mark.parametrize("broken", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"])
def test_profiler_that_fails(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = getattr(torch.profiler.profile, broken)

    def fail(self: Any, *args: Any) -> None:
        if broken == "stop_trace":
            works(self, *args)  # or torch would go on profiling
        raise RuntimeError("Kineto is not available")

    monkeypatch.setattr(profile.profile, broken, fail)
    run = trained(tmp_path / "a", profile=(5, 8))
    assert run.status == "finished" and len(run.kernels) == 0
    assert [d for d in said(run, "not recorded") if "Kineto is not available" in d] != []


def test_nvml_that_is_lost_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml.FakeNvml(fake_nvml.HOPPER)

    def sampler(writer: Any, device: Any) -> DeviceSampler:
        uuids = [fake_nvml.HOPPER.uuid]
        return DeviceSampler(writer, torch.device("cuda:0"), 0.2, library=nvml, uuids=uuids, retry_s=0.05)

    def between(step: int, folder: Path) -> None:
        if step == 5:
            wait_for(lambda: len(load_run(folder).device) > 0)
            nvml.lose()
        elif step == 15:
            wait_for(lambda: len(said(load_run(folder), "not recorded")) > 0)
            nvml.find_again()
        elif step == 25:
            wait_for(lambda: len(said(load_run(folder), "device samples")) > 0)

    monkeypatch.setattr(_watch, "DeviceSampler", sampler)
    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and "the GPU is lost" in said(run, "not recorded")[0]


def test_kernel_cache_on_a_full_disk_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(x):\n    return 2 * x\n")
    program = """
        import pathlib, resource, sys
        sys.path.insert(0, sys.argv[1])
        from amp_core.record._measure_cpu import kept
        import mine
        for most in (100, 1_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            print(kept(mine.twice)(21), len(list(pathlib.Path(sys.argv[1]).rglob("*.nb?"))))
        for file in pathlib.Path(sys.argv[1]).rglob("*.nb?"):
            file.write_bytes(b"")                            # a power cut
        print(kept(mine.twice)(21))
    """
    assert _program(program, str(tmp_path)).split() == ["42", "0", "42", "2", "42"]


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
    bare, direct, thread = _program(program, str(tmp_path)).strip().splitlines()
    assert bare == direct == thread
    for how in ("direct", "thread"):
        run = load_run(tmp_path / how)
        assert run.status == "finished" and run.steps["step"].tolist() == list(range(12))


def test_interrupt_in_the_middle_of_a_write_ends_the_training_as_without(disk: Disk, tmp_path: Path) -> None:
    def interrupt() -> None:
        disk.works()
        raise KeyboardInterrupt

    def between(step: int, folder: Path) -> None:
        if step == 10:
            disk.befall = interrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", between)
    (writer,) = [w for w in runlog._ending._open if isinstance(w, TrainingWriter)]
    writer.close("stopped", "interrupted from the keyboard")
    run = load_run(tmp_path / "a")
    assert run.status == "stopped" and run.steps["step"].tolist()[:9] == list(range(9))


# ---- helpers --------------------------------------------------------------------------------------------------------


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened, for half a minute at most."""
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def _program(body: str, *arguments: str) -> str:
    line = [sys.executable, "-c", textwrap.dedent(body), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _log_to_caplog(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="amp_core")
