"""Where jobs run: `local` (processes of this machine), `slurm`, `ray`. One interface, `base.Backend`.

    >>> by_name("slurm").devices().offered
    (('gpu', 'gpu (time limit 1-00:00:00, 8 nodes)'),)

To add one: a module with a subclass of `Backend`, or of `scheduler.Scheduler` for what queues jobs on other machines;
its line in `BACKENDS`; its name in `amp_core.settings.resources.PLACES`.
"""

from amp_core.jobs.backends.base import Backend, Devices, Observed
from amp_core.jobs.backends.local import Local
from amp_core.jobs.backends.ray import Ray
from amp_core.jobs.backends.slurm import Slurm
from amp_core.schema import RunError

__all__ = ["BACKENDS", "Backend", "Devices", "Observed", "by_name"]

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Local(), Slurm(), Ray())}


def by_name(name: str) -> Backend:
    """The backend of that name. Raises `RunError` if there is none, as for a job of a newer version."""
    if name not in BACKENDS:
        raise RunError(f"on={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
