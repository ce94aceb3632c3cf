"""Every page, the report, `diagnose` and its JSON name the same cause, the same origin and the same numbers."""

import contextlib
import html
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from amp_core import Run, RunError, diagnose, findings, load_run
from amp_core.__main__ import main
from amp_core.cli import diagnose as command
from amp_core.findings import GUIDE, Finding, diagnosis
from amp_core.findings.registry import RULES
from amp_core.report import report_html
from amp_core.text.formatting import scale, sentence
from amp_core.traces import import_traces
from pages.parts.overview.findings import PAGES
from tests.app_test import OVERVIEW
from tests.findings.zoo import ZOO
from tests.pages.conftest import words
from tests.synthetic import SAMPLES, write
from tests.traces.test_importing import trace_of

DETAIL, COMPARE = "pages/layer_detail.py", "pages/compare_runs.py"
OF_A_RUN = (
    "pages/loss_scale.py",
    "pages/number_ranges.py",
    DETAIL,
    "pages/low_precision.py",
    "pages/update_losses.py",
    "pages/memory_use.py",
    "pages/step_cost.py",
    "pages/tensor_cores.py",
    "pages/precision_map.py",
    "pages/gpu_forecast.py",
)
RECORDED = sorted((Path(__file__).parents[1] / "traces" / "recorded").glob("*.json.gz"))
"""Parts of traces that other people recorded."""
FAULTS = [case for case in reversed(ZOO) if not case.benign]
ONE_PER_FAMILY = {GUIDE[case.code].family: case for case in FAULTS}.values()
ONE_PER_CODE = {case.code: case for case in ZOO}
RANKED = sorted(GUIDE.values(), key=lambda entry: (entry.order, entry.code))
MODULES = {entry.code: rule.__module__.rpartition(".")[2] for entry, rule in zip(RANKED, RULES, strict=True)}
ONE_PER_MODULE = {MODULES[case.code]: case for case in FAULTS}


def diagnosis_of(folder):
    run = load_run(folder).salvaged()
    return diagnosis(run, diagnose(run))


@contextlib.contextmanager
def one_diagnosis(run: Run, found: list[Finding]) -> Iterator[None]:
    """Within, the command opens this run, which has these findings, and diagnoses it no second time."""

    def opened(folder):
        assert Path(folder) == run.path
        return run

    def once(other, baseline=None):
        assert other is run and baseline is None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "load_run", opened)
        patch.setattr(findings, "diagnose", once)
        yield


def plain(text):
    """Text as `words` gives that of a page."""
    return text.replace("\\", "").replace("\u00a0", " ")


def check_pages(open_app, chain, pages):
    """Every page shows this diagnosis of the run `a`."""
    app = open_app(run="run/a")
    for page in (OVERVIEW, *pages):
        app = app if page == OVERVIEW else app.switch_page(page).run()
        assert not app.exception, page
        text = words(app)
        if "This page needs training steps" in text or chain.cause is None:
            continue
        assert plain(chain.verdict).removesuffix(".") in text, page
        assert plain(chain.began) in text, page
        evidence = chain.cause.evidence() if page == OVERVIEW else chain.evidence
        assert all(plain(part) in text for part in evidence), (page, evidence)
        shown_patch = "\n".join(code.value for code in app.code) if page == OVERVIEW else text
        first = chain.patch.partition("\n")[0]
        assert "`" in first or plain(first) in plain(shown_patch), (page, first)
        shown = [box.value for box in app.selectbox if box.label == "Tensor"]
        if page == DETAIL and shown and chain.origin is not None and chain.origin.kind:
            assert shown == [chain.origin.name]


