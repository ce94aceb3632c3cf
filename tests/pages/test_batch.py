"""Largest batch: the search is queued with the form's settings, and its result is copied into the form."""

import json
from types import SimpleNamespace

import pytest

from amp_core import jobs
from amp_core.settings.resources import Resources
from amp_core.tune.max_batch import FILE
from tests.pages.conftest import words
from tests.pages.start_form import START, field

ANSWER = {"workload": "digits-cnn", "size": "tiny", "precision": "bf16", "device": "cpu"}


@pytest.fixture
def search(home, monkeypatch):
    """A search that was queued from the form: the arguments of `jobs.start`, and its job."""
    started = []
    job = SimpleNamespace(name="batch-1", folder=home.runs / "batch-1", alive=True, console=lambda lines: ["no memory"])

    def start(config, runs_dir, name, *, command, makes, resources):
        assert resources == Resources()
        started.append((config, name, command, makes))
        return job

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(jobs, "find", lambda folder: job)
    record(job.folder, "runs")
    return started, job


def record(folder, makes):
    """The record that `jobs.start` writes for a job that makes one run or several."""
    folder.mkdir(parents=True)
    record = {"argv": ["train"], "device": "cpu", "created_ns": 1, "makes": makes}
    (folder / "job.json").write_text(json.dumps(record))


def press(app, key):
    return next(b for b in app.button if b.key == key).click().run()


def test_the_result_of_a_search_is_copied_into_the_form(search, open_app):
    started, job = search
    app = open_app(START)
    field(app, "what").set_value(("digits-cnn", "tiny"))
    field(app, "precisions").set_value(["bf16", "fp16"])
    field(app, "batch_size").set_value(4)
    app = press(app, "batch.go")
    assert not app.exception and not app.error
    ((config, name, command, makes),) = started
    assert (config.workload, config.precision, config.batch_size) == ("digits-cnn", "bf16", None)
    assert (
        command[-4:] == ["tune", "--max-batch", "--timeout", "60"]
        and makes == "runs"
        and name == "batch-digits-cnn-tiny-bf16"
    )
    assert not any(b.key == "batch.use" for b in app.button)

    job.alive = False
    result = ANSWER | {"answer": "largest batch that fits: 48", "largest_batch": 48}
    (job.folder / FILE).write_text(json.dumps(result))
    app = press(app.run(), "batch.use")
    assert "digits-cnn tiny in bf16 on cpu: largest batch that fits: 48." in words(app).replace("*", "")
    assert field(app, "batch_size").value == 48
    again = open_app(START, search=job.name)  # the same address in a new session
    assert "largest batch that fits: 48." in words(again) and any(b.key == "batch.use" for b in again.button)
    assert "largest batch" not in words(open_app(START, search=f"../runs/{job.name}"))


def test_a_search_that_ended_without_a_result_has_a_sentence(search, open_app):
    _, job = search
    app = press(open_app(START), "batch.go")
    job.alive = False
    assert "ended without an answer: no memory." in words(app.run())
    (job.folder / FILE).write_text(json.dumps(ANSWER | {"answer": "not even a batch of 1 fits", "largest_batch": None}))
    app = app.run()
    assert "not even a batch of 1 fits." in words(app) and not any(b.key == "batch.use" for b in app.button)


@pytest.mark.parametrize(
    "name", ["batch-a\0b", "../runs/batch-1", "batch-1/", "batch-" + "a" * 300, "training", "batch-2"]
)
def test_an_address_that_names_no_search_is_refused(search, home, open_app, name):
    record(home.runs / "training", "runs")  # a comparison
    record(home.runs / "batch-2", "run")  # a training with that name
    _, job = search
    job.alive = False
    app = open_app(START, search=name)
    assert not app.exception
    assert "The address asks for search=" in words(app) and "search for a batch" not in words(app)


@pytest.mark.parametrize(
    "damaged", ["", "{}", "[]", '{"answer": 1}', json.dumps(ANSWER | {"answer": "48"}), "[" * 99_999, "\udcff"]
)
def test_a_damaged_result_has_a_sentence_without_a_path(search, home, open_app, damaged):
    _, job = search
    job.alive = False
    (job.folder / FILE).write_text(damaged, errors="surrogateescape")
    app = open_app(START, search=job.name)
    assert not app.exception and not any(b.key == "batch.use" for b in app.button)
    assert "What the search for a batch found cannot be read: its max_batch.json is damaged." in words(app)
    assert str(home.runs) not in words(app)


def test_a_search_whose_record_cannot_be_written_has_a_sentence(search, open_app, monkeypatch):
    _, job = search

    def find(folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(jobs, "find", find)
    app = open_app(START, search=job.name)
    assert not app.exception and "cannot be read: No space left on device." in words(app)
