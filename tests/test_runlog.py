"""Writing a run: rows as given, segments sealed, nothing lost to a kill, and cheap enough to be called every step."""

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
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run, runlog
from amp_core._files import replace_file
from amp_core._machine import process_alive, this_process
from amp_core.runlog import RunWriter
from amp_core.schema import TABLES

NAN, INF = math.nan, math.inf


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    for step in range(first, last):
        writer.append("steps", {"step": [step], "loss": [float(step)]})


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def same(got: list[Any], wanted: list[Any]) -> bool:
    """Equal item by item, where NaN is NaN and None is None."""
    return len(got) == len(wanted) and all(
        a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(got, wanted, strict=True)
    )


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_nan_infinity_and_null_are_themselves_open_and_sealed(tmp_path: Path) -> None:
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
        writer.append("steps", {"step": list(range(10, 40))})  # more rows than are kept ready
        writer.close()
    rows = load_run(tmp_path / "a").table("steps").to_pylist()
    assert {r["rank"] for r in rows} == {0, 3} and len(rows) == 62
    for row in rows:
        wanted = {c.name: c.default for c in TABLES["steps"].columns if c.name not in ("step", "rank")}
        assert {k: v for k, v in row.items() if k not in ("step", "rank")} == wanted


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
def test_columns_of_every_kind_come_back_as_given(tmp_path: Path, make: Callable[[Any, Any], Any]) -> None:
    given = {
        "step": (pa.int64(), [-(2**63), 2**63 - 1, 0]),
        "loss": (pa.float64(), [NAN, 1e300, -INF]),
        "skipped": (pa.bool_(), [True, False, True]),
    }
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {name: make(values, kind) for name, (kind, values) in given.items()})
        names = ["", "λ.weight", "x" * 1000]
        writer.append("tensors", {"step": [0, 1, 2], "name": make(names, pa.string())})
    run = load_run(tmp_path / "a")
    for name, (_, values) in given.items():
        # by bits: rows are ordered by step, so undo that by sorting both
        got = run.table("steps").column(name).to_pylist()
        assert same(sorted(got, key=repr), sorted(values, key=repr))
    assert run.table("tensors").column("name").to_pylist() == names


def test_columns_agree_with_what_arrow_itself_would_make(tmp_path: Path) -> None:
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
        wanted = pa.chunked_array(
            [pa.array([v for v in values for _ in range(2)], TABLES["tensors"].schema.field(name).type)]
        )
        assert column.equals(wanted), name


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
        ("steps", {}, "table 'steps' was given no column"),
        ("tensors", {"step": [1], "name": [7]}, "column 'name' of table 'tensors' takes string: 7 is no text"),
        ("tensors", {"step": [1], "name": "w"}, "a column is a sequence or an array, not str"),
        ("stepz", {"step": [1]}, "table='stepz' is unknown; choose one of steps, tensors"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_the_run_goes_on(
    tmp_path: Path, table: str, columns: dict[str, Any], says: str
) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 1)
        with pytest.raises(RunError, match=says.replace("(", r"\(")):
            writer.append(table, columns)
        write_steps(writer, 1, 2)
    assert load_run(tmp_path / "a").steps["step"].tolist() == [0, 1]


