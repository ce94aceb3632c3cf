"""The one diagnosis that all pages of a run show."""

from collections.abc import Sequence

from amp_core import Run, diagnose
from amp_core.findings import Diagnosis, diagnosis
from amp_core.library.mutes import muted
from pages.parts import loaders


def chain(run: Run) -> Diagnosis:
    """The diagnosis of the run, without muted findings."""
    return loaders.analysed(_chain, run, tuple(sorted(muted(run.path))))


def _chain(run: Run, silent: Sequence[str]) -> Diagnosis:
    return diagnosis(run, [f for f in loaders.analysed(diagnose, run) if f.code not in silent])
