"""The phases of a training step, in the order in which a step passes through them.

    >>> PHASES["data"].column, PHASES["data"].label
    ('data_ms', 'waiting for data')

A step is always in exactly one phase, so their times add up to the step's. To add a phase, add a line to `PHASES`;
its column in the table `steps`, the recorder's sums, analyses and charts follow. Its colour is in
`amp_core.figures.colours.PARTS`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str
    """Value of the column `phase` in several tables, e.g. `forward`."""
    label: str
    """What charts call it."""
    meaning: str
    """What its time covers: the description of its column."""

    @property
    def column(self) -> str:
        """Its column in the table `steps`, milliseconds."""
        return f"{self.name}_ms"


PHASES: dict[str, Phase] = {
    p.name: p
    for p in (
        Phase("data", "waiting for data", "from the end of the previous step to the start of forward: data loading"),
        Phase("forward", "forward", "forward and loss"),
        Phase("backward", "backward", "backward"),
        Phase("optimizer", "optimizer", "unscale, clip, optimizer step and scaler update"),
        Phase("watch", "recording overhead", "recording overhead within step_ms"),
    )
}
"""All phases by name, in order."""

COLUMNS = tuple(phase.column for phase in PHASES.values())
"""The columns of all phases in the table `steps`."""

OTHER = "other"
"""The rest of a step, outside the measured phases; shown like a phase."""

LABELS = {name: phase.label for name, phase in PHASES.items()} | {OTHER: "other"}
"""What charts call the phases and the rest of a step."""
