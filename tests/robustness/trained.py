"""A training that is watched during a fault, and its losses without.

>>> run = trained(tmp_path / "a", between=lambda step, folder: shutil.rmtree(folder) if step == 10 else None)
"""

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import load_run
from amp_core.store import resilient_writer, segment_writer
from amp_core.store.run import Run
from tests.paths import ROOT
from tests.record.loops import train

STEPS = 30
EVALUATED_STEP = 5
"""Before this one the model is called without gradients too."""


@functools.cache
def unwatched(steps: int = STEPS) -> list[float]:
    return train(None, torch.float16, steps=steps).losses


def trained(into: Path, between: Callable[[int, Path], None] | None = None, steps: int = STEPS, **options: Any) -> Run:
    """Train as `unwatched` does, watched, with `between(step, folder)` before each forward; the losses are the same."""
    step = 0

    def reported(model: torch.nn.Module) -> torch.nn.Module:
        kind: Any = type(model)

        def call(self: torch.nn.Module, *args: Any) -> Any:
            nonlocal step
            if between is not None:
                between(step, into)
            step += 1
            if step == EVALUATED_STEP:
                with torch.no_grad():
                    kind.__call__(self, *args)
            return kind.__call__(self, *args)

        # A hook would be called after the begin of the step.
        model.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        return model

    done = train(into, torch.float16, steps=steps, wrap=reported, **options)
    assert done.losses == unwatched(steps)
    return load_run(into)


def message(run: Run, name: str) -> list[str]:
    """The details of the events of that name."""
    return run.events[run.events["name"] == name]["detail"].tolist()


class Disk:
    """Intercepts the writer's access to its files: `befall` is called before each write of rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.befall: Callable[[], None] = lambda: None
        put, opened = segment_writer.OpenSegment._put, segment_writer.OpenSegment.__init__

        def before_put(segment: Any, data: bytes) -> None:
            self.befall()
            put(segment, data)

        def before_open(segment: Any, *args: Any) -> None:
            self.befall()
            opened(segment, *args)

        monkeypatch.setattr(segment_writer.OpenSegment, "_put", before_put)
        monkeypatch.setattr(segment_writer.OpenSegment, "__init__", before_open)
        monkeypatch.setattr(resilient_writer, "RETRY_S", 0.01)

    def fails(self, number: int) -> None:
        def fail() -> None:
            raise OSError(number, os.strerror(number))

        self.befall = fail

    def works(self) -> None:
        self.befall = lambda: None


def program_said(body: str, *arguments: str) -> str:
    line = [sys.executable, "-c", textwrap.dedent(body), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
