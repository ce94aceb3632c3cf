"""Behaviour that only a browser shows: live charts, uploads, themes, deep links on a fresh server."""

import itertools
import re
import sys

import pytest

from amp_core import RunError, load_run
from amp_core.store.packing import pack
from pages.parts.style import LAYOUT
from tests.app_test import pages
from tests.browser import picture
from tests.serve.running import app
from tests.synthetic import live, write
from tests.waiting import wait_for

ADDRESSES = ["/" if address == "overview" else f"/{address}" for address in pages().values()]


COUNTING = """new MutationObserver(() => {
  for (const chart of document.querySelectorAll('.js-plotly-plot')) if (chart.on && chart.again === undefined) {
    chart.again = 0;
    chart.on('plotly_beforeplot', () => {chart.again += 1});
  }}).observe(document, {subtree: true, childList: true});
document.fonts[Symbol.iterator] = function* () {};"""
"""Counts how often each chart is drawn after the first time. When the fonts of a page arrive depends on the machine, so
Plotly finds none to wait for."""
MARGINS = """() => [...document.querySelectorAll('.js-plotly-plot')].map((chart) => ({
  title: chart._fullLayout.title.text, again: chart.again, given: chart._fullLayout.margin,
  taken: chart._fullLayout._size}))"""


def recorded(folder):
    """The number of steps in the run's files."""
    try:
        return len(load_run(folder).steps)
    except RunError:
        return 0


def shown(tab):
    """The step in the progress line."""
    match = re.search(r"step ([\d,]+) of", tab.page.locator('[data-testid="stProgress"]').first.inner_text())
    return int(match[1].replace(",", "")) if match else 0


def pause(tab, advance, drawn):
    """Press Pause and return once new steps of the run are no longer drawn; returns the last drawn state.

    On a busy machine, ticks in progress are drawn after the press.
    """

    def holds():
        before = drawn()
        advance()
        tab.page.wait_for_timeout(3000)
        return drawn() == before

    tab.page.locator('[data-testid="stCheckbox"]', has_text="Pause").click()
    wait_for(holds)
    return drawn()


def test_start_a_run_watch_its_loss_move_reload_and_stop_it(server, new_tab):
    tab = new_tab().open(f"{server.base}/").open(f"{server.base}/start")
    tab.page.get_by_label("Steps", exact=True).fill("5000")
    tab.page.get_by_role("button", name="FP16 AMP").click()
    tab.page.get_by_role("button", name="BF16 AMP").click()  # as fast on a CPU as FP32
    tab.rest()
    tab.page.get_by_role("button", name="Start", exact=True).click()
    folder = server.runs / "text-gpt-tiny-bf16-1"
    tab.page.wait_for_selector('[data-testid="stMetric"]')
    assert "run=run%2Ftext-gpt-tiny-bf16-1" in tab.page.url
    first = tab.metric("Loss")
    wait_for(lambda: tab.metric("Loss") != first)

    before = recorded(folder)
    wait_for(lambda: shown(tab) >= before)

    tab.page.reload()
    tab.page.wait_for_selector('[data-testid="stProgress"]')
    wait_for(lambda: shown(tab) > before)
    second = new_tab().open(f"{server.base}/?run=run%2Ftext-gpt-tiny-bf16-1")  # Overview shows the live run too
    second.page.wait_for_selector('[data-testid="stProgress"]')

    # Within the page: while a script runs, Streamlit's toolbar has a Stop button too.
    tab.page.get_by_test_id("stMain").get_by_role("button", name="Stop").first.click()
    wait_for(lambda: recorded(folder) and load_run(folder).status == "stopped")
    for each in (tab, second):
        each.page.wait_for_selector('[data-testid="stMain"] >> text=stopped')
        assert not each.exceptions() and not each.wrong
    assert len(load_run(folder).steps) >= before


def test_a_live_run_is_followed_and_pause_holds_it(server, new_tab):
    with live(server.runs / "followed", steps=1000) as run:
        run.advance(5)
        tab = new_tab().open(f"{server.base}/?run=run%2Ffollowed")
        tab.page.wait_for_selector('[data-testid="stProgress"]')
        for _ in range(3):
            run.advance(10)
            wait_for(lambda: shown(tab) == run.step)
        held = pause(tab, lambda: run.advance(10), lambda: shown(tab))
        run.advance(10)
        tab.page.wait_for_timeout(3000)
        assert shown(tab) == held
    tab.page.get_by_test_id("stMain").get_by_text("finished").first.wait_for()  # the end of the run is not a chart
    assert not tab.exceptions() and not tab.wrong


