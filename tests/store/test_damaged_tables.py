"""A run with a damaged table: what the others tell is read; the damaged one is named once, with its file and why."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.findings.rules.damage import DAMAGED_TABLE
from amp_core.report import report_html
from amp_core.schema import TABLES
from amp_core.store.long_runs.extract import open_extract
from amp_core.store.packing import pack
from amp_core.store.step_range import within_steps
from tests.synthetic import SAMPLES, live, write

RUN = SAMPLES["fp16-overflow"]
OTHERS = [name for name in TABLES if (RUN / name).is_dir() and name != "steps"]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])


def other_bytes(file: Path) -> None:
    file.write_bytes(b"<html>404 Not Found</html>")


def missing_column(file: Path) -> None:
    rows = pq.read_table(file)
    pq.write_table(rows.drop_columns([c.name for c in TABLES[file.parent.name].columns if c.required]), file)


def other_type(file: Path) -> None:
    rows = pq.read_table(file)
    at = rows.column_names.index("step")
    pq.write_table(rows.set_column(at, "step", pa.array(["first"] * rows.num_rows)), file)


DAMAGES = (cut, other_bytes, missing_column, other_type)


def damaged(folder: Path, *tables: str, by: Callable[[Path], None] = cut) -> Path:
    shutil.copytree(RUN, folder)
    for table in tables:
        for file in (folder / table).iterdir():
            by(file)
    return folder


@pytest.fixture(scope="module")
def sound() -> set[tuple[str, str]]:
    return {(f.code, f.where) for f in diagnose(load_run(RUN))}


@pytest.mark.parametrize(
    ("table", "by"),
    [
        pytest.param(table, by, marks=[] if number % len(DAMAGES) == kind else pytest.mark.whole)
        for number, table in enumerate(OTHERS)
        for kind, by in enumerate(DAMAGES)
    ],
)
def test_findings_of_the_other_tables_stay_and_none_is_made_up(
    table: str, by: Callable[[Path], None], sound: set[tuple[str, str]], tmp_path: Path
) -> None:
    run = load_run(damaged(tmp_path / "a", table, by=by))
    assert len(run.steps) == 400
    findings = diagnose(run)
    (named,) = [f for f in findings if f.code == DAMAGED_TABLE]
    assert f"{table}/00000.parquet" in named.title and TABLES[table].shows in named.advice
    assert {(f.code, f.where) for f in findings if f is not named} <= sound
    assert f"{table}/00000.parquet" in report_html([run])
    with pytest.raises(RunError, match=rf"^{table}/00000\.parquet "):
        run.table(table)


def test_a_verdict_of_the_training_comes_before_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "collapsing")
    cut(folder / "tensors" / "00000.parquet")
    codes = [f.code for f in diagnose(load_run(folder))]
    assert codes[0] != DAMAGED_TABLE and DAMAGED_TABLE in codes


def test_commands_show_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path / "a", "tensors", "ops")
    assert main(["diagnose", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["damaged"]) == {"tensors", "ops"} and "is damaged" in document["damaged"]["ops"]
    assert [f["where"] for f in document["findings"] if f["code"] == DAMAGED_TABLE] == ["tensors, ops"]
    assert main(["diagnose", str(folder), "--fail-on", "error"]) == 1
    text = capsys.readouterr().out
    named = "2 tables cannot be read: tensors/00000.parquet, ops/00000.parquet are damaged: it is cut off"
    assert text.count(named) == 1 and "skipped" in text
    assert main(["report", str(folder), "--out", str(tmp_path / "a.html")]) == 0
    assert named in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_impossible_values_are_damage_too(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "a")
    file = folder / "tensors" / "00000.parquet"
    rows = pq.read_table(file)
    pq.write_table(rows.set_column(rows.column_names.index("zero"), "zero", pa.array([-1] * rows.num_rows)), file)
    with pytest.raises(RunError, match="tensors has a negative 'zero'"):
        load_run(folder).validate(full=True)
    run = load_run(folder).salvaged()
    run.validate(full=True)
    assert run.damage() == {"tensors": "tensors has a negative 'zero'; it counts from 0"} and run.tensors().empty


def test_damaged_steps_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path / "a", "steps")
    for read in (lambda run: diagnose(run), lambda run: run.salvaged().steps, lambda run: report_html([run])):
        with pytest.raises(RunError, match=r"^steps/00000\.parquet is damaged"):
            read(load_run(folder))
    assert main(["diagnose", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_packed_run_with_a_damaged_table_is_read_too(tmp_path: Path) -> None:
    packed = pack(shutil.copytree(RUN, tmp_path / "a"))
    broken = tmp_path / "b.zip"
    with zipfile.ZipFile(packed) as given, zipfile.ZipFile(broken, "w") as out:
        for info in given.infolist():
            data = given.read(info)
            out.writestr(info.filename, data[:300] if "memory/" in info.filename else data)
    run = load_run(broken)
    assert [f.where for f in diagnose(run) if f.code == DAMAGED_TABLE] == ["memory"]
    assert len(run.steps) == 400 and len(run.tensors())


def test_parts_of_a_run_and_bounded_reading_know_of_the_damage(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "a", "tensors", "memory")
    for run in (open_extract(folder), open_extract(folder, most_rows=10), load_run(folder)):
        part = within_steps(run, 10, 20).salvaged()
        assert set(part.damage()) == {"tensors", "memory"} and len(part.steps) == 11 and part.tensors().empty
        with pytest.raises(RunError):
            run.table("tensors")


def test_a_table_that_is_mended_is_read_again(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "a", "tensors")
    for run in (load_run(folder).salvaged(), open_extract(folder).salvaged()):
        assert run.tensors("weight_grad").empty and not run.refresh()
        file = folder / "tensors" / "00000.parquet"
        broken = file.read_bytes()
        shutil.copy(RUN / "tensors" / "00000.parquet", file)
        assert run.refresh() and len(run.tensors("weight_grad")) and run.damage() == {}
        file.write_bytes(broken)


def test_a_live_run_whose_table_is_damaged_meanwhile_is_followed(tmp_path: Path) -> None:
    with live(tmp_path / "a") as writing:
        writing.advance(10)
        run = load_run(tmp_path / "a").salvaged()
        assert len(run.steps) == 10 and len(run.tensors())
        with open(next((tmp_path / "a" / "tensors").iterdir()), "ab") as file:
            file.write(b"x" * 100_000)
        writing.advance(10)
        assert run.refresh() and len(run.steps) == 20 and set(run.damage()) == {"tensors"}
