"""Making findings: what a rule measured, with what the guide says of its code."""

from amp_core.findings.guide import GUIDE
from amp_core.findings.model import Finding, Severity


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
) -> Finding:
    """A finding of that code; severity and advice are the guide's unless given."""
    entry = GUIDE[code]
    return Finding(
        code=code,
        severity=severity or entry.severity,
        title=title,
        where=where,
        steps=steps,
        value=value,
        limit=limit,
        unit=unit,
        advice=advice or entry.advice,
        snippet=entry.snippet,
        frameworks=entry.frameworks,
    )
