"""Close every run, however the process exits.

A run ends by `close()`, by an uncaught exception, by SIGTERM or SIGHUP, or with the interpreter.
`register(ending)` covers the last three; `unregister(ending)` undoes it. The last
`unregister` removes all hooks, so a closed run leaves no trace in the process.

Only `kill -9`, the out-of-memory killer and a power cut leave no chance to write an end; readers call such a run lost.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

_SIGNALS = tuple(s for s in (getattr(signal, n, None) for n in ("SIGTERM", "SIGHUP")) if s is not None)


class Ending(Protocol):
    """Something that records how the process ends."""

    def end(self, status: str, reason: str) -> None:
        """Write the end; called at most once by this module."""

    def busy(self) -> bool:
        """Whether the calling thread is in the middle of a write, which `end` would leave incomplete."""


@dataclass
class _Installed:
    """The hooks installed in this process, and those they replaced."""

    hook: Callable[..., Any]
    previous_hook: Callable[..., Any]
    handlers: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """By signal: ours and the one before."""


_open: list[Ending] = []
_pid: int | None = None
_cause: tuple[str, str] | None = None  # status and reason, once the process is known to be ending
_pending: Callable[[], None] | None = None  # a signal that arrived during a write
_installed: _Installed | None = None


def register(ending: Ending) -> None:
    """Close `ending` however the process exits from now on."""
    global _pid, _cause, _pending
    if _pid != os.getpid():  # first use, or a forked child, which keeps the parent's hooks but not its runs
        _open.clear()
        _pid, _cause, _pending = os.getpid(), None, None
    _open.append(ending)
    if _installed is None:
        _install()


def unregister(ending: Ending) -> None:
    """Do not close `ending` at exit any more: it is already closed."""
    if ending in _open:
        _open.remove(ending)
        if not _open and _pid == os.getpid():
            _uninstall()


def after_write() -> None:
    """Handle a signal that arrived during a write; called after each write."""
    global _pending
    if _pending is not None and threading.current_thread() is threading.main_thread():
        act, _pending = _pending, None
        act()


def describe(kind: type[BaseException], error: BaseException | None) -> tuple[str, str]:
    """Status and reason of a run that `error` ended."""
    if issubclass(kind, KeyboardInterrupt):
        return "stopped", "interrupted from the keyboard"
    if issubclass(kind, SystemExit):
        code = getattr(error, "code", None)
        return ("finished", "the program exited") if not code else ("stopped", f"the program exited with {code}")
    text = str(error).strip()
    return "failed", f"{kind.__name__}: {text}" if text else kind.__name__


def _install() -> None:
    global _installed
    atexit.register(_at_exit)
    _installed = _Installed(_hook(sys.excepthook), sys.excepthook)
    sys.excepthook = _installed.hook
    if threading.current_thread() is threading.main_thread():  # Python sets handlers there only
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous in (signal.SIG_IGN, None):  # ignored on purpose (nohup), or not set by Python code
                continue
            _installed.handlers[number] = (_handler(previous), previous)
            signal.signal(number, _installed.handlers[number][0])


def _uninstall() -> None:
    """Restore the previous hooks, except those that other code has replaced since."""
    global _installed
    if _installed is None:
        return
    atexit.unregister(_at_exit)
    if sys.excepthook is _installed.hook:
        sys.excepthook = _installed.previous_hook
    if threading.current_thread() is threading.main_thread():
        for number, (ours, previous) in _installed.handlers.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, previous)
    _installed = None


def _end_all(status: str, reason: str) -> None:
    errors = []
    if _pid == os.getpid():
        for ending in tuple(_open):  # each removes itself
            try:
                ending.end(status, reason)
            except Exception as error:  # close the others as well
                errors.append(error)
    if errors:
        raise errors[0]


def _at_exit() -> None:
    _end_all(*(_cause or ("finished", "the program ended")))


# Each installation creates new functions that hold the previous hook. With a shared variable, a hook that other code
# wrapped around ours and that outlived it would later be called by ours, and recurse without end.


def _hook(previous: Callable[..., Any]) -> Callable[..., Any]:
    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _cause
        if _pid == os.getpid():
            _cause = describe(kind, error)
        previous(kind, error, trace)

    return on_exception


def _handler(previous: Any) -> Callable[[int, FrameType | None], None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        global _cause, _pending
        reason = f"stopped by {signal.Signals(number).name}"
        if callable(previous):  # the program handles the signal itself; the end records the cause
            _cause = ("stopped", reason)
            previous(number, frame)
            return

        def act() -> None:
            try:
                _end_all("stopped", reason)
            finally:  # die of the signal, as the program would have without AMPscope
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        if _pid == os.getpid() and any(e.busy() for e in _open):
            _pending = act
        else:
            act()

    return on_signal
