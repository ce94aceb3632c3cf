"""Faults in forms that the zoo does not have are named, and sound trainings that look odd have no warnings."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amp_core import load_run
from amp_core.findings import GUIDE, diagnose
from tests.findings.other_forms import FAULTS, HEALTHY, Form
from tests.findings.zoo import ZOO


def _params(forms: list[Form]) -> list[object]:
    return [pytest.param(f, id=f.train.__name__, marks=() if f.each_time else pytest.mark.whole) for f in forms]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of these faults itself
        yield


@pytest.mark.parametrize("form", _params(FAULTS))
def test_a_fault_in_another_form_is_named_with_its_place(form: Form, tmp_path: Path) -> None:
    for framework in ("accelerate", "lightning"):
        if form.train.__name__.startswith(framework):
            pytest.importorskip(framework)
    with _quietly():
        form.train(tmp_path / "run")
    findings = diagnose(load_run(tmp_path / "run"))
    named = [f for f in findings if f.code in form.code.split("|")]
    assert named, [(f.code, f.where) for f in findings]
    assert form.where in named[0].where
    assert named[0].where


def test_every_code_has_two_forms_beside_the_first_of_the_zoo() -> None:
    forms = Counter(code for form in FAULTS for code in form.code.split("|"))
    cases = Counter(case.code for case in ZOO)
    assert not [code for code in GUIDE if cases[code] + forms[code] < 3]


@pytest.mark.parametrize("form", _params(HEALTHY))
def test_a_sound_training_in_another_form_has_no_warnings(form: Form, tmp_path: Path) -> None:
    with _quietly():
        form.train(tmp_path / "run")
    findings = diagnose(load_run(tmp_path / "run"))
    assert not [(f.code, f.where, f.title) for f in findings if f.severity != "info"]
