"""A real server and a real headless Chromium, both on the loopback address.

Where there is no Chromium these tests are skipped and say so; with AMPSCOPE_REQUIRE_BROWSER=1 they fail instead.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.serve.running import Server, app
from tests.waiting import DEADLINE_S

FLAGS = (
    "--no-sandbox",  # needs privileges that a container seldom has; only our own page is opened
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
    """Everything in this folder needs the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One app for all tests of this folder, already visited once."""
    with app(tmp_path_factory.mktemp("app") / "runs") as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        sentence = "no chromium on this machine; install Debian's package chromium to run the browser tests"
        if os.environ.get("AMPSCOPE_REQUIRE_BROWSER") == "1":
            pytest.fail(sentence)
        pytest.skip(sentence)
    with sync_playwright() as playwright:
        browser = launch(playwright, found)
        yield browser
        browser.close()


def launch(playwright: Playwright, executable: str) -> Browser:
    """Start it without anything that talks to the network by itself."""
    return playwright.chromium.launch(executable_path=executable, args=list(FLAGS))


@dataclass
class Tab:
    """A page of the browser, with what went wrong on it."""

    page: Page
    wrong: list[str] = field(default_factory=list)

    def open(self, url: str) -> "Tab":
        """Go there and wait until the app has drawn the page and rests."""
        self.page.goto(url, wait_until="domcontentloaded")
        self.page.wait_for_selector("h1")
        self.rest()
        return self

    def rest(self) -> None:
        """Wait until no script runs: what is still drawn of an earlier pass takes no input."""
        self.page.wait_for_timeout(1000)  # the sign that a script runs comes late on a busy machine
        self.page.wait_for_function("() => !document.querySelector('[data-testid=\"stStatusWidget\"]')")

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
