"""Names that tell several runs apart."""

from collections.abc import Sequence

from amp_core.store.run import Run


def labelled(runs: Sequence[Run]) -> list[str]:
    """A name for each run that no other has: its own, with a number where two are called the same."""
    labels: list[str] = []
    for run in runs:
        name, number = run.name, 2
        while name in labels:
            name, number = f"{run.name} ({number})", number + 1
        labels.append(name)
    return labels
