"""The first minute of a new user: a sample with its findings, the tour, the line of code; and the three answers of
Overview."""

import pytest

from amp_core.store.writer import RunWriter
from amp_core.text.glossary import TERMS
from pages.parts.overview import findings
from tests.pages.conftest import words
from tests.synthetic import write


def samples(home):
    write(home.samples / "fp16-healthy", "healthy")
    write(home.samples / "fp16-overflow", "overflowing")


def test_the_first_page_opens_a_sample_with_findings_tour_and_the_one_line(home, open_app):
    samples(home)
    app = open_app()
    assert "Nothing wrong was found" in words(app)
    assert "New here? The sample **fp16-healthy** is open." in words(app) and "fp16-healthy is open\n" in words(app)
    links = {p.proto.label: p.proto.query_string for p in app.get("page_link")}
    assert links["Open fp16-overflow"] == "run=sample%2Ffp16-overflow" and "Start a run" in links
    assert "Open fp16-underflow" not in links  # this installation has no such sample
    assert any(f'into="{home.runs.as_posix()}/mine"' in c.value for c in app.code)
    next(b for b in app.button if b.label == "Dismiss").click().run()
    assert "New here?" not in words(app)


def test_the_users_own_runs_have_no_tour(home, open_app):
    samples(home)
    write(home.runs / "a", "healthy")
    assert "New here?" not in words(open_app(run="run/a"))


def test_the_gain_is_relative_to_fp32_of_the_same_task(home, open_app):
    write(home.runs / "a", "healthy")
    assert "the library has no FP32 run of the same task" in words(open_app(run="run/a"))
    write(home.runs / "b", "fp32")
    app = open_app(run="run/a")
    assert "against b." in words(app) and "Nothing needs to change." in words(app)
    link = next(p.proto for p in app.get("page_link") if p.proto.label == "See it on Compare")
    assert link.query_string == "run=run%2Fa&with=run%2Fb&with=run%2Fa"
    assert "This is FP32, the baseline for other recipes." in words(open_app(run="run/b"))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_slowdown_by_16_bits_on_a_cpu_is_explained(home, open_app, device):
    same = {"workload": "text-gpt", "size": "tiny", "device": device, "seed": 0}
    for name, precision, step_ms in (("a", "fp16", 30.0), ("b", "fp32", 10.0)):
        with RunWriter(home.runs / name, config=same | {"precision": precision}) as writer:
            count = 100
            times = [step_ms + step % 3 / 10 for step in range(count)]
            writer.append("steps", {"step": range(count), "loss": [2.0] * count, "step_ms": times})
    page_text = words(open_app(run="run/a"))
    assert "slower" in page_text
    assert ("numerics carry over to a GPU, times do not" in page_text) == (device == "cpu")


def test_unrecorded_values_are_not_shown_as_zero(home, open_app):
    with RunWriter(home.runs / "a") as writer:
        writer.append("steps", {"step": [0, 1], "skipped": [None, None], "step_ms": [1.0, 1.0]})
    app = open_app(run="run/a")
    assert [card.label for card in app.metric] == ["Step time"]
    assert "Not recorded: loss, loss scale, skipped steps, samples/s, peak memory." in words(app)
    assert "Skipped steps were not recorded." in words(app)


def test_every_term_links_to_an_existing_page():
    assert {term.page for term in TERMS.values()} <= set(findings.PAGES)


def test_a_page_without_data_offers_a_sample_that_has_them(home, open_app):
    samples(home)
    write(home.runs / "a", "bare")
    app = open_app("pages/number_ranges.py", run="run/a")
    next(b for b in app.button if b.label == "See it on a sample run").click().run()
    assert app.title[0].value == "Number ranges" and app.session_state["run"] == "sample/fp16-healthy"
    assert app.get("plotly_chart") and not app.exception
