"""Where a training runs, and what it requests there; no torch.

    >>> Resources(on="slurm", partition="gpu", gpus=1, time="2:00:00")
    >>> Resources(on="slurm", time="soon")
    Traceback (most recent call last):
    amp_core.schema.RunError: time='soon' is not a time limit; give minutes, H:MM:SS or D-HH:MM:SS

The command line and the app's forms make one, so both refuse the same things with the same sentence.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_core.schema import RunError

PLACES = ("local", "slurm", "ray")
"""Values of `on`: this machine, a Slurm cluster, a Ray cluster."""

SETUP_VARIABLE = "AMPSCOPE_SETUP"
"""Environment variable with the set-up lines of whoever starts the command or the app. The app has no field for them:
it runs no code that the owner has not written."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.,@+:-]*")
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
TAKES = {"local": (), "ray": ("gpus", "time", "setup")}
"""What a place takes, by its name; one that is not in it, such as Slurm, takes everything."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a job requests, checked on creation. Raises `RunError` with the argument and its value.

    None leaves the decision to the scheduler and its own defaults, such as `SBATCH_PARTITION`.
    """

    on: str = "local"
    """One of `PLACES`."""
    partition: str | None = None
    """Slurm's partition, or several with commas."""
    gpus: int | None = None
    """GPUs per node."""
    nodes: int = 1
    """Nodes; with several, torchrun starts `nproc` processes on each."""
    time: str | None = None
    """Time limit as Slurm writes it: minutes, `H:MM:SS` or `D-HH:MM:SS`."""
    account: str | None = None
    """Account that is charged."""
    setup: tuple[str, ...] = ()
    """Lines of shell that prepare the environment before the training, e.g. `module load cuda`."""
    requeue: bool = False
    """Whether the job is queued again after preemption, a node failure or its time limit, and resumes from its
    checkpoint."""

    def __post_init__(self) -> None:
        if self.on not in PLACES:
            raise RunError(f"on={self.on!r} is unknown; choose one of {', '.join(PLACES)}")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
                raise RunError(f"{name}={value!r} is not a name; give letters, digits and . _ - only")
        if self.time is not None and not (isinstance(self.time, str) and _TIME.fullmatch(self.time)):
            raise RunError(f"time={self.time!r} is not a time limit; give minutes, H:MM:SS or D-HH:MM:SS")
        for name, least in (("gpus", 0), ("nodes", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise RunError(f"{name}={value!r} is not possible; give a whole number of {least} or more")
        if not isinstance(self.setup, tuple) or not all(isinstance(line, str) for line in self.setup):
            raise RunError(f"setup={self.setup!r} is not possible; give a tuple of lines")
        taken = takes(self.on)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "on" and field.name not in taken and value != field.default:
                raise RunError(f"{field.name}={value!r} applies to on='slurm', not to on={self.on!r}; leave it out")

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds."""
        if self.time is None:
            return None
        days, _, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if days:  # D-HH, D-HH:MM, D-HH:MM:SS
            hours, minutes, seconds = [*parts, 0, 0][:3]
        else:  # MM, MM:SS, HH:MM:SS
            hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
        return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Resources":
        """From values as of `to_dict`; unknown ones are ignored. Raises `RunError` for a wrong value."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: value for name, value in values.items() if name in names}
        if isinstance(known.get("setup"), list):
            known["setup"] = tuple(known["setup"])
        return cls(**known)


def takes(on: str) -> tuple[str, ...]:
    """The names of what can be requested in a place."""
    return TAKES.get(on, tuple(field.name for field in dataclasses.fields(Resources) if field.name != "on"))


def setup_of_environment() -> tuple[str, ...]:
    """The set-up lines of the environment variable `AMPSCOPE_SETUP`."""
    return tuple(line for line in os.environ.get(SETUP_VARIABLE, "").splitlines() if line.strip())