def test_charts_of_two_live_runs_grow_and_pause_keeps_the_zoom(server, new_tab):
    longest = """() => Math.max(...document.querySelector('.js-plotly-plot').calcdata.map(
        points => points[0].trace.mode === 'lines' ? points[points.length - 1].x : 0))"""
    seen = "() => document.querySelector('.js-plotly-plot').layout.xaxis.range.join()"
    with live(server.runs / "side-a", "fp32", steps=500) as first, live(server.runs / "side-b", steps=500) as second:
        first.advance(20)
        second.advance(30)
        tab = new_tab().open(f"{server.base}/").open(f"{server.base}/compare?with=run%2Fside-a&with=run%2Fside-b")
        tab.page.wait_for_selector(".js-plotly-plot .xtick")
        for _ in range(2):
            first.advance(10)
            second.advance(10)
            wait_for(lambda: tab.page.evaluate(longest) == second.step - 1)
        lines = [line.inner_text() for line in tab.page.locator('[data-testid="stProgress"]').all()]
        assert "step 40 of 500" in lines[0] and "step 50 of 500" in lines[1]

        held = pause(tab, lambda: second.advance(10), lambda: tab.page.evaluate(longest))
        before = tab.page.evaluate(seen)
        box = tab.page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        tab.page.mouse.move(box["x"] + 0.3 * box["width"], middle)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
        tab.page.mouse.up()
        wait_for(lambda: tab.page.evaluate(seen) != before)
        tab.page.wait_for_timeout(1000)  # the zoom may be animated
        zoomed = tab.page.evaluate(seen)
        first.advance(50)
        tab.page.wait_for_timeout(3000)
        assert tab.page.evaluate(seen) == zoomed and tab.page.evaluate(longest) == held
    assert not tab.exceptions() and not tab.wrong


def test_upload_a_zip_and_a_folder(server, new_tab, tmp_path):
    packed = pack(write(tmp_path / "colleague", "overflowing"))
    tab = new_tab().open(f"{server.base}/").open(f"{server.base}/library")
    tab.upload("first", packed)
    tab.page.wait_for_selector("text=colleague is in the library and chosen")
    tab.rest()
    assert load_run(server.runs / "uploads" / "colleague").head.name == "colleague"
    tab.page.get_by_role("button", name="Other sources").click()
    tab.upload("last", write(tmp_path / "as-folder", "fp32"))
    tab.page.wait_for_selector("text=as-folder is in the library and chosen")
    tab.rest()
    assert len(load_run(server.runs / "uploads" / "as-folder").steps) == 120

    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(packed.read_bytes()[:5000])
    tab.upload("first", damaged)
    tab.page.wait_for_selector('[data-testid="stAlert"]:has-text("damaged")')
    assert sorted(p.name for p in (server.runs / "uploads").iterdir()) == ["as-folder", "colleague"]
    assert not tab.exceptions() and not tab.wrong


def test_a_row_of_the_library_chooses_its_run(server, new_tab):
    write(server.runs / "row-a", "healthy")
    write(server.runs / "row-b", "healthy")  # newer, so that row-a is not the first row, whichever other runs there are
    tab = new_tab().open(f"{server.base}/").open(f"{server.base}/library?run=run%2Frow-a")
    table = tab.page.locator('[data-testid="stDataFrame"]').first
    table.wait_for()
    for _ in range(5):  # the grid is a canvas: it has no elements to wait for
        tab.page.wait_for_timeout(1500)
        box = table.bounding_box()
        tab.page.mouse.click(box["x"] + 16, box["y"] + 52)  # below a header of 35 pixels, in the column of checkboxes
        tab.page.wait_for_timeout(1500)
        if "row-a" not in tab.page.url:
            break
    assert "run=" in tab.page.url and "row-a" not in tab.page.url
    assert not tab.exceptions() and not tab.wrong


def test_a_cell_of_a_heatmap_has_a_hover_text_and_opens_its_tensor(server, new_tab):
    write(server.runs / "cells", "overflowing")
    tab = new_tab().open(f"{server.base}/").open(f"{server.base}/number-ranges?run=run%2Fcells")
    plot = tab.page.locator(".js-plotly-plot").first
    plot.locator(".heatmaplayer image").wait_for()
    tab.rest()
    plot.scroll_into_view_if_needed()
    box, hover_text = plot.locator(".nsewdrag").first.bounding_box(), plot.locator(".hovertext")
    for place in range(40):  # no hover text for cells without a value and between rows
        across, down = 0.2 + 0.6 * place / 40, (0.35, 0.45, 0.55, 0.65)[place % 4]
        tab.page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
        tab.page.wait_for_timeout(200)
        if hover_text.count():
            break
    assert "of its nonzero values" in hover_text.text_content()
    assert plot.locator(".point").count() < 20  # although hardly any of its markers are drawn
    tab.page.mouse.down()
    tab.page.mouse.up()
    tab.page.wait_for_url("**/layer-detail?*layer=*")
    tab.rest()
    assert tab.page.locator("h1").first.inner_text() == "Layer detail"
    assert not tab.exceptions() and not tab.wrong


