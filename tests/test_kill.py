"""A run whose writer is killed, or is still writing: nothing that was reported as written is lost."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from amp_core import load_run
from tests.written import ROOT

# Forks one writer after another. Each notes every step in a file of its own after `append` has returned.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from amp_core.runlog import RunWriter
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


def test_kill_9_loses_nothing_that_was_reported_as_written(tmp_path: Path) -> None:
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
    assert sum(done) > 250 and len(set(done)) > 5  # the moments differ


LIVE = """
import pathlib, sys, time
from amp_core.runlog import RunWriter
enough = pathlib.Path(sys.argv[2])
with RunWriter(sys.argv[1], seal_bytes=20_000) as writer:
    step = 0
    while step < 1500 or not enough.exists():
        writer.append("steps", {"step": [step], "loss": [step / 8]})
        writer.append("tensors", {"step": [step], "name": ["a"], "exp_counts": [[step]]})
        step += 1
        if step % 10 == 0:
            time.sleep(0.005)
print(step)
"""


def test_reader_never_fails_while_the_run_is_written_and_sealed(tmp_path: Path) -> None:
    folder, enough = tmp_path / "a", tmp_path / "enough"
    command = [sys.executable, "-c", LIVE, str(folder), str(enough)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        while not (folder / "run.json").exists():
            assert child.poll() in (None, 0)
            time.sleep(0.005)
        followed = load_run(folder)
        rows: list[int] = [0]
        while child.poll() is None:
            followed.fingerprint()
            followed.refresh()
            for run in (followed, load_run(folder)):
                steps = run.table("steps").column("step").to_numpy()
                assert (steps == np.arange(len(steps))).all()
                tensors = run.table("tensors").column("exp_counts").combine_chunks().flatten().to_numpy()
                assert (tensors == np.arange(len(tensors))).all()
            rows.append(len(steps))
            if len(set(rows)) > 5:
                enough.touch()
        assert rows == sorted(rows) and enough.exists()  # it grew under our eyes, and never shrank
        followed.refresh()
        assert len(followed.steps) == int(child.communicate()[0]) and followed.status == "finished"
    finally:
        child.kill()
        assert child.wait() == 0
