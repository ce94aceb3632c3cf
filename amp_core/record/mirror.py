"""Headline numbers of each step, sent on to another tracker while training: what `Recorder.mirror` sets up.

    rec = watch(model, optimizer, scaler=scaler, into="runs/a")
    rec.mirror(wandb.init(project="lm"))        # anything that has .log(dict, step=)

A thread of its own talks to the tracker, so that neither its errors nor its waiting reach the training. What it cannot
take in time is dropped, and what it raises ends the mirroring; either is an event of the run.
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
PATIENCE_S = 10.0
"""How long the end of a run waits for the tracker to take the rest, seconds."""


class Mirror:
    """Sends rows of `steps` to `tracker`. Raises `RunError` where that has no `log`."""

    def __init__(self, tracker: Any, writer: RunWriter) -> None:
        if not callable(getattr(tracker, "log", None)):
            raise RunError(
                f"tracker={type(tracker).__name__} has no log(); give a run of wandb, or anything with log(dict, step=)"
            )
        self._tracker = tracker
        self._writer = writer
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name="ampscope-mirror", daemon=True)
        self._thread.start()

    def take(self, row: Mapping[str, list[Any]]) -> None:
        """Send the one row of `row`, columns as `RunWriter.append` takes them; returns at once."""
        if self._error is not None:
            self._tell()
            return
        try:
            self._rows.put_nowait({"rank": self._writer.rank} | {column: values[0] for column, values in row.items()})
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait a little for what is still to be sent, and say what was not."""
        try:
            self._rows.put(None, timeout=PATIENCE_S)
            self._thread.join(PATIENCE_S)
        except queue.Full:
            pass
        self._dropped += self._rows.qsize() if self._thread.is_alive() else 0
        self._tell()
        if self._dropped and self._error is None:
            detail = f"the tracker was too slow: {self._dropped} steps were not sent to it"
            self._writer.event("warning", name="mirror", detail=detail)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._tracker.log(headlines(row), step=row["step"])
            except BaseException as error:  # of any kind: what somebody else's code does must not end the training
                self._error = error
                return

    def _tell(self) -> None:
        """The error, once. Not from the mirror's thread: a writer that is closing waits for nobody."""
        if self._error is not None and not self._told:
            self._told = True
            detail = f"no more is sent to the tracker: {type(self._error).__name__}: {self._error}"
            self._writer.event("warning", name="mirror", detail=detail[:1000])


def headlines(row: Mapping[str, Any]) -> dict[str, float]:
    """What is sent of a step: `amp/loss` and so on; what was not measured is left out. Of further optimizers and ranks
    each number has a name of its own."""
    beside = "".join(f"/{key}{row[key]}" for key in ("rank", "optimizer") if row.get(key))
    return {f"amp/{column}{beside}": float(row[column]) for column in HEADLINES if row.get(column) is not None}
