"""A run whose writer is killed at any moment loses no row that `append` reported as written."""

import subprocess
import sys
from pathlib import Path

from amp_core import load_run
from tests.paths import ROOT

# Forks one writer after another. Each records every step in its own file after `append` has returned.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from amp_core.store.writer import RunWriter
root, number = Path(sys.argv[1]), int(sys.argv[2])
random.seed(7)
for i in range(number):
    pid = os.fork()
    if pid == 0:
        notes = os.open(root / f"notes-{i}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        writer = RunWriter(root / f"run-{i}", seal_bytes=random.Random(i).choice([1, 5_000, 40_000]))
        for step in range(10**9):
            writer.append("steps", {"step": [step], "loss": [step / 8]})
            writer.append("tensors", {"step": [step] * 3, "name": ["a", "b", "c"], "exp_counts": [[1, 2, step]] * 3})
            os.write(notes, b"%d\\n" % step)
    while not (root / f"notes-{i}").exists() or (root / f"notes-{i}").stat().st_size == 0:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_kill_9_loses_no_row_that_was_reported_as_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "25"], check=True, cwd=ROOT)
    done = []
    for i in range(25):
        reported = len((tmp_path / f"notes-{i}").read_text().split())
        run = load_run(tmp_path / f"run-{i}")
        steps = run.steps["step"].tolist()
        assert steps == list(range(len(steps))) and len(steps) in (reported, reported + 1)
        assert run.steps["loss"].tolist() == [s / 8 for s in steps]
        assert len(run.tensors()) in (3 * reported, 3 * reported + 3)
        assert [c[2] for c in run.tensors(name="c")["exp_counts"]] == list(range(len(run.tensors(name="c"))))
        assert run.status == "lost" and "its process is gone" in str(run.end_reason)
        done.append(reported)
    assert sum(done) > 250 and len(set(done)) > 5  # at different moments
