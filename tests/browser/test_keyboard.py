"""A walk with the keyboard only: first page, Start a run, the run's Overview, and Compare with two runs.

No clicks, and no focus set by a script: an element that Tab does not reach cannot be used. Wherever the walk uses an
element, the focus must be visible.
"""

import pytest

from amp_core import RunError, load_run
from tests.serve.running import app
from tests.synthetic import write
from tests.waiting import wait_for

MOST = 120
"""So many times Tab is pressed in search of one thing."""
NAME = """() => {
  const one = document.activeElement;
  const labels = one.labels ? [...one.labels].map(label => label.innerText) : [];
  return [one.getAttribute('aria-label'), ...labels, one.innerText].find(text => text && text.trim()) || '';
}"""
BOX = """() => {
  const {x, y, width, height} = window.ampWatched.closest('[data-testid]').getBoundingClientRect();
  return {x: Math.max(0, x - 6), y: Math.max(0, y - 6), width: width + 12, height: height + 12};
}"""


@pytest.fixture
def walker(new_tab, tmp_path):
    """A page of an app with one FP32 run, and the folder of runs."""
    write(tmp_path / "runs" / "reference", "fp32")
    with app(tmp_path / "runs") as server:
        tab = new_tab().open(f"{server.base}/")
        yield tab, server.runs


def go_to(tab, name):
    """Press Tab until the element called `name` has the focus, and check that the focus is visible."""
    met = []
    for _ in range(MOST):
        tab.page.keyboard.press("Tab")
        names = tab.page.evaluate(NAME)
        met.append(names.split("\n") if len(names) < 80 else [])  # the page itself can have the focus, for scrolling
        if name in met[-1]:  # the name of an icon is on a separate line
            break
    else:
        raise AssertionError(f"Tab does not come to {name!r}; it met {met}")
    assert tab.page.evaluate("() => (window.ampWatched = document.activeElement).matches(':focus-visible')"), name
    focused = focus_screenshot(tab)
    tab.page.evaluate("() => window.ampWatched.blur()")
    plain = focus_screenshot(tab)
    tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Tab")  # the browser continues from the last focus
    assert tab.page.evaluate("() => document.activeElement === window.ampWatched"), name
    assert focused != plain, f"the focus on {name!r} cannot be seen"


def focus_screenshot(tab):
    """A screenshot of the element that had the focus, with a few pixels around it."""
    tab.page.wait_for_timeout(400)  # a ring may fade in
    return tab.page.screenshot(clip=tab.page.evaluate(BOX))


def press(tab, key):
    tab.page.keyboard.press(key)
    tab.rest()


def heading(tab, text):
    tab.page.wait_for_function(f"() => document.querySelector('h1')?.innerText === {text!r}")
    tab.rest()


def ended(folder):
    try:
        return load_run(folder).status == "finished"
    except RunError:
        return False


@pytest.mark.whole
def test_from_the_first_page_to_a_comparison_without_a_mouse(walker):
    tab, runs = walker
    go_to(tab, "Start a run")
    press(tab, "Enter")
    heading(tab, "Start a run")
    go_to(tab, "Steps")
    press(tab, "Control+a")
    tab.page.keyboard.type("12")
    press(tab, "Enter")
    go_to(tab, "Start")
    tab.page.keyboard.press("Enter")  # from now on the page is live and never idle
    wait_for(lambda: ended(runs / "text-gpt-tiny-fp16-1"))
    tab.page.get_by_role("link", name="See its overview").wait_for()
    tab.rest()
    go_to(tab, "See its overview")
    press(tab, "Enter")
    heading(tab, "Overview")
    assert "run=run%2Ftext-gpt-tiny-fp16-1" in tab.page.url

    go_to(tab, "Compare")
    press(tab, "Enter")
    heading(tab, "Compare")
    chosen = tab.page.get_by_test_id("stMultiSelect").first
    tab.reads("Against reference")
    assert "reference" in chosen.inner_text() and "text-gpt-tiny-fp16-1" in chosen.inner_text()

    go_to(tab, "Runs, the baseline first")
    press(tab, "Backspace")  # removes the last one …
    tab.reads("Choose two runs or more")
    tab.page.keyboard.type("fp16-1")
    press(tab, "Enter")  # … and typing adds it again
    tab.reads("Against reference")
    press(tab, "Escape")
    go_to(tab, "Log loss axis")
    press(tab, "Space")
    assert not tab.exceptions() and not tab.wrong
