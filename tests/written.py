"""What tests of the run folder share: rows to write, and what lies there then."""

from pathlib import Path

from amp_core.store.writer import RunWriter

HEAD = {"schema": 1, "run_id": "x", "name": "theirs", "created_at": "2026-01-01T00:00:00Z", "status": "finished"}
"""The head of a run that another program writes, as its `run.json` has it."""


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    """Steps `first` to `last`, the last one excluded, each with its number as its loss."""
    for step in range(first, last):
        writer.append("steps", {"step": [step], "loss": [float(step)]})


def files(folder: Path) -> list[str]:
    """All files of a folder and of those within."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
