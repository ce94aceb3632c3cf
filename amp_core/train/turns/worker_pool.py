"""Processes that train by turns, kept from one training to the next.

    with Crew() as crew:
        interleave(first_seed, block_steps, on_progress, crew=crew)       # starts a process for each recipe
        interleave(second_seed, block_steps, on_progress, crew=crew)      # the same recipes: the same processes

A process belongs to one recipe, so that none meets another's memory peak, backend flags, cuDNN choices or allocator. It
trains that recipe's next seed, which saves the seconds that importing torch takes. What a process adds to a recipe's
speed by where its memory happened to lie is therefore the same for all those seeds, and an interval over them does not
hold it (Kalibera and Jones, "Rigorous benchmarking in reasonable time", 2013):
`amp_core.analysis.comparison.ratios.SAME_SPEED_FRAC` is for that. Where intervals must hold it, as in `ampscope
compare`, `interleave` is used without a crew. No torch.
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
    """A process that trains one member after another, each when it is its turn."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C then reaches it once, through us, and not a second time from the terminal.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "amp_core.train.turns.participant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | python_path(),
        )
        self.code: int | None = None
        """How its last training ended; None while it trains."""

    def begin(self, member: Member, about: dict[str, object]) -> None:
        """Order a training. It waits for its first turn then."""
        self.code = None
        order = {"config": member.config.to_dict(), "folder": os.fspath(member.folder), "level": member.level}
        self._say(json.dumps(order | {"comparison": about}))

    def train(self, steps: int) -> None:
        """Let it make so many steps and wait until it has; one that has ended is passed over."""
        if self.code is None:
            self._say(str(steps))
            self.waits()

    def waits(self) -> bool:
        """Whether it stands before its next turn; False once its training has ended."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:  # the process is gone, or about to be
            self.code = self.process.wait()
        elif words[0] == "ended":
            self.code = int(words[1])
        return self.code is None

    def end(self) -> int:
        """Take its turns away, wait for its end, and give its exit code."""
        if self.code is None:
            self._say("0")
            while self.waits():
                pass
        assert self.code is not None
        return self.code

    @property
    def usable(self) -> bool:
        """Whether it can train once more."""
        return self.code is not None and self.process.poll() is None

    def close(self) -> int:
        """End the process; its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended before it read what it was told; its exit code says why
                self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the same
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()


class WorkerPool:
    """Workers by recipe. Leave it with `with` or `close`: the processes wait for ever else."""

    def __init__(self) -> None:
        self._idle: dict[Key, Worker] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, member: Member) -> Worker:
        """A process for this member: one that trained its recipe before, else a new one."""
        worker = self._idle.pop(_key(member), None)
        return worker if worker is not None and worker.usable else Worker()

    def give_back(self, member: Member, worker: Worker) -> None:
        """What `take` gave. Only one that came to the end of its training is kept: what was left behind is done."""
        if worker.code == 0 and worker.usable and _key(member) not in self._idle:
            self._idle[_key(member)] = worker
        else:
            worker.close()

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.popitem()[1].close()


def _key(member: Member) -> Key:
    """What members must share to be trained by one process: all but seed and length."""
    plain = TrainConfig()
    own = {name: getattr(plain, name) for name in ("seed", "steps", "every", "evaluate")}
    return dataclasses.replace(member.config, **own), member.level
