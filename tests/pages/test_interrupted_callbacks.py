"""Library and Start: a callback whose pass the browser's next request interrupts gives its answer, once.

The browser sends that request before it has seen any answer, so it comes with the older choice of a run.
"""

from streamlit.proto.WidgetStates_pb2 import WidgetStates
from streamlit.runtime.scriptrunner import RerunData, get_script_run_ctx
from streamlit.runtime.uploaded_file_manager import UploadedFileRec

from amp_core import jobs
from pages.parts import picker
from pages.parts.library import actions, messages, trash, upload
from pages.parts.start import comparisons
from tests.pages.conftest import run_picker, words
from tests.pages.test_run_library import LIBRARY, button
from tests.synthetic import write


def request(states: WidgetStates) -> None:
    """What Streamlit does when the browser asks for a pass with these values of its widgets."""
    context = get_script_run_ctx()
    assert context is not None and context.script_requests is not None
    data = RerunData(context.query_string, states, context.page_script_hash)
    assert context.script_requests.request_rerun(data)


def then_request(function, states):
    """`function`, followed by such a request."""

    def followed(*arguments, **options):
        result = function(*arguments, **options)
        request(states)
        return result

    return followed


def test_files_dropped_while_another_is_read_are_imported_once_and_answered(home, open_app, monkeypatch):
    write(home.runs / "a", "healthy", steps=30)
    app = open_app(LIBRARY, run="run/a")
    field = app.get("file_uploader")[0].upload("b.zip", b"b")
    read = []

    def take(files, progress):
        (name,) = [name.removesuffix(".zip") for name, _ in files]
        read.append(name)
        if name == "b":
            field.upload("c.zip", b"c")
            for number, file, data, kind in field._files:
                record = UploadedFileRec(number, file, kind, data)
                get_script_run_ctx().uploaded_file_mgr.add_file("test session id", record)
            states.widgets.add().CopyFrom(field._widget_state)
            request(states)
        progress("reading: 50% of 2 MiB")
        write(home.runs / "uploads" / name, "healthy", steps=30)
        yield f"run/uploads/{name}"

    monkeypatch.setattr(upload, "take", take)
    states = app._tree.get_widget_states()
    del states.widgets[[state.id for state in states.widgets].index(field.id)]
    field.run()
    assert not app.exception and read == ["b", "c"]
    assert app.session_state["run"] == app.query_params["run"] == "run/uploads/c"
    assert "b is in the library." in words(app) and "c is in the library and chosen." in words(app)
    run_picker(app).select("run/uploads/b").run()
    assert "b is in the library and chosen." in words(app) and "c is in the library." in words(app)


def test_an_interrupted_deletion_restore_and_label_are_answered(home, open_app, monkeypatch):
    for name in ("a", "b"):
        write(home.runs / name, "healthy", steps=30)
    app = open_app(LIBRARY, run="run/a")
    monkeypatch.setattr(trash, "delete", then_request(trash.delete, app._tree.get_widget_states()))
    button(app, "Delete").click().run()
    assert "a was deleted." in words(app).replace("*", "") and "There is no run" not in words(app)
    monkeypatch.setattr(trash, "restore", then_request(trash.restore, app._tree.get_widget_states()))
    button(app, "Undo").click().run()
    assert app.session_state["run"] == app.query_params["run"] == "run/a" and "a was restored." in words(app)
    next(t for t in app.text_input if t.key == "library.name.run/a").set_value("mine")
    monkeypatch.setattr(actions, "write_label", then_request(actions.write_label, app._tree.get_widget_states()))
    button(app, "Save").click().run()
    assert "The label of a was saved." in words(app) and app.session_state["entries"]["run/a"].name == "mine"
    run_picker(app).select("run/b").run()  # back at once: the run that was restored is not held
    assert app.session_state["run"] == app.query_params["run"] == "run/b" and not app.exception


def test_what_the_browser_sends_before_it_has_shown_an_upload_chooses_no_other_run(home, open_app, monkeypatch):
    for name in ("a", "b"):
        write(home.runs / name, "healthy", steps=30)

    def take(files, progress):
        write(home.runs / "uploads" / "c", "healthy", steps=30)
        return ["run/uploads/c"]

    monkeypatch.setattr(upload, "take", take)
    app = open_app(LIBRARY, run="run/b")
    run_picker(app).select("run/a").run()
    before = WidgetStates(widgets=[run_picker(app)._widget_state])
    app.get("file_uploader")[0].upload("c.zip", b"c").run()
    assert app.session_state["run"] == app.query_params["run"] == "run/uploads/c"
    for _ in range(3):
        app.query_params["run"] = "run/a"  # a busy browser sends its fields and its address as they were
        app._run(before)
        assert app.session_state["run"] == app.query_params["run"] == "run/uploads/c"
    monkeypatch.setattr(picker, "STALE_S", 0.0)
    app.query_params["run"] = "run/a"  # Back
    app.run()
    assert app.session_state["run"] == run_picker(app).value == "run/a"
    run_picker(app).select("run/b").run()
    assert app.session_state["run"] == app.query_params["run"] == "run/b" and not app.exception


def test_an_interrupted_start_starts_once_and_says_so(home, open_app, started, monkeypatch):
    configs, _ = started
    app = open_app("pages/start_run.py")
    states = app._tree.get_widget_states()
    monkeypatch.setattr(jobs, "start", then_request(jobs.start, states))
    app.button(key="start.go").click().run()
    assert not app.exception and len(configs) == 1
    assert (
        app.session_state["start.followed"] == ["run/text-gpt-tiny-fp16-1"] and not app.session_state["start.refused"]
    )
    (key,) = app.session_state["start.followed"]
    assert app.session_state["run"] == key


def test_a_toast_of_an_interrupted_callback_is_shown(home, open_app, monkeypatch):
    app = open_app("pages/start_run.py")
    states = app._tree.get_widget_states()
    monkeypatch.setattr(comparisons, "begin", then_request(lambda *_: "compare-1", states))
    app.button_group(key="start.precisions").set_value(["fp32", "bf16"]).run()
    app.button(key="start.turns").click().run()
    assert not app.exception and [toast.value for toast in app.toast] == ["compare\\-1 is in the queue below."]
    assert app.session_state["start.comparison"] == "compare-1"
    assert not app.run().toast  # once


def test_a_message_of_an_interrupted_pass_is_drawn_again_however_long_the_pass_took(home, open_app, monkeypatch):
    for name in ("a", "b"):
        write(home.runs / name, "healthy", steps=30)
    app = open_app(LIBRARY, run="run/a")
    monkeypatch.setattr(messages, "MESSAGE_S", 0.0)
    drawn, show = [], messages.show

    def interrupted_once():
        show()
        drawn.append(1)
        if len(drawn) == 1:
            request(app._tree.get_widget_states())

    monkeypatch.setattr(messages, "show", interrupted_once)
    next(t for t in app.text_input if t.key == "library.name.run/a").set_value("mine")
    button(app, "Save").click().run()
    assert len(drawn) == 2 and "The label of a was saved." in words(app)
    app.run()
    assert "The label of a was saved." not in words(app)
