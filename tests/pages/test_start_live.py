"""Start a run: the live view of a running job."""

import dataclasses

from amp_core import jobs
from tests.pages.conftest import metric, titles, words
from tests.pages.start_form import START, field, submit
from tests.synthetic import live, write


def test_stop_requests_the_end_of_the_job(started, open_app, monkeypatch):
    stopped = []
    monkeypatch.setattr(jobs.Job, "request_stop", lambda self, *_: stopped.append(self.name))
    app = open_app(START)
    field(app, "precisions").set_value(["fp16", "bf16"])
    app = submit(app)
    next(b for b in app.button if b.key == "live.stop.text-gpt-tiny-fp16-1").click().run()
    next(b for b in app.button if b.key == "queue.stop.text-gpt-tiny-bf16-1").click().run()
    assert stopped == ["text-gpt-tiny-fp16-1", "text-gpt-tiny-bf16-1"]


def test_the_live_view_follows_the_run_and_stops_when_it_ends(started, home, open_app):
    _, states = started
    app = submit(open_app(START))
    folder = home.runs / "text-gpt-tiny-fp16-1"
    with live(folder, "overflowing") as run:
        states[folder] = dataclasses.replace(states[folder], state="running", queue_position=None)
        run.advance(40)
        app.run()
        assert not app.exception
        assert "step 40 of 120" in app.get("progress")[0].proto.text
        assert int(metric(app, "Skipped steps").value) > 0
        assert titles(app)[:2] == ["Loss", "Loss scale"]
        assert "Output gradients at step 30" in titles(app)
        states[folder] = dataclasses.replace(states[folder], state="finished")
    app.run()
    assert not app.exception
    assert not any(b.label == "Stop" for b in app.button)
    assert any("finished" in m.value for m in app.markdown)


def test_a_reload_shows_the_running_job(started, home, open_app):
    _, states = started
    submit(open_app(START))
    folder = home.runs / "text-gpt-tiny-fp16-1"
    with live(folder) as run:
        states[folder] = dataclasses.replace(states[folder], state="running", queue_position=None)
        run.advance(5)
        app = open_app(START, run="run/text-gpt-tiny-fp16-1")  # a second tab: nothing in its session state
        assert "step 5 of 120" in app.get("progress")[0].proto.text
        assert any(b.label == "Stop" for b in app.button)


def test_a_finished_run_leaves_the_form_open(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(START, run="run/a")
    assert "Each precision is one run" in words(app)
    assert not app.get("plotly_chart")
