"""What a place that runs jobs must offer. See `amp_core.jobs.backends`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_core.jobs import job_file
from amp_core.jobs.job_file import Living, Record
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from amp_core.store.sources import console_tail


@dataclass(frozen=True)
class Observed:
    """What is known of a job at one moment."""

    alive: bool | None
    """Whether it waits or runs; None for a process of another machine."""
    waiting: str | None = None
    """Why it waits, in words; None if it does not wait."""
    position: int | None = None
    """The number of jobs before it in its queue; None if it does not wait, or the order is unknown."""
    node: str | None = None
    """Where it runs."""
    note: str | None = None
    """What makes this uncertain, e.g. a scheduler that does not answer."""
    restarted: bool = False
    """Whether it runs, and the end in its run folder is that of an earlier attempt."""


@dataclass(frozen=True)
class Devices:
    """What a training may choose from."""

    offered: tuple[tuple[str, str], ...]
    """Name and label of each; partitions for Slurm."""
    why_not: str | None = None
    """Why something that one may expect is not among them, e.g. a GPU."""


class Backend(ABC):
    """Submits, observes and stops jobs. `folder` is the run folder and `record` the content of its `job.json`."""

    name: str
    """The value of `--on`."""
    label: str
    """Its name in sentences and on pages."""

    def check_available(self) -> None:  # noqa: B027 - processes of this machine can always be started
        """Raise `RunError` if no job can be submitted from here."""

    @abstractmethod
    def devices(self) -> Devices:
        """What a training may choose from. Raises `RunError` if no job can run there at all."""

    @abstractmethod
    def device_of(self, config: TrainConfig, resources: Resources) -> str:
        """The queue that the job is in, as a label such as `cpu`, `cuda:0` or `slurm:gpu`."""

    @abstractmethod
    def submit(self, folder: Path, record: Record) -> None:
        """Start or queue the job whose `job.json` is written already. Raises `RunError` or `OSError` if it was not
        submitted, and `UnconfirmedError` if that is not known."""

    def submit_array(self, folders: Sequence[Path], records: Sequence[Record]) -> None:  # noqa: ARG002 - Slurm's alone
        """Submit the jobs, whose folders lie side by side, in one submission: as the tasks of an array, each with its
        own record. Raises as `submit` does, for all of them, and `RunError` where there are no arrays."""
        raise RunError(f"array=True applies to on='slurm', not to on={self.name!r}; leave it out, or give on='slurm'")

    @abstractmethod
    def upkeep(self, folder: Path, record: Record) -> Record:
        """Record the end of a job that has ended; returns the current record."""

    @abstractmethod
    def observe(self, folder: Path, record: Record, others: Sequence[Living] | None) -> Observed:
        """The state of the job. `others` are the living jobs of the runs directory, if the caller has looked for them
        already."""

    @abstractmethod
    def request_stop(self, folder: Path, grace_s: float) -> None:
        """Request that the job ends, and return at once. Raises `RunError` if that is not possible."""

    def output(self, folder: Path, lines: int) -> list[str]:
        """The last lines that the job has printed."""
        return console_tail(folder / job_file.CONSOLE_FILE, lines)
