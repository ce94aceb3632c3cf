"""How fast the app is in a browser, and what an accessibility audit says of its pages. A script, not a test.

    python -m tests.browser.measure                        # speeds, on a run of 10,000 steps that it makes
    python -m tests.browser.measure --axe node_modules/axe-core/axe.min.js     # and the audit

Server time is from the click to the last change of the page, the waiting for that it stays still not counted. Needs the
test extra and Chromium; `npm install axe-core` brings the audit's rules.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import FLAGS
from tests.pages.conftest import pages
from tests.serve.running import app
from tests.synthetic import live, write

STILL_MS = 400
"""A page that has not changed for so long is drawn."""
WATCH = """() => {
  window.ampChanged = performance.now();
  new MutationObserver(() => { window.ampChanged = performance.now(); })
    .observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
}"""
DRAWN = f"() => window.ampChanged && performance.now() - window.ampChanged > {STILL_MS} ? window.ampChanged : false"
AXE_OPTIONS = "{resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"


def first_page(page: Page, base: str) -> float:
    """Seconds from the address to the verdict on the screen."""
    began = time.monotonic()
    page.goto(base, wait_until="domcontentloaded")
    page.wait_for_selector('[data-testid="stMain"] [data-testid="stAlert"]', timeout=60_000)
    return time.monotonic() - began


def change(page: Page, name: str) -> float:
    """Seconds from the click on a page's name to its title standing there and the page being drawn."""
    page.evaluate(WATCH)
    began = page.evaluate("() => performance.now()")
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True).click()
    page.wait_for_function(f"() => document.querySelector('h1')?.innerText === {name!r}", timeout=60_000)
    drawn = page.wait_for_function(DRAWN, timeout=60_000).json_value()
    return (float(drawn) - float(began)) / 1000


def tick(runs: Path, page: Page, base: str) -> list[float]:
    """Milliseconds from a tick's question to its answer, over the WebSocket, on a live run of 10,000 steps."""
    asked: list[float] = []
    took: list[float] = []

    def sent(_: object) -> None:
        asked.append(time.monotonic())

    def received(_: object) -> None:
        if asked:
            took.append((time.monotonic() - asked[-1]) * 1000)

    with live(runs / "live", steps=20_000) as run:
        run.advance(10_000)
        page.on("websocket", lambda s: (s.on("framesent", sent), s.on("framereceived", received)))
        page.goto(f"{base}/?run=run%2Flive")
        page.wait_for_selector('[data-testid="stProgress"]', timeout=60_000)
        page.wait_for_timeout(3000)
        del asked[:], took[:]
        longest = []
        for _ in range(8):
            run.advance(5)
            page.wait_for_timeout(1000)
            if took:
                longest.append(max(took))
            del took[:]
    return longest


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


def main() -> int:
    """Measure, and audit where asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="ampscope-measure-") as aside,
        app(Path(aside) / "runs") as server,
        sync_playwright() as playwright,
    ):
        executable = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        if asked.axe:
            return audit(page, server.base, asked.axe.read_text())
        sys.stdout.write(f"first page: {first_page(page, server.base):.2f} s\n")
        write(server.runs / "long", "healthy", steps=10_000)
        page.goto(f"{server.base}/?run=run%2Flong")
        page.wait_for_selector('[data-testid="stMetric"]', timeout=60_000)
        page.wait_for_timeout(2000)
        names = ["Loss scale", "Number ranges", "Layer detail", "Memory", "Step cost", "Library", "Overview"]
        for turn in ("first visit", "again"):
            for name in names:
                sys.stdout.write(f"{name}, {turn}: {change(page, name):.2f} s\n")
        ticks = sorted(tick(server.runs, browser.new_page(), server.base))
        sys.stdout.write(f"live tick: median {ticks[len(ticks) // 2]:.0f} ms, longest {ticks[-1]:.0f} ms\n")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
