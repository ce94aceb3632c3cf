"""The documents of `--json`: their version and their keys, of every command that has the flag, as docs/reading.md lists
them. Scripts depend on them: within a version keys are added, and none is renamed or removed."""

import dataclasses
import json
import re

import pytest

from amp_core import Finding, load_run
from amp_core.__main__ import main
from amp_core.analysis import compare
from amp_core.analysis.comparison.document import comparison_document
from amp_core.cli.tune import as_json
from amp_core.settings.training import TrainConfig
from amp_core.tune.max_batch import MaxBatch, Trial
from amp_core.tune.result import Tuned
from tests.paths import ROOT, SAMPLE_RUNS
from tests.traces.made import training, write

DIAGNOSIS = ("verdict", "cause", "where", "origin", "evidence", "advice", "patch", "skips", "loss_scale")


def listed():
    """By document, the keys in the table of docs/reading.md; not those in brackets, which belong to one of them."""
    section = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8").split("## JSON documents")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, flags=re.MULTILINE)[2:]
    return {name.replace("`", ""): set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", keys))) for name, keys in rows}


def printed(capsys, *argv):
    assert main([str(part) for part in argv]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("diagnose", ("diagnose", SAMPLE_RUNS / "fp16-underflow")),
        ("compare --localise", ("compare", "--localise", SAMPLE_RUNS / "fp32", SAMPLE_RUNS / "bf16")),
        ("what-if", ("what-if", SAMPLE_RUNS / "bf16-blocks", "--formats", "nvfp4")),
        ("forecast", ("forecast", "--workload", "digits-cnn", "--gpu", "H100")),
        ("env", ("env",)),
    ],
)
def test_a_command_prints_the_keys_that_the_page_lists(name, argv, capsys):
    document = printed(capsys, *argv, "--json")
    assert next(iter(document)) == "schema" and document["schema"] == 1
    assert set(document) - {"schema"} == listed()[name]


def test_two_traces_print_the_keys_that_the_page_lists(tmp_path, capsys):
    files = [write(tmp_path / f"{name}.json", training()) for name in ("a", "b")]
    assert set(printed(capsys, "compare", *files, "--json")) - {"schema"} == listed()["compare of two traces"]


def test_comparisons_have_the_keys_that_the_page_lists():
    document = comparison_document(compare([load_run(SAMPLE_RUNS / "fp32"), load_run(SAMPLE_RUNS / "bf16")]))
    assert document["schema"] == 1 and set(document) - {"schema"} == listed()["compare"]


def test_searches_have_the_keys_that_the_page_lists():
    trial = Trial(**{f.name: None for f in dataclasses.fields(Trial)} | {"batch_size": 8, "fits": True})
    largest = as_json(TrainConfig(device="cpu"), MaxBatch(8, None, None, True, (trial,)))
    assert set(largest) == listed()["tune --max-batch"]
    search = Tuned("finished", "digits-cnn", "tiny", "cpu", 1.0, 1.0).to_json()
    assert {*search, "out", "code"} == listed()["tune"]


def test_findings_have_their_fields(capsys):
    document = printed(capsys, "diagnose", SAMPLE_RUNS / "fp16-underflow", "--json")
    assert set(document["diagnosis"]) == set(DIAGNOSIS)
    fields = {field.name for field in dataclasses.fields(Finding)}
    assert {"code", "severity", "title", "where", "steps", "value", "limit", "unit", "advice", "snippet"} <= fields
    assert document["findings"] and all(set(finding) == fields for finding in document["findings"])
