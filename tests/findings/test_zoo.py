"""Each fault of the zoo is detected with the right code and place; its healthy twin has no findings."""

from collections.abc import Callable
from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import GUIDE, RULES, diagnose
from tests.findings.zoo import ZOO, Case


@pytest.mark.parametrize("case", ZOO, ids=lambda c: c.name)
def test_the_fault_is_reported_at_its_place(case: Case, planted: Callable[[Case, Path], None], tmp_path: Path) -> None:
    planted(case, tmp_path / "run")
    run = load_run(tmp_path / "run").salvaged()
    run.validate(full=True)  # else it could not be reported, exported or shared
    assert bool(run.damage()) == (case.code == "damaged-table")
    findings = diagnose(run)
    result = [f for f in findings if f.code == case.code]
    assert result, [(f.code, f.where) for f in findings]
    assert case.where in result[0].where, result[0]
    assert case.benign or result[0].severity != "info"


FIRST = {case.code: case.name for case in reversed(ZOO)}
"""Of each code, the case whose twin is tried on each commit; --whole tries all."""


@pytest.mark.parametrize(
    "case",
    [case if FIRST[case.code] == case.name else pytest.param(case, marks=pytest.mark.whole) for case in ZOO],
    ids=lambda c: c.name,
)
def test_the_healthy_twin_has_no_findings(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path / "run", False)
    findings = diagnose(load_run(tmp_path / "run"))
    assert not [f for f in findings if f.severity != "info" or f.code == case.code]


def test_every_code_has_a_fault_a_rule_and_a_page_in_the_guide() -> None:
    rules = [rule.__name__.replace("_", "-") for rule in RULES]
    assert len(set(rules)) == len(rules)
    assert set(rules) == set(GUIDE) == {case.code for case in ZOO}
