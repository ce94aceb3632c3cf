"""What a person reads on three journeys: a newcomer, a run that fails, traces of another program; and the bar above."""

import itertools
import json
import re

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis import step_cost
from amp_core.findings import diagnosis
from amp_core.text.formatting import duration
from pages.parts.words import unbroken
from tests.serve.running import app
from tests.synthetic import write
from tests.traces.made import training
from tests.waiting import wait_for

VERDICT = "22 of 375 steps after calibration were skipped because the loss scale grows too often"
ORIGIN = "Origin: tokens.weight (weight gradients), in 14 of 22 skips after calibration"
PATCH = "init_scale=2.0**14"
MAX_SCREENS = 3
HEIGHT = "() => document.querySelector('[data-testid=\"stMain\"]').scrollHeight / window.innerHeight"
TOP_OF_FIRST_CHART = "() => document.querySelector('.js-plotly-plot').getBoundingClientRect().top"
END_OF_FIRST_CHART = "() => document.querySelector('.js-plotly-plot').getBoundingClientRect().bottom"
TICKS = """() => [...document.querySelector('.js-plotly-plot').querySelectorAll('.xtick text')]
  .map((one) => one.getBoundingClientRect()).map(({left, right}) => [left, right])"""
LEGEND_END = "() => document.querySelector('.js-plotly-plot .legend').getBoundingClientRect().right"
WHOLE_PLOT = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(chart => {
  const {_size} = chart._fullLayout, {t, b} = chart.layout.margin;
  const reserved = parseFloat(getComputedStyle(chart.parentElement).containIntrinsicHeight);
  const inView = chart.getBoundingClientRect().height <= chart.closest('.stElementContainer').clientHeight + 1;
  return inView && _size.h >= reserved - t - b - 2}).length"""
"""Charts whose legend takes nothing from the plot, and that are not cut off."""
RANGES = """() => [...document.querySelectorAll('.js-plotly-plot')]
  .filter(c => c._fullLayout.xaxis.title.text === 'step')
  .map(c => c._fullLayout.xaxis.range.map(Math.round))"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """An app with the samples alone."""
    with app(tmp_path_factory.mktemp("journeys") / "runs") as running:
        yield running


def follow(tab, name):
    tab.rest()  # a link that is drawn anew under the mouse takes no click
    tab.page.get_by_role("link", name=name, exact=True).first.click()
    tab.rest()


def drawn(tab):
    """The first chart begins on the first screen, and the page has no more than `MAX_SCREENS`."""
    tab.page.locator(".js-plotly-plot .main-svg").first.wait_for()
    tab.rest()  # a chart further down may be drawn first
    assert tab.page.evaluate(TOP_OF_FIRST_CHART) < 900
    assert tab.page.evaluate(HEIGHT) <= MAX_SCREENS


def test_a_newcomer_reads_what_this_is_and_dismisses_the_tour_for_good(library, new_tab):
    tab = new_tab().open(f"{library.base}/")
    tab.reads("shows whether PyTorch training in mixed precision is healthy, what it loses, what it gains over FP32")
    tab.reads("Nothing wrong was found", "Nothing needs to change")
    drawn(tab)
    follow(tab, "Open fp16-overflow")
    tab.reads(
        "The sample fp16-overflow is open.", "Against fp32", VERDICT, ORIGIN, "convergence parity unknown (1 seed)"
    )
    assert PATCH in tab.page.locator('[data-testid="stCode"]').first.inner_text()
    drawn(tab)
    follow(tab, "See it on Compare")
    tab.reads(VERDICT, ORIGIN, "6.71 × slower, 18.3\u00a0% less memory, convergence parity unknown (1 seed)")
    drawn(tab)
    follow(tab, "Overview")
    tab.page.get_by_role("button", name="Dismiss").click()
    tab.rest()
    tab.open(f"{library.base}/?run=sample/fp16-underflow")  # a new session
    tab.reads("Against fp32")
    assert not tab.page.get_by_text("New here?").count()
    assert not tab.exceptions() and not tab.wrong


def test_the_reader_of_a_failing_run_comes_from_the_verdict_to_the_tensor(library, new_tab):
    tab = new_tab().open(f"{library.base}/?run=sample/fp16-overflow")
    tab.reads("1 warning found.", VERDICT, ORIGIN, "What to change")
    follow(tab, "Loss scale")
    tab.reads(
        VERDICT,
        ORIGIN,
        PATCH,
        "40 steps of 400 (10.0\u00a0%) skipped",
        "Skipped steps 40 of 400 (10.0\u00a0%), baseline 0 of 400",
    )
    tab.reads("began at 2³⁴, ended at 2¹⁷ and ranged from 2¹⁶ to 2³⁴", "2¹⁴ is recommended")
    drawn(tab)
    follow(tab, "Number ranges")
    tab.reads(VERDICT, ORIGIN, "hold infinities or NaN, first in head, only at step 0")
    drawn(tab)
    follow(tab, "Layer detail")  # opens on the origin
    tab.reads("tokens.weight (weight gradients, float32) first held infinities or NaN at step 0")
    drawn(tab)
    tab.open(f"{library.base}/layer-detail?run=sample/fp16-overflow&kind=weight_grad&layer=tokens.weight&steps=0-60")
    tab.reads("tokens.weight (weight gradients", "Magnitudes")
    drawn(tab)
    follow(tab, "Memory")  # the steps stay
    tab.reads(VERDICT, "Peak tensor memory 3.06\u00a0MiB, at the start of backward: mostly activations")
    assert "steps=0-60" in tab.page.url
    assert not tab.exceptions() and not tab.wrong


def test_dropped_traces_become_a_run_whose_answer_stands_beside_the_field(library, new_tab, tmp_path):
    trace = tmp_path / "step.pt.trace.json"
    trace.write_text(json.dumps(training()))
    tab = new_tab().open(f"{library.base}/library")
    tab.upload("first", trace)
    answer = tab.page.get_by_text("step is in the library and chosen")
    answer.wait_for()
    assert answer.bounding_box()["y"] < 900
    (head,) = library.runs.rglob("step*/run.json")
    run = load_run(head.parent)
    verdict = diagnosis(run, diagnose(run)).verdict.removesuffix(".")
    follow(tab, "Overview")
    tab.reads(verdict)
    follow(tab, "Step cost")
    tab.reads(verdict, f"A step takes {unbroken(duration(step_cost(run).step_us / 1e6))}")
    drawn(tab)
    follow(tab, "Tensor cores")
    tab.reads(verdict, "GEMM/conv on tensor cores", "Where kernel time goes")
    noise = tmp_path / "noise.json"
    noise.write_text("no trace")
    tab.open(f"{library.base}/library")
    tab.upload("first", noise)
    tab.reads("noise.json is not a profiler trace")
    assert not tab.exceptions() and not tab.wrong


def test_the_bar_stays_on_a_small_screen_and_charts_share_their_zoom(library, new_tab):
    tab = new_tab()
    tab.page.set_viewport_size({"width": 1366, "height": 768})
    tab.open(f"{library.base}/loss-scale?run=sample/fp16-overflow")
    tab.page.locator(".js-plotly-plot .main-svg").nth(1).wait_for()
    plot = tab.page.locator(".js-plotly-plot .nsewdrag").first

    def crossed():  # what loads above the chart moves it away from the pointer
        box = plot.bounding_box()
        tab.page.mouse.move(box["x"] + 100, box["y"] + 60)
        tab.page.mouse.move(box["x"] + 120, box["y"] + 60)
        return tab.page.locator(".ampscope-crosshair").count() == 2 and plot.bounding_box() == box

    wait_for(crossed)
    box = plot.bounding_box()
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 220, box["y"] + 60, steps=4)
    tab.page.mouse.up()
    wait_for(lambda: tab.page.evaluate(RANGES)[0][0] > 20)
    wait_for(lambda: len({tuple(one) for one in tab.page.evaluate(RANGES)}) == 1)
    tab.page.evaluate("() => document.querySelector('[data-testid=\"stMain\"]').scrollTo(0, 500)")
    bar = tab.page.locator(".st-key-bar")
    wait_for(lambda: 0 <= bar.bounding_box()["y"] < 20)
    assert re.search(r"Run\b.*Baseline\b.*Steps\b", bar.inner_text(), re.DOTALL)
    assert not tab.exceptions() and not tab.wrong


def test_a_run_that_ended_is_still_there_after_a_reload_of_start(library, new_tab):
    write(library.runs / "ended", "healthy")
    tab = new_tab().open(f"{library.base}/start?run=run/ended&followed=run/ended")
    tab.reads("See its overview", "Start another run")
    assert not tab.exceptions() and not tab.wrong


def test_an_address_that_names_no_page_shows_overview_and_says_so(library, new_tab):
    tab = new_tab().open(f"{library.base}/nonsense?run=sample/fp16-healthy")
    tab.reads("There is no page nonsense here. This is Overview", "Nothing wrong was found")
    assert not tab.page.get_by_role("dialog").count()
    follow(tab, "Loss scale")
    assert not tab.page.get_by_text("There is no page").count()
    assert not tab.exceptions()


def test_format_lab_answers_on_the_first_screen_of_a_laptop(library, new_tab):
    tab = new_tab()
    tab.page.set_viewport_size({"width": 1366, "height": 768})
    tab.open(f"{library.base}/format-lab?run=sample/fp16-overflow")
    for section in ("Number", "Blocks of 8 and 4 bits"):
        tab.page.get_by_role("tab", name=section).click()
        tab.page.locator(".js-plotly-plot .main-svg").first.wait_for()
        wait_for(lambda: tab.page.evaluate(END_OF_FIRST_CHART) < 768)
    tab.page.get_by_role("tab", name="Glossary").click()
    tab.page.get_by_text("Precision map shows which operator").first.wait_for()
    assert tab.page.evaluate(HEIGHT) * 768 < 2700


@pytest.mark.whole
def test_charts_with_many_labels_can_be_read_on_a_phone(library, new_tab):
    tab = new_tab()
    tab.page.set_viewport_size({"width": 390, "height": 900})
    tab.open(f"{library.base}/format-lab?run=sample/fp16-overflow")
    tab.page.locator(".js-plotly-plot .main-svg").first.wait_for()
    ticks = sorted(tab.page.evaluate(TICKS))
    assert len(ticks) > 3 and all(right <= left + 1 for (_, right), (left, _) in itertools.pairwise(ticks))
    tab.open(f"{library.base}/step-cost?run=sample/fp16-overflow")
    tab.page.locator(".js-plotly-plot .main-svg").first.wait_for()
    wait_for(lambda: tab.page.evaluate(WHOLE_PLOT) == 1)
    assert tab.page.evaluate(LEGEND_END) <= 390
