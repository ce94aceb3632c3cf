"""The result of `ampscope tune`, as stored in `tune.json`: the recipe, its evidence, and what was not tried.

    >>> result = load_tuned("runs/tune-1")
    >>> result.answer
    'BF16: 2.31 × faster, 38 % less memory, same loss within noise'
    >>> result.config["precision"], [row.name for row in result.tried if row.out]

The file is written again after each stage, so that a page can follow a search. No torch: the app reads it.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_core.hardware.host import process_alive
from amp_core.schema import RunError
from amp_core.store.atomic import replace_file

FILE = "tune.json"
SCHEMA = 1
STAGES = {
    "race": "race of the precisions",
    "confirm": "the fastest, against FP32 over several seeds",
    "rivals": "race of the confirmed recipe with those that may be faster",
    "options": "race of the options on the confirmed recipe",
}


@dataclass(frozen=True)
class Tried:
    """One recipe in one stage. Numbers that were not measured are NaN."""

    name: str
    stage: str
    """One of `STAGES`."""
    against: str
    """The recipe that its numbers are relative to."""
    runs: tuple[str, ...]
    """Its run folders, relative to the search's."""
    steps: int
    """Steps made by the shortest of them."""
    speed_ratio: float = math.nan
    speed_ratio_low: float = math.nan
    speed_ratio_high: float = math.nan
    speed_verdict: str = "not measured"
    memory_ratio: float = math.nan
    parity: str = ""
    """Parity in words; empty if it was not tested."""
    answer: str = ""
    """Speed, memory and parity in one line; empty if parity was not tested."""
    out: str = ""
    """Why the recipe was ruled out; empty if it was not."""
    note: str = ""
    """Where its settings come from."""
    loss_change_frac: float = math.nan
    loss_change_high: float = math.nan
    noise_frac: float = math.nan
    """Deviation of the final loss, the upper end of its 95 % interval, and the baseline's spread between seeds; each
    over the baseline's loss."""


@dataclass(frozen=True)
class Tuned:
    """A search. `config` holds the settings of the chosen recipe, `{}` while there is none."""

    status: str
    """`running`, `finished`, `stopped` or `failed`."""
    workload: str
    size: str | None
    device: str
    budget_s: float
    seconds: float
    """Time used so far."""
    chosen: str = ""
    """The name of the recipe."""
    confirmed: bool = True
    """Whether the recipe was confirmed. If not, it looks best so far, and `answer` names what is undecided."""
    needs_s: float | None = None
    """The budget expected to decide, in seconds, if this one did not."""
    config: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""
    """The recipe in one line."""
    why: str = ""
    """Why this one, and what would change that."""
    tried: tuple[Tried, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """What was not tried, and the reason."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """The searching process: machine, pid and start time, as in a run's head."""

    @property
    def present_status(self) -> str:
        """`status`, or `lost` if it is `running` and the process is gone."""
        gone = self.status == "running" and bool(self.process) and process_alive(self.process) is False
        return "lost" if gone else self.status

    def save(self, folder: Path) -> None:
        """Write `tune.json`."""
        record = {"schema": SCHEMA} | _without_nan(dataclasses.asdict(self))
        replace_file(folder / FILE, json.dumps(record, indent=1, allow_nan=False).encode())

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it: numbers that were not measured are null."""
        document: dict[str, Any] = _without_nan(dataclasses.asdict(self))
        return document


def load_tuned(folder: str | os.PathLike[str]) -> Tuned:
    """Read a search. Raises `RunError` if the folder holds none, or one that cannot be read."""
    file = Path(folder) / FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["schema"] > SCHEMA:
            raise RunError(f"{file} has schema {record['schema']}; this AMPscope reads up to {SCHEMA}: update it")
        tried = [_row(row) for row in record["tried"]]
        names = {f.name for f in dataclasses.fields(Tuned)} - {"tried", "left_out"}
        given = {name: record[name] for name in names if name in record}
        texts = [given.get(n, "") for n in ("status", "workload", "device", "chosen", "answer", "why")]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(given.get(name, {}), dict) for name in ("config", "process")
        ):
            raise TypeError
        confirmed, needs_s = given.get("confirmed", True), given.get("needs_s")
        if not isinstance(confirmed, bool) or not isinstance(needs_s, int | float | None):
            raise TypeError
        left_out = tuple((str(what), str(why)) for what, why in record["left_out"])
        return Tuned(tried=tuple(tried), left_out=left_out, **given)
    except RunError:
        raise
    except OSError as error:
        raise RunError(
            f"folder={str(folder)!r} holds no search: {error.strerror}; give the folder of an ampscope tune search"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(
            f"{file} was not written by ampscope tune, or is damaged; tune again into a new folder"
        ) from None


def _row(row: Mapping[str, Any]) -> Tried:
    given: dict[str, Any] = {}
    for one in dataclasses.fields(Tried):
        value = row.get(one.name)
        if one.type is float or one.type == "float":
            given[one.name] = math.nan if value is None else float(value)
        elif one.name == "runs":
            given[one.name] = tuple(str(v) for v in value or ())
        else:
            given[one.name] = int(value) if one.name == "steps" and value is not None else str(value or "")
    return Tried(**given)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return value