def test_deep_link_on_a_fresh_server(new_tab, tmp_path):
    write(tmp_path / "runs" / "deep", "overflowing")
    with app(tmp_path / "runs") as fresh:
        tab = new_tab().open(f"{fresh.base}/loss-scale?run=run%2Fdeep")
        tab.page.wait_for_selector('.st-key-bar [data-testid="stSelectbox"]')  # with our frame, not a bare page
        assert tab.page.locator("h1").first.inner_text() == "Loss scale"
        assert tab.metric("Skipped steps") == "8"
        assert "run=run%2Fdeep" in tab.page.url
        assert not tab.exceptions() and not tab.wrong


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.whole)])
def test_every_page_loads_without_errors_in_both_themes(server, new_tab, theme):
    write(server.runs / f"themed-{theme}", "overflowing")
    tab = new_tab(theme)
    tab.page.add_init_script(COUNTING)
    tab.open(f"{server.base}/")
    charts = []
    for address in ADDRESSES:
        tab.open(f"{server.base}{address}?run=run%2Fthemed-{theme}")
        background = tab.page.evaluate(
            "() => getComputedStyle(document.querySelector('[data-testid=\"stApp\"]')).backgroundColor"
        )
        lightness = sum(int(n) for n in re.findall(r"\d+", background)[:3]) / 3
        assert (lightness > 200) == (theme == "light"), (address, background)
        assert not tab.exceptions(), address
        levels = tab.page.evaluate("() => [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1])")
        assert levels[0] == 1 and all(b <= a + 1 for a, b in itertools.pairwise(levels)), (address, levels)
        assert not tab.page.locator("text=Failed to fetch").count()
        charts += tab.page.evaluate(MARGINS)
    assert not tab.wrong
    pushed = [c["title"] for c in charts if any(round(c["taken"][side]) > c["given"][side] for side in "lrtb")]
    assert len(charts) > 12 and len(pushed) <= 1, pushed  # see amp_core.figures.margins
    # A page that gets a scroll bar is drawn once more in the new width; on a busy machine that comes after its charts.
    again = [c["title"] for c in charts if c["again"]]
    assert len(again) <= len(charts) / 2, again  # see amp_core.figures.browser


def test_a_theme_chosen_in_the_menu_changes_the_charts_at_once(server, new_tab):
    write(server.runs / "switched", "overflowing")
    tab = new_tab().open(f"{server.base}/loss-scale?run=run%2Fswitched")
    tab.page.locator(".js-plotly-plot .xtick text").first.wait_for()
    looks = """() => {
      const of = (place, what) => getComputedStyle(document.querySelector(place))[what];
      return [of('.js-plotly-plot .main-svg', 'backgroundColor'), of('h1', 'color'), of('.gtitle', 'fill')]}"""
    ground, heading, title = tab.page.evaluate(looks)
    assert ground == "rgba(0, 0, 0, 0)" and title == heading
    tab.page.get_by_test_id("stMainMenu").click()
    tab.page.locator("text=Dark").first.click()
    wait_for(lambda: tab.page.evaluate(looks)[1] != heading)
    _, heading, title = tab.page.evaluate(looks)
    assert title == heading
    assert not tab.exceptions() and not tab.wrong


def test_the_help_of_the_screenshot_script_takes_no_screenshot(monkeypatch, capsys):
    monkeypatch.setattr(picture, "app", None)
    monkeypatch.setattr(sys, "argv", ["picture", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        picture.main()
    assert "sample_runs/loss-scale.png" in capsys.readouterr().out


def test_the_title_of_a_page_without_the_bar_is_below_the_header(new_tab):
    """As of an empty library, which has no run to choose in the bar."""
    page = new_tab().page
    content = "<div data-testid='stMainBlockContainer'><div data-testid='stVerticalBlock'><h1>Overview</h1></div></div>"
    header = "<header data-testid='stHeader' style='position: fixed; top: 0; left: 0; right: 0'></header>"
    page.set_content(f"<style>body {{margin: 0}} {LAYOUT}</style>{header}{content}")
    top, below = page.evaluate(
        "() => ['h1', 'header'].map((part) => document.querySelector(part).getBoundingClientRect())"
        ".map((box, i) => i ? box.bottom : box.top)"
    )
    assert top > below
