"""Progress of a training run, on a terminal or in a log.

    >>> with Progress("runs/a", total=200) as progress:
    ...     for step in range(200):
    ...         ...
    ...         progress.update(step + 1)

On a terminal it is a tqdm bar. Elsewhere (a job's `console.log`) it is one plain line every two seconds and at the end:

    step 120 of 200 | loss 2.3 | loss scale 32768 | 1 skipped | 14.1 steps/s | 6 s left

Loss, scale and skips are read from the run folder, as the app reads them. So nothing here waits for the device, and
the numbers shown are those recorded, possibly one step behind.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import pyarrow.compute as pc

from amp_core.schema import RunError
from amp_core.store.run import Run, load_run
from amp_core.store.urls import located

LOG_INTERVAL_S = 2.0
TERMINAL_INTERVAL_S = 0.5


class Progress:
    """Shows how many of `total` steps the run in `folder` has made."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._folder = located(folder)
        self._stream = stream or sys.stderr
        self._clock = clock
        self._run: Run | None = None
        on_terminal = self._stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if on_terminal else LOG_INTERVAL_S
        self._bar: Any = None
        if on_terminal:
            from tqdm import tqdm  # not needed on a bare training node that writes to a log

            self._bar = tqdm(total=total, file=self._stream, unit="step", dynamic_ncols=True, mininterval=0)
        self._began: float | None = None
        self._first = 0  # steps made at the first update: a resumed run has more than one
        self._shown = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:  # keeps the bar on the screen
            with contextlib.suppress(OSError):  # as in `update`
                self._bar.close()

    def update(self, done: int, last: bool = False) -> None:
        """Report `done` steps; displayed at most once per interval, and if this is the `last`."""
        now = self._clock()
        if self._began is None:  # the first step warms up: the rate is that of the steps after it
            self._began = self._shown = now
            self._first = done
        elif last or now - self._shown >= self._interval_s:
            self._shown = now
            try:
                self._show(done, (done - self._first) / max(now - self._began, 1e-9))
            except OSError:  # the log's disk is full, or the reader is gone: the training continues
                return  # and the next update tries again

    def _show(self, done: int, steps_per_s: float) -> None:
        loss, loss_scale, skipped = self._recorded()
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss}, scale {loss_scale}, {skipped} skipped", refresh=False)
            self._bar.update(done - self._bar.n)
            return
        left = f"{(self.total - done) / steps_per_s:.0f} s left" if steps_per_s else "– s left"
        parts = (
            f"step {done} of {self.total}",
            f"loss {loss}",
            f"loss scale {loss_scale}",
            f"{skipped} skipped",
            f"{steps_per_s:.1f} steps/s",
            left,
        )
        print(" | ".join(parts), file=self._stream, flush=True)

    def _recorded(self) -> tuple[str, str, int]:
        """Loss and loss scale of the last recorded step, and the number of skipped steps so far."""
        try:
            if self._run is None:
                self._run = load_run(self._folder)
            self._run.refresh()
            steps = self._run.table("steps")
        except RunError:  # the folder was removed, and may come back
            return "–", "–", 0
        if steps.num_rows == 0:
            return "–", "–", 0
        loss, loss_scale = (steps[name][-1].as_py() for name in ("loss", "loss_scale"))
        return f"{loss:.4g}" if loss is not None else "–", f"{loss_scale:g}", pc.sum(steps["skipped"]).as_py() or 0
