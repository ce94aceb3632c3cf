"""What is ready before a newcomer asks for it."""

import sys
import threading

import pytest

from amp_core import diagnose
from amp_core.analysis import overview
from pages.parts import loaders, warm
from pages.parts.shelf import library
from tests.pages.conftest import ROOT


def asked_by(monkeypatch, work):
    """What `work` has analysed: names of the functions, of which runs, with what else."""
    asked, analysed = set(), loaders.analysed

    def remember(function, of, *args, **options):
        runs = of if isinstance(of, list) else [of]
        asked.add((function.__qualname__, tuple(run.path for run in runs), args, tuple(options.items())))
        return analysed(function, of, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loaders, "analysed", remember)
        work()
    return asked


def test_the_first_page_is_analysed_ahead_and_the_verdict_of_each_sample(monkeypatch, open_app):
    monkeypatch.setattr(library, "SAMPLES", ROOT / "sample_runs")
    monkeypatch.setattr(warm, "PAUSE_S", 0.0)
    interval = sys.getswitchinterval()
    ahead = asked_by(monkeypatch, lambda: warm.ahead().join())
    assert sys.getswitchinterval() == pytest.approx(interval)
    assert not [thread for thread in threading.enumerate() if thread.name == "ampscope-ahead"]
    page = asked_by(monkeypatch, open_app)
    assert page and page <= ahead
    samples = [entry.path for entry in library.listing().values() if entry.origin == "sample"]
    for function in (overview, diagnose):
        assert {(function.__qualname__, (path,), (), ()) for path in samples} <= ahead
