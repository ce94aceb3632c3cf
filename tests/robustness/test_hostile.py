"""Untrusted files do no harm: the quick form of `fuzz`, and cases that random inputs rarely reach."""

import io
import os
import resource
import time
import tracemalloc
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.report import report_html
from amp_core.store import packing
from amp_core.store.packing import unpack
from amp_core.store.writer import RunWriter
from amp_core.text.csv_safe import as_csv, harmless
from tests.robustness.fuzz import fuzz
from tests.robustness.inputs import hostile, valid_files
from tests.robustness.values import MARKUP


@pytest.mark.parametrize(("first", "inputs"), [(0, 200), pytest.param(200, 3_200, marks=pytest.mark.whole)])
def test_no_input_crashes_hangs_or_writes_elsewhere(first: int, inputs: int) -> None:
    result = fuzz(first, inputs)
    assert result.wrong == [] and sum(result.kinds.values()) == inputs
    assert {kind.split()[1] for kind in result.kinds} == {"refused", "passed"}


def test_a_zip_of_a_million_entries_is_refused_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "many.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for i in range(2_000):
            archive.writestr(f"steps/{i}.parquet", b"")
    monkeypatch.setattr(packing, "MAX_MEMBERS", 1_999)
    tracemalloc.start()
    with pytest.raises(RunError, match="holds 2000 files; a packed run has at most 1999"):
        unpack(file, tmp_path / "out")
    assert tracemalloc.get_traced_memory()[1] < 2_000 * 2**12  # 4 KiB each: a million take less than the limit of 8 GiB
    tracemalloc.stop()


@pytest.mark.parametrize("link", ["run.json", "steps", "steps/00000.parquet"])
def test_links_in_a_run_folder_are_not_followed(link: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with RunWriter(secret, name="secret") as writer:
        writer.append("steps", {"step": [77]})
    folder = tmp_path / "a"
    for name, data in valid_files()[0].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.startswith("steps") or link == "run.json":
            (folder / name).write_bytes(data)
    (folder / "steps").mkdir(exist_ok=True)
    if (folder / link).is_dir():
        (folder / link).rmdir()
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(secret / link)
    if link == "steps/00000.parquet":  # segments that are not files are ignored
        assert load_run(folder).steps["step"].tolist() == []
    else:
        with pytest.raises(RunError, match="link"):
            load_run(folder).table("steps")


def test_reading_a_pipe_in_place_of_a_head_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunError, match="a run head is neither a link nor a pipe"):
        load_run(tmp_path)


def test_a_stream_that_does_not_begin_with_a_schema_is_refused(tmp_path: Path) -> None:
    """pyarrow takes any message there for a schema, and reads out of bounds."""
    for name, data in valid_files()[1].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    stream = bytearray(valid_files()[1]["steps/00000.arrows"])
    assert stream[29] == 1  # a schema, in the union of message headers
    stream[29] = 9
    (tmp_path / "steps" / "00000.arrows").write_bytes(stream)
    with pytest.raises(RunError, match="it begins with a message of type 'unknown', not with a schema"):
        load_run(tmp_path).table("steps")


def test_the_memory_limit_holds_only_while_an_untrusted_file_is_read(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    assert main(["unpack", str(tmp_path / "bad.zip"), "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "bad.json").write_bytes(b"no trace")
    assert main(["import-trace", str(tmp_path / "bad.json"), "--out", str(tmp_path / "out")]) == 2
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_markup_in_every_name_stays_text_in_the_report(tmp_path: Path) -> None:
    markup = MARKUP[0]
    with RunWriter(tmp_path / "a", name=markup, config={"precision": markup, markup: markup}) as writer:
        for step in range(30):
            writer.append("steps", {"step": [step], "loss": [1.0], "skipped": [step % 2 == 0], "loss_scale": [0.5]})
            writer.event("skipped", name=markup, detail=markup, step=step)
    html = report_html([load_run(tmp_path / "a")])
    assert markup not in html and "&lt;script&gt;alert(1)" in html


@pytest.mark.parametrize("formula", [m for m in MARKUP if m[0] in "=@-\t"])
def test_formulas_in_names_and_columns_are_text_in_a_csv(formula: str) -> None:
    frame = pd.DataFrame({"name": [formula, "w", None], formula: [-1.5, None, 2.0], "mixed": [formula, -3, "-2.5"]})
    back = pd.read_csv(io.BytesIO(as_csv(frame)))
    assert back["name"].tolist()[:2] == [f"'{formula}", "w"] and list(back.columns)[1] == f"'{formula}"
    assert back.iloc[0, 1] == -1.5 and back["mixed"].tolist() == [f"'{formula}", "-3", "-2.5"]


@given(st.text())
def test_no_exported_text_begins_like_a_formula(text: str) -> None:
    safe = harmless(text)
    assert safe in (text, f"'{text}")
    if safe.startswith(("=", "@", "\t", "\r", "+", "-")):
        float(safe)  # a number is not a formula


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("number", range(40))
def test_an_input_can_be_reproduced_from_its_number(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)  # a zip stores the time of its members
    contents = []
    for room in (tmp_path / "one", tmp_path / "other"):
        room.mkdir()
        kind, write = hostile(number)
        write(room)
        result = sorted(p for p in room.rglob("*") if p.is_file() and not p.is_symlink())
        contents.append((kind, {p.relative_to(room).as_posix(): p.read_bytes() for p in result}))
    assert contents[0] == contents[1]
