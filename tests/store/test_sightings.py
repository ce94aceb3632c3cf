"""Setting a clock by hours, on the machine of the run or on that of the reader, neither ends a run nor revives one."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from amp_core import load_run
from amp_core.hardware.host import is_same_process, process_alive, this_process
from amp_core.jobs import job_file
from amp_core.store import sightings, sources
from amp_core.store.sightings import Sightings
from tests.run_folders import HEAD

HOURS = 3 * 3600.0
WITHIN_S = sources.STALE_S


@dataclass
class Clocks:
    """The reader's clock, which may be set, and the time that passes."""

    wall: float = 1_700_000_000.0
    elapsed: float = 50.0

    def pass_s(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def seen(clocks: Clocks) -> Sightings:
    return Sightings(lambda: clocks.wall, lambda: clocks.elapsed)


def files(size: int, written_s: float) -> sightings.Files:
    return (("run.json", 100, 1), ("steps/00000.arrows", size, int(written_s * 1e9)))


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_the_readers_clock_is_set_while_a_run_is_written(clocks: Clocks, seen: Sightings, jump: float) -> None:
    server_s = clocks.wall
    assert seen.changed_lately("a", files(1, server_s), WITHIN_S)
    clocks.wall += jump
    for size in range(2, 5):
        clocks.pass_s(60)
        server_s += 60
        assert seen.changed_lately("a", files(size, server_s), WITHIN_S)
    clocks.pass_s(WITHIN_S - 1)
    assert seen.changed_lately("a", files(4, server_s), WITHIN_S)
    clocks.pass_s(2)
    assert not seen.changed_lately("a", files(4, server_s), WITHIN_S)  # it was killed meanwhile


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_the_writers_clock_is_set_while_a_run_is_read(clocks: Clocks, seen: Sightings, jump: float) -> None:
    assert seen.changed_lately("a", files(1, clocks.wall), WITHIN_S)
    for size in range(2, 40):
        clocks.pass_s(60)
        assert seen.changed_lately("a", files(size, clocks.wall + jump), WITHIN_S)
    last = files(39, clocks.wall + jump)
    clocks.pass_s(WITHIN_S + 1)
    assert not seen.changed_lately("a", last, WITHIN_S)


def test_the_first_look_goes_by_the_time_of_the_newest_file(clocks: Clocks, seen: Sightings) -> None:
    killed, ahead = files(1, clocks.wall - WITHIN_S - 1), files(1, clocks.wall + HOURS)
    stale = files(1, clocks.wall - WITHIN_S + 5)
    for _ in range(2):
        assert not seen.changed_lately("killed long ago", killed, WITHIN_S)
        assert seen.changed_lately("from the future", ahead, WITHIN_S)
        assert seen.changed_lately("almost stale", stale, WITHIN_S)
    clocks.pass_s(6)
    assert not seen.changed_lately("almost stale", stale, WITHIN_S)
    assert seen.changed_lately("from the future", ahead, WITHIN_S)
    clocks.pass_s(WITHIN_S)
    assert not seen.changed_lately("from the future", ahead, WITHIN_S)


def test_few_runs_are_remembered(seen: Sightings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings, "MAX_SIGHTINGS", 10)
    for i in range(100):
        seen.changed_lately(str(i), files(1, 0.0), WITHIN_S)
    assert list(seen._latest) == [str(i) for i in range(90, 100)]


def test_a_run_of_another_machine_that_is_written_on_is_running_whatever_the_clocks_say(
    foreign_run: Path, clocks: Clocks, seen: Sightings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SIGHTINGS", seen)
    head, steps = foreign_run / "run.json", foreign_run / "console.log"
    head.write_text(json.dumps(HEAD | {"status": "running", "process": {"machine": "elsewhere", "pid": 1}}))
    for file in foreign_run.rglob("*"):
        os.utime(file, (clocks.wall - HOURS, clocks.wall - HOURS))  # the writer's clock was set back
    assert load_run(foreign_run).status == "lost"
    for line in range(3):
        steps.write_text("step\n" * (line + 1))
        os.utime(steps, (clocks.wall - HOURS, clocks.wall - HOURS))
        clocks.wall += HOURS
        assert load_run(foreign_run).status == "running"
    clocks.pass_s(WITHIN_S + 1)
    assert load_run(foreign_run).status == "lost"


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_a_process_of_this_machine_lives_on_when_the_clock_is_set(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    me, create_time = this_process(), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + jump)  # follows boot time
    assert process_alive(me) is True and is_same_process(psutil.Process(), me)
    without_ticks = {key: value for key, value in me.items() if key != "started_ticks"}
    assert process_alive(without_ticks) is False  # as recorded by an older AMPscope


@pytest.mark.parametrize("jump", [0.0, -HOURS])
def test_a_job_whose_process_was_never_recorded_does_not_wait_for_the_clock(
    clocks: Clocks, seen: Sightings, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_file, "SIGHTINGS", seen)
    record = job_file.Record(argv=("x",), device="cpu", created_ns=int(clocks.wall * 1e9))
    clocks.wall += jump
    assert job_file.is_alive(record)
    clocks.pass_s(job_file.STARTING_S + 1)
    assert not job_file.is_alive(record)
