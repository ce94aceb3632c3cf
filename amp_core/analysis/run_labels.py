"""Labels that distinguish several runs."""

from collections.abc import Sequence

from amp_core.store.run import Run


def unique_labels(runs: Sequence[Run]) -> list[str]:
    """A unique label for each run: its name, with a number if another run has the same name."""
    labels: list[str] = []
    for run in runs:
        name, number = run.name, 2
        while name in labels:
            name, number = f"{run.name} ({number})", number + 1
        labels.append(name)
    return labels
