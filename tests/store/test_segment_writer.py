"""Segments are sealed while writing continues, rows of all threads and ranks are kept, and a failed write loses only
its row."""

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import load_run
from amp_core.schema import TABLES
from amp_core.store import segment_writer
from amp_core.store.writer import RunWriter
from tests.run_folders import files, write_steps


def test_full_segments_are_sealed_while_writing_continues(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", seal_bytes=10_000) as writer:
        write_steps(writer, 0, 100)
        number = len(list((tmp_path / "a" / "steps").glob("*.arrows")) + list((tmp_path / "a/steps").glob("*.parquet")))
        assert number > 3
    names = [f for f in files(tmp_path / "a") if f.startswith("steps")]
    assert names == [f"steps/{i:05d}.parquet" for i in range(len(names))] and len(names) > 3
    assert load_run(tmp_path / "a").steps["loss"].tolist() == [float(i) for i in range(100)]


def test_an_old_segment_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(segment_writer, "time", SimpleNamespace(monotonic=lambda: now))
    with RunWriter(tmp_path / "a", seal_age_s=60.0) as writer:
        for now in (0.0, 59.0, 60.0, 61.0):
            write_steps(writer, int(now), int(now) + 1)
    rows = [pq.read_table(f).column("step").to_pylist() for f in sorted((tmp_path / "a" / "steps").iterdir())]
    assert rows == [[0, 59], [60, 61]]


def test_sealed_parquet_is_readable_by_other_tools(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 5)
    table = pq.read_table(tmp_path / "a" / "steps")
    assert table.schema.equals(TABLES["steps"].schema) and table.num_rows == 5


def test_a_stream_is_a_plain_arrow_stream(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 5)
    with pa.ipc.open_stream((tmp_path / "a" / "steps" / "00000.arrows").read_bytes()) as reader:
        assert reader.read_all().column("step").to_pylist() == list(range(5))
    writer.close()


def test_a_failed_seal_keeps_the_rows_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 3)
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and run.steps["step"].tolist() == [0, 1, 2]


class TornFile:
    """A file in which one write stores only a part and then fails, as on a full disk."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.fail = True

    def write(self, data: bytes) -> int:
        if self.fail:
            self.fail = False
            self.file.write(data[:100])
            raise OSError(28, "No space left on device")
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "TornFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def test_a_sealed_file_is_synced_before_its_stream_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    stream = tmp_path / "a" / "steps" / "00000.arrows"
    works = os.fsync

    def fsync(number: int) -> None:
        works(number)
        synced.append((os.fstat(number).st_ino, stream.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {"step": [0]})
    sealed = stream.with_suffix(".parquet")
    assert (sealed.stat().st_ino, True) in synced and not stream.exists()


@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_write_that_fails_half_way_loses_only_its_row(tmp_path: Path, rows_before: int) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, rows_before)
    segment = writer._segments.of_table("steps")
    segment._file = TornFile(segment._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        write_steps(writer, 50, 51)
    expected = list(range(rows_before))
    assert load_run(tmp_path / "a").steps["step"].tolist() == expected
    write_steps(writer, 60, 62)
    assert load_run(tmp_path / "a").steps["step"].tolist() == [*expected, 60, 61]
    writer.close()
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and run.steps["step"].tolist() == [*expected, 60, 61]


def test_many_threads_may_write_at_once(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", seal_bytes=50_000) as writer:
        threads = [threading.Thread(target=write_steps, args=(writer, 100 * i, 100 * i + 100)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert load_run(tmp_path / "a").steps["step"].tolist() == list(range(400))


def test_ranks_write_their_own_segments_and_are_merged(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path / "a", rank=r, world_size=3) for r in (2, 0, 1)]  # rank 0 need not be first
    for step in range(4):
        for writer in writers:
            writer.append("steps", {"step": [step], "loss": [step + writer.rank / 10]})
    run = load_run(tmp_path / "a")
    for _ in ("open", "sealed"):
        assert run.steps[["step", "rank"]].to_numpy().tolist() == [[s, r] for s in range(4) for r in range(3)]
        for writer in writers:
            writer.close()
        run.refresh()
    assert {"steps/00000.parquet", "steps/00000.r1.parquet", "steps/00000.r2.parquet"} <= set(files(tmp_path / "a"))
    assert run.head.world_size == 3 and run.status == "finished"
    assert sorted(run.events[run.events["kind"] == "ended"]["rank"]) == [0, 1, 2]


def test_a_second_close_changes_nothing_and_closed_runs_refuse_rows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    writer.close("failed", "first")
    writer.close("finished", "second")
    write_steps(writer, 0, 3)
    writer.update_head(name="other")
    run = load_run(tmp_path / "a")
    assert (run.status, run.end_reason, len(run.steps), run.name) == ("failed", "first", 0, "a")


def test_the_end_is_written_even_if_pending_rows_fail(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    writer = RunWriter(tmp_path / "a")
    writer.before_end = fail
    with pytest.raises(RuntimeError, match="CUDA error"):
        writer.close("stopped", "by hand")
    assert load_run(tmp_path / "a").head.status == "stopped"


def test_deleted_files_are_restored_with_their_rows_even_at_the_end(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 3)
    (tmp_path / "a" / "steps" / "00000.arrows").unlink()
    writer.close()
    run = load_run(tmp_path / "a")
    assert run.steps["step"].tolist() == [0, 1, 2]
    message = "the run's files were removed; all rows not yet sealed were kept and are being written now"
    assert run.events["detail"].tolist().count(message) == 1


def test_deleted_rows_that_cannot_be_restored_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: object) -> bytes:
        raise OSError(116, "Stale file handle")

    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 3)
    writer.event("warning", name="kept")
    (tmp_path / "a" / "steps" / "00000.arrows").unlink()
    monkeypatch.setattr(segment_writer.OpenSegment, "_content", stale)
    writer.close()
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and len(run.steps) == 0
    reported = run.events[run.events["name"] == "not recorded"]
    assert reported["detail"].tolist() == ["the run's files were removed; rows lost: those in steps"]


def test_a_file_of_another_run_in_place_of_a_deleted_one_is_not_sealed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 3)
    shutil.rmtree(tmp_path / "a")
    other = RunWriter(tmp_path / "a", name="the new one")
    write_steps(other, 70, 72)
    with pytest.raises(FileExistsError, match="another run"):
        writer.close()
    write_steps(other, 72, 73)
    other.close()
    run = load_run(tmp_path / "a")
    assert run.name == "the new one" and run.steps["step"].tolist() == [70, 71, 72]
