"""What is wrong with a run, how one can tell, and what to do: rules from `Run` to a list of `Finding`.

    from amp_core import diagnose, load_run

    for finding in diagnose(load_run("runs/a")):
        print(finding.severity, finding.code, finding.where, finding.advice)

A rule is a function `Run -> list[Finding]`. It stands in a module of `rules/` beside its guide entry, which explains
its code. Every module of that package is loaded. A rule fires only where the numbers leave no doubt; what it cannot
know it does not say.
"""

from dataclasses import replace

from amp_core.findings import rules
from amp_core.findings.first_cause import DATA, RATE, Cause, first_cause
from amp_core.findings.model import SEVERITIES, Entry, Finding, Severity
from amp_core.findings.registry import FAMILIES, GUIDE, PAIRED_RULES, RULES, load
from amp_core.store.run import Run, check_run

__all__ = [
    "FAMILIES",
    "GUIDE",
    "RULES",
    "SEVERITIES",
    "Cause",
    "Entry",
    "Finding",
    "Severity",
    "diagnose",
    "first_cause",
]

load(rules)


def diagnose(run: Run, baseline: Run | None = None) -> list[Finding]:
    """What the rules find in `run`, the worst first and causes before what follows from them; empty where all is well.

    With `baseline`, a run of the same task in FP32, also what shows only beside it. Raises `RunError` for damaged
    tables.
    """
    check_run(run)
    if baseline is not None:
        check_run(baseline, "baseline")
    findings = [finding for rule in RULES for finding in rule(run)]
    if baseline is not None:
        findings += [finding for rule in PAIRED_RULES for finding in rule(run, baseline)]
    findings = [replace(f, follows=_follows(f, findings)) for f in findings]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), bool(f.follows)))


def _follows(finding: Finding, findings: list[Finding]) -> str:
    """Code of the finding that this one is a consequence of; empty where there is none."""
    own = finding.where in (DATA, RATE)  # no module is to blame, so no finding of one is its cause
    entry = GUIDE[finding.code]
    for code in (*entry.follows, *entry.follows_in_place):
        places = {f.where for f in findings if f.code == code}
        if own and code != "loss-nonfinite":
            continue
        if places and (code in entry.follows or finding.where in places):
            return code
    return ""
