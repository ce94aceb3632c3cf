"""Reading a run: its frames, its status, and a refresh that reads only new rows."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.analysis import compare, safe_window, what_if
from amp_core.hardware.host import this_process
from amp_core.schema import TABLES
from amp_core.store import segment_reader, sources
from amp_core.store.segment_reader import File, read_parquet, read_stream
from amp_core.store.sightings import Sightings
from amp_core.store.writer import RunWriter
from tests.run_folders import HEAD, write_steps


def test_tensors_are_selected_by_kind_name_and_steps(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        for step in range(5):
            for kind in ("weight_grad", "output_grad"):
                columns = {"step": [step] * 2, "name": ["a", "b"], "kind": [kind] * 2, "exp_counts": [[step], [1, 2]]}
                writer.append("tensors", columns)
    run = load_run(tmp_path / "a")
    assert len(run.tensors()) == 20
    assert set(run.tensors(kind="output_grad")["kind"]) == {"output_grad"} and len(run.tensors("output_grad")) == 10
    chosen = run.tensors(kind="weight_grad", name="a", steps=(1, 3))
    assert chosen["step"].tolist() == [1, 2, 3]  # both ends included
    assert [c.tolist() for c in chosen["exp_counts"]] == [[1], [2], [3]]
    assert isinstance(chosen["exp_counts"][0], np.ndarray) and chosen["exp_counts"][0].dtype == np.int64
    assert len(run.tensors(name="c")) == 0 and list(run.tensors(name="c").columns) == list(chosen.columns)


def recorded(folder: Path) -> RunWriter:
    """Forty steps of two tensors and two kinds: segments that are sealed, and one that is still open."""
    writer = RunWriter(folder, seal_bytes=16_384)
    for step in range(40):
        for kind in ("weight_grad", "output_grad"):
            rows = {"step": [step] * 2, "name": ["a", "b"], "kind": [kind] * 2, "exp_counts": [[step], [1, 2]]}
            writer.append("tensors", rows)
    return writer


@pytest.mark.parametrize(
    "selection",
    [
        {"name": "a"},
        {"kind": "output_grad"},
        {"steps": (5, 17)},
        {"name": "b", "kind": "weight_grad", "steps": (0, 39)},
        {"name": "none"},
    ],
)
def test_rows_of_a_selective_read_are_those_of_the_whole_table(tmp_path: Path, selection: dict[str, Any]) -> None:
    with recorded(tmp_path / "a"):
        assert {p.suffix for p in (tmp_path / "a" / "tensors").iterdir()} >= {".arrows"}
        alone, read_before = load_run(tmp_path / "a"), load_run(tmp_path / "a")
        read_before.table("tensors")
        pd.testing.assert_frame_equal(alone.tensors(**selection), read_before.tensors(**selection))
    sealed, whole = load_run(tmp_path / "a"), load_run(tmp_path / "a")
    whole.table("tensors")
    pd.testing.assert_frame_equal(sealed.tensors(**selection), whole.tensors(**selection))


def test_only_matching_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "a").close()
    rows: list[int] = []
    read = sources.FolderSource.read

    def counting(*args: Any, **kwargs: Any) -> Any:
        segment = read(*args, **kwargs)
        rows.append(segment.rows)
        return segment

    monkeypatch.setattr(sources.FolderSource, "read", counting)
    run = load_run(tmp_path / "a")
    assert len(run.tensors(name="a", kind="weight_grad", steps=(3, 7))) == 5
    assert sum(rows) == 5 and len(rows) > 2
    for _ in range(20):  # after several requests the whole table is read once
        assert len(run.tensors(name="b", kind="weight_grad")) == 40
    assert sum(rows) < 5 + 160 + 4 * 40


def test_rows_of_a_file_without_a_column_are_selected_by_its_default(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "tensors").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(HEAD))
    pq.write_table(pa.table({"step": [0, 1], "name": ["a", "b"]}), folder / "tensors" / "00000.parquet")
    default = next(c.default for c in TABLES["tensors"].columns if c.name == "kind")
    assert load_run(folder).tensors(kind=default, name="b")["step"].tolist() == [1]


def test_an_empty_run_has_every_table_with_its_columns(tmp_path: Path) -> None:
    RunWriter(tmp_path / "a").close()
    run = load_run(tmp_path / "a")
    for name, table in TABLES.items():
        assert run.table(name).schema.names == [c.name for c in table.columns]
    frames = {"steps": run.steps, "device": run.device, "kernels": run.kernels, "ops": run.ops, "audits": run.audits}
    for name, frame in frames.items():
        assert len(frame) == 0 and list(frame.columns) == [c.name for c in TABLES[name].columns]
    with pytest.raises(RunError, match="table='losses' is unknown; choose one of steps, tensors"):
        run.table("losses")


def test_changing_a_frame_does_not_change_the_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 3)
    run = load_run(tmp_path / "a")
    frame = run.steps
    frame["loss"] = 7.0
    frame["more"] = 1
    assert run.steps["loss"].tolist() == [0.0, 1.0, 2.0] and "more" not in run.steps


def test_rows_are_in_the_order_of_steps_whichever_rank_wrote_first(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        for step in (3, 1, 2):
            write_steps(writer, step, step + 1)
    assert load_run(tmp_path / "a").steps["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "does not exist; give a run folder or a packed run"),
        (lambda p: p.mkdir(), "holds no run: run.json is missing"),
        (lambda p: p.write_text("hello"), "is not a packed run: File is not a zip file"),
        (lambda p: (p / "run.json").mkdir(parents=True), "cannot be read: Is a directory"),
        (lambda p: (p.mkdir(), (p / "run.json").write_text("{")), "is not a run head: it does not hold JSON"),
        (lambda p: (p.mkdir(), (p / "run.json").write_bytes(b" " * 5 * 2**20)), "is larger than 4 MiB"),
    ],
)
def test_a_path_without_a_run_raises_one_sentence(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(RunError, match=says) as caught:
        load_run(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("path", [None, 5, b"runs/a"])
def test_a_value_that_is_not_a_path_raises_one_sentence(path: Any) -> None:
    with pytest.raises(RunError, match=f"path={path!r} is not a path; give a run folder or a packed run"):
        load_run(path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "foo"}, "kind='foo' is unknown; choose one of weight_grad"),
        ({"steps": 5}, "steps=5 is not a pair of steps"),
        ({"steps": (1, 2, 3)}, r"steps=\(1, 2, 3\) is not a pair of steps"),
        ({"steps": ("1", "2")}, "is not a pair of steps"),
    ],
)
def test_an_invalid_selection_of_tensors_is_refused(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 3)
    with pytest.raises(RunError, match=says):
        load_run(tmp_path / "a").tensors(**wrong)


@pytest.mark.parametrize("public", [diagnose, what_if, safe_window, lambda run: compare([run])])
def test_a_path_in_place_of_a_run_raises_one_sentence(public: Callable[[Any], Any]) -> None:
    with pytest.raises(RunError, match=r"='runs/a' is not an opened run; give load_run\('runs/a'\)"):
        public("runs/a")


def test_the_run_of_a_dead_process_is_lost_and_shows_its_last_output(foreign_run: Path) -> None:
    dead_process = this_process() | {"started_s": 1.0, "started_ticks": 1}
    (foreign_run / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": dead_process}))
    run = load_run(foreign_run)
    assert run.status == "lost" and not run.is_live
    assert (
        run.end_reason
        == "its process is gone without recording an end: killed, out of memory, or the machine went down"
    )
    (foreign_run / "console.log").write_bytes(b"step 1\rstep 2\rstep 3\r\n\nKilled\n\n")
    assert run.console() == ["step 3", "", "Killed"]
    assert str(run.end_reason).endswith("went down. Last output: step 3 / Killed")
    (foreign_run / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": this_process()}))
    assert run.refresh() and run.status == "running" and run.is_live and run.end_reason is None


def test_the_status_of_a_run_of_another_machine_follows_from_its_files(
    foreign_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in ({}, {"machine": f"not-{socket.gethostname()}", "pid": 1, "started_s": 1.0}):
        (foreign_run / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": process}))
        monkeypatch.setattr(sources, "SIGHTINGS", Sightings())
        assert load_run(foreign_run).status == "running"
        monkeypatch.setattr(sources, "SIGHTINGS", Sightings())  # another process looks for the first time
        old = time.time() - sources.STALE_S - 5
        os.utime(foreign_run / "run.json", (old, old))
        assert load_run(foreign_run).status == "lost"
        pq.write_table(pa.table({"step": [0]}), foreign_run / "steps.parquet")  # its last write is recent
        assert load_run(foreign_run).status == "running"
        (foreign_run / "steps.parquet").unlink()


def test_console_returns_the_last_lines_of_a_long_file(foreign_run: Path) -> None:
    assert load_run(foreign_run).console() == []
    (foreign_run / "console.log").write_text(
        "".join(f"line {i}\n" for i in range(50_000)) + "é\udcff", "utf-8", "surrogateescape"
    )
    run = load_run(foreign_run)
    assert run.console(3) == ["line 49998", "line 49999", "é�"]
    assert run.console(500) == [f"line {i}" for i in range(49_501, 50_000)] + ["é�"]


class Counted:
    """Counts reads of segments: bytes of streams, and Parquet files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream_bytes = 0
        self.parquet: list[str] = []
        monkeypatch.setattr(sources, "read_stream", self.read_stream)
        monkeypatch.setattr(sources, "read_parquet", self.read_parquet)

    def read_stream(self, file: File, data: bytes, *rest: Any) -> Any:
        self.stream_bytes += len(data)
        return read_stream(file, data, *rest)

    def read_parquet(self, file: File, source: Any, table: Any, before: Any, **rest: Any) -> Any:
        segment = read_parquet(file, source, table, before, **rest)
        if before is None or segment.table is not before.table:
            self.parquet.append(file.name)
        return segment

    def take(self) -> tuple[int, list[str]]:
        got = (self.stream_bytes, self.parquet)
        self.stream_bytes, self.parquet = 0, []
        return got


