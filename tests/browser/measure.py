"""The speed of the app in a browser, and an accessibility audit of its pages. A script, not a test.

    python -m tests.browser.measure                        # speeds, on a run of 10,000 steps that it makes
    python -m tests.browser.measure --rounds 5             # five times, each with a new server and browser
    python -m tests.browser.measure --axe node_modules/axe-core/axe.min.js     # instead, axe's rules on every page
    python -m tests.browser.measure --keyboard             # instead, what Tab reaches on every page

The time of a change is from the click to the last visible change, without the wait that confirms that nothing moves any
more; elements for screen readers, which a table adds a third of a second later, do not count. The time of the first
page is until its headline; the line above it is for an app that shows one word, i.e. the time of Streamlit itself in
this browser. Next to the seconds are costs that are also valid on a busy machine: processor time of the server, bytes
over the WebSocket, and processor time of the browser's main thread. With several rounds each line has the medians, and
the lowest and highest seconds. A server counts as started once it responds; page changes are measured on the server of
`ampscope serve`. Needs the test extra and Chromium; `npm install axe-core` brings the audit's rules.
"""

import argparse
import math
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.browser.accessibility import audit, walk
from tests.browser.conftest import FLAGS
from tests.serve.running import Server, app, serving
from tests.synthetic import live, write

STILL_MS = 400
"""A page that has not changed for so long is drawn."""
TICKS = 10
WATCH = """() => {
  window.ampChanged = undefined;
  document.addEventListener('click', (event) => {window.ampClicked = event.timeStamp}, {capture: true, once: true});
  const seen = (change) => !(change.target.closest?.('canvas') && (change.type === 'childList' ||
    change.target.nodeName !== 'CANVAS'));
  window.ampWatch?.disconnect();  // the one of the change before, which would take time too
  window.ampWatch = new MutationObserver((changes) => {if (changes.some(seen)) window.ampChanged = performance.now()});
  window.ampWatch.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
}"""
SIZE: ViewportSize = {"width": 1400, "height": 900}
# Polling at each frame would make the browser draw frames.
PATIENCE: dict[str, Any] = {"timeout": 60_000, "polling": 50}
ONE_WORD = 'import streamlit as st\n\nst.success("up")\n'
ALERT = '[data-testid="stMain"] [data-testid="stAlert"]'
DRAWN = f"() => performance.now() - window.ampChanged > {STILL_MS} ? window.ampChanged - window.ampClicked : false"
FIRST = f"""new MutationObserver((_, observer) => {{
  if (!document.querySelector('{ALERT}')) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => {{window.ampFirst = performance.now()}}));  // painted, once that is run
}}).observe(document, {{subtree: true, childList: true}});"""
"""Notes the milliseconds from the request of a page until its verdict is on the screen."""
HEAD = f"{'':28} {'s':>6} {'lowest':>7} {'highest':>8} {'server ms':>10} {'kB':>7} {'browser ms':>11}\n"


@dataclass
class Cost:
    """A cost: processor time (ms) of server and browser, and bytes over the WebSocket."""

    server_ms: float
    received: float
    browser_ms: float


class Meter:
    """Measures the cost of an action on a page: `meter.begin()`, the action, `meter.end()`."""

    def __init__(self, page: Page, server: Server) -> None:
        self._server = psutil.Process(server.process.pid)
        self._devtools = page.context.new_cdp_session(page)
        self._devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._devtools.send("Network.enable")
        self._devtools.on("Network.webSocketFrameReceived", self._count)
        self._received = 0.0
        self._began = self._now()

    def begin(self) -> None:
        """Start measuring."""
        self._began = self._now()

    def end(self) -> Cost:
        """The cost since `begin`."""
        now, began = self._now(), self._began
        return Cost(now.server_ms - began.server_ms, now.received - began.received, now.browser_ms - began.browser_ms)

    def _count(self, event: dict[str, Any]) -> None:
        frame = event["response"]
        # Binary payloads are base64.
        self._received += len(frame["payloadData"]) * (3 / 4 if frame["opcode"] == 2 else 1)

    def _now(self) -> Cost:
        used = self._server.cpu_times()
        metrics = {m["name"]: m["value"] for m in self._devtools.send("Performance.getMetrics")["metrics"]}
        return Cost(1000 * (used.user + used.system), self._received, 1000 * metrics["TaskDuration"])


