"""Library: the table, choosing, downloading, labels, deleting and restoring."""

import json

import pytest

from amp_core import RunError, load_run
from amp_core.analysis import overview
from amp_core.library.labels import Label, label_of, write_label
from amp_core.library.mutes import mute
from amp_core.store.writer import RunWriter
from pages.parts.library import run_list, ticks, trash
from tests.pages.conftest import files_below, run_picker, words
from tests.synthetic import live, write

LIBRARY = "pages/run_library.py"


def button(app, label):
    return next(b for b in app.button if b.label == label)


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
    assert table.loc["mine", "Final loss"] == overview(load_run(home.runs / "mine")).loss_final  # as on Overview
    assert len(table.loc["mine", "Loss"]) > 10 and table.loc["mine", "Verdict"] == "nothing wrong"
    assert 0 < table.loc["mine", "Size (MiB)"] < 1


def test_a_damaged_run_is_listed_as_damaged(home, open_app):
    for name in ("head", "table"):
        write(home.runs / name, "healthy")
    (home.runs / "head" / "run.json").write_text("{")
    next((home.runs / "table" / "steps").iterdir()).write_bytes(b"PAR1")
    table = open_app(LIBRARY).dataframe[0].value.set_index("Name")
    assert table["Verdict"].tolist() == table["Status"].tolist() == ["damaged", "damaged"]


def test_folders_that_are_not_runs_are_ignored(home, open_app):
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
    run_picker(app).select("run/a").run()
    mute(home.runs / "a", "watch-overhead")
    before = files_below(home.runs)
    button(app, "Delete").click().run()
    assert not (home.runs / "a").exists() and "**a** was deleted." in words(app)
    button(app, "Undo").click().run()
    assert files_below(home.runs / "a") and app.session_state["run"] == "run/a"
    assert [f for f in files_below(home.runs) if not f.startswith(".deleted")] == before
    button(app, "Delete").click().run()
    again = open_app(LIBRARY)  # another session knows of the deletion only from the trash
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


def test_a_damaged_run_of_a_comparison_can_be_restored_too(home):
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
    assert load_run(home.runs / "a").head.name == "a"  # the run itself is unchanged
    for query, result in (("PAPER good", ["the good one (a)"]), ("fp32", ["b"])):
        next(t for t in app.text_input if t.key == "library.search").set_value(query).run()
        assert list(app.dataframe[0].value["Name"]) == result
    next(t for t in app.text_input if t.key == "library.search").set_value("nowhere").run()
    assert "No run matches all of these words." in words(app)


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
    assert ticks.chosen(ticked, before, current) == chosen


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


def test_a_running_training_cannot_be_deleted(home, open_app):
    with live(home.runs / "a") as run:
        run.advance(1)
        assert button(open_app(LIBRARY, run="run/a"), "Delete").disabled


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
    app.text_input[0].set_value("seed0").run()  # a text search includes collapsed runs
    assert list(app.dataframe[0].value["Name"]) == ["tune-a/confirm/bf16/bf16-seed0"]


def test_a_deleted_training_of_a_search_is_restored_to_its_place(home, open_app):
    write(home.runs / "tune-a" / "confirm" / "bf16" / "bf16-seed0", "healthy", steps=5)
    (home.runs / "tune-a" / "tune.json").write_text("{}")
    app = open_app(LIBRARY, run="run/tune-a/confirm/bf16/bf16-seed0")
    app = next(b for b in app.button if b.label == "Delete").click().run()
    assert not any("bf16-seed0" in key for key in app.session_state["entries"])
    app = next(b for b in app.button if b.label == "Undo").click().run()
    assert "run/tune-a/confirm/bf16/bf16-seed0" in app.session_state["entries"] and not app.error


def test_ticks_stay_with_their_runs_when_runs_are_added(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(LIBRARY, run="run/a")
    before, _ = app.session_state["library.ticks"]
    write(home.runs / "b", "healthy")
    app.run()
    key, numbers = app.session_state["library.ticks"]
    assert key != before and [app.session_state["library.shown"][n] for n in numbers] == ["run/a"]


def test_a_run_can_be_named_like_its_folder_and_its_recorded_name_restored(home, open_app):
    write(home.runs / "recorded", "healthy", steps=5).rename(home.runs / "folder")
    app = open_app(LIBRARY, run="run/folder")
    names = []
    for typed in ("recorded", "folder", "folder", ""):  # its current name, another, the same again, none
        next(t for t in app.text_input if t.label == "Name").set_value(typed)
        app = button(app, "Save").click().run()
        assert not app.exception and not app.error
        names.append((app.session_state["entries"]["run/folder"].name, label_of(home.runs / "folder").name))
    assert names == [("recorded", ""), ("folder", "folder"), ("folder", "folder"), ("recorded", "")]


def test_charts_use_the_new_name_of_a_run(home, open_app):
    for name in ("a", "b"):
        write(home.runs / name, "healthy", steps=20)
    compare = "pages/compare_runs.py"
    query = {"run": "run/a", "with": ["run/a", "run/b"]}

    def drawn(app):
        return "".join(chart.proto.spec for chart in app.get("plotly_chart"))

    assert "given later" not in drawn(open_app(compare, **query))
    write_label(home.runs / "b", Label(name="given later"))
    assert "given later" in drawn(open_app(compare, **query))


def test_a_failed_run_is_not_called_healthy(home, open_app):
    with pytest.raises(ZeroDivisionError), RunWriter(home.runs / "a"):
        raise ZeroDivisionError
    table = open_app(LIBRARY, run="run/a").dataframe[0].value
    assert table.set_index("Name").loc["a", "Verdict"] == "failed"


def test_a_run_without_steps_is_not_judged(home, open_app):
    for name, status in (("a", "stopped"), ("b", "failed")):
        with RunWriter(home.runs / name) as writer:
            writer.close(status, "before it started")
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
    assert "the good one (a)" in run_picker(app).options and run_picker(app).key == "picker.1"  # a new field
