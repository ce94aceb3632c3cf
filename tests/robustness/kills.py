"""End writers at random moments and in every possible way, and read the runs that they leave.

    python -m tests.robustness.kills --times 200        # the long form

The suite has each kind of writer and each end once, and with --whole each pair of them.

A child appends steps and tensors as fast as it can, and notes each step after `append` has returned. Then it is killed
(`kill -9`, like the out-of-memory killer), gets SIGTERM or SIGINT, or raises; or a power cut is simulated: its folder
is copied at one moment, with half a batch or zeros at the end of an open file. In every case all noted steps are read
back, in order and once, no reader fails, and a second writer is refused. Then another child resumes the run,
`resume=True`, is ended in another way, and the same must hold for both parts together.
"""

import argparse
import collections
import faulthandler
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from amp_core import RunError, load_run
from amp_core.record import watch
from amp_core.record.stats.measure import compile_ahead
from amp_core.store import shutdown
from amp_core.store.resilient_writer import TrainingWriter
from amp_core.store.writer import RunWriter
from tests.waiting import wait_for

WRITERS: dict[str, Callable[..., RunWriter]] = {
    "RunWriter": RunWriter,
    "rank 1": lambda folder, **how: RunWriter(folder, rank=1, world_size=2, **how),
    "TrainingWriter": TrainingWriter,
    "TrainingWriter's thread": lambda folder, **how: _handed_over(TrainingWriter(folder, **how)),
}
WATCHED = "watch"
"""A training loop, watched: what notes a step is the forward of the next but one, by which its row is written."""
KINDS = (*WRITERS, WATCHED)
ENDS = ("kill -9", "SIGTERM", "SIGINT", "exception", "power cut")


def _handed_over(writer: TrainingWriter) -> TrainingWriter:
    writer._direct = False
    return writer


def write(folder: Path, notes: Path, kind: str, seal_bytes: int, fails_at: float, resume: bool) -> None:
    """In the child: write until it is ended."""
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if kind == WATCHED:
        train(folder, noted, fails_at, resume)
    if kind == "rank 1":
        RunWriter(folder, world_size=2, resume=resume)  # rank 0 writes the head
    writer = WRITERS[kind](folder, seal_bytes=seal_bytes, resume=resume)
    first = writer.earlier.next_step if writer.earlier is not None else 0
    for step in range(first, 10**9):
        writer.append("steps", {"step": [step], "loss": [step / 8]})
        writer.append("tensors", {"step": [step] * 3, "name": ["a", "b", "c"], "exp_counts": [[1, 2, step]] * 3})
        if isinstance(writer, TrainingWriter) and step == first:
            wait_for(lambda: writer.written)  # a loop without pauses may stay ahead of the thread for ever
        if not isinstance(writer, TrainingWriter) or writer.written:
            os.write(noted, b"%d\n" % step)
        if time.monotonic() > fails_at:
            raise ValueError("loss is NaN")


