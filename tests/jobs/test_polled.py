"""How often a scheduler is asked, and how long anyone waits for its answer."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from amp_core import RunError
from amp_core.jobs.backends import polled
from amp_core.jobs.backends.polled import Polled
from amp_core.jobs.backends.slurm import Slurm
from tests.jobs.fake_slurm import FakeSlurm
from tests.waiting import DEADLINE_S, wait_for


def test_a_thousand_jobs_wait_once_for_a_scheduler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [1000.0], []

    class Hanging:
        def wait(self, timeout_s: float) -> None:
            waits.append(timeout_s)
            now[0] += timeout_s

    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(polled, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(
        polled, "threading", SimpleNamespace(Lock=threading.Lock, Event=Hanging, Thread=lambda **_: thread)
    )
    asked = Polled(dict, "Slurm")
    assert all("has not answered" in str(asked.latest().error) for _ in range(1000))
    assert sum(waits) == polled.WAIT_S
    asked.latest(15.0)  # a submission waits longer
    assert sum(waits) == 15.0


def test_nobody_waits_for_a_scheduler_that_is_known_not_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled, "AFTER_ERROR_S", 0.0)
    hangs, asked = threading.Event(), []

    def ask() -> dict[str, polled.SchedulerJob]:
        asked.append(1)
        if len(asked) > 1:
            hangs.wait(DEADLINE_S)
        raise RunError("no controller")

    scheduler = Polled(ask, "Slurm")
    wait_for(lambda: scheduler.latest().error == "no controller")
    monkeypatch.setattr(polled, "WAIT_S", 600.0)
    assert scheduler.latest().error == "no controller"  # at once, although the question is put again
    hangs.set()


def test_squeue_is_asked_once_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm(tmp_path, monkeypatch, jobs=3)
    monkeypatch.setattr(polled, "FRESH_S", 600.0)
    backend = Slurm()
    threads = [threading.Thread(target=backend.polled.latest) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(backend.polled.latest().jobs) == 3 and fake.times_asked() == 1


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("slurm_load_jobs error: Socket timed out on send/recv operation", "did not answer: slurm_load_jobs error"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "did not answer: slurm_load"),
        ("slurm_load_jobs error: Access/permission denied", "refused: slurm_load_jobs error: Access"),
    ],
)
def test_a_controller_that_does_not_answer_has_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, said: str
) -> None:
    FakeSlurm(tmp_path, monkeypatch, jobs=0)
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho '{printed}' >&2; exit 1\n")
    with pytest.raises(RunError, match=f"^Slurm {said}"):
        Slurm().ask()
