"""A process whose training is interleaved with others, a block of steps at a time.

    python -m amp_core.train.turns.participant        started by `amp_core.train.turns.interleave`

Standard input holds first a line of JSON, `{"config": …, "folder": …, "comparison": …, "level": …}`, then for each turn
a line with a number of steps; 0 ends the training. On standard output the process writes `ready` before the first step,
`done` after each turn, and `ended 0` with the exit code of the training. Output of the training itself goes to standard
error. Another training of the same recipe may follow: importing torch takes seconds, and a training of forty steps may
take less. While the process waits it sleeps, and the device is idle. The process ends when standard input does.

Between trainings the process releases memory and compiled code, and resets memory peaks. Weights, data order and
dropout are drawn from the seed again, so losses equal those of a new process bit for bit.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.importing import collecting_later
from amp_core.train.engine.stopping import stop_on_signals


class Turns:
    """The `stop` callback of a training that takes turns: it blocks until the next step may begin."""

    def __init__(
        self, stop: Callable[[], str | None], commands: TextIO, replies: TextIO, synchronize: Callable[[], None]
    ) -> None:
        self._stop = stop
        self._commands = commands
        self._replies = replies
        self._synchronize = synchronize
        self._left = 0
        self._began = False

    def __call__(self) -> str | None:
        """None once the step may begin; a reason if the run must end."""
        if reason := self._stop():
            return reason
        if self._left == 0:
            self._synchronize()
            self._replies.write("done\n" if self._began else "ready\n")
            self._replies.flush()
            self._began = True
            line = self._commands.readline()
            if reason := self._stop():
                return reason
            if not line.strip().isdecimal() or int(line) == 0:
                return "stopped: the comparison it was part of ended"
            self._left = int(line)
        self._left -= 1
        return None


def main() -> int:
    """Run one training per order; returns the exit code of the last: 130 if stopped, 2 for bad input."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the others' cores
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a workload of the user may print
    code = 130
    with stop_on_signals() as stop:  # before torch is imported: that alone takes seconds
        while line := sys.stdin.readline():
            code = _train(json.loads(line), stop, replies)
            if code == 2 or stop():
                break
            replies.write(f"ended {code}\n")
            replies.flush()
    return code


def _train(order: Mapping[str, Any], stop: Callable[[], str | None], replies: TextIO) -> int:
    with collecting_later():
        import torch
        import torch._dynamo  # which the first optimizer imports

        from amp_core.record.backends import BACKENDS, forget_peaks
        from amp_core.train.engine.training import train

    def synchronize() -> None:
        for backend in BACKENDS.values():
            if backend.in_use():
                backend.synchronize()

    config = TrainConfig.from_dict(order["config"])
    try:
        summary = train(
            config,
            order["folder"],
            stop=Turns(stop, sys.stdin, replies, synchronize),
            also={"comparison": order["comparison"]},
            level=order.get("level", "standard"),
        )
    except RunError as error:
        sys.stderr.write(f"ampscope: {' '.join(str(error).split())}\n")
        return 2
    gc.collect()  # the model and what watched it refer to each other
    for backend in BACKENDS.values():
        if backend.in_use():
            backend.release_memory()
    forget_peaks()
    if config.compile:
        torch._dynamo.reset()  # its cache is limited to a few models
    return 130 if summary.status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
