"""Shared by the tests of run folders: a head, rows to write, and a listing of the files."""

from pathlib import Path

from amp_core.store.writer import RunWriter

HEAD = {"schema": 1, "run_id": "x", "name": "theirs", "created_at": "2026-01-01T00:00:00Z", "status": "finished"}
"""The content of `run.json` in a run that another program wrote."""


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    """Write steps `first` to `last`, not including `last`; the loss of each is its number."""
    for step in range(first, last):
        writer.append("steps", {"step": [step], "loss": [float(step)]})


def files(folder: Path) -> list[str]:
    """All files below a folder, as paths relative to it."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
