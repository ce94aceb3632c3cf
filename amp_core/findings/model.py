"""What rules give and what the guide holds: `Finding`, `Entry`, `Remedy`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amp_core.text import formatting

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first."""

LOSS_SCALING = "Loss scaling"
TRAINING_LOOP = "Training loop"
RANGE_AND_PRECISION = "Range and precision"
SPEED_AND_MEMORY = "Speed and memory"
FAMILY_NAMES = (LOSS_SCALING, TRAINING_LOOP, RANGE_AND_PRECISION, SPEED_AND_MEMORY)
"""The families in the order of the guide. Families that are not named here come after them, by name."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way in which mixed precision goes wrong: what it is, what shows it, and what repairs it."""

    code: str
    """Name of the rule, e.g. `scale-collapse`; stable, for scripts."""
    severity: Severity
    """The usual one; a finding may be graver or milder, as its evidence is."""
    family: str
    """Heading in the guide."""
    order: int
    """Place in the order of harm, which decides among findings of one severity: the smallest comes first. Each
    rule has a place of its own; they are spaced by ten, so that a new rule fits between two others."""
    follows: tuple[str, ...] = ()
    """Codes that this one is a consequence of where both are found, the likeliest cause first."""
    follows_in_place: tuple[str, ...] = ()
    """Codes that this one is a consequence of only where both are found in the same place (`Finding.where`)."""
    what: str
    """What happens."""
    signal: str
    """What is looked at."""
    threshold: str
    """From where on it is called so, and why from there: the definition or the source."""
    advice: str
    """What it means and what to try, in two sentences."""
    snippet: str = ""
    """Plain PyTorch that does so."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The same where a framework does it otherwise: `Accelerate`, `Transformers Trainer`, `Lightning`."""
    page: str = "loss-scale"
    """Address of the page that proves it."""


@dataclass(frozen=True)
class Remedy:
    """What to do about one finding, where the guide's advice for its code does not fit the run."""

    advice: str
    """Two sentences: what it means, and what to try."""
    snippet: str = ""
    """Plain PyTorch that does so."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The same in frameworks that do it otherwise, by their names."""


@dataclass(frozen=True)
class Finding:
    """Something a reader should know of a run, and what to do about it."""

    code: str
    """Name of the rule, e.g. `scale-collapse`; stable, for scripts."""
    severity: Severity
    """`error` breaks training, `warning` costs quality or speed, `info` is good to know and benign."""
    title: str
    """What was found, in one line."""
    where: str
    """The tensor, the module or the setting concerned."""
    steps: tuple[int, int] | None
    """First and last step of the evidence; None where it concerns the whole run."""
    value: float | None
    """The number that was measured, in `unit`."""
    limit: float | None
    """The number it was held against."""
    unit: str
    """Unit of `value` and `limit`."""
    advice: str
    """What it means and what to try, in two sentences."""
    snippet: str
    """Plain PyTorch that does what the advice says; empty where there is nothing to change."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The same in frameworks that do it otherwise, by their names."""
    follows: str = ""
    """Code of the finding that this one is a consequence of; empty where it stands for itself."""

    def evidence(self) -> list[str]:
        """Where, when, and the number beside its limit, in words: `['fc1', 'steps 3–9', '7 steps, limit 0 steps']`."""
        said = [self.where] if self.where else []
        if self.steps is not None:
            first, last = self.steps
            said.append(f"step {first:,}" if first == last else f"steps {first:,}–{last:,}")
        if self.value is not None:
            limit = f", limit {formatting.amount(self.limit, self.unit)}" if self.limit is not None else ""
            said.append(f"{formatting.amount(self.value, self.unit)}{limit}")
        return said

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from amp_core.notebook import finding_html

        return finding_html(self)
