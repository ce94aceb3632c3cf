"""How fast the app is in a browser, and what an accessibility audit says of its pages. A script, not a test.

    python -m tests.browser.measure                        # speeds, on a run of 10,000 steps that it makes
    python -m tests.browser.measure --rounds 5             # five times, each in a server and a browser of its own
    python -m tests.browser.measure --axe node_modules/axe-core/axe.min.js     # and the audit

Seconds of a change are from the click to the last change of what is to be seen, the waiting for that it stays still not
counted: what a table lays into its canvas for screen readers, a third of a second later, is not. Those of the first
page are to its verdict; above it stands an app that says one word, as what Streamlit itself takes in this browser.
Beside the seconds stands where they went: processor time of the server's process, what came over the WebSocket, and
processor time of the browser's main thread, which hold on a busy machine too. Of several rounds each line has the
medians, and the lowest and the highest seconds. A server is up as soon as it answers; pages are changed in the one of
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

from tests.browser.conftest import FLAGS
from tests.pages.conftest import pages
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
PATIENCE: dict[str, Any] = {"timeout": 60_000, "polling": 50}  # asking at each frame would make the browser draw frames
ONE_WORD = 'import streamlit as st\n\nst.success("up")\n'
ALERT = '[data-testid="stMain"] [data-testid="stAlert"]'
DRAWN = f"() => performance.now() - window.ampChanged > {STILL_MS} ? window.ampChanged - window.ampClicked : false"
FIRST = f"""new MutationObserver((_, observer) => {{
  if (!document.querySelector('{ALERT}')) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => {{window.ampFirst = performance.now()}}));  // painted, once that is run
}}).observe(document, {{subtree: true, childList: true}});"""
"""Notes the milliseconds from the request of a page until its verdict is on the screen."""
AXE_OPTIONS = "{resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"
HEAD = f"{'':28} {'s':>6} {'lowest':>7} {'highest':>8} {'server ms':>10} {'kB':>7} {'browser ms':>11}\n"


@dataclass
class Cost:
    """What something took: processor time (ms) of server and browser, and bytes over the WebSocket."""

    server_ms: float
    received: float
    browser_ms: float


class Meter:
    """Counts for a page of the browser what it costs: `meter.begin()`, something happens, `meter.end()`."""

    def __init__(self, page: Page, server: Server) -> None:
        self._server = psutil.Process(server.process.pid)
        self._devtools = page.context.new_cdp_session(page)
        self._devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._devtools.send("Network.enable")
        self._devtools.on("Network.webSocketFrameReceived", self._count)
        self._received = 0.0
        self._began = self._now()

    def begin(self) -> None:
        """From here on."""
        self._began = self._now()

    def end(self) -> Cost:
        """Up to here."""
        now, began = self._now(), self._began
        return Cost(now.server_ms - began.server_ms, now.received - began.received, now.browser_ms - began.browser_ms)

    def _count(self, event: dict[str, Any]) -> None:
        frame = event["response"]
        self._received += len(frame["payloadData"]) * (3 / 4 if frame["opcode"] == 2 else 1)  # binary comes as base64

    def _now(self) -> Cost:
        used = self._server.cpu_times()
        metrics = {m["name"]: m["value"] for m in self._devtools.send("Performance.getMetrics")["metrics"]}
        return Cost(1000 * (used.user + used.system), self._received, 1000 * metrics["TaskDuration"])


@dataclass
class Table:
    """What each line of the table was in each round."""

    lines: dict[str, list[tuple[float, Cost]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, seconds: float, cost: Cost) -> None:
        """One round of a line; `seconds` are NaN for what happens by the clock."""
        self.lines[what].append((seconds, cost))

    def write(self) -> None:
        """All of them, in the order in which they came first."""
        sys.stdout.write(HEAD)
        for what, found in self.lines.items():
            seconds = [s for s, _ in found]
            times = [f"{t:.2f}" if t == t else "" for t in (median(seconds), min(seconds), max(seconds))]
            cost = [median(getattr(c, name) for _, c in found) for name in ("server_ms", "received", "browser_ms")]
            numbers = f"{cost[0]:10.0f} {cost[1] / 1000:7.0f} {cost[2]:11.0f}"
            sys.stdout.write(f"{what:28} {times[0]:>6} {times[1]:>7} {times[2]:>8} {numbers}\n")


def first_page(browser: Browser, server: Server, what: str, table: Table) -> None:
    """From the address to the verdict on the screen, in a browser that knows nothing of the app yet."""
    page = browser.new_page(viewport=SIZE)
    page.add_init_script(FIRST)
    meter = Meter(page, server)
    page.goto(server.base, wait_until="domcontentloaded")
    seen = page.wait_for_function("() => window.ampFirst", **PATIENCE).json_value()
    table.add(what, float(seen) / 1000, meter.end())
    page.close()


def changes(page: Page, server: Server, table: Table) -> None:
    """From the click on a page's name to its title standing there and the page being drawn."""
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
    """What a second of a live run of 10,000 steps costs, of which some come on every second."""
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


def audit(page: Page, base: str, axe: str) -> int:
    """Print what axe finds on each page; gives the number of serious violations."""
    serious = 0
    for address in pages().values():
        page.goto(f"{base}/{'' if address == 'overview' else address}?run=sample%2Ffp16-overflow")
        page.wait_for_selector("h1", timeout=60_000)
        page.wait_for_timeout(2500)
        page.evaluate(axe)
        for found in page.evaluate(f"async () => (await axe.run(document, {AXE_OPTIONS})).violations"):
            grave = found["impact"] in ("serious", "critical")
            serious += grave
            nodes = found["nodes"]
            sys.stdout.write(f"{address}: {found['impact']} {found['id']} × {len(nodes)}: {nodes[0]['html'][:140]}\n")
    sys.stdout.write(f"{serious} serious or critical violations\n")
    return serious


def one_round(browser: Browser, aside: Path, table: Table) -> None:
    """All that is measured, once."""
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
    """Measure, and audit where asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure; the table has the medians")
    asked = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    table = Table()
    with sync_playwright() as playwright:
        for _ in range(1 if asked.axe else asked.rounds):
            browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
            with tempfile.TemporaryDirectory(prefix="ampscope-measure-") as aside:
                if asked.axe:
                    with serving(Path(aside) / "runs") as server:
                        return audit(browser.new_page(viewport=SIZE), server.base, asked.axe.read_text())
                one_round(browser, Path(aside), table)
            browser.close()
    table.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
