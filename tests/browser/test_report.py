"""The report in a real browser: opened from disk, it draws all charts without network requests or errors; its theme can
be changed, and it can be printed."""

import pytest

from amp_core import load_run
from amp_core.report import report_html
from amp_core.store.writer import RunWriter
from tests.synthetic import SAMPLES, write

PLOTS = """() => [...document.querySelectorAll('[data-chart]')].map((box) => box._fullLayout)
  .map(({title, _size}) => [title.text, _size.w, _size.h])"""


@pytest.fixture
def opened(chromium):
    """Opens a report: returns its page, and its errors and network requests."""
    contexts = []

    def go(file, theme="light"):
        context = chromium.new_context(viewport={"width": 1200, "height": 900}, color_scheme=theme, offline=True)
        contexts.append(context)
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("dialog", lambda d: wrong.append(d.message))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached")
        return page, wrong

    yield go
    for context in contexts:
        context.close()


def background(page):
    """Colour of the page."""
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.whole), "dark"])
def test_all_charts_are_drawn_without_network_or_errors(opened, tmp_path, theme):
    runs = [load_run(SAMPLES["fp32"]), load_run(SAMPLES["fp16-overflow"]), load_run(write(tmp_path / "p", "profiled"))]
    file = tmp_path / "report.html"
    file.write_text(report_html(runs), encoding="utf-8")
    page, wrong = opened(file, theme)
    boxes = page.locator("[data-chart]").count()
    assert boxes > 8 and page.locator("figure.drawn .main-svg >> nth=0").count()
    assert page.locator("[data-chart] .plot-container").count() == boxes
    assert not wrong
    before = background(page)
    assert before == ("rgb(252, 252, 250)" if theme == "light" else "rgb(17, 24, 27)")
    page.get_by_role("button", name="Light or dark").click()
    assert background(page) != before
    assert not wrong


def test_on_a_phone_plots_keep_their_size_and_the_page_does_not_scroll_sideways(opened, tmp_path):
    file = tmp_path / "report.html"
    runs = [load_run(SAMPLES["fp16-overflow"]), load_run(write(tmp_path / "p", "profiled"))]
    file.write_text(report_html(runs), encoding="utf-8")
    page, wrong = opened(file)
    page.set_viewport_size({"width": 390, "height": 900})
    page.reload()
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.wait_for_function(f"() => ({PLOTS})().every(([title, width, height]) => width > 120 && height > 35)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390 and not wrong


def test_a_hostile_name_is_shown_as_text(opened, tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>x</a>"
    with RunWriter(tmp_path / "evil", name=evil, config={"precision": evil}) as writer:
        writer.append("steps", {"step": [0, 1, 2], "loss": [2.0, 1.5, 1.0], "step_ms": [3.0, 3.0, 3.0]})
    run = load_run(tmp_path / "evil")
    file = tmp_path / "report.html"
    file.write_text(report_html([run, load_run(SAMPLES["fp32"])]), encoding="utf-8")
    page, wrong = opened(file)
    assert evil in page.inner_text("header")
    assert page.locator("main img, main script, a[href^='javascript']").count() == 0
    assert not wrong


def test_the_printed_report_is_light(opened, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(report_html([load_run(SAMPLES["fp32"])]), encoding="utf-8")
    page, wrong = opened(file, "dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert background(page) == "rgb(252, 252, 250)"
    widths = page.eval_on_selector_all(".main-svg", "all => all.map(e => e.getBoundingClientRect().width)")
    assert max(widths) <= 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert background(page) == "rgb(17, 24, 27)"
    assert page.pdf(format="A4")[:5] == b"%PDF-" and not wrong