def train(folder: Path, noted: int, fails_at: float, resume: bool) -> None:
    """The same with a training loop with known losses."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = watch(model, optimizer, into=folder, every=3, resume=resume)
    earlier = recorder.writer.earlier
    first = earlier.next_step if earlier is not None else 0
    for step in range(first, 10**9):
        loss = 0.0 * model(torch.ones(1, 2)).sum() + step / 8
        if step - 2 == first:
            wait_for(lambda: recorder.writer.written)
        if step - 2 >= first and recorder.writer.written:
            os.write(noted, b"%d\n" % (step - 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if time.monotonic() > fails_at:
            raise ValueError("loss is NaN")


def end_one(room: Path, number: int) -> tuple[list[str], int]:
    """Start a writer and end it, twice. Returns how it ended and the number of noted steps; raises `AssertionError` if
    a row was lost."""
    rng = random.Random(number)
    kind, end = KINDS[number % len(KINDS)], ENDS[number // len(KINDS) % len(ENDS)]
    folder, noted = room / f"run-{number}", set[int]()
    ended = []
    for resume, how in ((False, end), (True, rng.choice(ENDS))):
        folder, more = _ended(room, folder, kind, how, rng, resume)
        noted |= more
        check(folder, kind, how, noted)
        ended.append(f"{kind}, {how}{', resumed' if resume else ''}")
    return ended, len(noted)


def _ended(room: Path, folder: Path, kind: str, end: str, rng: random.Random, resume: bool) -> tuple[Path, set[int]]:
    """Let a child write to the folder and end it; returns the folder of the run, and the noted steps."""
    notes, stacks = room / f"notes-{resume}", room / f"stacks-{resume}"
    notes.touch()
    lasts, seal_bytes = rng.uniform(0.0, 0.12), rng.choice([1, 5_000, 40_000])
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # with its traceback
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fails_at = time.monotonic() + lasts if end == "exception" else float("inf")
            write(folder, notes, kind, seal_bytes, fails_at, resume)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            shutdown._at_exit()  # the interpreter calls it when a program ends
        finally:
            os._exit(1)

    try:
        wait_for(lambda: notes.stat().st_size or _has_ended(child))
        time.sleep(lasts)
        reported = _steps(notes)
        if end == "power cut":
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, os.WUNTRACED)  # it has stopped
            folder = _copied(folder, room / f"copy-{resume}")
            _cut(folder, rng)
            os.kill(child, signal.SIGKILL)
        elif end != "exception":
            number_of = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}[end]
            os.kill(child, number_of)
        _wait_for_end(child, stacks)
    except BaseException as error:  # else it would continue forever
        os.kill(child, signal.SIGUSR1)
        time.sleep(1.0)
        error.add_note(f"{kind}, {end}: the stacks of the writer:\n{stacks.read_text()}")
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    return folder, reported if end == "power cut" else _steps(notes)  # after a power cut, the copy may lack noted steps


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for_end(child: int, stderr: Path) -> None:
    """Wait until the child has ended; interrupt it again each time Python ignored an interrupt."""
    seen = 0
    while not _has_ended(child):
        ignored = _ignored_interrupts(stderr)
        if ignored > seen:
            os.kill(child, signal.SIGINT)
        seen = ignored
        wait_for(lambda seen=seen: _has_ended(child) or _ignored_interrupts(stderr) > seen)


def _ignored_interrupts(stderr: Path) -> int:
    """The number of interrupts that came during a finalizer or a callback of the garbage collector. Python reports
    these and goes on: a user presses Ctrl+C again."""
    return len(re.findall(r"^Exception ignored(?s:.)*?^KeyboardInterrupt", stderr.read_text(), re.MULTILINE))


def _steps(notes: Path) -> set[int]:
    return {int(line) for line in notes.read_text().splitlines(keepends=True) if line.endswith("\n")}


def _copied(folder: Path, into: Path) -> Path:
    """A copy of the folder as it is on the disk at one moment."""
    return shutil.copytree(folder, into, ignore=shutil.ignore_patterns(".*"))


def _cut(folder: Path, rng: random.Random) -> None:
    """Put half a batch at the end of the open file, or zeros as if the file system had allocated space."""
    streams = sorted(folder.rglob("*.arrows"))
    if streams:
        with open(streams[-1], "ab") as file:
            file.write(
                b"\xff\xff\xff\xff\x10\x00\x00\x00\x0c"[: rng.randrange(10)] if rng.random() < 0.5 else b"\0" * 99
            )


def check(folder: Path, kind: str, end: str, noted: set[int]) -> None:
    """All noted steps are in the run, and its status states how it ended."""
    run = load_run(folder)
    run.validate(full=True)
    steps = run.steps["step"].tolist()
    assert steps == list(range(len(steps))), f"{kind}, {end}: steps are not one after another"
    assert noted <= set(steps), f"{kind}, {end}: the noted steps {sorted(noted - set(steps))} are lost"
    assert run.steps["loss"].tolist() == [s / 8 for s in steps]
    if kind != WATCHED:
        counts = [c[2] for c in run.tensors(name="c")["exp_counts"]]
        assert counts == sorted(set(counts)) and noted <= set(counts)
    status = {"kill -9": "lost", "power cut": "lost", "exception": "failed"}.get(end, "stopped")
    assert run.status in ((status,) if kind != "rank 1" or status != "lost" else ("lost", "running")), (
        f"{kind}, {end}: {run.status}"
    )
    with pytest.raises(RunError, match="already holds a run"):
        RunWriter(folder)


def end_all(numbers: Iterable[int]) -> collections.Counter[str]:
    """End the writers with these numbers, each twice; returns the number of each kind."""
    ended: collections.Counter[str] = collections.Counter()
    # What a watched training imports, two seconds of processor time, its children have from here.
    model = torch.nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)
    compile_ahead([model.weight.device])
    with tempfile.TemporaryDirectory() as room:
        for number in numbers:
            how, reported = end_one(Path(room), number)
            ended.update(how)
            ended["steps"] += reported
            for left in Path(room).iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return ended


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    ended = end_all(range(arguments.first, arguments.first + arguments.times))
    for how, times in sorted(ended.items()):
        print(f"{times:8,} {how}")
    print(f"{arguments.times} writers ended, were gone on with and ended again")
    print(f"{ended['steps']:,} steps were reported as written, and all of them read back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
