"""A real server and a real headless Chromium, both on the loopback address.

Without Chromium these tests are skipped with a reason; with AMPSCOPE_REQUIRE_BROWSER=1 they fail instead.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, Playwright, sync_playwright

from tests.serve.running import Server, app
from tests.waiting import DEADLINE_S

FLAGS = (
    "--no-sandbox",  # the sandbox needs privileges that containers rarely have; only our own pages are opened
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PROBES = ("/_stcore/health", "/_stcore/host-config")
"""Streamlit's page looks for its server below each part of the address; those that are not there are 404."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder: they need the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One app for all tests in this folder, already visited once."""
    with app(tmp_path_factory.mktemp("app") / "runs") as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sentence = "no chromium on this machine; install Debian's package chromium to run the browser tests"
        if os.environ.get("AMPSCOPE_REQUIRE_BROWSER") == "1":
            pytest.fail(sentence)
        pytest.skip(sentence)
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        yield browser
        browser.close()


def launch(playwright: Playwright, executable: str) -> Browser:
    """Start it without services that use the network."""
    return playwright.chromium.launch(executable_path=executable, args=list(FLAGS))


@dataclass
class Tab:
    """A page of the browser, and its errors."""

    page: Page
    wrong: list[str] = field(default_factory=list)

    def open(self, url: str) -> "Tab":
        """Open `url` and wait until the app has drawn the page and is idle."""
        self.page.goto(url, wait_until="domcontentloaded")
        self.page.wait_for_selector("h1")
        self.rest()
        return self

    def rest(self) -> None:
        """Wait until no script runs: elements of an earlier pass that are still drawn ignore input."""
        self.page.wait_for_timeout(1000)  # on a busy machine the indicator of a running script appears late
        self.page.wait_for_function("() => !document.querySelector('[data-testid=\"stStatusWidget\"]')")

    def reads(self, *texts: str) -> None:
        """Wait until the page shows each text."""
        for text in texts:
            try:
                self.page.get_by_text(text).first.wait_for()
            except Error:
                shown = self.page.get_by_test_id("stMain").inner_text()
                pytest.fail(f"{self.page.url} does not show {text!r}; it shows:\n{shown}")

    def metric(self, label: str) -> str:
        """The value on the metric card of that label."""
        card = self.page.locator('[data-testid="stMetric"]', has_text=label).first
        return card.locator('[data-testid="stMetricValue"]').inner_text()

    def exceptions(self) -> list[str]:
        """Exceptions shown on the page."""
        return [e.inner_text() for e in self.page.locator('[data-testid="stException"]').all()]


@pytest.fixture
def new_tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """Open tabs: `new_tab(theme="dark")`. All are closed at the end."""
    contexts = []

    def go(theme: str = "light") -> Tab:
        context = chromium.new_context(viewport={"width": 1400, "height": 900}, color_scheme=theme)
        context.set_default_timeout(1000 * DEADLINE_S)
        contexts.append(context)
        tab = Tab(context.new_page())
        tab.page.on("pageerror", lambda error: tab.wrong.append(str(error)))
        tab.page.on("requestfailed", lambda r: tab.wrong.append(f"{r.url}: {r.failure}") if foreign(r.url) else None)
        tab.page.on("response", lambda r: tab.wrong.append(f"{r.status} {r.url}") if bad(r.status, r.url) else None)
        return tab

    yield go
    for context in contexts:
        context.close()


def foreign(url: str) -> bool:
    """Whether a request left this machine."""
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def bad(status: int, url: str) -> bool:
    """Whether a response is an error, or comes from elsewhere."""
    return foreign(url) or (status >= 400 and not url.endswith(PROBES))