def test_text_that_is_no_utf8_is_written_all_the_same(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        writer.event("warning", detail=os.fsdecode(b"file-\xff"))
    assert load_run(tmp_path / "a").events["detail"].tolist()[0] == "file-?"


def test_writing_imports_neither_pandas_nor_torch() -> None:
    code = (
        "import sys, tempfile; from amp_core.runlog import RunWriter\n"
        "with RunWriter(tempfile.mkdtemp() + '/a') as w:\n"
        "    w.append('steps', {'step': [0], 'loss': [None]})\n"
        "    w.append('tensors', {'step': [0], 'name': ['x'], 'exp_counts': [[1, 2]]})\n"
        "print([m for m in ('pandas', 'torch', 'streamlit', 'plotly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_root()).stdout
    assert out.strip() == "[]"


def test_appending_a_step_takes_far_less_than_a_millisecond(tmp_path: Path) -> None:
    row = {c.name: [1.0] for c in TABLES["steps"].columns if c.type == pa.float64()}
    row |= {"step": [1], "samples": [32], "memory_allocated_bytes": [2**30], "skipped": [False]}
    with RunWriter(tmp_path / "a") as writer:
        best = INF
        for _ in range(200):
            began = time.perf_counter()
            writer.append("steps", row)
            best = min(best, time.perf_counter() - began)
    assert best < 200e-6  # about 45 µs on an idle core; the limit leaves room for a busy one


# ---- folder and head ------------------------------------------------------------------------------------------------


def test_folder_that_is_in_use_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
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


def test_what_a_job_put_there_and_hidden_files_do_not_hinder(tmp_path: Path) -> None:
    for name in ("job.json", "config.json", "console.log", ".job.json.123.tmp", ".DS_Store"):
        (tmp_path / name).write_text("")
    RunWriter(tmp_path).close()
    assert load_run(tmp_path).status == "finished"


def test_refused_run_leaves_no_trace_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    before = sys.excepthook
    with pytest.raises(RunError):
        RunWriter(tmp_path)
    assert sys.excepthook is before


def test_head_says_who_writes_and_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "a", name="über", config={"lr": NAN, "path": tmp_path}, model={"parameters": 3})
    head = load_run(tmp_path / "a").head
    assert (head.name, head.status, head.world_size, head.model) == ("über", "running", 1, {"parameters": 3})
    assert head.config == {"lr": "nan", "path": str(tmp_path)}
    assert process_alive(head.process) is True
    seen = []
    replace = Path.replace

    def checked(self: Path, target: Path) -> Path:
        seen.append(json.loads(self.read_text())["results"])  # whole, before it takes the name
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", checked)
    writer.update_head(results={"eval_loss": 2.5})
    assert seen == [{"eval_loss": 2.5}]
    monkeypatch.undo()
    writer.close()
    assert load_run(tmp_path / "a").head.results == {"eval_loss": 2.5}
    assert [f for f in files(tmp_path / "a") if "tmp" in f] == []


def test_file_is_replaced_from_many_threads_without_a_mix_up(tmp_path: Path) -> None:
    target = tmp_path / "x"
    contents = [bytes([65 + i]) * 50_000 for i in range(8)]
    threads = [threading.Thread(target=lambda c=c: [replace_file(target, c) for _ in range(5)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        if target.exists():
            assert target.read_bytes() in contents
    assert files(tmp_path) == ["x"]


def test_own_process_is_alive_and_others_are_told_apart() -> None:
    me = this_process()
    assert process_alive(me) is True
    assert process_alive(me | {"started_s": me["started_s"] - 60}) is False  # the pid was given out again
    assert process_alive(me | {"machine": "elsewhere"}) is None
    for broken in ({}, me | {"pid": None}, me | {"pid": "1"}, me | {"started_s": None}):
        assert process_alive(broken) is None
    for impossible in (-1, 2**40):
        assert process_alive(me | {"pid": impossible}) is False


# ---- segments -------------------------------------------------------------------------------------------------------


def test_full_segments_are_sealed_while_writing_goes_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", seal_bytes=10_000) as writer:
        write_steps(writer, 0, 100)
        number = len(list((tmp_path / "a" / "steps").glob("*.arrows")) + list((tmp_path / "a/steps").glob("*.parquet")))
        assert number > 3
    names = [f for f in files(tmp_path / "a") if f.startswith("steps")]
    assert names == [f"steps/{i:05d}.parquet" for i in range(len(names))] and len(names) > 3
    assert load_run(tmp_path / "a").steps["loss"].tolist() == [float(i) for i in range(100)]


def test_old_segment_is_sealed(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", seal_age_s=0.05) as writer:
        write_steps(writer, 0, 1)
        time.sleep(0.06)
        write_steps(writer, 1, 2)
    assert [f for f in files(tmp_path / "a") if "steps" in f] == ["steps/00000.parquet", "steps/00001.parquet"]


def test_sealed_parquet_is_readable_by_other_tools(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        write_steps(writer, 0, 5)
    table = pq.read_table(tmp_path / "a" / "steps")
    assert table.schema.equals(TABLES["steps"].schema) and table.num_rows == 5


def test_stream_is_a_plain_arrow_stream(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, 5)
    with pa.ipc.open_stream((tmp_path / "a" / "steps" / "00000.arrows").read_bytes()) as reader:
        assert reader.read_all().column("step").to_pylist() == list(range(5))
    writer.close()


def test_seal_that_fails_leaves_the_rows_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A file of which one write puts down a part and then fails, as on a full disk."""

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


@pytest.mark.parametrize("rows_before", [0, 2])
def test_write_that_fails_half_way_costs_its_own_row_only(tmp_path: Path, rows_before: int) -> None:
    writer = RunWriter(tmp_path / "a")
    write_steps(writer, 0, rows_before)
    segment = writer._segment("steps")
    segment._file = TornFile(segment._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        write_steps(writer, 50, 51)
    wanted = list(range(rows_before))
    assert load_run(tmp_path / "a").steps["step"].tolist() == wanted
    write_steps(writer, 60, 62)
    assert load_run(tmp_path / "a").steps["step"].tolist() == [*wanted, 60, 61]
    writer.close()
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and run.steps["step"].tolist() == [*wanted, 60, 61]


def test_many_threads_may_write(tmp_path: Path) -> None:
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


def test_closing_twice_changes_nothing_and_closed_runs_take_no_rows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    writer.close("failed", "first")
    writer.close("finished", "second")
    write_steps(writer, 0, 3)
    writer.update_head(name="other")
    run = load_run(tmp_path / "a")
    assert (run.status, run.end_reason, len(run.steps), run.name) == ("failed", "first", 0, "a")


def test_end_is_written_although_what_was_held_back_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    writer = RunWriter(tmp_path / "a")
    writer.before_end = fail
    with pytest.raises(RuntimeError, match="CUDA error"):
        writer.close("stopped", "by hand")
    assert load_run(tmp_path / "a").head.status == "stopped"


# ---- kill -9 --------------------------------------------------------------------------------------------------------

# Forks one writer after another. Each notes every step in a file of its own after `append` has returned.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from amp_core.runlog import RunWriter
root, number = Path(sys.argv[1]), int(sys.argv[2])
random.seed(7)
for i in range(number):
    pid = os.fork()
    if pid == 0:
        notes = os.open(root / f"notes-{i}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        writer = RunWriter(root / f"run-{i}", seal_bytes=random.Random(i).choice([1, 5_000, 40_000]))
        for step in range(10**9):
            writer.append("steps", {"step": [step], "loss": [step / 8]})
            writer.append("tensors", {"step": [step] * 3, "name": ["a", "b", "c"], "exp_counts": [[1, 2, step]] * 3})
            os.write(notes, b"%d\\n" % step)
    while not (root / f"notes-{i}").exists() or (root / f"notes-{i}").stat().st_size == 0:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_kill_9_loses_nothing_that_was_reported_as_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "25"], check=True, cwd=_root())
    done = []
    for i in range(25):
        reported = len((tmp_path / f"notes-{i}").read_text().split())
        run = load_run(tmp_path / f"run-{i}")
        steps = run.steps["step"].tolist()
        assert steps == list(range(len(steps))) and len(steps) in (reported, reported + 1)
        assert run.steps["loss"].tolist() == [s / 8 for s in steps]
        assert len(run.tensors()) in (3 * reported, 3 * reported + 3)
        assert [c[2] for c in run.tensors(name="c")["exp_counts"]] == list(range(len(run.tensors(name="c"))))
        assert run.status == "lost" and "its process is gone" in str(run.end_reason)
        done.append(reported)
    assert sum(done) > 250 and len(set(done)) > 5  # the moments differ


LIVE = """
import sys, time
from amp_core.runlog import RunWriter
with RunWriter(sys.argv[1], seal_bytes=20_000) as writer:
    for step in range(1500):
        writer.append("steps", {"step": [step], "loss": [step / 8]})
        writer.append("tensors", {"step": [step], "name": ["a"], "exp_counts": [[step]]})
        if step % 10 == 0:
            time.sleep(0.005)
"""


def test_reader_never_fails_while_the_run_is_written_and_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    child = subprocess.Popen([sys.executable, "-c", LIVE, str(folder)], cwd=_root())
    try:
        while not (folder / "run.json").exists():
            assert child.poll() in (None, 0)
            time.sleep(0.005)
        followed = load_run(folder)
        rows: list[int] = [0]
        while child.poll() is None:
            followed.fingerprint()
            followed.refresh()
            for run in (followed, load_run(folder)):
                steps = run.table("steps").column("step").to_numpy()
                assert (steps == np.arange(len(steps))).all()
                tensors = run.table("tensors").column("exp_counts").combine_chunks().flatten().to_numpy()
                assert (tensors == np.arange(len(tensors))).all()
            rows.append(len(steps))
        assert rows == sorted(rows) and len(set(rows)) > 5  # it grew under our eyes, and never shrank
        followed.refresh()
        assert len(followed.steps) == 1500 and followed.status == "finished"
    finally:
        child.kill()
        assert child.wait() == 0


def _root() -> Path:
    return Path(runlog.__file__).parent.parent


def test_head_keeps_its_fields_through_the_file(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", environment={"torch": "2.9"}) as writer:
        pass
    read = load_run(tmp_path / "a").head
    assert dataclasses.asdict(read) == dataclasses.asdict(writer.head)
