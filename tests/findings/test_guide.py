"""The guide has an entry for each code: its meaning, its signal, its threshold and its remedy."""

import ast
import re
from pathlib import Path

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import FAMILIES, GUIDE, SEVERITIES, Entry, rules
from tests.synthetic import SAMPLES


@pytest.mark.parametrize("entry", GUIDE.values(), ids=lambda e: e.code)
def test_an_entry_has_a_signal_and_a_remedy(entry: Entry) -> None:
    assert entry.severity in SEVERITIES
    for text in (entry.what, entry.signal, entry.threshold, entry.advice):
        assert len(text.split()) >= 2 and text.endswith((".", ")", "”")), text
    assert entry.advice.count(". ") == 1  # two sentences
    assert entry.snippet or entry.code == "calibration-skips"
    assert "2^" not in f"{entry.what} {entry.signal} {entry.threshold} {entry.advice}"  # powers are superscript
    for code in (entry.snippet, *entry.frameworks.values()):
        compile(code, entry.code, "exec")
    assert set(entry.frameworks) <= {"Accelerate", "Transformers Trainer", "Lightning"}


def test_every_code_is_in_one_family() -> None:
    entries = [entry for family in FAMILIES.values() for entry in family]
    assert {entry.code: entry for entry in entries} == GUIDE and len(entries) == len(GUIDE)


def graded() -> set[str]:
    """Codes that a rule reports with more than one severity."""
    modules = [ast.parse(path.read_text()) for path in Path(rules.__file__).parent.glob("*.py")]
    calls = [node for tree in modules for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "make_finding"]
    firsts = [call.args[0] for call in named if any(keyword.arg == "severity" for keyword in call.keywords)]
    one_function = {"e4m3-gradients", "quantized-gradient-underflow"}  # two rules that share the call
    return one_function | {first.value for first in firsts if isinstance(first, ast.Constant)}


@pytest.mark.parametrize("code", sorted(graded()))
def test_an_entry_describes_other_severities_of_its_findings(code: str) -> None:
    assert re.search("An error|[Aa] warning|[Ii]nformational", GUIDE[code].threshold)


def test_the_entry_on_calibration_has_advice_for_a_warning_and_for_info() -> None:
    info = next(f for f in diagnose(load_run(SAMPLES["fp16-healthy"])) if f.code == "calibration-skips")
    warning = next(f for f in diagnose(load_run(SAMPLES["fp16-overflow"])) if f.code == "calibration-skips")
    advice = GUIDE["calibration-skips"].advice
    assert info.severity == "info" and info.advice.endswith("Nothing needs to change.")
    assert warning.severity == "warning" and "growth_interval=2000" in warning.snippet
    assert "Nothing needs to change" not in advice and "growth_interval=2000" in advice and "init_scale" in advice
