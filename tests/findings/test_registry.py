"""A rule and its entry are registered together, and the registry decides the order of findings."""

import json
from pathlib import Path

import pytest

from amp_core import Run
from amp_core.findings import FAMILIES, GUIDE, RULES, SEVERITIES, Finding, diagnose
from amp_core.findings.model import FAMILY_NAMES, Entry
from amp_core.findings.registry import PAIRED_RULES, paired_rule, rule
from tests.edited_package import run_edited_copy
from tests.synthetic import SCENARIOS

BY_HARM = [
    "recording-incomplete",
    "fp16-parameters",
    "custom-function-dtype",
    "bce-banned",
    "mask-constant-overflow",
    "graphed-callable-cache",
    "no-gradients",
    "update-without-step",
    "unscale-per-microbatch",
    "missing-scaler-update",
    "optimizer-step-bypasses-scaler",
    "rank-ended",
    "rank-scale-desync",
    "bf16-model-in-fp16",
    "activation-overflow",
    "eps-rounds-to-zero",
    "optimizer-eps-rounds-to-zero",
    "half-model",
    "batchnorm-poisoned",
    "loss-nonfinite",
    "loss-diverged",
    "scale-collapse",
    "fp16-without-scaler",
    "gradient-underflow",
    "clip-before-unscale",
    "scaled-gradient-penalty",
    "autocast-cache-no-grad",
    "lost-weight-updates",
    "lost-weight-decay",
    "average-stands-still",
    "half-accumulation",
    "amp-loss-gap",
    "branch-always-skipped",
    "shared-backoff",
    "scheduler-steps-on-skip",
    "scale-unbounded",
    "scaler-state-not-restored",
    "scaler-with-bf16",
    "checkpoint-dtype-mismatch",
    "backward-under-autocast",
    "compile-autocast-mismatch",
    "autocast-not-in-thread",
    "autocast-inactive",
    "logged-scaled-values",
    "anomaly-mode-with-scaler",
    "no-tensor-cores-on-device",
    "kernels-off-tensor-cores",
    "launch-bound",
    "host-syncs",
    "layout-transposes",
    "unaligned-dims",
    "tf32-baseline",
    "memory-not-lower",
    "watch-overhead",
    "calibration-skips",
]
"""Codes from the most harmful to the most harmless. Rules that are newer may stand anywhere between them."""

MADE_UP = """
from amp_core.findings.model import Entry, Finding
from amp_core.findings.registry import make_finding, paired_rule, rule
from amp_core.store.run import Run

TEXTS = dict(what="It is made up.", signal="Nothing at all.", threshold="Every run.", advice="It is so. Leave it.")
PAIR = Entry(code="made-up-pair", severity="warning", family="Made up", order=7, **TEXTS)


def finding(code):
    return [make_finding(code, "Made up", "nowhere", unit="runs")]


@rule(Entry(code="made-up", severity="warning", family="Made up", order=205, follows=("first-made-up",), **TEXTS))
def made_up(run: Run) -> list[Finding]:
    return finding("made-up")


@rule(Entry(code="last-made-up", severity="warning", family="Speed and memory", order=9999, **TEXTS))
def last_made_up(run: Run) -> list[Finding]:
    return finding("last-made-up")


@rule(Entry(code="first-made-up", severity="warning", family="Made up", order=5, **TEXTS))
def first_made_up(run: Run) -> list[Finding]:
    return finding("first-made-up")


@paired_rule(PAIR)
def made_up_pair(run: Run, baseline: Run) -> list[Finding]:
    return finding("made-up-pair")
"""
SHOWN = """
import contextlib, io, json
from streamlit.testing.v1 import AppTest
from amp_core import diagnose, load_run
from amp_core.__main__ import main
from amp_core.findings import FAMILIES, GUIDE
from amp_core.store.writer import RunWriter

with RunWriter("run") as writer:
    writer.append("steps", {"step": [0, 1], "loss": [2.0, 1.0]})
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    code = main(["diagnose", "run", "--json", "--mute", "last-made-up", "--fail-on", "warning"])
app = AppTest.from_file("app.py", default_timeout=300).run()
app.switch_page("pages/findings_guide.py").run()
assert not app.exception, app.exception
run = load_run("run")
print(json.dumps({
    "alone": [(f.code, f.follows) for f in diagnose(run)],
    "paired": [f.code for f in diagnose(run, run)],
    "families": {name: [e.code for e in entries] for name, entries in FAMILIES.items()},
    "cli": [code, [f["code"] for f in json.loads(printed.getvalue())["findings"]]],
    "page": sorted(e.label.split("**")[1] for e in app.expander),
    "tabs": [tab.label.rpartition(" (")[0] for tab in app.tabs],
    "guide": sorted(GUIDE),
}))
"""


