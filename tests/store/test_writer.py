"""Writing a run: rows unchanged, one head, and cheap enough for every step."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from amp_core import RunError, load_run
from amp_core.hardware.host import process_alive, this_process
from amp_core.schema import TABLES
from amp_core.store.atomic import replace_file
from amp_core.store.writer import RunWriter
from tests.paths import ROOT
from tests.run_folders import files, write_steps

NAN, INF = math.nan, math.inf


def same(got: list[Any], expected: list[Any]) -> bool:
    """Equal item by item, where NaN is NaN and None is None."""
    return len(got) == len(expected) and all(
        a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(got, expected, strict=True)
    )


def test_nan_infinity_and_null_are_kept_in_open_and_sealed_segments(tmp_path: Path) -> None:
    losses = [1.5, NAN, INF, -INF, None, 0.0, -0.0, 5e-324]
    writer = RunWriter(tmp_path / "a")
    writer.append("steps", {"step": list(range(8)), "loss": losses, "skipped": [True, False, None] + [False] * 5})
    for path in ("open", "sealed"):
        table = load_run(tmp_path / "a").table("steps")
        assert same(table.column("loss").to_pylist(), losses), path
        assert math.copysign(1, table.column("loss")[6].as_py()) == -1
        assert table.column("skipped").to_pylist()[:3] == [True, False, None]
        writer.close()
    assert files(tmp_path / "a") == ["events/00000.parquet", "run.json", "steps/00000.parquet"]


def test_absent_columns_are_null_or_the_default_and_rank_is_filled_in(tmp_path: Path) -> None:
    for rank in (0, 3):
        writer = RunWriter(tmp_path / "a", rank=rank, world_size=4)
        writer.append("steps", {"step": [rank]})
        writer.append("steps", {"step": list(range(10, 40))})  # more rows than defaults are cached for
        writer.close()
    rows = load_run(tmp_path / "a").table("steps").to_pylist()
    assert {r["rank"] for r in rows} == {0, 3} and len(rows) == 62
    for row in rows:
        expected = {c.name: c.default for c in TABLES["steps"].columns if c.name not in ("step", "rank")}
        assert {k: v for k, v in row.items() if k not in ("step", "rank")} == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda v, t: v,
        lambda v, t: tuple(v),
        lambda v, t: np.array(v, dtype=t.to_pandas_dtype() if not pa.types.is_string(t) else object),
        lambda v, t: pa.array(v, t),
    ],
    ids=["list", "tuple", "numpy", "arrow"],
)
def test_columns_of_every_type_are_read_back_unchanged(tmp_path: Path, make: Callable[[Any, Any], Any]) -> None:
    columns = {
        "step": (pa.int64(), [-(2**63), 2**63 - 1, 0]),
        "loss": (pa.float64(), [NAN, 1e300, -INF]),
        "skipped": (pa.bool_(), [True, False, True]),
    }
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {name: make(values, kind) for name, (kind, values) in columns.items()})
        names = ["", "λ.weight", "x" * 1000]
        writer.append("tensors", {"step": [0, 1, 2], "name": make(names, pa.string())})
    run = load_run(tmp_path / "a")
    for name, (_, values) in columns.items():
        # compared by their text, in any order: rows are sorted by step
        got = run.table("steps").column(name).to_pylist()
        assert same(sorted(got, key=repr), sorted(values, key=repr))
    assert run.table("tensors").column("name").to_pylist() == names


def test_columns_equal_those_that_arrow_makes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = [None if rng.random() < 0.2 else float(x) for x in rng.standard_normal(100)]
    counts = [None if rng.random() < 0.2 else rng.integers(0, 9, rng.integers(0, 30)).tolist() for _ in range(100)]
    texts = [None if rng.random() < 0.2 else "é" * int(rng.integers(0, 9)) for _ in range(100)]
    columns = {"step": list(range(100)), "name": ["n"] * 100, "rms": numbers, "exp_counts": counts, "dtype": texts}
    with RunWriter(tmp_path / "a") as writer:
        writer.append("tensors", columns)
        writer.append("tensors", columns | {"exp_counts": [None if c is None else np.array(c, int) for c in counts]})
    table = load_run(tmp_path / "a").table("tensors")
    for name, values in columns.items():
        column = table.column(name)
        column.validate(full=True)
        expected = pa.chunked_array(
            [pa.array([v for v in values for _ in range(2)], TABLES["tensors"].schema.field(name).type)]
        )
        assert column.equals(expected), name


def test_histograms_may_be_arrays(tmp_path: Path) -> None:
    histograms = [np.array([1, 2]), np.array([], np.int64), np.array([3], np.int32)]
    with RunWriter(tmp_path / "a") as writer:
        writer.append("tensors", {"step": [0, 1, 2], "name": ["w"] * 3, "exp_counts": histograms})
    assert load_run(tmp_path / "a").table("tensors").column("exp_counts").to_pylist() == [[1, 2], [], [3]]


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        ("steps", {"step": ["a"]}, "column 'step' of table 'steps' takes int64"),
        ("steps", {"step": [1.5]}, "column 'step' of table 'steps' takes int64"),
        ("steps", {"step": np.array([1.5])}, "column 'step' of table 'steps' takes int64"),
        ("steps", {"step": [2**63]}, "column 'step' of table 'steps' takes int64"),
        ("steps", {"step": 1}, "column 'step' is a int; give a sequence with one item per row"),
        ("steps", {"step": np.zeros((2, 2), int)}, "one dimension, not 2"),
        ("steps", {"step": [1, 2], "loss": [1.0]}, "column 'loss' of table 'steps' has 1 rows where others have 2"),
        ("steps", {"step": [1], "skipped": ["no"]}, "'no' is neither True nor False"),
        ("steps", {"stpe": [1]}, "table 'steps' has no column 'stpe'; it has step, time_s"),
        ("steps", {}, "table 'steps' was given no columns"),
        ("tensors", {"step": [1], "name": [7]}, "column 'name' of table 'tensors' takes string: 7 is not text"),
        ("tensors", {"step": [1], "name": "w"}, "a column is a sequence or an array, not str"),
        ("stepz", {"step": [1]}, "table='stepz' is unknown; choose one of steps, tensors"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_the_run_continues(
    tmp_path: Path, table: str, columns: dict[str, Any], says: str
) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 1)
        with pytest.raises(RunError, match=says.replace("(", r"\(")):
            writer.append(table, columns)
        write_steps(writer, 1, 2)
    assert load_run(tmp_path / "a").steps["step"].tolist() == [0, 1]


def test_text_that_is_not_utf8_is_still_written(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        writer.event("warning", detail=os.fsdecode(b"file-\xff"))
    assert load_run(tmp_path / "a").events["detail"].tolist()[0] == "file-?"


def test_writing_imports_neither_pandas_nor_torch() -> None:
    code = (
        "import sys, tempfile; from amp_core.store.writer import RunWriter\n"
        "with RunWriter(tempfile.mkdtemp() + '/a') as w:\n"
        "    w.append('steps', {'step': [0], 'loss': [None]})\n"
        "    w.append('tensors', {'step': [0], 'name': ['x'], 'exp_counts': [[1, 2]]})\n"
        "print([m for m in ('pandas', 'torch', 'streamlit', 'plotly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.strip() == "[]"


def test_appending_a_step_takes_far_less_than_a_millisecond(tmp_path: Path) -> None:
    row = {c.name: [1.0] for c in TABLES["steps"].columns if c.type == pa.float64()}
    row |= {"step": [1], "samples": [32], "memory_allocated_bytes": [2**30], "skipped": [False]}
    with RunWriter(tmp_path / "a") as writer:
        best = INF
        for _ in range(200):
            began = time.thread_time()
            writer.append("steps", row)
            best = min(best, time.thread_time() - began)
    assert best < 200e-6  # about 45 µs of processor time


def test_a_folder_that_is_in_use_or_not_writable_is_refused(tmp_path: Path) -> None:
    RunWriter(tmp_path / "a").close()
    with pytest.raises(RunError, match=r"into='.*a' already holds a run; give a folder that does not exist yet"):
        RunWriter(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"into='.*b' holds other files \('thesis.tex'\)"):
        RunWriter(tmp_path / "b")
    assert files(tmp_path / "b") == ["thesis.tex"]
    with pytest.raises(RunError, match=r"into='.*tex/c' cannot be written: Not a directory"):
        RunWriter(tmp_path / "b" / "thesis.tex" / "c")


def test_a_run_stays_in_its_folder_if_the_loop_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra and some launchers do that."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = RunWriter("runs/a")
    write_steps(writer, 0, 3)
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_steps(writer, 3, 6)
    writer.event("warning", "of a table that is begun here")
    writer.close()
    run = load_run(tmp_path / "runs" / "a")
    assert run.status == "finished" and len(run.steps) == 6 and list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(("name", "says"), [("a\0b", "embedded null"), ("a\udc80b", "its name is not in UTF-8")])
def test_a_name_that_cannot_be_written_is_refused(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"cannot be written: {says}"):
        RunWriter(f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_job_and_hidden_files_do_not_count_as_content(tmp_path: Path) -> None:
    for name in ("job.json", "config.json", "console.log", ".job.json.123.tmp", ".DS_Store"):
        (tmp_path / name).write_text("")
    RunWriter(tmp_path).close()
    assert load_run(tmp_path).status == "finished"


def test_a_refused_run_leaves_no_hooks_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    before = sys.excepthook
    with pytest.raises(RunError):
        RunWriter(tmp_path)
    assert sys.excepthook is before


def test_head_names_the_writing_process_and_is_replaced_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "a", name="über", config={"lr": NAN, "path": tmp_path}, model={"parameters": 3})
    head = load_run(tmp_path / "a").head
    assert (head.name, head.status, head.world_size, head.model) == ("über", "running", 1, {"parameters": 3})
    assert head.config == {"lr": "nan", "path": str(tmp_path)}
    assert process_alive(head.process) is True
    heads = []
    replace = Path.replace

    def checked(self: Path, target: Path) -> Path:
        heads.append(json.loads(self.read_text())["results"])  # complete before it is renamed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", checked)
    writer.update_head(results={"eval_loss": 2.5})
    assert heads == [{"eval_loss": 2.5}]
    monkeypatch.undo()
    writer.close()
    assert load_run(tmp_path / "a").head.results == {"eval_loss": 2.5}
    assert [f for f in files(tmp_path / "a") if "tmp" in f] == []


def test_many_threads_may_replace_a_file_at_once(tmp_path: Path) -> None:
    target = tmp_path / "x"
    contents = [bytes([65 + i]) * 50_000 for i in range(8)]
    threads = [threading.Thread(target=lambda c=c: [replace_file(target, c) for _ in range(5)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        if target.exists():
            assert target.read_bytes() in contents
    assert files(tmp_path) == ["x"]


def test_this_process_is_alive_and_others_are_distinguished() -> None:
    me = this_process()
    assert process_alive(me) is True
    assert process_alive(me | {"started_ticks": me["started_ticks"] - 6000}) is False  # the pid was reused
    assert process_alive(me | {"machine": "elsewhere"}) is None
    for broken in ({}, me | {"pid": None}, me | {"pid": "1"}, me | {"started_s": None}):
        assert process_alive(broken) is None
    for impossible in (-1, 2**40):
        assert process_alive(me | {"pid": impossible}) is False


def test_the_head_keeps_its_fields_in_the_file(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", environment={"torch": "2.9"}) as writer:
        pass
    read = load_run(tmp_path / "a").head
    assert dataclasses.asdict(read) == dataclasses.asdict(writer.head)