@dataclass
class Table:
    """The lines of the table, with their values in each round."""

    lines: dict[str, list[tuple[float, Cost]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, seconds: float, cost: Cost) -> None:
        """Add a round of a line; `seconds` are NaN for periodic events."""
        self.lines[what].append((seconds, cost))

    def write(self) -> None:
        """Print all lines, in the order in which they were first added."""
        sys.stdout.write(HEAD)
        for what, rounds in self.lines.items():
            seconds = [s for s, _ in rounds]
            times = [f"{t:.2f}" if t == t else "" for t in (median(seconds), min(seconds), max(seconds))]
            cost = [median(getattr(c, name) for _, c in rounds) for name in ("server_ms", "received", "browser_ms")]
            numbers = f"{cost[0]:10.0f} {cost[1] / 1000:7.0f} {cost[2]:11.0f}"
            sys.stdout.write(f"{what:28} {times[0]:>6} {times[1]:>7} {times[2]:>8} {numbers}\n")


def first_page(browser: Browser, server: Server, what: str, table: Table) -> None:
    """The time from the address to the headline, in a browser with an empty cache."""
    page = browser.new_page(viewport=SIZE)
    page.add_init_script(FIRST)
    meter = Meter(page, server)
    page.goto(server.base, wait_until="domcontentloaded")
    seen = page.wait_for_function("() => window.ampFirst", **PATIENCE).json_value()
    table.add(what, float(seen) / 1000, meter.end())
    page.close()


def changes(page: Page, server: Server, table: Table) -> None:
    """The time from the click on a page's name until its title and the page are drawn."""
    meter = Meter(page, server)
    for turn in ("first visit", "again"):
        for name in ["Loss scale", "Number ranges", "Layer detail", "Memory", "Step cost", "Library", "Overview"]:
            page.evaluate(WATCH)
            meter.begin()
            page.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True).click()
            page.wait_for_function(f"() => document.querySelector('h1')?.innerText === {name!r}", **PATIENCE)
            drawn = page.wait_for_function(DRAWN, **PATIENCE).json_value()
            table.add(f"{name}, {turn}", float(drawn) / 1000, meter.end())


def ticks(page: Page, server: Server, table: Table) -> None:
    """The cost per second of a live run of 10,000 steps that grows every second."""
    with live(server.runs / "live", steps=20_000) as run:
        run.advance(10_000)
        meter = Meter(page, server)
        page.goto(f"{server.base}/?run=run%2Flive")
        page.wait_for_selector('[data-testid="stProgress"]', timeout=60_000)
        page.wait_for_timeout(5000)
        meter.begin()
        for _ in range(TICKS):
            run.advance(5)
            page.wait_for_timeout(1000)
        cost = meter.end()
    mean = Cost(cost.server_ms / TICKS, cost.received / TICKS, cost.browser_ms / TICKS)
    table.add("live tick, mean", math.nan, mean)


def one_round(browser: Browser, aside: Path, table: Table) -> None:
    """Measure everything once."""
    (aside / "one_word.py").write_text(ONE_WORD)
    with app(aside / "none" / "runs", aside / "one_word.py") as bare:
        first_page(browser, bare, "one word", table)
    with app(aside / "of_checkout" / "runs") as checkout:
        first_page(browser, checkout, "first page, `streamlit run`", table)
    with serving(aside / "runs") as server:
        first_page(browser, server, "first page", table)
        page = browser.new_page(viewport=SIZE)
        write(server.runs / "long", "healthy", steps=10_000)
        page.goto(f"{server.base}/?run=run%2Flong")
        page.wait_for_selector('[data-testid="stMetric"]', timeout=60_000)
        page.wait_for_timeout(2000)
        changes(page, server, table)
        page.close()
        ticks(browser.new_page(viewport=SIZE), server, table)


def main() -> int:
    """Measure, and audit if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    parser.add_argument("--keyboard", action="store_true", help="audit what Tab reaches")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure; the table has the medians")
    arguments = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    table = Table()
    with sync_playwright() as playwright:
        audits = arguments.axe or arguments.keyboard
        for _ in range(1 if audits else arguments.rounds):
            browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
            with tempfile.TemporaryDirectory(prefix="ampscope-measure-") as aside:
                if audits:
                    with serving(Path(aside) / "runs") as server:
                        faults = audit(browser, server.base, arguments.axe.read_text()) if arguments.axe else 0
                        faults += walk(browser.new_page(viewport=SIZE), server.base) if arguments.keyboard else 0
                        return min(faults, 1)
                one_round(browser, Path(aside), table)
            browser.close()
    table.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
