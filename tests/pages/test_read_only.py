"""A read-only server offers nothing that it would refuse: no start, stop, upload, label, mute or delete on any page."""

import os
from pathlib import Path

import pytest

from amp_core import RunError, jobs
from amp_core.library.labels import Label, write_label
from amp_core.library.mutes import mute
from amp_core.library.permissions import Rules
from pages.parts.library import run_list, trash
from tests.app_test import pages
from tests.pages.conftest import words
from tests.synthetic import live, write

READS = {
    "Open",
    "Compare these 2",
    "Compare ticked",
    "Dismiss",
    "Read what is new",
    "See it on a sample run",
    "Watch",
}
"""Buttons that change nothing on the disk. Whoever adds one that does has to ask `serving.current().read_only`."""


@pytest.fixture
def busy(home, monkeypatch):
    """A library with everything that can be changed: an ended run with a muted finding, another with findings, a
    training job, a label, a run in the trash. Then the server becomes read-only."""
    for name, scenario in (("a", "underflowing"), ("b", "stopped"), ("gone", "healthy")):
        write(home.runs / name, scenario)
    write(home.samples / "fp16-healthy", "healthy")
    write_label(home.runs / "a", Label(tags=("paper",)))
    mute(home.runs / "b", "watch-overhead")
    trash.delete(run_list.listing()["run/gone"])
    with live(home.runs / "l") as run:
        run.advance(30)
        (home.runs / "l" / "job.json").write_text("{}")
        job = jobs.Job(home.runs.absolute() / "l", "cpu", 0, "running", None, None, False, os.getpid(), {})
        monkeypatch.setattr(jobs, "under_way", lambda _: [job])
        find = jobs.find
        monkeypatch.setattr(jobs, "find", lambda path: job if Path(path).absolute() == job.folder else find(path))
        yield home


def pressable(app) -> set[str]:
    return {b.label for b in app.button}


def read_only(monkeypatch) -> None:
    for name, value in Rules(read_only=True).environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("page", pages())
def test_no_page_offers_a_change(page, busy, open_app, monkeypatch):
    read_only(monkeypatch)
    for key in ("run/a", "run/b", "run/l"):
        app = open_app(page, run=key)
        assert not app.exception
        assert pressable(app) <= READS
        assert not app.get("file_uploader") and not app.get("form")


def test_the_same_library_offers_changes_if_they_are_allowed(busy, open_app):
    """This shows that the test above would detect a change that is offered."""
    result = {label for page in pages() for label in pressable(open_app(page, run="run/a"))}
    result |= pressable(open_app(run="run/l")) | pressable(open_app("pages/run_library.py", run="run/b"))
    assert {"Delete", "Save", "Run again", "Restore gone", "Remove all for good", "Mute", "Stop", "Start"} <= result


def test_a_muted_finding_stays_muted_and_is_still_named(home, open_app, monkeypatch):
    write(home.runs / "a", "underflowing")
    app = open_app(run="run/a")
    next(b for b in app.button if b.label == "Mute").click().run()
    assert any(b.label.startswith("Show ") for b in app.button)
    read_only(monkeypatch)
    app = open_app(run="run/a")
    assert "Muted for this run" in words(app) and pressable(app) <= READS


def test_the_functions_refuse_too(home, monkeypatch):
    write(home.runs / "a", "healthy")
    entry = run_list.listing()["run/a"]
    kept = trash.delete(entry)
    read_only(monkeypatch)
    for change in (
        lambda: write_label(home.runs / "b", Label(name="x")),
        lambda: mute(home.runs / "b", "watch-overhead"),
        lambda: trash.restore(kept),
        trash.empty,
    ):
        with pytest.raises(RunError, match="read-only"):
            change()
    assert kept in trash.deleted_runs()
