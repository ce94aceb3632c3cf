"""Where the time of a step went: phases that add up to it.

A step is always in exactly one phase: `data`, `forward`, `backward`, `optimizer` or `watch`. `Phases.enter` ends the
current one; no time is counted twice or left out. Time after backward belongs to the optimizer if an optimizer step
follows, and to data if another forward follows (gradient accumulation).

Marks come from the clock of the device's backend: on CUDA events on the current stream, so that phases are times of the
device; on a CPU the host's clock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from amp_core.phases import PHASES


class Clock(Protocol):
    """Marks moments, and measures the time between two of them."""

    adds_up: bool
    """Whether marks are numbers in seconds, of which differences can be added up at once."""

    def mark(self) -> Any:
        """This moment."""

    def ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks."""


class HostClock:
    """Marks are seconds of `now`, by default the monotonic clock."""

    adds_up = True

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def mark(self) -> float:
        """This moment."""
        return self.now()

    def ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks."""
        return float((stop - start) * 1e3)


class Phases:
    """The phases of the current step, in order."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.present = "data"
        self.changed: Callable[[str], None] | None = None
        """Called with the phase that was entered."""
        self.failed: Callable[[Exception], None] | None = None
        """Called with an exception raised within `watching`, which is not propagated."""
        self._since = clock.mark()
        self._spans: list[tuple[str, Any, Any]] = []
        self._seconds: dict[str, float] = {}
        self._is_left_out = False
        self._watched = 0.0  # seconds of `watch` since the beginning
        self._entered: tuple[float, float, str] = (float("-inf"), 0.0, "")
        """On a CPU, when the last phase was entered, the seconds of `watch` until then, and the phase before it."""
        self._taken = float("-inf")  # on a CPU, when spans were last taken
        self._called_in: dict[str, float] = {}  # seconds by the phase from which they have to be taken; see `calling`
        self.adds_up = clock.adds_up
        """Each phase is added up at once. A tuple for every span would be some thousand objects in a sampled step, and
        Python's garbage collector runs after every 700."""

    def enter(self, phase: str, ago_s: float = 0.0) -> None:
        """The step is in `phase` from now on, or since `ago_s` seconds ago by the host's clock."""
        if phase == self.present:
            return
        now = self.clock.mark()
        if ago_s:
            now = max(self._since, now - ago_s)
        if self.present == "after_backward":
            self.present = "data" if phase == "forward" else "optimizer"
            if "after_backward" in self._called_in:
                self._take_from(self.present, self._called_in.pop("after_backward"))
        self._spent(now)
        if self.adds_up:
            self._entered = now, self._watched, self.present
        self._be_in(phase, now)

    def watching(self, *, raises: bool = False) -> "_Watching":
        """Within this context the phase is `watch`; afterwards the step is in its phase again.

        Exceptions are reported to `failed`; they are propagated only with `raises`.
        """
        return _Watching(self, None if raises else self.failed)

    def report(self, error: Exception) -> None:
        """Report an exception of watching as `watching` does."""
        if self.failed is None:
            raise error
        self.failed(error)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude the time within this context from every step, for example while another program had the machine."""
        self._spent(self.clock.mark())
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False
            self._since = self.clock.mark()

    def _spent(self, until: Any) -> None:
        """Record that the current phase lasted until that mark."""
        if self._is_left_out:  # other trainings may call patched functions meanwhile
            return
        if self.adds_up:
            seconds = until - self._since
            self._seconds[self.present] = self._seconds.get(self.present, 0.0) + seconds
            if self.present == "watch":
                self._watched += seconds
        else:
            self._spans.append((self.present, self._since, until))

    def _take_from(self, phase: str, seconds: float) -> None:
        """The recording overhead within the time of that phase."""
        self._called_in[phase] = self._called_in.get(phase, 0.0) + seconds

    def _listened(self, phase: str, since: float, watched: float, until: float) -> None:
        """Listeners were called between two marks; at the first the step was in `phase`, with `watched` seconds of
        `watch` behind it.

        A listener may enter another phase. Each phase gives up its own part; that of a step that a listener ended is
        gone with its spans.
        """
        entered, watched_before, left = self._entered
        if entered > since:
            if self._taken < since and left != "watch":
                self._take_from(left, max(entered - since - (watched_before - watched), 0.0))
            phase, since, watched = self.present, entered, watched_before
        own = until - since - (self._watched - watched)
        if own > 0 and phase != "watch" and not self._is_left_out:
            self._take_from(phase, own)

    def _be_in(self, phase: str, now: Any) -> None:
        self.present, self._since = phase, now
        if self.changed is not None:
            self.changed(phase)

    def take(self) -> list[tuple[str, Any, Any]]:
        """The spans since the last `take`, up to now; for `totals`, once the marks can be read.

        On a CPU there is one per phase, as long as all its spans together.
        """
        now = self.clock.mark()
        self._spent(now)
        for phase, seconds in self._called_in.items():
            moved = min(seconds, self._seconds.get(phase, 0.0))
            self._seconds[phase] = self._seconds.get(phase, 0.0) - moved
            self._seconds["watch"] = self._seconds.get("watch", 0.0) + moved
        self._called_in = {}
        spans = self._spans
        if self.adds_up:
            spans = [(phase, 0.0, s) for phase, s in self._seconds.items()]
            self._taken = now
        self._spans, self._seconds, self._since = [], {}, now
        return spans

    def totals(self, spans: list[tuple[str, Any, Any]]) -> dict[str, float]:
        """Milliseconds per phase of the spans that `take` returned."""
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, start, stop in spans:
            sums["optimizer" if phase == "after_backward" else phase] += self.clock.ms(start, stop)
        return sums


_counting: list[tuple[Phases, Callable[[], float]]] = []
"""Those of the runs that are being recorded, where the host's clock times phases, with that clock."""
Called = list[tuple[Phases, Callable[[], float], float, float, str]]


def count_calls(phases: Phases, count: bool = True) -> None:
    """From now on `calling` counts for these phases; with `count` False, no more."""
    _counting[:] = [entry for entry in _counting if entry[0] is not phases]
    if count and isinstance(phases.clock, HostClock):
        _counting.append((phases, phases.clock.now))


def calling() -> Called:
    """torch is about to call listeners, whatever they do. To be passed to `called` when they are done.

    The time in between counts as `watch`, as far as it is not counted already. The phase does not change: listeners may
    ask for it.
    """
    begun: Called = []
    for phases, now in _counting:  # a comprehension would be one more call, and this runs around every hook
        begun.append((phases, now, now(), phases._watched, phases.present))
    return begun


def called(begun: Called) -> None:
    """See `calling`."""
    for phases, now, then, watched, phase in begun:
        phases._listened(phase, then, watched, now())


def count_watched(phase: str, seconds: float) -> None:
    """So many seconds of that phase of the current step went to listeners that count their time themselves."""
    for phases, _ in _counting:
        phases._take_from(phase, seconds)


class _Watching:
    __slots__ = ("_before", "_failed", "_phases")

    def __init__(self, phases: Phases, failed: Callable[[Exception], None] | None) -> None:
        self._phases = phases
        self._failed = failed
        self._before = ""

    def __enter__(self) -> None:
        self._before = self._phases.present
        if self._before != "watch":
            self._switch("watch")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and self._failed is not None:
            self._failed(error)
            error = None
        if self._before != "watch":
            self._switch(self._before)
        return kind is not None and error is None

    def _switch(self, phase: str) -> None:
        phases = self._phases
        now = phases.clock.mark()
        phases._spent(now)
        phases._be_in(phase, now)
