"""The queue on *Start a run* with many jobs and many sessions."""

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from amp_core.jobs import backends, job_file, queue
from amp_core.jobs.backends import polled
from amp_core.jobs.backends.slurm import Slurm
from tests.jobs.fake_slurm import FakeSlurm
from tests.pages.conftest import Home


def test_many_sessions_list_the_jobs_and_ask_the_scheduler_once(
    home: Home, open_app: Callable[..., AppTest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path, monkeypatch, jobs=30)
    assert fake.runs == home.runs
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    monkeypatch.setattr(polled, "FRESH_S", 600.0)
    monkeypatch.setattr(queue, "SHARED_S", 600.0)
    listings, every = [], job_file.every
    monkeypatch.setattr(job_file, "every", lambda folder: (listings.append(folder), every(folder))[1])
    for _ in range(2):
        app = open_app("pages/start_run.py")
        assert not app.exception
        assert [button.label for button in app.button].count("Watch") == 20
        assert "10 more jobs wait." in [caption.value for caption in app.caption]
    assert fake.times_asked() == 1 and len(listings) == 1
