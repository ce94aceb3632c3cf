"""A real server and a real headless Chromium, both on the loopback address.

Without Chromium these tests are skipped with a reason; with AMPSCOPE_REQUIRE_BROWSER=1 they fail instead.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, Playwright, sync_playwright
from playwright.sync_api import TimeoutError as BrowserTimeout

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
    "--js-flags=--no-opt --no-maglev",  # to optimize the code of a page takes longer than it runs
)
PROBES = ("/_stcore/health", "/_stcore/host-config")
"""Streamlit's page looks for its server below each part of the address; those that are not there are 404."""
SEEN_MS, MAX_LOG_CHARS = 10_000, 4000
"""How long a failed test waits for a page's text, and how much of the server's log it shows."""
UPLOAD_TRIES, UPLOAD_MS = 4, 30_000
"""How often a file is chosen at most, and how long its upload takes to begin on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder: they need the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the pages show where a test fails, and the last lines of the server's log."""
    report = yield
    used = getattr(item, "funcargs", {})
    if report.failed and report.when == "call":
        report.sections += [(tab.page.url, tab.seen()) for tab in getattr(used.get("new_tab"), "tabs", [])]
        if isinstance(running := used.get("server"), Server):
            report.sections.append((running.log.name, running.log.read_text(errors="replace")[-MAX_LOG_CHARS:]))
    return report


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
        self.page.wait_for_selector('[data-test-script-state="notRunning"][data-test-connection-state="CONNECTED"]')

    def upload(self, place: str, path: Path) -> None:
        """Choose a file, or a folder, in the `first` or `last` upload field; again if no upload begins.

        On a busy machine a field ignored a file now and then, and nothing of it reached the server: presumably the
        field was drawn anew at that moment. Once it ignored four in a row, so the last two tries load the page anew.
        """
        for left in reversed(range(UPLOAD_TRIES)):
            try:
                with self.page.expect_request("**/upload_file/**", timeout=UPLOAD_MS):
                    getattr(self.page.locator('input[type="file"]'), place).set_input_files(path)
                return
            except BrowserTimeout:
                if not left:
                    raise
                if left < UPLOAD_TRIES - 1:
                    self.open(self.page.url)

    def reads(self, *texts: str) -> None:
        """Wait until the page shows each text."""
        for text in texts:
            self.page.get_by_text(text).first.wait_for()

    def metric(self, label: str) -> str:
        """The value on the metric card of that label."""
        card = self.page.locator('[data-testid="stMetric"]', has_text=label).first
        return card.locator('[data-testid="stMetricValue"]').inner_text()

    def seen(self) -> str:
        """The text of the whole page, and its errors; why, if the browser does not answer."""
        try:
            return "\n".join([self.page.locator("body").inner_text(timeout=SEEN_MS), *self.wrong])
        except Error as error:
            return str(error)

    def exceptions(self) -> list[str]:
        """Exceptions shown on the page."""
        return [e.inner_text() for e in self.page.locator('[data-testid="stException"]').all()]


@dataclass
class Tabs:
    """Opens tabs."""

    browser: Browser
    tabs: list[Tab] = field(default_factory=list)

    def __call__(self, theme: str = "light") -> Tab:
        context = self.browser.new_context(  # drawn without a graphics card, moving parts keep a processor busy
            viewport={"width": 1400, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        context.set_default_timeout(1000 * DEADLINE_S)
        tab = Tab(context.new_page())
        self.tabs.append(tab)
        tab.page.on("pageerror", lambda error: tab.wrong.append(str(error)))
        tab.page.on("requestfailed", lambda r: tab.wrong.append(f"{r.url}: {r.failure}") if foreign(r.url) else None)
        tab.page.on("response", lambda r: tab.wrong.append(f"{r.status} {r.url}") if bad(r.status, r.url) else None)
        return tab


@pytest.fixture
def new_tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """Open tabs: `new_tab(theme="dark")`. All are closed at the end."""
    tabs = Tabs(chromium)
    yield tabs
    for tab in tabs.tabs:
        tab.page.context.close()


def foreign(url: str) -> bool:
    """Whether a request left this machine."""
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def bad(status: int, url: str) -> bool:
    """Whether a response is an error, or comes from elsewhere."""
    return foreign(url) or (status >= 400 and not url.endswith(PROBES))
