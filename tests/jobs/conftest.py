"""A fake `ampscope train`, and a folder whose jobs are ended after each test."""

import getpass
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from amp_core.jobs import backends, listing
from amp_core.jobs.backends import local, polled
from amp_core.jobs.backends.slurm import Slurm
from tests import slurm_cluster
from tests.waiting import wait_for

# Replaces `ampscope train`: a run with a step every 20 ms, without torch. The mode selects its behaviour.
STAND_IN = """
import os, signal, subprocess, sys, time
from amp_core.store.writer import RunWriter
mode, folder = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
print("mode", mode, "config", sys.argv[sys.argv.index("--config") + 1])
if mode == "bad-input":
    print("ampscope: device='cuda' is not available; choose cpu or auto", file=sys.stderr)
    sys.exit(2)
if mode == "crash-first":
    raise RuntimeError("no such luck")
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
writer = RunWriter(folder, config={"precision": "fp16"})
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "with-child":
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
steps = 3 if mode in ("short", "raises", "dies", "aborts") else 10**9
for step in range(steps):
    writer.append("steps", {"step": [step], "loss": [1.0]})
    print("step", step)
    time.sleep(0.02)
if mode == "raises":
    raise ValueError("loss went away")
if mode == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "aborts":
    os._exit(7)
print("bye", end="")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], list[str]]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return lambda mode: [sys.executable, str(script), mode]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    yield folder
    for job in listing(folder):
        if job.alive:
            job.stop(grace_s=0)

    def waited_for() -> bool:
        assert [j.name for j in listing(folder) if j.alive] == []  # listing jobs reaps those that ended
        return not [f for f in local._children if f.parent == folder]

    wait_for(waited_for)


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    if (why := slurm_cluster.missing()) is not None:
        if os.environ.get("AMPSCOPE_REQUIRE_SLURM") == "1":
            pytest.fail(why)
        pytest.skip(why)
    # A socket's path has at most 107 characters, which those of pytest's folders exceed.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = slurm_cluster.Cluster(Path(folder))
        yield cluster
        cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the last lines of the daemons' logs where a test with a cluster fails: jobs may be lost or held in them."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm")
    if report.failed and isinstance(cluster, slurm_cluster.Cluster):
        report.sections += [(log.name, tail) for log, tail in cluster.last_lines().items()]
    return report


@pytest.fixture
def slurm(
    _cluster: slurm_cluster.Cluster, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> Iterator[slurm_cluster.Cluster]:
    """A Slurm cluster that this process submits to, asked every 0.2 s."""
    monkeypatch.setenv("SLURM_CONF", str(_cluster.conf))
    monkeypatch.setattr(polled, "FRESH_S", 0.2)
    monkeypatch.setattr(polled, "AFTER_ERROR_S", 0.2)
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    yield _cluster
    _cluster.do("scancel", "--user", getpass.getuser())


# A training without imports: a run folder with run.json alone, which ends by SIGTERM, on its own, when a file `.end`
# appears in its folder, or never.
TINY = """
import json, os, signal, sys, time
folder, seconds = sys.argv[sys.argv.index("--out") + 1], float(sys.argv[1])
head = {"schema": 1, "run_id": os.urandom(6).hex(), "name": os.path.basename(folder), "created_at": "2026-01-01"}
def write(status, reason=None):
    with open(folder + "/.tmp", "w") as file:
        json.dump(head | {"status": status, "end_reason": reason}, file)
    os.replace(folder + "/.tmp", folder + "/run.json")
def stop(*_):
    write("stopped", "stopped by SIGTERM")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop if seconds >= 0 else signal.SIG_IGN)
write("running")
until = time.monotonic() + abs(seconds)
while time.monotonic() < until and not os.path.exists(folder + "/.end"):
    time.sleep(min(abs(seconds), 0.05))
write("finished")
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[float], list[str]]:
    """The command of a training that takes some seconds, or until a file `.end` is in its folder; a negative number
    ignores SIGTERM."""
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    return lambda seconds: [sys.executable, "-S", "-E", str(script), str(seconds)]
