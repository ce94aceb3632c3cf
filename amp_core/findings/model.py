"""`Finding`: what a rule has found, with its evidence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amp_core import words

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first."""


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
            limit = f", limit {words.amount(self.limit, self.unit)}" if self.limit is not None else ""
            said.append(f"{words.amount(self.value, self.unit)}{limit}")
        return said

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from amp_core.notebook import finding_html

        return finding_html(self)