def test_findings_are_in_the_order_of_harm() -> None:
    codes = [rule.__name__.replace("_", "-") for rule in RULES]
    assert [code for code in codes if code in set(BY_HARM)] == BY_HARM
    orders = [GUIDE[code].order for code in codes]
    assert orders == sorted(orders) and len({entry.order for entry in GUIDE.values()}) == len(GUIDE)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_diagnose_orders_findings_by_severity_then_cause_then_harm(scenario: str, runs: dict[str, Run]) -> None:
    findings = diagnose(runs[scenario])
    places = [(SEVERITIES.index(f.severity), bool(f.follows), GUIDE[f.code].order) for f in findings]
    assert places == sorted(places)


def test_codes_that_an_entry_follows_are_known() -> None:
    assert {code for entry in GUIDE.values() for code in entry.follows + entry.follows_in_place} <= set(GUIDE)


def test_the_families_of_the_guide_are_in_a_fixed_order() -> None:
    assert tuple(FAMILIES) == FAMILY_NAMES and all(FAMILIES.values())


def test_a_new_module_of_rules_is_registered_diagnosed_listed_and_shown(tmp_path: Path) -> None:
    """Only the module is added to the product."""
    printed = run_edited_copy(tmp_path, {}, SHOWN, files={"amp_core/findings/rules/made_up.py": MADE_UP})
    document = json.loads(printed.splitlines()[-1])
    assert document["alone"] == [["first-made-up", ""], ["last-made-up", ""], ["made-up", "first-made-up"]]
    assert document["paired"] == ["first-made-up", "last-made-up", "made-up-pair", "made-up"]
    families = document["families"]
    assert list(families) == [*FAMILY_NAMES, "Made up"]
    assert families["Made up"] == ["first-made-up", "made-up-pair", "made-up"]
    assert families["Speed and memory"][-1] == "last-made-up"
    assert document["cli"] == [1, ["first-made-up", "made-up"]]
    codes = {"first-made-up", "last-made-up", "made-up", "made-up-pair"}
    assert set(document["page"]) == set(document["guide"]) == codes | set(GUIDE)
    assert document["tabs"] == list(families)


def entry(code: str = "tf32-baseline") -> Entry:
    return Entry(
        code=code,
        severity="info",
        family="None",
        order=0,
        what="One.",
        signal="Two.",
        threshold="Three.",
        advice="Four.",
    )


def test_a_code_has_one_entry() -> None:
    with pytest.raises(ValueError, match="'tf32-baseline' has a guide entry already"):
        rule(entry())(lambda _: [])


def test_a_code_has_one_rule_of_each_kind() -> None:
    def second(_: Run, __: Run | None = None) -> list[Finding]:
        return []

    with pytest.raises(ValueError, match=r"'tf32-baseline' has a rule already: amp_core\..*\.tf32_baseline"):
        rule(GUIDE["tf32-baseline"])(second)
    with pytest.raises(ValueError, match=r"'amp-loss-gap' has a rule already: amp_core\..*\.amp_loss_gap_to"):
        paired_rule(GUIDE["amp-loss-gap"])(second)
    assert second not in RULES and second not in PAIRED_RULES