def check_texts(folder, capsys, *, in_report=True):
    """The command, its JSON and the report say the same as the diagnosis, which is returned."""
    run = load_run(folder).salvaged()
    found = diagnose(run)
    chain = diagnosis(run, found)
    with one_diagnosis(run, found):
        assert main(["diagnose", str(folder), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)["diagnosis"]
        assert chain.cause is None or main(["diagnose", str(folder)]) == 0
        printed = plain(capsys.readouterr().out)
    assert (record["verdict"], record["evidence"]) == (chain.verdict, list(chain.evidence))
    assert (record["patch"], record["advice"]) == (chain.patch, chain.advice)
    assert (record["cause"], record["where"]) == (
        (chain.cause.code, chain.cause.where) if chain.cause else (None, None)
    )
    assert record["origin"] == (asdict(chain.origin) if chain.origin else None)
    if chain.cause is None:
        return chain
    shown = (chain.verdict, chain.began, *chain.cause.evidence(), *chain.measurements)
    assert all(plain(text) in printed for text in shown), shown
    assert all(line in printed for line in plain(chain.patch).splitlines()), chain.patch
    if not in_report:
        return chain
    if not len(run.steps) and not len(run.windows):  # a fault that lets no step happen: a report refuses such a run
        with pytest.raises(RunError, match="has no steps and no profiled window"):
            report_html([run])
        return chain
    report = plain(html.unescape(report_html([run])))
    assert all(plain(text).removesuffix(".") in report for text in shown), shown
    assert plain(chain.patch) in report, chain.patch
    return chain


def test_every_place_names_the_origin_of_an_overflow(home, open_app, capsys):
    folder = home.runs / "a"
    shutil.copytree(SAMPLES["fp16-overflow"], folder)
    chain = diagnosis_of(folder)
    assert (chain.origin.name, chain.origin.skips, chain.origin.all_skips) == ("tokens.weight", 14, 22)
    assert "init_scale = 2³⁴" in chain.verdict
    assert chain.patch == "scaler = torch.amp.GradScaler(device_type, init_scale=2.0**14, growth_interval=2000)"
    check_pages(open_app, check_texts(folder, capsys), ("pages/loss_scale.py", DETAIL))


def test_an_underflow_begins_in_the_first_tensor_of_backward_and_says_which_scale_to_take(capsys):
    chain = diagnosis_of(SAMPLES["fp16-underflow"])
    assert (chain.origin.name, chain.origin.kind) == ("head", "output_grad")
    assert "init_scale=2.0**14" in chain.patch and "2¹⁴" in chain.advice
    assert any("audits measured 0.0219 %" in text for text in chain.evidence)
    check_texts(SAMPLES["fp16-underflow"], capsys)


def test_the_patch_of_an_underflow_is_the_scale_that_the_run_recommends(tmp_path):
    below, vanished = (case for case in ZOO if case.code == "gradient-underflow")
    below.write(tmp_path / "below", True)
    chain = diagnosis_of(tmp_path / "below")
    # Which power of two depends on the CPU: the largest gradient lies close to one.
    assert 2.0**7 <= chain.window.lowest < chain.window.recommended < chain.window.highest <= 2.0**18
    power = f"2.0**{math.log2(chain.window.recommended):.0f}"
    assert chain.recommends_scale and scale(chain.window.recommended) in chain.advice
    assert f"init_scale={power}, growth_interval=" in chain.patch
    assert f"init_scale={power}" in chain.cause.frameworks["Lightning"]
    assert chain.to_dict()["loss_scale"]["recommended"] == chain.window.recommended
    vanished.write(tmp_path / "vanished", True)
    chain = diagnosis_of(tmp_path / "vanished")  # no scale is known that would keep zeros
    assert "torch.bfloat16" in chain.patch and not chain.recommends_scale
    assert not chain.measurements and chain.to_dict()["loss_scale"]["recommended"] is None


def test_a_healthy_run_has_no_origin_of_a_fault():
    chain = diagnosis_of(SAMPLES["fp16-healthy"])
    assert (chain.cause, chain.began, chain.patch) == (None, "", "")
    assert chain.origin.name == "blocks.0.attn.proj.bias"  # where its one skipped step began


@pytest.mark.whole
@pytest.mark.parametrize("name", SAMPLES)
def test_every_page_of_each_sample(name, home, open_app, capsys):
    shutil.copytree(SAMPLES[name], home.runs / "a")
    check_pages(open_app, check_texts(home.runs / "a", capsys), OF_A_RUN)


@pytest.mark.whole
@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=lambda case: case.code)
def test_every_page_of_a_fault_of_each_family(case, planted, home, open_app, capsys):
    planted(case, home.runs / "a")
    check_pages(open_app, check_texts(home.runs / "a", capsys), OF_A_RUN)


def test_each_module_of_rules_has_a_planted_fault():
    assert set(ONE_PER_MODULE) == set(MODULES.values())


def test_a_run_whose_steps_were_not_recorded_says_why(planted, home, open_app):
    (case,) = (case for case in ZOO if case.name == "no_steps")
    planted(case, home.runs / "a")
    assert load_run(home.runs / "a").steps.empty
    check_pages(open_app, diagnosis_of(home.runs / "a"), ("pages/loss_scale.py", "pages/step_cost.py"))


@pytest.mark.whole
@pytest.mark.parametrize("module", ONE_PER_MODULE)
def test_overview_and_the_page_of_the_evidence_of_a_fault_of_each_module(module, planted, home, open_app):
    planted(ONE_PER_MODULE[module], home.runs / "a")
    chain = diagnosis_of(home.runs / "a")
    assert chain.cause is not None
    page, _ = PAGES.get(GUIDE[chain.cause.code].page, (COMPARE, ""))
    check_pages(open_app, chain, [page] if page != COMPARE else [])  # Compare needs a second run


@pytest.mark.whole
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_report_and_command_of_each_fault(case, planted, tmp_path, capsys):
    """Commands of every fault; a report, which draws all charts too, of one fault of each module of rules."""
    planted(case, tmp_path / "run")
    check_texts(tmp_path / "run", capsys, in_report=ONE_PER_MODULE[MODULES[case.code]] is case)


def test_every_place_names_the_cause_of_an_imported_trace(home, open_app, capsys):
    import_traces([next(file for file in RECORDED if "alexnet" in file.name)], home.runs / "a")
    chain = check_texts(home.runs / "a", capsys)
    assert chain.cause is not None
    check_pages(open_app, chain, ("pages/step_cost.py",))


@pytest.mark.whole
@pytest.mark.parametrize("file", [None, *RECORDED], ids=lambda file: file.name.partition(".")[0] if file else "made")
def test_every_page_of_a_trace(file, home, open_app, tmp_path, capsys):
    import_traces([file or trace_of(tmp_path)], home.runs / "a")
    check_pages(open_app, check_texts(home.runs / "a", capsys), OF_A_RUN)


@pytest.mark.whole
def test_compare_shows_the_diagnosis_of_each_run(home, open_app):
    shutil.copytree(SAMPLES["fp16-overflow"], home.runs / "a")
    write(home.runs / "b", "collapsing")
    text = words(open_app(COMPARE, **{"with": ["run/a", "run/b"]}))
    for name in "ab":
        chain = diagnosis_of(home.runs / name)
        called = load_run(home.runs / name).name
        assert f"{called}: **{plain(sentence(chain.verdict))}** {plain(chain.began)}" in text
