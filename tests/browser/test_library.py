"""Actions on runs in the Library, end to end in a browser: label, delete, undo, compare, share."""

import pytest

from amp_core import load_run
from amp_core.library.labels import label_of
from amp_core.store.packing import unpack
from tests.serve.running import app
from tests.synthetic import write
from tests.waiting import wait_for

HEADER, ROW = 35, 35
"""Pixels of the table's header and of its rows, which are drawn on a canvas."""


@pytest.fixture
def library(new_tab, tmp_path):
    """The Library of an app with two runs, the first of which is chosen."""
    for name in ("first", "second"):
        write(tmp_path / "runs" / name, "healthy", steps=30)
    with app(tmp_path / "runs") as server:
        tab = new_tab().open(f"{server.base}/").open(f"{server.base}/library?run=run%2Ffirst")
        yield tab, server.runs


def downloaded(page):
    """The file of the open popover. Streamlit forgets it if two passes end before the browser fetches it, as on a busy
    machine while the table still reads verdicts."""
    for _ in range(5):
        with page.expect_download() as coming:
            page.get_by_test_id("stDownloadButton").get_by_role("button").click()
        if coming.value.failure() is None:
            break
    return coming.value


def test_label_delete_undo_compare_and_share(library, tmp_path):
    tab, runs = library
    page = tab.page
    actions = page.locator(".st-key-library-actions")

    actions.get_by_role("button", name="Rename, tag").click()
    page.get_by_label("Name", exact=True).fill("Baseline")
    page.get_by_label("Tags, with commas between").fill("paper, lstm")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("The label of first was saved.").wait_for()
    wait_for(lambda: label_of(runs / "first").tags == ("paper", "lstm"))
    page.keyboard.press("Escape")
    tab.rest()
    assert label_of(runs / "first").name == "Baseline" and "Baseline" in actions.inner_text()

    actions.get_by_role("button", name="Delete").click()
    page.get_by_text("first was deleted").wait_for()
    assert not (runs / "first").exists() and "run=run%2Ffirst" not in page.url
    tab.rest()
    page.get_by_role("button", name="Undo", exact=True).click()
    page.get_by_text("first was restored.").wait_for()
    tab.rest()
    assert len(load_run(runs / "first").steps) == 30 and label_of(runs / "first").tags == ("paper", "lstm")
    assert "run=run%2Ffirst" in page.url and not page.get_by_text("Deleted:").count()
    wait_for(lambda: "Baseline" in actions.inner_text())  # the run that was restored is chosen again

    actions.get_by_role("button", name="Share").click()
    download = downloaded(page)
    packed = tmp_path / download.suggested_filename
    download.save_as(packed)
    assert packed.name == "first.zip" and len(load_run(unpack(packed, tmp_path / "there")).steps) == 30
    link = page.get_by_test_id("stCode").get_by_text("?run=").inner_text()
    page.keyboard.press("Escape")

    table = page.get_by_test_id("stDataFrame").first
    compare = actions.get_by_role("button", name="Compare these 2")
    for _ in range(5):  # a canvas has no elements to wait for
        tab.rest()
        for row in (0, 1):  # the user's runs come first; the chosen one is ticked, and unticking it chooses the other
            # `click` waits until the table, which moves with what is above it, has come to rest.
            table.click(position={"x": 16, "y": HEADER + (row + 0.5) * ROW})
            tab.rest()
            if compare.count():
                break
        if compare.count():
            break
    compare.click()
    page.get_by_text("Against").first.wait_for()
    tab.rest()
    chosen = page.get_by_test_id("stMultiSelect").first.inner_text()
    assert "Baseline" in chosen and "second" in chosen

    tab.open(link.strip())
    assert (
        page.locator("h1").first.inner_text() == "Overview" and "Baseline" in page.get_by_test_id("stMain").inner_text()
    )
    assert not tab.exceptions() and not tab.wrong
