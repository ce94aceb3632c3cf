"""Making findings: what a rule measured, with what the guide says of its code."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_core.findings.guide import GUIDE
from amp_core.findings.model import Finding, Severity


@dataclass(frozen=True)
class Remedy:
    """What to do about one finding, where the guide's advice for its code does not fit the run."""

    advice: str
    """Two sentences: what it means, and what to try."""
    snippet: str = ""
    """Plain PyTorch that does so."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The same in frameworks that do it otherwise, by their names."""


def found(
    code: str,
    title: str,
    where: str,
    *,
    steps: tuple[int, int] | None = None,
    value: float | None = None,
    limit: float | None = None,
    unit: str,
    severity: Severity | None = None,
    advice: str | None = None,
    remedy: Remedy | None = None,
) -> Finding:
    """A finding of that code; severity, advice, snippet and frameworks are the guide's unless given. `remedy` replaces
    the last three, `advice` the first of these alone."""
    entry = GUIDE[code]
    do = remedy or Remedy(advice or entry.advice, entry.snippet, entry.frameworks)
    return Finding(
        code=code,
        severity=severity or entry.severity,
        title=title,
        where=where,
        steps=steps,
        value=value,
        limit=limit,
        unit=unit,
        advice=do.advice,
        snippet=do.snippet,
        frameworks=do.frameworks,
    )
