"""A fake `ampscope train`, and a folder whose jobs are ended after each test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amp_core.jobs import listing
from amp_core.jobs.backends import local
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
