"""Library: the table, choosing, downloading, deleting, and what is done with uploads, the hostile ones too."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run
from amp_core.hardware.child_environment import python_path
from amp_core.library.labels import Label, label_of, write_label
from amp_core.library.mutes import mute
from amp_core.store.packing import pack
from amp_core.store.writer import RunWriter
from pages.parts.library import run_list, run_table, trash
from pages.parts.library import upload as incoming
from tests.pages.conftest import words
from tests.synthetic import live, write
from tests.traces.made import training

LIBRARY = "pages/run_library.py"


def button(app, label):
    return next(b for b in app.button if b.label == label)


def upload(app, which, name, data, mime="application/zip"):
    return app.get("file_uploader")[which].upload(name, data, mime).run()


def files_below(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*")) if folder.exists() else []


def test_the_table_lists_every_run(home, open_app):
    write(home.samples / "fp16-healthy", "healthy")
    write(home.runs / "mine", "stopped")
    write(home.runs / "cmp" / "fp32", "fp32")
    table = open_app(LIBRARY).dataframe[0].value.set_index("Name")
    assert set(table.index) == {"fp16-healthy", "mine", "cmp/fp32"}
    assert table.loc["fp16-healthy", "Kind"] == "sample"
    assert table.loc["mine", "Status"] == "stopped"
    assert table.loc["mine", "Steps"] == "37 of 37"
    assert table.loc["cmp/fp32", "Recipe"] == "fp32"
    assert table.loc["mine", "Last loss"] == pytest.approx(load_run(home.runs / "mine").steps["loss"].iloc[-1])
    assert len(table.loc["mine", "Loss"]) > 10 and table.loc["mine", "Verdict"] == "nothing wrong"
    assert 0 < table.loc["mine", "Size (MiB)"] < 1


def test_a_damaged_run_is_listed_as_damaged(home, open_app):
    for name in ("head", "table"):
        write(home.runs / name, "healthy")
    (home.runs / "head" / "run.json").write_text("{")
    next((home.runs / "table" / "steps").iterdir()).write_bytes(b"PAR1")
    table = open_app(LIBRARY).dataframe[0].value.set_index("Name")
    assert table["Verdict"].tolist() == table["Status"].tolist() == ["damaged", "damaged"]


def test_folders_that_are_no_runs_are_passed_over(home, open_app):
    write(home.runs / "a", "healthy")
    (home.runs / "notes" / "deep").mkdir(parents=True)
    (home.runs / ".hidden").mkdir()
    (home.runs / "file.txt").write_text("x")
    assert list(open_app(LIBRARY).dataframe[0].value["Name"]) == ["a"]


def test_a_deletion_can_be_undone_and_samples_stay(home, open_app):
    write(home.samples / "s", "healthy")
    write(home.runs / "a", "healthy")
    app = open_app(LIBRARY, run="sample/s")
    assert button(app, "Delete").disabled
    app.sidebar.selectbox[0].select("run/a").run()
    mute(home.runs / "a", "watch-overhead")
    before = files_below(home.runs)
    button(app, "Delete").click().run()
    assert not (home.runs / "a").exists() and "**a** was deleted." in words(app)
    button(app, "Undo").click().run()
    assert files_below(home.runs / "a") and app.session_state["run"] == "run/a"
    assert [f for f in files_below(home.runs) if not f.startswith(".deleted")] == before
    button(app, "Delete").click().run()
    again = open_app(LIBRARY)  # another session knows nothing of the deletion but what lies in the bin
    button(again, "Restore a").click().run()
    assert (home.runs / "a" / "run.json").exists()
    button(again, "Delete").click().run()
    button(again, "Remove all for good").click().run()
    assert not again.exception and files_below(home.runs) == []


def test_a_run_that_another_tab_deleted_has_a_notice(home):
    write(home.runs / "few", "healthy")
    entry = run_list.listing()["run/few"]
    trash.delete(entry)
    with pytest.raises(RunError, match=r"^few is no longer there: it was moved or deleted elsewhere$"):
        trash.delete(entry)
    (kept,) = trash.deleted_runs()
    trash.restore(kept)
    with pytest.raises(RunError, match=r"^the place of few is taken by another run; rename or delete that first$"):
        trash.restore(kept)


def test_a_damaged_run_of_a_comparison_comes_back_too(home):
    for name in ("fp32", "bf16"):
        write(home.runs / "cmp" / name, name)
    (home.runs / "cmp" / "fp32" / "run.json").unlink()
    before = files_below(home.runs)
    trash.delete(run_list.listing()["run/cmp/fp32"])
    (kept,) = trash.deleted_runs()
    assert trash.restore(kept) == "run/cmp/fp32"
    assert [f for f in files_below(home.runs) if not f.startswith(".deleted")] == before


def test_restoring_does_not_overwrite_a_new_run(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(LIBRARY, run="run/a")
    button(app, "Delete").click().run()
    write(home.runs / "a", "fp32")
    button(app, "Undo").click().run()
    assert "is taken by another run" in words(app) and load_run(home.runs / "a").head.config["precision"] == "fp32"


def test_name_tags_and_note_are_kept_and_searched(home, open_app):
    write(home.runs / "a", "healthy")
    write(home.runs / "b", "fp32")
    app = open_app(LIBRARY, run="run/a")
    for name, text in (("name", "the good one"), ("tags", "paper, lstm ,, paper"), ("note", "as in table 2")):
        next(t for t in (*app.text_input, *app.text_area) if t.key == f"library.{name}.run/a").set_value(text)
    button(app, "Save").click().run()
    table = app.dataframe[0].value.set_index("Name")
    assert list(table.loc["the good one (a)", "Tags"]) == ["paper", "lstm"] and "as in table 2" in words(app)
    assert load_run(home.runs / "a").head.name == "a"  # the run itself is as it was
    for asked, result in (("PAPER good", ["the good one (a)"]), ("fp32", ["b"])):
        next(t for t in app.text_input if t.key == "library.search").set_value(asked).run()
        assert list(app.dataframe[0].value["Name"]) == result
    next(t for t in app.text_input if t.key == "library.search").set_value("nowhere").run()
    assert "No run has all of these words." in words(app)


def test_ticked_runs_are_compared(home, open_app):
    for name in ("a", "b", "c"):
        write(home.runs / name, "healthy")
    app = open_app(LIBRARY, run="run/a")
    app.session_state["library.ticked"] = ["run/b", "run/a"]
    app.run()
    button(app, "Compare these 2").click().run()
    assert app.title[0].value == "Compare" and app.query_params["with"] == ["run/b", "run/a"]


@pytest.mark.parametrize(
    ("ticked", "before", "current", "chosen"),
    [
        (["b", "c"], [], "b", "c"),
        (["a", "b", "c"], ["b", "c"], "c", "a"),
        (["b"], ["a", "b"], "a", "b"),
        ([], ["a"], "a", "a"),
    ],
)
def test_the_run_that_was_ticked_last_is_chosen(ticked, before, current, chosen):
    assert run_table.chosen(ticked, before, current) == chosen


def test_run_again_uses_the_run_s_settings(home, open_app):
    folder = write(home.runs / "a", "healthy")
    head = json.loads((folder / "run.json").read_text())
    head["config"] |= {
        "workload": "text-lstm",
        "size": "logistic",
        "precision": "fp16",
        "steps": 77,
        "loss_scale": 128.0,
    }
    (folder / "run.json").write_text(json.dumps(head))
    app = open_app(LIBRARY, run="run/a")
    button(app, "Run again").click().run()
    assert app.title[0].value == "Start a run" and not app.exception
    state = app.session_state
    assert (state["start.what"], state["start.precisions"]) == (("text-lstm", "logistic"), ["fp16"])
    assert (state["start.steps"], state["start.scaling"], state["start.scale"]) == (77, "static", 128.0)


def test_run_under_way_cannot_be_deleted(home, open_app):
    with live(home.runs / "a") as run:
        run.advance(1)
        assert button(open_app(LIBRARY, run="run/a"), "Delete").disabled


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
        ("bomb.json.gz", gzip.compress(b"[" * 10**7), "bomb.json.gz is nested deeper than any trace is"),
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


def test_trainings_of_a_search_are_folded_until_its_folder_is_chosen(home, open_app):
    search = home.runs / "tune-a"
    for place in ("look", "race/fp32", "confirm/bf16/bf16-seed0"):
        write(search / place, "healthy", steps=5)
    (search / "tune.json").write_text("{}")
    write(home.runs / "cmp" / "fp32", "fp32", steps=5)
    write(home.runs / "own", "healthy", steps=5)
    app = open_app(LIBRARY)
    assert not app.exception
    assert set(app.session_state["entries"]) >= {"run/tune-a/look", "run/tune-a/confirm/bf16/bf16-seed0"}
    assert sorted(app.dataframe[0].value["Name"]) == ["cmp/fp32", "own"]
    assert "folded: tune-a (3 runs)" in words(app)
    folder = next(s for s in app.selectbox if s.label == "Folder")
    assert folder.options == ["cmp (1 run)", "tune-a (3 runs)"] or folder.options == ["tune-a (3 runs)", "cmp (1 run)"]
    app = folder.set_value("tune-a").run()
    assert sorted(app.dataframe[0].value["Name"]) == [
        "tune-a/confirm/bf16/bf16-seed0",
        "tune-a/look",
        "tune-a/race/fp32",
    ]
    app = next(s for s in app.selectbox if s.label == "Folder").set_value(None).run()
    app.text_input[0].set_value("seed0").run()  # a search looks everywhere
    assert list(app.dataframe[0].value["Name"]) == ["tune-a/confirm/bf16/bf16-seed0"]


def test_a_deleted_training_of_a_search_comes_back_to_its_place(home, open_app):
    write(home.runs / "tune-a" / "confirm" / "bf16" / "bf16-seed0", "healthy", steps=5)
    (home.runs / "tune-a" / "tune.json").write_text("{}")
    app = open_app(LIBRARY, run="run/tune-a/confirm/bf16/bf16-seed0")
    app = next(b for b in app.button if b.label == "Delete").click().run()
    assert not any("bf16-seed0" in key for key in app.session_state["entries"])
    app = next(b for b in app.button if b.label == "Undo").click().run()
    assert "run/tune-a/confirm/bf16/bf16-seed0" in app.session_state["entries"] and not app.error


def test_ticks_stay_with_their_runs_when_others_come(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(LIBRARY, run="run/a")
    before, _ = app.session_state["library.ticks"]
    write(home.runs / "b", "healthy")
    app.run()
    key, numbers = app.session_state["library.ticks"]
    assert key != before and [app.session_state["library.shown"][n] for n in numbers] == ["run/a"]


def test_a_run_can_be_called_as_its_folder_and_its_recorded_name_come_back(home, open_app):
    write(home.runs / "recorded", "healthy", steps=5).rename(home.runs / "folder")
    app = open_app(LIBRARY, run="run/folder")
    names = []
    for typed in ("recorded", "folder", "folder", ""):  # as it is called, another one, the same again, none
        next(t for t in app.text_input if t.label == "Name").set_value(typed)
        app = button(app, "Save").click().run()
        assert not app.exception and not app.error
        names.append((app.session_state["entries"]["run/folder"].name, label_of(home.runs / "folder").name))
    assert names == [("recorded", ""), ("folder", "folder"), ("folder", "folder"), ("recorded", "")]


def test_charts_call_a_run_as_it_was_renamed(home, open_app):
    for name in ("a", "b"):
        write(home.runs / name, "healthy", steps=20)
    compare = "pages/compare_runs.py"
    asked = {"run": "run/a", "with": ["run/a", "run/b"]}

    def drawn(app):
        return "".join(chart.proto.spec for chart in app.get("plotly_chart"))

    assert "given later" not in drawn(open_app(compare, **asked))
    write_label(home.runs / "b", Label(name="given later"))
    assert "given later" in drawn(open_app(compare, **asked))


def test_a_failed_run_is_not_called_healthy(home, open_app):
    with pytest.raises(ZeroDivisionError), RunWriter(home.runs / "a"):
        raise ZeroDivisionError
    table = open_app(LIBRARY, run="run/a").dataframe[0].value
    assert table.set_index("Name").loc["a", "Verdict"] == "failed"


def test_a_run_that_never_made_a_step_has_no_verdict(home, open_app):
    for name, status in (("a", "stopped"), ("b", "failed")):
        with RunWriter(home.runs / name) as writer:
            writer.close(status, "before it began")
    table = open_app(LIBRARY).dataframe[0].value.set_index("Name")
    assert dict(table["Verdict"]) == {"a": "stopped", "b": "failed"}


def test_fp32_is_the_baseline_of_a_comparison(home, open_app):
    for name in ("fp16", "fp32"):
        write(home.runs / name, name if name == "fp32" else "healthy")
    app = open_app(LIBRARY, run="run/fp16")
    assert button(app, "Compare ticked").disabled
    app.session_state["library.ticked"] = ["run/fp16", "run/fp32"]
    app.run()
    button(app, "Compare these 2").click().run()
    assert app.query_params["with"] == ["run/fp32", "run/fp16"]


def test_a_new_name_reaches_the_picker(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(LIBRARY, run="run/a")
    next(t for t in app.text_input if t.key == "library.name.run/a").set_value("the good one")
    button(app, "Save").click().run()
    assert app.sidebar.selectbox[0].proto.set_value and "the good one (a)" in app.sidebar.selectbox[0].options
