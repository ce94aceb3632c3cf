"""A sandbox process, which may crash, converts the segments of an untrusted run; this process reads the result."""

import gc
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError
from amp_core.hardware.host import this_machine
from amp_core.schema import TABLES
from amp_core.store.long_runs.extract import Extract, open_extract
from amp_core.store.run import Run
from amp_core.store.untrusted import converted_source, sandbox
from amp_core.store.untrusted.sandbox import Sandbox
from amp_core.store.writer import RunWriter
from tests.robustness.inputs import valid_files


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture
def requested(running: Sandbox, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the segments that the process converts."""
    names: list[str] = []
    works = running.convert

    def record_and_convert(run: str, file: Any, *more: Any) -> Any:
        names.append(file.name)
        return works(run, file, *more)

    monkeypatch.setattr(running, "convert", record_and_convert)
    return names


def untrusted_run(folder: Path, files: dict[str, bytes]) -> Path:
    """A run folder of another machine with these files."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    head = json.loads((folder / "run.json").read_text())
    head["process"] = {"machine": "elsewhere", "pid": 1, "started_s": 0.0}
    (folder / "run.json").write_text(json.dumps(head))
    return folder


def all_tables(run: Run) -> dict[str, pa.Table]:
    return {name: run.table(name) for name in TABLES}


@pytest.mark.parametrize("form", [0, 1], ids=["sealed", "streams"])
def test_a_valid_untrusted_run_is_read_unchanged_and_converted_once(
    form: int, running: Sandbox, requested: list[str], tmp_path: Path
) -> None:
    folder = untrusted_run(tmp_path / "a", valid_files()[form])
    run = open_extract(folder, sandbox=running)
    assert all_tables(run) == all_tables(open_extract(folder))
    assert set(requested) == {n for n in valid_files()[form] if n.endswith((".parquet", ".arrows"))}
    first = len(requested)
    run.refresh()
    all_tables(run)
    run.tensors(name="w")
    assert len(requested) == first


def test_the_private_folder_is_removed_with_the_run(
    running: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    run = open_extract(untrusted_run(tmp_path / "a", valid_files()[0]), sandbox=running)
    all_tables(run)
    assert len(list((tmp_path / "private").rglob("*.parquet"))) > 3
    del run
    gc.collect()
    assert list((tmp_path / "private").iterdir()) == []


def test_files_of_an_untrusted_run_are_bounded(
    running: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted_source, "MAX_DISK_BYTES", 1_000)
    folder = untrusted_run(tmp_path / "a", valid_files()[0])
    with pytest.raises(RunError, match=r"takes more than 9.31e-07 GiB of files; open it in Python"):
        open_extract(folder, sandbox=running).table("tensors")


def test_runs_of_this_machine_are_not_converted(running: Sandbox, requested: list[str], tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    run = open_extract(tmp_path / "a", sandbox=running)
    for step in range(3):
        writer.append("steps", {"step": [step]})
        run.refresh()
        assert run.table("steps").num_rows == step + 1
    writer.close()
    run.refresh()
    assert run.table("steps").num_rows == 3 and requested == []
    assert this_machine().startswith(socket.gethostname()) and this_machine() != socket.gethostname()


def test_only_new_rows_of_a_growing_stream_are_converted(running: Sandbox, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    writer.append("steps", {"step": [0], "loss": [0.5]})
    untrusted_run(tmp_path / "a", {})
    sent = []
    convert = running.convert

    class Noting(Sandbox):
        def convert(self, run: str, file: Any, table: str, content: Any, *more: Any) -> Any:
            sent.append(len(content))
            return convert(run, file, table, content, *more)

    run = open_extract(tmp_path / "a", sandbox=Noting())
    assert run.table("steps").num_rows == 1
    writer.append("steps", {"step": [1], "loss": [0.25]})
    run.refresh()
    assert run.steps["loss"].tolist() == [0.5, 0.25] and sent[0] > sent[1] > 0
    writer._release()


def test_a_file_that_crashes_its_reader_does_not_crash_the_app(running: Sandbox, tmp_path: Path) -> None:
    """A column whose chunk has another type than the schema: pyarrow 26 ends the process when an extract reads its
    statistics."""
    files = valid_files()[0]
    chunk_of_int64 = b"\x1c\x15\x04\x19"  # Thrift: the struct of a chunk's metadata, its type, its list of encodings
    sound = files["tensors/00000.parquet"]
    at = sound.rindex(chunk_of_int64)
    damaged = sound[:at] + b"\x1c\x15\x02\x19" + sound[at + 4 :]
    folder = untrusted_run(tmp_path / "a", files | {"tensors/00000.parquet": damaged})
    with pytest.raises(RunError, match=r"tensors/00000.parquet is damaged"):
        open_extract(folder, sandbox=running).table("tensors")
    folder = untrusted_run(tmp_path / "sound", files)
    assert open_extract(folder, sandbox=running).table("tensors").num_rows == 8  # in another sandbox process


@pytest.mark.parametrize("program", ["input()", "import time; time.sleep(600)"], ids=["dies", "hangs"])
def test_a_segment_whose_sandbox_does_not_reply_is_refused(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-c", program]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    monkeypatch.setattr(sandbox, "_start", start)
    running = Sandbox(timeout_s=600.0 if program == "input()" else 0.2)
    folder = untrusted_run(tmp_path / "a", valid_files()[0])
    for _ in range(2):  # the refusal is remembered
        with pytest.raises(RunError, match=r"steps/00000.parquet is damaged and crashed its reader"):
            open_extract(folder, sandbox=running).table("steps")
        assert running._child is None
        monkeypatch.setattr(sandbox, "_start", None)


def test_a_sandbox_process_that_ended_when_idle_is_replaced(tmp_path: Path) -> None:
    running = Sandbox()
    for number in range(2):
        folder = untrusted_run(tmp_path / f"{number}", valid_files()[0])
        assert open_extract(folder, sandbox=running).table("steps").num_rows == 4
        child = running._child
        assert child is not None
        child.kill()
        child.wait()
    running.close()
    assert running._child is None


def test_an_untrusted_run_of_many_small_files_is_bounded(
    running: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted_source, "MAX_MEMORY_BYTES", 100_000)
    folder = untrusted_run(tmp_path / "a", valid_files()[0])
    rows = pa.table({"step": pa.repeat(0, 1_000)})
    for number in range(1, 9):
        pq.write_table(rows, folder / "steps" / f"{number:05d}.parquet")
    with pytest.raises(RunError, match=r"holds more than 9.31e-05 GiB of rows"):
        open_extract(folder, sandbox=running).table("steps")


def test_an_extract_of_an_untrusted_run_reads_parts_of_its_segments(running: Sandbox, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a", seal_bytes=2_000)
    for step in range(40):
        writer.append("tensors", {"step": [step] * 4, "name": list("abcd"), "absmax": [float(step)] * 4})
    writer.close()
    untrusted_run(tmp_path / "a", {})
    run = open_extract(tmp_path / "a", most_rows=40, sandbox=running)
    assert isinstance(run, Extract)
    steps = run.of_tensor("weight_grad", "a", ["step", "absmax"])
    assert steps.num_rows == 40 and run.sampled_steps == 40


@pytest.mark.parametrize("form", ["parquet", "arrows"])
def test_a_row_without_a_step_is_refused_on_every_path(form: str, running: Sandbox, tmp_path: Path) -> None:
    rows = pa.table({"step": [0, None, 2], "name": ["w"] * 3, "inf": [0, 1, 0]})
    folder = untrusted_run(tmp_path / "a", valid_files()[0])
    file = folder / "tensors" / f"00001.{form}"
    if form == "parquet":
        pq.write_table(rows, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
    for most_rows in (2, 100):
        with pytest.raises(RunError, match="tensors has rows without 'step'; every row needs it"):
            open_extract(folder, most_rows, running).validate(full=True)
