"""What is wrong with a run, how one can tell, and what to do: rules from `Run` to a list of `Finding`.

    from amp_core import diagnose, load_run

    for finding in diagnose(load_run("runs/a")):
        print(finding.severity, finding.code, finding.where, finding.advice)

A rule is a function `Run -> list[Finding]` in `RULES`. It fires only where the numbers leave no doubt; what it cannot
know it does not say.
"""

from collections.abc import Callable

from amp_core.findings.model import SEVERITIES, Finding, Severity
from amp_core.findings.scaling import (
    calibration_skips,
    fp16_without_scaler,
    loss_nonfinite,
    scale_collapse,
    scaler_with_bf16,
)
from amp_core.run import Run

__all__ = ["RULES", "SEVERITIES", "Finding", "Severity", "diagnose"]

RULES: tuple[Callable[[Run], list[Finding]], ...] = (
    loss_nonfinite,
    scale_collapse,
    fp16_without_scaler,
    scaler_with_bf16,
    calibration_skips,
)
"""All rules."""


def diagnose(run: Run) -> list[Finding]:
    """What the rules find in `run`, the worst first; empty where all is well. Raises `RunError` for damaged tables."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