def test_refresh_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    writer = RunWriter(tmp_path / "a", seal_bytes=30_000)
    write_steps(writer, 0, 60)
    writer._sealer.finish()
    sealed = sorted(p.name for p in (tmp_path / "a" / "steps").glob("*.parquet"))
    assert len(sealed) >= 2
    run = load_run(tmp_path / "a")
    assert len(run.steps) == 60 and sorted(counted.take()[1]) == [f"steps/{n}" for n in sealed]

    assert run.refresh() is False and counted.take() == (0, [])

    (stream,) = (tmp_path / "a" / "steps").glob("*.arrows")
    size = stream.stat().st_size
    write_steps(writer, 60, 62)
    assert run.refresh() is True
    assert counted.take() == (stream.stat().st_size - size, [])
    assert run.steps["step"].tolist() == list(range(62))

    writer.close()  # sealing rows that were already read changes nothing
    assert run.refresh() is True and run.status == "finished"
    assert counted.take() == (0, [])
    assert run.steps["loss"].tolist() == [float(i) for i in range(62)]


def test_refresh_reads_the_head_and_new_tables(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    run = load_run(tmp_path / "a")
    assert len(run.events) == 0 and run.refresh() is False
    writer.event("warning", detail="hot")
    assert run.refresh() is True and run.events["detail"].tolist() == ["hot"]
    writer.update_head(results={"eval_loss": 1.0})
    assert run.refresh() is True and run.head.results == {"eval_loss": 1.0}
    writer.close()


def test_fingerprint_changes_whenever_the_run_does(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    run = load_run(tmp_path / "a")
    fingerprints = [run.fingerprint()]
    assert run.fingerprint() == fingerprints[0]
    for change in (lambda: write_steps(writer, 0, 1), lambda: write_steps(writer, 1, 2), writer.close):
        change()
        fingerprints.append(run.fingerprint())
    (tmp_path / "a" / "console.log").write_text("x")
    fingerprints.append(run.fingerprint())
    assert len(set(fingerprints)) == 5


def test_files_that_vanish_while_being_listed_are_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 3)
    listed = sources.FolderSource.segments
    fails = [FileNotFoundError(2, "gone"), FileNotFoundError(2, "gone")]

    def segments(self: sources.FolderSource, table: str) -> dict[str, File]:
        if fails:
            raise fails.pop()
        return listed(self, table)

    monkeypatch.setattr(sources.FolderSource, "segments", segments)
    run = load_run(tmp_path / "a")
    assert run.steps["step"].tolist() == [0, 1, 2]
    fails += [FileNotFoundError(2, "gone")]
    assert len(run.fingerprint()) == 3
    fails += [FileNotFoundError(2, "gone")] * 100
    with pytest.raises(RunError, match="its files disappear"):
        run.fingerprint()
    fails[:] = [PermissionError(13, "Permission denied")]  # type: ignore[list-item]
    with pytest.raises(RunError, match="cannot be read: Permission denied"):
        run.fingerprint()


def test_a_stream_that_a_crash_left_beside_its_parquet_counts_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 3)
    stream = tmp_path / "a" / "steps" / "00000.arrows"
    data = stream.read_bytes()
    writer.close()
    stream.write_bytes(data)
    (tmp_path / "a" / "steps" / ".00001.parquet.tmp").write_bytes(b"half a file")
    (tmp_path / "a" / "steps" / "notes.txt").write_text("mine")
    assert load_run(tmp_path / "a").steps["step"].tolist() == [0, 1, 2]
    both = [File(f"steps/00000.{form}", 1, 0) for form in ("parquet", "arrows")]
    for listed in (both, both[::-1]):  # the order of a listing is arbitrary
        files: dict[str, File] = {}
        for file in listed:
            sources.keep_sealed(files, file)
        assert files == {"steps/00000": both[0]}


def test_a_stream_of_single_rows_is_merged_into_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has an overhead of ten kilobytes for a row of a hundred bytes."""
    together = segment_reader._together
    held: list[int] = []
    monkeypatch.setattr(
        segment_reader, "_together", lambda batches, *rest: (held.append(len(batches)), together(batches, *rest))[1]
    )
    with RunWriter(tmp_path / "run") as writer:
        write_steps(writer, 0, 1000)
        run = load_run(tmp_path / "run")
        assert run.steps["step"].tolist() == list(range(1000))
        assert sum(held) == 1000 and max(held) <= segment_reader.BATCHES_AT_ONCE
        for first in range(1000, 1400, 7):
            write_steps(writer, first, first + 7)
            assert run.refresh() and run.steps["loss"].tolist() == [float(i) for i in range(first + 7)]
            assert run._segments["steps"]["steps/00000"].table.column("step").num_chunks <= 10
        assert sum(held) == len(run.steps)  # each row is decoded once
