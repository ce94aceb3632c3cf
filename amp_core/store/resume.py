"""The part of a resumed run that earlier processes wrote.

    >>> earlier = earlier_part(Path("runs/a"), rank=0)
    >>> earlier.next_step, earlier.head.run_id
    (500, '9f0c1d2e3a4b')

Existing files stay unchanged: new rows go into new segments, numbered after the existing ones. `run.json` is replaced
and keeps the run's id, name and time of creation.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from amp_core.schema import TABLES, Head, RunError
from amp_core.store.run import load_run

DETECTED_SETTINGS = ("device", "precision", "autocast_dtype")
"""Settings that `watch` detects in the first forward; a resumed run may have others."""


@dataclass(frozen=True)
class Earlier:
    """The part of a run that earlier processes wrote."""

    head: Head
    next_step: int
    """One more than the last step that any rank recorded."""
    elapsed_s: float
    """Since the run was created."""
    segments: dict[str, int]
    """By table, the number of this rank's next segment."""


def earlier_part(folder: Path, rank: int) -> Earlier | None:
    """The earlier part of the run in `folder`; None if it holds none.

    Raises `RunError` if the run cannot be read, and on rank 0 if it is still being written.
    """
    if not (folder / "run.json").exists():
        return None
    run = load_run(folder)
    if rank == 0 and run.is_live:  # other ranks may see that rank 0 has resumed it already
        raise RunError(f"into={str(folder)!r} holds a run that is still running; stop it before resuming it")
    last = pc.max(run.table("steps").column("step")).as_py()
    config = {name: value for name, value in run.head.config.items() if name not in DETECTED_SETTINGS}
    head = dataclasses.replace(run.head, config=config)
    return Earlier(head, 0 if last is None else last + 1, _since(run.head.created_at), _numbers(folder, rank))


def with_earlier_nodes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a resumed run: that of its last process, with the nodes of its earlier Slurm jobs too."""
    job = now.get("slurm")
    if not isinstance(job, Mapping):
        return dict(now)
    nodes = dict.fromkeys([*_nodes(before), *_nodes(now)])
    return {**now, "slurm": {**job, "nodes": list(nodes)}}


def _nodes(environment: Mapping[str, Any]) -> list[Any]:
    job = environment.get("slurm")
    nodes = job.get("nodes") if isinstance(job, Mapping) else None
    return nodes if isinstance(nodes, list) else []


def _since(created_at: str) -> float:
    try:
        created = datetime.datetime.fromisoformat(created_at)
        return max(0.0, (datetime.datetime.now(datetime.UTC) - created).total_seconds())
    except (ValueError, TypeError):  # written by another program: the new part begins at 0
        return 0.0


def _numbers(folder: Path, rank: int) -> dict[str, int]:
    suffix = f".r{rank}" if rank else ""
    numbers: dict[str, int] = {}
    for table in TABLES:
        for file in (folder / table).glob(f"[0-9]*{suffix}.*"):
            number, _, rest = file.name.partition(".")
            if number.isdecimal() and rest in (f"{suffix[1:]}.{kind}".lstrip(".") for kind in ("arrows", "parquet")):
                numbers[table] = max(numbers.get(table, 0), int(number) + 1)
    return numbers
