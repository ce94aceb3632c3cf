"""The results of rules and the entries of the guide: `Finding`, `Entry`, `Remedy`."""

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
"""The families in the order of the guide; others follow by name."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A guide entry: one way in which mixed precision goes wrong, how it is detected, and how to repair it."""

    code: str
    """Name of the rule, e.g. `scale-collapse`; stable, for scripts."""
    severity: Severity
    """The default; a finding may be more or less severe, depending on its evidence."""
    family: str
    """Heading in the guide."""
    order: int
    """Rank in the order of harm, which sorts findings of one severity: the smallest comes first. Each
    rule has its own rank; ranks are spaced by ten, so that a new rule fits between two others."""
    follows: tuple[str, ...] = ()
    """Codes of the causes of this one, if both are found, the likeliest first."""
    follows_in_place: tuple[str, ...] = ()
    """Codes of causes that count only if both are found in the same place (`Finding.where`)."""
    what: str
    """What happens."""
    signal: str
    """The evidence that the rule examines."""
    threshold: str
    """The threshold and its reason: a definition or a source."""
    advice: str
    """What it means and what to try, in two sentences."""
    snippet: str = ""
    """Plain PyTorch code for the advice."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The code for frameworks that differ: `Accelerate`, `Transformers Trainer`, `Lightning`."""
    page: str = "loss-scale"
    """URL path of the page with the evidence."""


@dataclass(frozen=True)
class Remedy:
    """Advice for one finding, if the guide's advice for its code does not fit the run."""

    advice: str
    """Two sentences: what it means, and what to try."""
    snippet: str = ""
    """Plain PyTorch code for the advice."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The code for frameworks that differ, by their names."""


@dataclass(frozen=True)
class Finding:
    """A detected fault of a run, its evidence and a remedy."""

    code: str
    """Name of the rule, e.g. `scale-collapse`; stable, for scripts."""
    severity: Severity
    """`error` breaks training, `warning` costs quality or speed, `info` is good to know and benign."""
    title: str
    """The fault in one line."""
    where: str
    """The tensor, the module or the setting concerned."""
    steps: tuple[int, int] | None
    """First and last step of the evidence; None if it concerns the whole run."""
    value: float | None
    """The number that was measured, in `unit`."""
    limit: float | None
    """The limit for `value`."""
    unit: str
    """Unit of `value` and `limit`."""
    advice: str
    """What it means and what to try, in two sentences."""
    snippet: str
    """Plain PyTorch code for the advice; empty if there is nothing to change."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The code for frameworks that differ, by their names."""
    win_ms: float | None = None
    """Most milliseconds per step that a repair can save, half of them where the profiler may be the cause; None where
    that is not estimated."""
    follows: str = ""
    """Code of the finding that caused this one; empty if there is none."""

    def evidence(self) -> list[str]:
        """Place, steps, and value with its limit, in words: `['fc1', 'steps 3–9', '7 steps, limit 0']`."""
        kernel = self.where.startswith("void ") or "::" in self.where or "kernel" in self.where.lower()
        place = formatting.kernel_in_words(self.where) if kernel else formatting.shortened(self.where)
        texts = [place] if place else []
        if self.steps is not None:
            first, last = self.steps
            texts.append(f"step {first:,}" if first == last else f"steps {first:,}–{last:,}")
        if self.value is not None:
            # What is counted is said once.
            unit = "share" if self.unit.startswith("share") else self.unit if self.unit == "loss scale" else ""
            limit = f", limit {formatting.amount(self.limit, unit)}" if self.limit is not None else ""
            texts.append(f"{formatting.amount(self.value, self.unit)}{limit}")
        return texts

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """The finding as a notebook shows it."""
        from amp_core.notebook import finding_html

        return finding_html(self)
