"""Diagnosis of a run: rules from `Run` to a list of `Finding`, each with its evidence and a remedy.

    from amp_core import diagnose, load_run

    for finding in diagnose(load_run("runs/a")):
        print(finding.severity, finding.code, finding.where, finding.advice)

A rule is a function `Run -> list[Finding]` in a module of `rules/`, beside the guide entry that explains its code.
Every module of that package is loaded. A rule fires only if the numbers leave no doubt.
"""

from dataclasses import replace

from amp_core.findings import rules
from amp_core.findings.diagnosis import Diagnosis, Origin, diagnosis, measured_underflow, skips_in_words
from amp_core.findings.first_cause import INPUT_DATA, LEARNING_RATE, Cause, first_cause
from amp_core.findings.fitting import fitted
from amp_core.findings.model import SEVERITIES, Entry, Finding, Severity
from amp_core.findings.registry import FAMILIES, GUIDE, PAIRED_RULES, RULES, load
from amp_core.findings.trace_sentence import first_sentence
from amp_core.store.run import Run, check_run

__all__ = [
    "FAMILIES",
    "GUIDE",
    "RULES",
    "SEVERITIES",
    "Cause",
    "Diagnosis",
    "Entry",
    "Finding",
    "Origin",
    "Severity",
    "diagnose",
    "diagnosis",
    "first_cause",
    "first_sentence",
    "measured_underflow",
    "skips_in_words",
]

load(rules)


def diagnose(run: Run, baseline: Run | None = None) -> list[Finding]:
    """The findings of all rules on `run`, the worst first and causes before their consequences; empty if all is well.
    Those of a trace are ordered by possible savings.

    With `baseline`, a run of the same task in FP32, also those of the rules that compare both. A damaged table is a
    finding, `damaged-table`; damaged `steps` raise `RunError`.
    """
    check_run(run)
    run = run.salvaged()
    run.damage()  # found before a rule reads a sound part of a damaged table
    if baseline is not None:
        check_run(baseline, "baseline")
        baseline = baseline.salvaged()
    findings = fitted(run, [finding for rule in RULES for finding in rule(run)])
    if baseline is not None:
        findings += [finding for rule in PAIRED_RULES for finding in rule(run, baseline)]
    findings = [replace(f, follows=_follows(f, findings)) for f in findings]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), bool(f.follows), -(f.win_ms or 0.0)))


def _follows(finding: Finding, findings: list[Finding]) -> str:
    """Code of the finding that caused this one; empty if there is none."""
    no_module = finding.where in (INPUT_DATA, LEARNING_RATE)  # then no finding about a module can be its cause
    entry = GUIDE[finding.code]
    for code in (*entry.follows, *entry.follows_in_place):
        places = {f.where for f in findings if f.code == code}
        if no_module and code != "loss-nonfinite":
            continue
        if places and (code in entry.follows or finding.where in places):
            return code
    return ""
