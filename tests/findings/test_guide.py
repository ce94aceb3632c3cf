"""The guide: an entry for each code that says what it is, what shows it, from where on, and what repairs it."""

import pytest

from amp_core.findings import FAMILIES, GUIDE, SEVERITIES, Entry


@pytest.mark.parametrize("entry", GUIDE.values(), ids=lambda e: e.code)
def test_an_entry_says_what_shows_it_and_what_repairs_it(entry: Entry) -> None:
    assert entry.severity in SEVERITIES
    for text in (entry.what, entry.signal, entry.threshold, entry.advice):
        assert len(text.split()) >= 2 and text.endswith((".", ")", "”")), text
    assert entry.advice.count(". ") == 1  # two sentences
    assert entry.snippet or entry.code == "calibration-skips"
    for code in (entry.snippet, *entry.frameworks.values()):
        compile(code, entry.code, "exec")
    assert set(entry.frameworks) <= {"Accelerate", "Transformers Trainer", "Lightning"}


def test_every_code_is_in_one_family() -> None:
    assert sum(len(entries) for entries in FAMILIES.values()) == len(GUIDE) == 50
