"""Reading a run: whatever was written whole is read, new rows only are read again, other programs' runs open too."""

import dataclasses
import json
import os
import random
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

from amp_core import RunError, _source, load_run
from amp_core._machine import this_process
from amp_core._segments import File, read_parquet, read_stream
from amp_core.run import Run
from amp_core.runlog import RunWriter
from amp_core.schema import TABLES

HEAD = {"schema": 1, "run_id": "x", "name": "theirs", "created_at": "2026-01-01T00:00:00Z", "status": "finished"}


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    for step in range(first, last):
        writer.append("steps", {"step": [step], "loss": [float(step)]})


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The head of a run that another program writes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(HEAD))
    return folder


# ---- what a run gives -----------------------------------------------------------------------------------------------


def test_tensors_are_chosen_by_kind_name_and_steps(tmp_path: Path) -> None:
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


def test_empty_run_has_every_table_with_its_columns(tmp_path: Path) -> None:
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


def test_rows_come_in_the_order_of_steps_whoever_wrote_first(tmp_path: Path) -> None:
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
def test_what_is_no_run_is_one_sentence(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(RunError, match=says) as caught:
        load_run(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# ---- status ---------------------------------------------------------------------------------------------------------


def test_run_of_a_dead_process_is_lost_and_gives_its_last_output(theirs: Path) -> None:
    gone = this_process() | {"started_s": 1.0}
    (theirs / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": gone}))
    run = load_run(theirs)
    assert run.status == "lost" and not run.is_live
    assert run.end_reason == "its process is gone and wrote no end: killed, out of memory, or the machine went down"
    (theirs / "console.log").write_bytes(b"step 1\rstep 2\rstep 3\r\n\nKilled\n\n")
    assert run.console() == ["step 3", "", "Killed"]
    assert str(run.end_reason).endswith("went down. Last output: step 3 / Killed")
    (theirs / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": this_process()}))
    assert run.refresh() and run.status == "running" and run.is_live and run.end_reason is None


def test_run_of_another_machine_is_judged_by_its_files(theirs: Path) -> None:
    for process in ({}, {"machine": f"not-{socket.gethostname()}", "pid": 1, "started_s": 1.0}):
        (theirs / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": process}))
        assert load_run(theirs).status == "running"
        old = time.time() - _source.STALE_S - 5
        os.utime(theirs / "run.json", (old, old))
        assert load_run(theirs).status == "lost"
        pq.write_table(pa.table({"step": [0]}), theirs / "steps.parquet")  # it has just written
        assert load_run(theirs).status == "running"
        (theirs / "steps.parquet").unlink()


def test_console_gives_the_last_lines_of_a_long_file(theirs: Path) -> None:
    assert load_run(theirs).console() == []
    (theirs / "console.log").write_text(
        "".join(f"line {i}\n" for i in range(50_000)) + "é\udcff", "utf-8", "surrogateescape"
    )
    run = load_run(theirs)
    assert run.console(3) == ["line 49998", "line 49999", "é�"]
    assert run.console(500) == [f"line {i}" for i in range(49_501, 50_000)] + ["é�"]


# ---- live -----------------------------------------------------------------------------------------------------------


class Counted:
    """Counts what is read of segments: bytes of streams, and Parquet files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream_bytes = 0
        self.parquet: list[str] = []
        monkeypatch.setattr(_source, "read_stream", self.read_stream)
        monkeypatch.setattr(_source, "read_parquet", self.read_parquet)

    def read_stream(self, file: File, data: bytes, *rest: Any) -> Any:
        self.stream_bytes += len(data)
        return read_stream(file, data, *rest)

    def read_parquet(self, file: File, source: Any, table: Any, before: Any, *rest: Any) -> Any:
        segment = read_parquet(file, source, table, before, *rest)
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

    writer.close()  # sealing rows that were read already is no news
    assert run.refresh() is True and run.status == "finished"
    assert counted.take() == (0, [])
    assert run.steps["loss"].tolist() == [float(i) for i in range(62)]


def test_refresh_sees_the_head_and_new_tables(tmp_path: Path) -> None:
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
    seen = [run.fingerprint()]
    assert run.fingerprint() == seen[0]
    for change in (lambda: write_steps(writer, 0, 1), lambda: write_steps(writer, 1, 2), writer.close):
        change()
        seen.append(run.fingerprint())
    (tmp_path / "a" / "console.log").write_text("x")
    seen.append(run.fingerprint())
    assert len(set(seen)) == 5


def test_files_that_vanish_while_being_listed_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 3)
    listed = _source.FolderSource.segments
    fails = [FileNotFoundError(2, "gone"), FileNotFoundError(2, "gone")]

    def segments(self: _source.FolderSource, table: str) -> dict[str, File]:
        if fails:
            raise fails.pop()
        return listed(self, table)

    monkeypatch.setattr(_source.FolderSource, "segments", segments)
    run = load_run(tmp_path / "a")
    assert run.steps["step"].tolist() == [0, 1, 2]
    fails += [FileNotFoundError(2, "gone")]
    assert len(run.fingerprint()) == 3
    fails += [FileNotFoundError(2, "gone")] * 100
    with pytest.raises(RunError, match="its files vanish"):
        run.fingerprint()
    fails[:] = [PermissionError(13, "Permission denied")]  # type: ignore[list-item]
    with pytest.raises(RunError, match="cannot be read: Permission denied"):
        run.fingerprint()


def test_stream_that_a_crash_left_beside_its_parquet_counts_once(tmp_path: Path) -> None:
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
    for listed in (both, both[::-1]):  # folders are listed in any order
        found: dict[str, File] = {}
        for file in listed:
            _source._keep_better(found, file)
        assert found == {"steps/00000": both[0]}


# ---- torn and damaged -----------------------------------------------------------------------------------------------


def event_stream(tmp_path: Path, rows: int) -> bytes:
    writer = RunWriter(tmp_path / "a")
    for step in range(rows):
        writer.event("warning", name=f"n{step}", step=step)
    data = (tmp_path / "a" / "events" / "00000.arrows").read_bytes()
    writer.close()
    return data


def test_stream_cut_at_any_byte_gives_whole_rows_and_reads_on(tmp_path: Path) -> None:
    data = event_stream(tmp_path, 4) + b"\xff\xff\xff\xff\x00\x00\x00\x00"
    events, rows = TABLES["events"], 0
    for length in range(len(data) + 1):
        file = File("events/00000.arrows", length, 0)
        cut = read_stream(file, data[:length], events, None)
        assert cut.rows >= rows and cut.offset <= length
        rows = cut.rows
        if cut.table is not None:
            assert cut.table.column("step").to_pylist() == list(range(rows))
        if length % 7 == 0:  # the rest, when it has come
            whole = read_stream(file, data[cut.offset :], events, cut)
            assert whole.table is not None and whole.table.column("step").to_pylist() == [0, 1, 2, 3]
            assert whole.table.column("name").to_pylist() == ["n0", "n1", "n2", "n3"]
    assert rows == 4


def test_cut_stream_is_read_through_the_run_too(theirs: Path, tmp_path: Path) -> None:
    data = event_stream(tmp_path, 4)
    (theirs / "events").mkdir()
    for length in (0, 5, 300, len(data) // 2, len(data) - 1, len(data)):
        (theirs / "events" / "00000.arrows").write_bytes(data[:length])
        names = load_run(theirs).events["name"].tolist()
        assert names == [f"n{i}" for i in range(len(names))]
    assert len(names) == 4
    (theirs / "events" / "00000.arrows").write_bytes(
        data + b"\0" * 5000
    )  # what a power cut leaves on some file systems
    assert len(load_run(theirs).events) == 4


def test_damaged_tables_are_one_sentence(theirs: Path, tmp_path: Path) -> None:
    data = bytearray(event_stream(tmp_path, 4))
    (theirs / "events").mkdir()
    (theirs / "events" / "00000.arrows").write_bytes(b"GIF89a" + bytes(data))
    with pytest.raises(RunError, match=r"events/00000\.arrows is damaged: no message starts at byte 0") as caught:
        _ = load_run(theirs).events
    assert "\n" not in str(caught.value)
    (theirs / "events" / "00000.arrows").unlink()
    (theirs / "events" / "00000.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RunError, match=r"events/00000\.parquet is damaged"):
        _ = load_run(theirs).events


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    # Only Parquet: a schema message made on purpose can make Arrow itself abort, which is why files from strangers are
    # read in a process of their own.
    event_stream(tmp_path, 4)
    whole = (tmp_path / "a" / "events" / "00000.parquet").read_bytes()
    rng, refused = random.Random(1), 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 20))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        try:
            file = File("events/00000.parquet", len(data), 0)
            segment = read_parquet(file, pa.BufferReader(bytes(data)), TABLES["events"], None)
        except RunError:
            refused += 1
            continue
        assert segment.table is not None
        segment.table.to_pylist()
    assert refused > 100


# ---- other programs' runs -------------------------------------------------------------------------------------------

FOREIGN_STEPS = pa.table(
    {
        "loss": pa.array([2.5, None, float("nan")], pa.float32()),
        "step": pa.array([0, 1, 2], pa.int32()),
        "skipped": pa.array([0, 1, 0], pa.uint8()),
        "samples": pa.array([32, 32, 32], pa.uint64()),
        "perplexity": pa.array([1.0, 2.0, 3.0]),
    }
)
FOREIGN_TENSORS = pa.table(
    {
        "step": pa.array([0, 0], pa.int16()),
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "kind": pa.array(["weight_grad", "output_grad"], pa.large_string()),
        "exp_counts": pa.array([[1, 2], None], pa.large_list(pa.int32())),
        "rms": pa.array([1.0, 2.0], pa.float16()),
    }
)


def write_stream(table: pa.Table, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1):
            writer.write_batch(batch)


@pytest.mark.parametrize("place", ["in a folder", "beside the head"])
@pytest.mark.parametrize("form", ["parquet", "arrows"])
def test_run_written_by_plain_arrow_is_read(theirs: Path, place: str, form: str) -> None:
    for name, table in (("steps", FOREIGN_STEPS), ("tensors", FOREIGN_TENSORS)):
        file = theirs / f"{name}.{form}"
        if place == "in a folder":
            (theirs / name).mkdir()
            file = theirs / name / f"anything-Else_1.{form}"
        if form == "parquet":
            pq.write_table(table, file)
        else:
            write_stream(table, file)
    run = load_run(theirs)
    for _ in range(2):
        steps = run.table("steps")
        assert steps.schema.names == [*(c.name for c in TABLES["steps"].columns), "perplexity"]
        assert steps.schema.field("step").type == pa.int64() and steps.schema.field("loss").type == pa.float64()
        assert steps.column("skipped").to_pylist() == [False, True, False]
        assert steps.column("loss").null_count == 1 and np.isnan(steps.column("loss")[2].as_py())
        assert steps.column("rank").to_pylist() == [0, 0, 0] and steps.column("lr").null_count == 3
        assert run.steps["perplexity"].tolist() == [1.0, 2.0, 3.0]
        assert run.tensors(name="b")["kind"].tolist() == ["output_grad"]
        assert run.tensors(name="a")["exp_counts"][0].tolist() == [1, 2]
        run.validate(full=False)
        assert run.refresh() is False
    assert len(run.fingerprint()) == 3


def test_stream_with_dictionaries_may_grow(theirs: Path) -> None:
    table = pa.concat_tables([FOREIGN_TENSORS] * 3).combine_chunks()
    write_stream(table, theirs / "whole")
    data = (theirs / "whole").read_bytes()
    run = load_run(theirs)
    rows = []
    for length in (*range(0, len(data), 97), len(data)):
        (theirs / "tensors.arrows").write_bytes(data[:length])
        run.refresh()
        rows.append(len(run.tensors()))
    assert rows == sorted(rows) and rows[-1] == 6 and len(set(rows)) > 4


def test_rows_of_another_program_are_put_in_order(theirs: Path) -> None:
    (theirs / "steps").mkdir()
    pq.write_table(pa.table({"step": [5, 3]}), theirs / "steps" / "a.parquet")
    pq.write_table(pa.table({"step": [4, 1], "rank": [1, None]}), theirs / "steps" / "b.parquet")
    assert load_run(theirs).steps["step"].tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (pa.table({"loss": [1.0]}), "has no column 'step'; each row of 'steps' needs it"),
        (pa.table({"step": ["one"]}), "has column 'step' of type string, which is no int64"),
        (pa.table({"step": [2.5]}), "has column 'step' of type double, which is no int64"),
        (pa.table({"step": pa.array([2**63], pa.uint64())}), "has column 'step' of type uint64, which is no int64"),
        (pa.table({"step": [1], "loss": [[1.0]]}), "has column 'loss' of type list<.*>, which is no double"),
    ],
)
def test_columns_of_a_wrong_kind_are_one_sentence(theirs: Path, table: pa.Table, says: str) -> None:
    pq.write_table(table, theirs / "steps.parquet")
    with pytest.raises(RunError, match=says) as caught:
        _ = load_run(theirs).steps
    assert "damaged" not in str(caught.value)


def test_links_are_not_followed(theirs: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"step": [1]}), tmp_path / "elsewhere.parquet")
    (theirs / "steps").mkdir()
    (theirs / "steps" / "x.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    assert len(load_run(theirs).steps) == 0


def test_frames_are_pandas_with_their_types(theirs: Path) -> None:
    pq.write_table(FOREIGN_STEPS, theirs / "steps.parquet")
    frame = load_run(theirs).steps
    assert isinstance(frame, pd.DataFrame)
    assert frame.dtypes[["step", "loss", "skipped"]].astype(str).tolist() == ["int64", "float64", "bool"]


def test_repr_names_the_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", name="my run"):
        pass
    run: Run = load_run(tmp_path / "a")
    assert repr(run) == f"Run('my run', finished, {str(tmp_path / 'a')!r})"
    assert dataclasses.replace(run.head, name="").name == "" and run.name == "my run"
