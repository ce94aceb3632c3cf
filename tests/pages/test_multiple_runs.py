"""Compare during training: a line per run, overlaid curves, and the findings so far."""

import contextlib
import json

import pytest

from amp_core import jobs
from tests.pages.conftest import titles, words
from tests.synthetic import live, write

COMPARE = "pages/compare_runs.py"


@pytest.fixture
def pair(home):
    """FP32 and FP16 in training."""
    with contextlib.ExitStack() as runs:
        yield [runs.enter_context(live(home.runs / name, name, steps=200)) for name in ("fp32", "overflowing")]


def lines(app):
    return [bar.proto.text.replace("\\", "") for bar in app.get("progress")]


def drawn(app):
    """Traces of the loss figure."""
    chart = next(c for c in app.get("plotly_chart") if json.loads(c.proto.spec)["layout"]["title"]["text"] == "Loss")
    return json.loads(chart.proto.spec)["data"]


def test_two_live_runs_are_followed_on_one_page(pair, open_app):
    for run in pair:
        run.advance(50)
    app = open_app(COMPARE, **{"with": ["run/fp32", "run/overflowing"]})
    assert not app.exception
    assert [line.split(" · ")[:3] for line in lines(app)] == [
        ["**fp32**", "running", "step 50 of 200"],
        ["**overflowing**", "running", "step 50 of 200"],
    ]
    assert {t["name"] for t in drawn(app) if t.get("name")} >= {"fp32", "overflowing", "skipped step", "phase change"}
    assert titles(app).count("Loss") == 1
    assert "2.00 × faster" in words(app) and any(b.label == "Read what is new" for b in app.button)

    pair[0].advance(7)
    app.run()
    assert "step 57 of 200" in lines(app)[0]


def test_pause_freezes_the_page(pair, open_app):
    for run in pair:
        run.advance(20)
    app = open_app(COMPARE, **{"with": ["run/fp32", "run/overflowing"]})
    pause = next(t for t in app.toggle if t.label == "Pause")
    pause.set_value(True).run()
    before = drawn(app)
    pair[0].advance(30)
    app.run()
    assert "step 20 of 200" in lines(app)[0] and drawn(app) == before
    pause.set_value(False).run()
    assert "step 50 of 200" in lines(app)[0]


def test_a_run_without_steps_and_one_in_the_queue_have_a_line(pair, home, open_app, monkeypatch):
    folder = home.runs.absolute() / "waiting"
    folder.mkdir()
    (folder / "job.json").write_text("{}")
    job = jobs.Job(folder, "cpu", 0, "queued", "behind another", 1, False, None, {})
    monkeypatch.setattr(jobs, "under_way", lambda _: [job])
    find = jobs.find
    monkeypatch.setattr(jobs, "find", lambda path: job if path.absolute() == folder else find(path))
    app = open_app(COMPARE, **{"with": ["run/fp32", "run/waiting"]})
    assert not app.exception
    assert lines(app) == [
        "**fp32** · running · step 0 of 200",
        "**waiting** · number 1 in the queue, behind another",
    ]
    assert "once two of them have steps" in words(app)


def test_the_page_stops_refreshing_when_the_last_run_ends(home, open_app):
    write(home.runs / "fp32", "fp32")
    with live(home.runs / "a") as run:
        run.advance(40)
        app = open_app(COMPARE, **{"with": ["run/fp32", "run/a"]})
        assert [line.split(" · ")[1] for line in lines(app)] == ["finished", "running"]
        run.advance(80)
    app.run()
    assert not app.exception and not lines(app)
    assert titles(app)[0] == "Loss" and "2.00 × faster" in words(app)


def test_a_live_run_is_suggested_only_if_a_live_run_is_chosen(pair, home, open_app):
    write(home.runs / "ended", "healthy")
    assert open_app(COMPARE, run="run/ended").multiselect[0].value == ["run/ended"]
    assert set(open_app(COMPARE, run="run/fp32").multiselect[0].value) == {"run/fp32", "run/overflowing", "run/ended"}


def test_a_followed_run_that_ended_is_shown_as_finished_beside_a_live_one(home, open_app):
    with live(home.runs / "b") as going_on:
        going_on.advance(10)
        with live(home.runs / "a") as run:
            run.advance(40)
            app = open_app(COMPARE, **{"with": ["run/a", "run/b"]})
        app.run()
        assert [line.split(" · ")[1] for line in lines(app)] == ["finished", "running"]
