"""Whatever happens to a run's folder, training continues with the same losses, and the run recovers and reports it
once."""

import errno
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_core import load_run
from amp_core.store import resilient_writer, segment_writer, shutdown, writer
from amp_core.store.resilient_writer import TrainingWriter
from tests.robustness.trained import STEPS, Disk, message, program_said, trained, unwatched


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
    (detail,) = message(run, "writing")
    assert os.strerror(number) in detail and "all rows were kept" in detail
    assert caplog.text.count("training continues, and rows wait in memory") == 1


def test_a_disk_that_stays_full_loses_only_the_rows(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path / "a", lambda step, _: disk.fails(errno.ENOSPC) if step == 10 else None)
    assert run.steps["step"].tolist() == list(range(9))  # a step is written when the next one begins
    assert caplog.text.count("No space left on device") >= 1


def test_half_a_row_is_cut_off_if_the_disk_fills_during_its_write(tmp_path: Path) -> None:
    """`RLIMIT_FSIZE` makes a write store only a part; every new segment has space again."""
    program = """
        import resource, sys, torch
        from amp_core.record.stats import measure
        from amp_core.store import resilient_writer
        from tests.record.loops import train
        resilient_writer.RETRY_S = 0.01
        torch.set_num_threads(int(sys.argv[2]))  # sums come out otherwise with another number
        measure.measure([torch.zeros(1)])  # numba keeps what it compiles, which is longer
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        print(train(sys.argv[1], torch.float16, steps=60).losses)
    """
    assert program_said(program, str(tmp_path / "a"), str(torch.get_num_threads())).strip() == str(unwatched(60))
    run = load_run(tmp_path / "a")
    assert run.steps["step"].tolist() == list(range(60)) and set(run.tensors()["step"]) == set(range(0, 60, 3))
    assert all("File too large" in detail for detail in message(run, "writing")) and len(message(run, "writing")) > 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a file system")
def test_a_file_system_that_is_really_full_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resilient_writer, "RETRY_S", 0.01)
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
        assert "No space left on device" in message(run, "writing")[0]
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def _remove(folder: Path) -> None:
    """Remove a folder at once: emptied in place, it may meanwhile get another file."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def test_a_folder_that_vanishes_and_returns_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(resilient_writer, "RETRY_S", 0.01)

    def between(step: int, folder: Path) -> None:
        if step == 10:
            _remove(folder)
        elif step == 20:
            folder.mkdir()

    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    assert "the run's files were removed" in message(run, "writing")[0]


def test_files_that_vanish_just_before_the_end_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_writer, "CHECK_INTERVAL_S", 1e9)  # only the last check

    def between(step: int, folder: Path) -> None:
        if step == STEPS - 3:
            for stream in folder.glob("*/*.arrows"):
                stream.unlink()

    run = trained(tmp_path / "a", between)
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    assert sorted(set(run.tensors()["step"])) == list(range(0, STEPS, 3))
    (detail,) = message(run, "writing")
    assert detail == "the run's files were removed; all rows not yet sealed were kept and are being written now"
    assert caplog.text.count(detail) == 1


def test_another_run_in_the_same_place_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(resilient_writer, "RETRY_S", 0.01)
    monkeypatch.setattr(resilient_writer, "END_TIMEOUT_S", 1.0)

    def between(step: int, folder: Path) -> None:
        if step == 10:
            _remove(folder)
            with writer.RunWriter(folder, name="the new one") as other:
                other.append("steps", {"step": [77]})

    run = trained(tmp_path / "a", between)
    assert (run.name, run.status, run.steps["step"].tolist()) == ("the new one", "finished", [77])


def test_a_thread_writes_to_a_slow_disk(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilient_writer, "SLOW_S", 0.005)
    threads = set()

    def slow() -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.01)

    disk.befall = slow
    run = trained(tmp_path / "a")
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    assert threads == {"MainThread", "ampscope-write"}


@pytest.mark.parametrize("answers_at_the_end", [True, False])
def test_a_file_system_that_hangs_never_blocks_the_loop(
    answers_at_the_end: bool,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resilient_writer, "NETWORK_FILE_SYSTEMS", ("",))  # as on a network file system
    monkeypatch.setattr(resilient_writer, "END_TIMEOUT_S", 5.0 if answers_at_the_end else 0.1)
    answers = threading.Event()

    def between(step: int, folder: Path) -> None:
        if step == 5:
            disk.befall = lambda: (answers.wait(), None)[1]
        elif step == STEPS - 1 and answers_at_the_end:
            answers.set()  # the test is that the loop gets here while a write hangs

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
    monkeypatch.setattr(resilient_writer, "MAX_BYTES", 200_000)
    held = []

    def between(step: int, folder: Path) -> None:
        writers = [w for w in shutdown._open if isinstance(w, TrainingWriter)]
        held.append(writers[0]._queued_bytes)
        if step == 5:
            disk.fails(errno.ENOSPC)
        elif step == 50:
            disk.works()

    run = trained(tmp_path / "a", between, steps=80, every=1)
    assert run.steps["step"].tolist() == list(range(80))
    sampled = set(run.tensors()["step"])
    assert {0, 79} <= sampled and not {30, 40} & sampled
    assert 50_000 < max(held) <= 200_000


def test_rows_dropped_for_lack_of_memory_are_counted(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resilient_writer, "MAX_BYTES", 5_000)

    def between(step: int, folder: Path) -> None:
        if step == 5:
            disk.fails(errno.ENOSPC)
        elif step == 25:
            disk.works()
            time.sleep(0.1)

    run = trained(tmp_path / "a", between)
    steps = run.steps["step"].tolist()
    detail = next(d for d in message(run, "not recorded") if "memory was full" in d)
    assert f"{STEPS - len(steps)} of steps" in detail and steps[:4] == [0, 1, 2, 3] and steps[-1] == STEPS - 1


def test_network_file_systems_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mounts(all: bool) -> list[Any]:  # noqa: A002 - psutil's name
        return [SimpleNamespace(mountpoint=p, fstype=t) for p, t in (("/", "ext4"), (str(tmp_path), "nfs4"))]

    monkeypatch.setattr(resilient_writer.psutil, "disk_partitions", mounts)
    assert resilient_writer.can_hang(tmp_path / "runs" / "a") and not resilient_writer.can_hang(Path("/elsewhere/a"))
