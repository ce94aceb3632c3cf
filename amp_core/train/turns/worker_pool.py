"""Processes of interleaved trainings, reused from one training to the next.

    with WorkerPool() as pool:
        interleave(first_seed, block_steps, on_progress, pool=pool)       # starts a process for each recipe
        interleave(second_seed, block_steps, on_progress, pool=pool)      # as above recipes: the same processes

A process belongs to one recipe, so that none inherits another's memory peak, backend flags, cuDNN choices or allocator.
It trains that recipe's next seed, which saves the seconds that importing torch takes. The effect of a process's memory
layout on speed is therefore the same for all those seeds, and an interval over them does not include it (Kalibera and
Jones, "Rigorous benchmarking in reasonable time", 2013); `amp_core.analysis.comparison.ratios.SAME_SPEED_FRAC` allows
for it. Where intervals must include it, as in `ampscope compare`, `interleave` is used without a pool. No torch.
"""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from amp_core.hardware.child_environment import python_path
from amp_core.settings.training import TrainConfig
from amp_core.train.turns.member import Member

Key = tuple[TrainConfig, str]


class Worker:
    """A process that trains one member after another, interleaved with other processes."""

    def __init__(self) -> None:
        # In its own session Ctrl-C reaches it once, through us, and not a second time from the terminal.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "amp_core.train.turns.participant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | python_path(),
        )
        self.code: int | None = None
        """Exit code of its last training; None while it trains."""

    def begin(self, member: Member, about: dict[str, object]) -> None:
        """Start a training, which waits for its first turn."""
        self.code = None
        order = {"config": member.config.to_dict(), "folder": os.fspath(member.folder), "level": member.level}
        self._send(json.dumps(order | {"comparison": about}))

    def train(self, steps: int) -> None:
        """Train `steps` steps and wait for them; does nothing if the training has ended."""
        if self.code is None:
            self._send(str(steps))
            self.wait_for_turn()

    def wait_for_turn(self) -> bool:
        """Wait until the training is ready for its next turn; False if it has ended."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:  # the process is gone, or about to be
            self.code = self.process.wait()
        elif words[0] == "ended":
            self.code = int(words[1])
        return self.code is None

    def end(self) -> int:
        """End the training early if it still runs, wait for its end, and return its exit code."""
        if self.code is None:
            self._send("0")
            while self.wait_for_turn():
                pass
        assert self.code is not None
        return self.code

    @property
    def usable(self) -> bool:
        """Whether it can train another member."""
        return self.code is not None and self.process.poll() is None

    def close(self) -> int:
        """End the process; returns its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            with suppress(BrokenPipeError):  # it ended before reading; its exit code is the error
                self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # as above
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()


class WorkerPool:
    """Workers by recipe. Use it in `with` or call `close`: the processes wait for ever otherwise."""

    def __init__(self) -> None:
        self._idle: dict[Key, Worker] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, member: Member) -> Worker:
        """A process for this member: an idle one of its recipe, else a new one."""
        worker = self._idle.pop(_key(member), None)
        return worker if worker is not None and worker.usable else Worker()

    def give_back(self, member: Member, worker: Worker) -> None:
        """Return a worker from `take`. It is kept only if its training ended normally, and so cleaned up."""
        if worker.code == 0 and worker.usable and _key(member) not in self._idle:
            self._idle[_key(member)] = worker
        else:
            worker.close()

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.popitem()[1].close()


def _key(member: Member) -> Key:
    """Members with equal keys can share a process: all settings but seed and length are equal."""
    plain = TrainConfig()
    own = {name: getattr(plain, name) for name in ("seed", "steps", "every", "evaluate")}
    return dataclasses.replace(member.config, **own), member.level
