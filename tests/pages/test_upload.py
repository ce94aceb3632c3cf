"""Library: uploads of packed runs, traces and folders, hostile ones too."""

import gzip
import io
import json
import subprocess
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run
from amp_core.hardware.child_environment import python_path
from amp_core.store.packing import pack
from pages.parts.library import upload as incoming
from tests.pages.conftest import files_below, words
from tests.synthetic import write
from tests.traces.made import training

LIBRARY = "pages/run_library.py"


def upload(app, which, name, data, mime="application/zip"):
    return app.get("file_uploader")[which].upload(name, data, mime).run()


def test_uploaded_zip_is_in_the_library_and_chosen(home, open_app, tmp_path):
    write(home.runs / "a", "healthy")
    data = pack(write(tmp_path / "b", "overflowing")).read_bytes()
    app = upload(open_app(LIBRARY), 0, "from a colleague.zip", data)
    assert not app.exception
    assert app.session_state["run"] == "run/uploads/from-a-colleague"
    assert "from-a-colleague is in the library" in words(app)
    again = load_run(home.runs / "uploads" / "from-a-colleague")
    assert len(again.steps) == 120
    app = upload(app, 0, "from a colleague.zip", data)
    assert app.session_state["run"] == "run/uploads/from-a-colleague-2"


def test_an_upload_leaves_the_other_fields_as_they_are(home, open_app, tmp_path):
    """A file that is on its way in one of them would be lost with it."""
    app = open_app(LIBRARY)
    before = [field.proto.id for field in app.get("file_uploader")]
    app = upload(app, 0, "a.zip", pack(write(tmp_path / "a", "healthy")).read_bytes())
    after = [field.proto.id for field in app.get("file_uploader")]
    assert after[1:] == before[1:] and after[0] != before[0]


def test_uploaded_logs_of_transformer_engine_are_a_run(home, open_app, tmp_path):
    write(home.runs / "a", "healthy")
    name = "nvdlfw_inspect_globalrank-0.log"
    statistic = "fc1_gradient_fp8_delayed_scaling_underflows%"
    log = f"2026-03-01 12:00:00,250 - INFO - {statistic} \t\t iteration=000004 \t\t value=25.0000\n"
    app = upload(open_app(LIBRARY), 0, name, log.encode(), "text/plain")
    assert not app.exception
    (row,) = load_run(home.runs / "uploads" / "te-logs").quantized.to_dict("records")
    assert (row["step"], row["kind"], row["underflow_frac"]) == (4, "output_grad", 0.25)
    upload(app, 0, name, b"nothing of the kind", "text/plain")
    assert "nvdlfw-inspect" in words(app) or "holds no statistics" in words(app)


def zip_of(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("noise.zip", b"\x00\x01not a zip"),
        ("empty.zip", b""),
        ("foreign.zip", zip_of({"readme.txt": b"hello"})),
        ("head.zip", zip_of({"run.json": b"[]"})),
        ("newer.zip", zip_of({"run.json": b'{"schema": 7}'})),
        ("table.zip", zip_of({"run.json": b'{"schema": 1}', "steps/00000.parquet": b"PAR1xxxxPAR1"})),
    ],
)
def test_bad_upload_is_one_sentence_and_nothing_is_written(home, open_app, name, data):
    write(home.runs / "a", "healthy")
    before = files_below(home.runs)
    app = upload(open_app(LIBRARY), 0, name, data)
    assert not app.exception
    assert len(app.error) == 1
    assert app.error[0].value.endswith(".") and "Traceback" not in app.error[0].value
    assert "path=" not in app.error[0].value.replace("\\", "")
    assert str(home.runs.parent) not in app.error[0].value.replace("\\", "")
    assert files_below(home.runs) == before


def test_hostile_names_in_a_zip_lead_nowhere(home, open_app):
    """A sound head at a hostile place is read for what it is; what is written has names of our own."""
    home.runs.mkdir()
    hostile = zip_of({"../../run.json": b'{"schema": 1}', "../../steps/x.parquet": b"", "../../../evil": b"x"})
    app = upload(open_app(LIBRARY), 0, "../../evil.zip", hostile)
    assert not app.exception
    assert {f.parts[0] for f in map(Path, files_below(home.runs.parent))} == {"runs"}
    assert all(f in ("uploads", "uploads/evil", "uploads/evil/run.json") for f in files_below(home.runs))


