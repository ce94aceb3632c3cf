"""A training that waits for its turn: one of several that a comparison lets train a block of steps each.

    python -m amp_core.train.turns DIR        started by `ampscope compare`, see `amp_core.train.interleave`

Standard input gives first a line of JSON, `{"config": …, "comparison": …, "level": …}`, then a line with a number of
steps for each turn. A line `ready` on standard output says that the training stands before its first step, `done` that
a turn is over; what the training itself prints goes to standard error. While it waits the process sleeps, and the
device has finished what it was given. When standard input ends, so does the run.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

from amp_core.schema import RunError
from amp_core.train.config import TrainConfig
from amp_core.train.stopping import stop_on_signals


class Turns:
    """What `train` asks before each step: it answers when the step may be made."""

    def __init__(
        self, asked: Callable[[], str | None], given: TextIO, said: TextIO, settle: Callable[[], None]
    ) -> None:
        self._asked = asked
        self._given = given
        self._said = said
        self._settle = settle
        self._left = 0
        self._began = False

    def __call__(self) -> str | None:
        """None once the step may be made; a reason where the run is to end."""
        if reason := self._asked():
            return reason
        if self._left == 0:
            self._settle()
            self._said.write("done\n" if self._began else "ready\n")
            self._said.flush()
            self._began = True
            line = self._given.readline()
            if reason := self._asked():
                return reason
            if not line.strip().isdecimal() or int(line) == 0:
                return "stopped: the comparison that it was part of ended"
            self._left = int(line)
        self._left -= 1
        return None


def main(folder: str) -> int:
    """Train in turns; 130 where it was asked to stop, 2 for bad input."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the others' cores
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a workload of one's own may print
    with stop_on_signals() as stop:  # before torch is imported: that alone takes seconds
        order = json.loads(sys.stdin.readline() or "null")
        if order is None:
            return 130
        import torch

        from amp_core.train.engine import train

        def settle() -> None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()

        try:
            turns = Turns(stop, sys.stdin, said, settle)
            summary = train(
                TrainConfig.from_dict(order["config"]),
                folder,
                stop=turns,
                also={"comparison": order["comparison"]},
                level=order.get("level", "standard"),
            )
        except RunError as error:
            sys.stderr.write(f"ampscope: {' '.join(str(error).split())}\n")
            return 2
    return 130 if summary.status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
