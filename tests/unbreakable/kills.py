"""End writers in the middle of their work, at random moments and in every way there is, and read what they left.

    python -m tests.unbreakable.kills --times 200        # the long form; the suite kills 24 times

A child appends steps and tensors as fast as it can, and notes each step after `append` has returned. Then it is killed
(`kill -9`, which is what the out-of-memory killer does), told to end (SIGTERM, SIGINT) or raises; or the power is cut:
its folder is copied as it is at one moment, and what was being written has half a batch at its end, or zeros. Whatever
it was, every step noted before is read back, in order and once, no reader fails, and a second writer is refused.
"""

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_core import RunError, _ending, load_run
from amp_core.record._guard import TrainingWriter
from amp_core.runlog import RunWriter

WRITERS: dict[str, Callable[[Path, int], RunWriter]] = {
    "RunWriter": lambda folder, seal: RunWriter(folder, seal_bytes=seal),
    "rank 1": lambda folder, seal: RunWriter(folder, seal_bytes=seal, rank=1, world_size=2),
    "TrainingWriter": lambda folder, seal: TrainingWriter(folder, seal_bytes=seal),
    "TrainingWriter's thread": lambda folder, seal: _handed_over(TrainingWriter(folder, seal_bytes=seal)),
}
ENDS = ("kill -9", "SIGTERM", "SIGINT", "exception", "power cut")


def _handed_over(writer: TrainingWriter) -> TrainingWriter:
    writer._direct = False
    return writer


def write(folder: Path, notes: Path, kind: str, seal_bytes: int, fails_at: float) -> None:
    """In the child: write until something ends it."""
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if kind == "rank 1":
        RunWriter(folder, world_size=2)  # the head is rank 0's
    writer = WRITERS[kind](folder, seal_bytes)
    for step in range(10**9):
        writer.append("steps", {"step": [step], "loss": [step / 8]})
        writer.append("tensors", {"step": [step] * 3, "name": ["a", "b", "c"], "exp_counts": [[1, 2, step]] * 3})
        if not isinstance(writer, TrainingWriter) or writer.written:
            os.write(noted, b"%d\n" % step)
        if time.monotonic() > fails_at:
            raise ValueError("loss is NaN")


def end_one(room: Path, number: int) -> tuple[str, int]:
    """Start a writer and end it; raises `AssertionError` where anything was lost. Gives how it ended, and its steps."""
    rng = random.Random(number)
    kind, end = list(WRITERS)[number % len(WRITERS)], ENDS[number // len(WRITERS) % len(ENDS)]
    folder, notes = room / f"run-{number}", room / f"notes-{number}"
    notes.touch()
    lasts = rng.uniform(0.0, 0.12)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback is wanted
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fails_at = time.monotonic() + lasts if end == "exception" else float("inf")
            write(folder, notes, kind, rng.choice([1, 5_000, 40_000]), fails_at)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            _ending._at_exit()  # which the interpreter calls when a program ends
        finally:
            os._exit(1)
    while not notes.stat().st_size:
        time.sleep(0.001)
    time.sleep(lasts)
    reported = len(notes.read_text().split())
    try:
        if end == "power cut":
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, os.WUNTRACED)  # it has stopped
            folder = _copied(folder, room / f"copy-{number}")
            _cut(folder, rng)
        elif end != "exception":
            number_of = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}[end]
            os.kill(child, number_of)
    finally:
        if end == "power cut":
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if end != "power cut":  # of what is cut off by hand, less is left than was reported
        reported = len(notes.read_text().split())
    check(folder, kind, end, reported)
    return f"{kind}, {end}", reported


def _copied(folder: Path, into: Path) -> Path:
    """What the disk holds of the folder at one moment."""
    return shutil.copytree(folder, into, ignore=shutil.ignore_patterns(".*"))


def _cut(folder: Path, rng: random.Random) -> None:
    """Half a batch at the end of what was being written, or zeros where the file system had given room already."""
    streams = sorted(folder.rglob("*.arrows"))
    if streams:
        with open(streams[-1], "ab") as file:
            file.write(
                b"\xff\xff\xff\xff\x10\x00\x00\x00\x0c"[: rng.randrange(10)] if rng.random() < 0.5 else b"\0" * 99
            )


def check(folder: Path, kind: str, end: str, reported: int) -> None:
    """Everything that was noted is there, and the run says how it ended."""
    run = load_run(folder)
    run.validate(full=True)
    steps = run.steps["step"].tolist()
    assert steps == list(range(len(steps))), f"{kind}, {end}: steps are not one after another"
    assert len(steps) >= reported, f"{kind}, {end}: {reported} steps were reported and {len(steps)} are there"
    assert run.steps["loss"].tolist() == [s / 8 for s in steps]
    counts = [c[2] for c in run.tensors(name="c")["exp_counts"]]
    assert counts == list(range(len(counts))) and len(counts) >= reported
    status = {"kill -9": "lost", "power cut": "lost", "exception": "failed"}.get(end, "stopped")
    assert run.status in ((status,) if kind != "rank 1" or status != "lost" else ("lost", "running")), (
        f"{kind}, {end}: {run.status}"
    )
    with pytest.raises(RunError, match="already holds a run"):
        WRITERS["RunWriter"](folder, 1)


def end_all(times: int, first: int = 0) -> collections.Counter[str]:
    """End `times` writers; gives the number of each sort."""
    ended: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as room:
        for number in range(first, first + times):
            how, reported = end_one(Path(room), number)
            ended[how] += 1
            ended["steps"] += reported
            for left in Path(room).iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return ended


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    ended = end_all(given.times, given.first)
    for how, times in sorted(ended.items()):
        print(f"{times:8,} {how}")
    print(f"{given.times} writers ended; {ended['steps']:,} steps were reported as written, and all of them read back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
