"""One question to a scheduler for everyone in this process, asked at most every few seconds.

>>> polled = Polled(ask, "Slurm")
>>> polled.latest().jobs["12"].state

However many sessions ask, one thread puts the question, and nobody waits for longer than `WAIT_S`: a scheduler that
hangs leaves the last answer, with a sentence on why it is old.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from amp_core.schema import RunError

FRESH_S = 3.0
"""An answer of this age is not asked for again."""
STALE_S = 15.0
"""An older answer is not shown before its successor, as long as that does not take longer than `WAIT_S`."""
WAIT_S = 3.0
AFTER_ERROR_S = 15.0
"""How long a scheduler that did not answer is left alone."""


@dataclass(frozen=True)
class SchedulerJob:
    """A job as its scheduler lists it."""

    id: str
    name: str
    state: str
    """The scheduler's own word: `PENDING`, `TIMEOUT`, …"""
    phase: str
    """`waiting`, `running` or `ended`."""
    reason: str = ""
    """Why it waits or ended, in the scheduler's words."""
    node: str = ""
    """Where it runs or ran; empty before."""
    partition: str = ""
    position: int | None = None
    """The number of jobs before it in its queue."""
    returncode: int | None = None
    ran: bool = False
    """Whether an ended job had started, so that its run folder must show it."""

    @property
    def token(self) -> str:
        """The part of its name after the last dot: the token of a job of ours."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Answer:
    """What a scheduler said, and when."""

    jobs: Mapping[str, SchedulerJob] = field(default_factory=dict)
    """All jobs by id, recently ended ones included."""
    asked_s: float = float("-inf")
    """When the question was put, seconds since 1970; everything submitted before is in `jobs`."""
    error: str | None = None
    """Why there is no newer answer."""

    @functools.cached_property
    def by_token(self) -> Mapping[str, SchedulerJob]:
        """The jobs by token. Ids are reused by a scheduler that lost its state."""
        return {job.token: job for job in self.jobs.values()}


class Polled:
    """The latest answer of a scheduler."""

    def __init__(self, ask: Callable[[], Mapping[str, SchedulerJob]], name: str) -> None:
        self._ask, self._name = ask, name
        self._lock = threading.Lock()
        self._answer = Answer()
        self._next_s = float("-inf")  # monotonic: when the scheduler may be asked again
        self._pending: threading.Event | None = None
        self._pending_s = 0.0  # monotonic: when the pending question was put

    def latest(self, wait_s: float | None = None) -> Answer:
        """The latest answer. Asks again if it is older than `FRESH_S`.

        Waits only if it is older than `STALE_S` without a known error, until the question was put `WAIT_S` ago; with
        `wait_s` until then, whatever is known.
        """
        most_s = WAIT_S if wait_s is None else wait_s
        with self._lock:
            if self._pending is None and time.monotonic() >= self._next_s:
                self._pending, self._pending_s = threading.Event(), time.monotonic()
                threading.Thread(target=self._refresh, args=(self._pending,), daemon=True).start()
            pending, answer, until_s = self._pending, self._answer, self._pending_s + most_s
        if pending is None or time.time() - answer.asked_s < STALE_S or (answer.error is not None and wait_s is None):
            return answer
        pending.wait(max(0.0, until_s - time.monotonic()))  # a list of many jobs asks for each: they wait once
        with self._lock:
            if self._pending is pending and self._answer.error is None:
                return replace(self._answer, error=f"{self._name} has not answered for {most_s:g} s")
            return self._answer

    def _refresh(self, pending: threading.Event) -> None:
        asked_s = time.time()
        try:
            answer = Answer(self._ask(), asked_s)
        except RunError as error:
            answer = replace(self._answer, error=str(error))
        except TimeoutError:
            answer = replace(self._answer, error=f"{self._name} did not answer in time")
        with self._lock:
            self._answer, self._pending = answer, None
            self._next_s = time.monotonic() + (FRESH_S if answer.error is None else AFTER_ERROR_S)
        pending.set()
