"""The registry of rules: a decorator registers a rule with its guide entry, and `load` finds the modules.

    @rule(Entry(code="tf32-baseline", severity="warning", order=490, ...))
    def tf32_baseline(run: Run) -> list[Finding]:
        return [make_finding("tf32-baseline", title, where, unit="share of kernel time")]

`RULES`, `PAIRED_RULES`, `GUIDE` and `FAMILIES` are filled by `load` and stay the same objects.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from amp_core.findings.model import FAMILY_NAMES, Entry, Finding, Remedy, Severity
from amp_core.store.run import Run
from amp_core.text.formatting import raised

Rule = Callable[[Run], list[Finding]]
PairedRule = Callable[[Run, Run], list[Finding]]
"""Takes a run and its baseline, a run of the same task in FP32."""

RULES: list[Rule] = []
"""Rules on one run, in order of harm: causes before consequences."""
PAIRED_RULES: list[PairedRule] = []
"""Rules that compare a run with its baseline, in order of harm."""
GUIDE: dict[str, Entry] = {}
"""All entries by code."""
FAMILIES: dict[str, tuple[Entry, ...]] = {}
"""The entries by family, in order of harm within each family."""


@dataclass(frozen=True)
class _Registered:
    entry: Entry
    rule: Rule | None = None
    paired: PairedRule | None = None


_registered: dict[str, _Registered] = {}


def rule(entry: Entry) -> Callable[[Rule], Rule]:
    """Register the decorated function, which takes a run, as the rule of `entry`.

    Raises `ValueError` if the code already has another entry or another such rule.
    """

    def register(function: Rule) -> Rule:
        known = _known(entry)
        _refuse_second(entry.code, known.rule, function)
        _registered[entry.code] = replace(known, rule=function)
        return function

    return register


def paired_rule(entry: Entry) -> Callable[[PairedRule], PairedRule]:
    """Register the decorated function, which takes a run and its baseline, as a rule of `entry`.

    An entry may have a rule of each kind. Raises `ValueError` as `rule` does.
    """

    def register(function: PairedRule) -> PairedRule:
        known = _known(entry)
        _refuse_second(entry.code, known.paired, function)
        _registered[entry.code] = replace(known, paired=function)
        return function

    return register


def _known(entry: Entry) -> _Registered:
    known = _registered.get(entry.code, _Registered(entry))
    if known.entry != entry:
        raise ValueError(f"code {entry.code!r} has a guide entry already; give the new rule its own code")
    return known


def _refuse_second(code: str, known: Rule | PairedRule | None, new: Rule | PairedRule) -> None:
    # A rule of the same name is the same rule: Python executes a module again if its first import failed.
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"code {code!r} has a rule already: {known.__module__}.{known.__qualname__}")


def load(package: ModuleType) -> None:
    """Import every module of `package`, and sort all registered rules and entries."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    ordered = sorted(_registered.values(), key=lambda r: (r.entry.order, r.entry.code))
    RULES[:] = [r.rule for r in ordered if r.rule is not None]
    PAIRED_RULES[:] = [r.paired for r in ordered if r.paired is not None]
    entries = [_written(r.entry) for r in ordered]
    others = sorted({entry.family for entry in entries}.difference(FAMILY_NAMES))
    FAMILIES.clear()
    FAMILIES.update({name: tuple(e for e in entries if e.family == name) for name in (*FAMILY_NAMES, *others)})
    GUIDE.clear()
    GUIDE.update({entry.code: entry for family in FAMILIES.values() for entry in family})


def _written(entry: Entry) -> Entry:
    """The entry with its powers as people read them: 2⁻²⁴ for `2^-24`. Code keeps its own."""
    return replace(
        entry,
        what=raised(entry.what),
        signal=raised(entry.signal),
        threshold=raised(entry.threshold),
        advice=raised(entry.advice),
    )


def make_finding(
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
    """A finding with the guide's severity, advice, snippet and frameworks unless given. `remedy` replaces
    the last three, `advice` only the advice. Powers in title and advice, `2^14`, are written as 2¹⁴."""
    entry = GUIDE[code]
    remedy = remedy or Remedy(advice or entry.advice, entry.snippet, entry.frameworks)
    return Finding(
        code=code,
        severity=severity or entry.severity,
        title=raised(title),
        where=where,
        steps=steps,
        value=value,
        limit=limit,
        unit=unit,
        advice=raised(remedy.advice),
        snippet=remedy.snippet,
        frameworks=remedy.frameworks,
    )