def test_truncated_upload_is_refused(home, open_app, tmp_path):
    data = pack(write(tmp_path / "b", "healthy")).read_bytes()
    app = upload(open_app(LIBRARY), 0, "cut.zip", data[: len(data) // 2])
    assert len(app.error) == 1 and "cut" in app.error[0].value
    assert files_below(home.runs) == []


def test_uploaded_trace_becomes_a_run(home, open_app):
    data = gzip.compress(json.dumps(training()).encode())
    app = open_app(LIBRARY)
    app = app.get("file_uploader")[1].upload("rank 0.pt.trace.json.gz", data, "application/gzip").run()
    assert not app.exception and not app.error
    assert app.session_state["run"] == "run/uploads/rank-0"
    run = load_run(home.runs / "uploads" / "rank-0")
    assert run.head.config["source"] == "import" and len(run.kernels) == 9 and run.steps["step"].tolist() == [5, 6]


def test_traces_of_several_ranks_become_one_run(home):
    files = [("t.json", json.dumps(training(distributedInfo={"rank": r, "world_size": 2})).encode()) for r in (1, 0)]
    key = incoming.take_traces(files)
    run = load_run(home.runs / "uploads" / key.rsplit("/", 1)[-1])
    assert key == "run/uploads/t" and sorted(set(run.kernels["rank"])) == [0, 1]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("noise.json", b"\x00\x01", "noise.json is not a profiler trace"),
        ("cut.json", json.dumps(training()).encode()[:500], "cut.json is cut off"),
        ("bomb.json.gz", gzip.compress(b"[" * 10**7), "bomb.json.gz is nested deeper than a trace can be"),
        ("../../evil.json", b"{}", "evil.json is not a profiler trace"),
    ],
)
def test_bad_trace_is_one_sentence_and_nothing_is_written(home, open_app, name, data, expected):
    write(home.runs / "a", "healthy")
    before = files_below(home.runs)
    app = open_app(LIBRARY)
    app = app.get("file_uploader")[1].upload(name, data, "application/json").run()
    assert not app.exception and len(app.error) == 1
    assert expected in app.error[0].value.replace("\\", "") and "/tmp" not in app.error[0].value
    assert files_below(home.runs) == before


def folder_files(folder: Path, prefix: str) -> list[tuple[str, bytes]]:
    return [(f"{prefix}/{f.relative_to(folder)}", f.read_bytes()) for f in folder.rglob("*") if f.is_file()]


def test_folder_upload_keeps_only_what_a_run_has(home, tmp_path):
    source = write(tmp_path / "b", "healthy")
    (source / "secret.json").write_text("{}")
    (source / "steps" / "notes.txt").write_text("x")
    files = [*folder_files(source, "b"), ("b/../../../x.parquet", b""), ("/abs/steps/1.parquet", b"")]
    key = incoming.take_folder(files)
    assert key == "run/uploads/b"
    result = files_below(home.runs / "uploads" / "b")
    assert "run.json" in result and not any("secret" in f or "notes" in f or "x.parquet" in f for f in result)
    assert len(load_run(home.runs / "uploads" / "b").steps) == 120


def test_folder_upload_takes_tables_of_one_file_each(home, tmp_path):
    """DESIGN's smallest run of another program: run.json and one file per table beside it."""
    source = write(tmp_path / "b", "healthy")
    files = [("b/run.json", (source / "run.json").read_bytes()), ("b/notes.parquet", b"no table of a run")]
    for table in ("steps", "tensors"):
        pq.write_table(load_run(source).table(table), tmp_path / f"{table}.parquet")
        files.append((f"b/{table}.parquet", (tmp_path / f"{table}.parquet").read_bytes()))
    incoming.take_folder(files)
    assert not any("notes" in f for f in files_below(home.runs / "uploads" / "b"))
    run = load_run(home.runs / "uploads" / "b")
    assert len(run.steps) == 120 and len(run.table("tensors")) == len(load_run(source).table("tensors"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([("b/steps/0.parquet", b"")], "run.json is missing"),
        ([("b/run.json", b"{}"), ("c/run.json", b"{}")], "holds 2 runs"),
        ([("b/run.json", b"{")], "does not hold JSON"),
    ],
)
def test_bad_folder_upload_is_refused(home, files, expected):
    with pytest.raises(RunError, match=expected):
        incoming.take_folder(files)
    assert files_below(home.runs) == []


@pytest.mark.skipif(python_path() == {}, reason="what is installed is not put before another of that name")
def test_an_upload_is_read_by_this_amp_core_wherever_the_server_was_started(home, tmp_path, monkeypatch):
    packed = pack(write(tmp_path / "a", "healthy"), tmp_path / "a.zip").read_bytes()
    (tmp_path / "other" / "amp_core").mkdir(parents=True)
    (tmp_path / "other" / "amp_core" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path)
    assert incoming.take_zip("a.zip", packed) == "run/uploads/a"


def test_upload_that_takes_too_long_is_given_up(home, monkeypatch):
    monkeypatch.setattr(incoming, "READING_TIMEOUT_S", 0.01)
    with pytest.raises(RunError, match="took more than"):
        incoming.take_zip("slow.zip", zip_of({"run.json": b"{}"}))
    assert files_below(home.runs) == []


def test_the_share_of_a_trace_that_was_read_is_told_while_it_is_read(home, monkeypatch):
    """By the user's name of the file, and not as an error."""
    real, record = subprocess.Popen, []

    def slow(line, **how):
        script = (
            "import sys; from amp_core.cli import import_trace; import_trace.PROGRESS_EVERY_S = 0;"
            "from amp_core.__main__ import main; sys.exit(main(sys.argv[1:]))"
        )
        return real([line[0], "-c", script, *line[3:]], **how)

    monkeypatch.setattr(subprocess, "Popen", slow)
    data = json.dumps(training()).encode()
    assert incoming.take_traces([("my trace.json", data)], record.append) == "run/uploads/my-trace"
    assert record[-1].startswith("reading my trace.json: 100% of ")
