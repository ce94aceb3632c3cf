"""Of imported traces, the pages, the report, `diagnose` and its JSON give the same sentence and the same step time."""

import html
import json
import re
import shutil

import pytest

from amp_core import diagnose, load_run
from amp_core.__main__ import main
from amp_core.analysis import overview, step_cost
from amp_core.findings import first_sentence
from amp_core.report import report_html
from amp_core.traces import import_traces
from tests.pages.conftest import words
from tests.traces.families import FAMILIES, training_of
from tests.traces.made import run_of, training, write
from tests.traces.test_judged import H100, decoding
from tests.traces.test_recorded import FOLDER

RECORDED = sorted(file.name for file in FOLDER.glob("*.json.gz"))


def plain(text):
    return " ".join(text.replace("\u00a0", " ").split())


@pytest.mark.parametrize(
    "name", [name if name.startswith("cpu") else pytest.param(name, marks=pytest.mark.whole) for name in RECORDED]
)
def test_the_first_sentence_is_the_same_in_every_text(tmp_path, capsys, name):
    folder = import_traces([FOLDER / name], tmp_path / "run")
    run = load_run(folder)
    said, found = first_sentence(run), diagnose(run)
    main(["diagnose", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["first_sentence"] == said
    assert [f["title"] for f in document["findings"]] == [f.title for f in found]
    assert [f["win_ms"] for f in document["findings"]] == [f.win_ms for f in found]
    main(["diagnose", str(folder)])
    assert plain(said) in plain(capsys.readouterr().out)
    assert plain(said) in plain(html.unescape(re.sub(r"<[^>]+>", "", report_html([run]))))


@pytest.mark.parametrize("name", ["made", "mi250-training.json.gz", *FAMILIES])
def test_step_cost_and_overview_give_one_step_time(tmp_path, name):
    file = FOLDER / name
    if not file.exists():
        file = write(tmp_path / "t.json", training() if name == "made" else training_of(name))
    run = load_run(import_traces([file], tmp_path / "run"))
    shown = overview(run).speed.step_ms
    # Steps that the device marks end with their last kernel, and the gap to the next one counts in the window alone.
    assert step_cost(run).step_us / 1e3 == pytest.approx(shown, rel=0.01) or FAMILIES[name].marks == "whole"


def test_pages_say_what_diagnose_says(home, open_app):
    import_traces([FOLDER / "mi250-training.json.gz"], home.runs / "a")
    said = first_sentence(load_run(home.runs / "a"))
    app = open_app(run="run/a")
    assert not app.exception and plain(said) in plain(words(app))


def test_a_trace_that_says_what_to_win_without_a_finding_is_not_called_flawless(home, open_app, tmp_path):
    imported = run_of(tmp_path, decoding("step[DECODE bs=1]", busy_us=100), *H100)
    shutil.copytree(imported.path, home.runs / "a")
    run = load_run(home.runs / "a")
    assert not [finding for finding in diagnose(run) if finding.severity != "info"]
    shown, app = plain(html.unescape(re.sub(r"<[^>]+>", "", report_html([run])))), open_app(run="run/a")
    for text in (shown, plain(words(app))):
        assert "10 passes decode 1 token each" in text and "Nothing wrong" not in text
    assert not app.exception
