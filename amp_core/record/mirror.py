"""Sends headline numbers of each step to another tracker during training, for `Recorder.mirror`.

    rec = watch(model, optimizer, scaler=scaler, into="runs/a")
    rec.mirror(wandb.init(project="lm"))        # any object with .log(dict, step=)

A separate thread calls the tracker, so that neither its errors nor its delays reach the training. Steps that it cannot
take in time are dropped, and an exception ends the mirroring; an event reports either.
"""

import queue
import threading
from collections.abc import Mapping
from typing import Any

from amp_core.interop.tags import HEADLINES
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter

MAX_WAITING = 10_000
"""Steps that may wait for a slow tracker; later ones are dropped until there is room."""
CLOSE_TIMEOUT_S = 10.0
"""Time that the end of a run waits for the tracker to take the remaining steps."""


class Mirror:
    """Sends rows of `steps` to `tracker`. Raises `RunError` if it has no `log`."""

    def __init__(self, tracker: Any, writer: RunWriter) -> None:
        if not callable(getattr(tracker, "log", None)):
            raise RunError(
                f"tracker={type(tracker).__name__} has no log(); give a wandb run, or anything with log(dict, step=)"
            )
        self._tracker = tracker
        self._writer = writer
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._error: BaseException | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="ampscope-mirror", daemon=True)
        self._thread.start()

    def take(self, row: Mapping[str, list[Any]]) -> None:
        """Send a single row, given as columns as for `RunWriter.append`; returns at once."""
        if self._error is not None:
            self._report()
            return
        try:
            self._rows.put_nowait({"rank": self._writer.rank} | {column: values[0] for column, values in row.items()})
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait for the remaining steps to be sent, at most `CLOSE_TIMEOUT_S`, and report those that were not."""
        try:
            self._rows.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        except queue.Full:
            pass
        self._dropped += self._rows.qsize() if self._thread.is_alive() else 0
        self._report()
        if self._dropped and self._error is None:
            detail = f"the tracker was too slow: {self._dropped} steps were not sent to it"
            self._writer.event("warning", name="mirror", detail=detail)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._tracker.log(headlines(row), step=row["step"])
            except BaseException as error:  # any error of foreign code: it must not end the training
                self._error = error
                return

    def _report(self) -> None:
        """Write the error as an event, once. Not from the mirror's thread: a closing writer does not wait for it."""
        if self._error is not None and not self._reported:
            self._reported = True
            detail = f"logging to the tracker stopped: {type(self._error).__name__}: {self._error}"
            self._writer.event("warning", name="mirror", detail=detail[:1000])


def headlines(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step that are sent: `amp/loss` and so on; those not measured are left out. Further optimizers
    and ranks have names of their own."""
    beside = "".join(f"/{key}{row[key]}" for key in ("rank", "optimizer") if row.get(key))
    return {f"amp/{column}{beside}": float(row[column]) for column in HEADLINES if row.get(column) is not None}
