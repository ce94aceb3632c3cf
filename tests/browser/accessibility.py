"""An audit of every page: the rules of axe-core in both themes on a wide and a narrow screen, and what Tab reaches.

    python -m tests.browser.measure --axe node_modules/axe-core/axe.min.js
    python -m tests.browser.measure --keyboard

A page is keyboard-accessible if Tab reaches each of its links, buttons and fields, with a visible focus. One member of
a group of buttons is enough: arrow keys move between them.
"""

import sys

from playwright.sync_api import Browser, Page

from tests.app_test import pages

AXE_OPTIONS = "{resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"
AXE_CONTEXT = "{include: [['body']], exclude: [['[data-testid=stSidebarNavItems]']]}"
"""Streamlit's own list of pages breaks the rules `list` and `listitem`: its sections are headers between the items."""
RUN = "sample%2Ffp16-overflow"
SETTLE_MS = 2500
MAX_TABS = 800
"""Times that Tab is pressed on one page: within a table it moves from cell to cell."""
REACHABLE = """() => {
  const fields = 'a[href], button:not([disabled]), input:not([disabled]), textarea:not([disabled]), [role=slider]';
  const shown = (one) => one.checkVisibility({visibilityProperty: true, opacityProperty: true}) &&
    one.getBoundingClientRect().width > 1;
  return [...document.querySelectorAll(fields)].filter((one) => shown(one) && one.tabIndex >= 0 &&
    !one.closest('[data-testid="stDataFrame"], .modebar, [aria-hidden=true]'));
}"""
REST = f"""() => ({REACHABLE})().filter((one) => !window.ampReached.has(one))
  .filter((one) => ![...one.closest('[data-testid=stButtonGroup]')?.querySelectorAll('button, input') ?? []]
    .some((other) => window.ampReached.has(other)))
  .map((one) => (one.getAttribute('aria-label') || one.innerText || one.outerHTML).slice(0, 80))"""
STEP = """() => {
  const one = document.activeElement;
  const again = window.ampReached.values().next().value === one && window.ampReached.size > 1;
  window.ampReached.add(one);
  const seen = one === document.body || one.matches(':focus-visible');
  return {again, hidden: seen ? '' : (one.innerText || one.outerHTML).slice(0, 80)};
}"""


def audit(browser: Browser, base: str, axe: str) -> int:
    """Print axe's violations on each page; returns the number of serious ones."""
    serious = 0
    for theme in ("light", "dark"):
        for width in (1400, 390):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            for address in pages().values():
                _open(page, base, address)
                page.evaluate(axe)
                for rule in page.evaluate(f"async () => (await axe.run({AXE_CONTEXT}, {AXE_OPTIONS})).violations"):
                    serious += rule["impact"] in ("serious", "critical")
                    nodes = rule["nodes"]
                    what = f"{rule['impact']} {rule['id']} × {len(nodes)}: {nodes[0]['html'][:140]}"
                    sys.stdout.write(f"{address or 'overview'}, {theme}, {width} px: {what}\n")
            page.close()
    sys.stdout.write(f"{serious} serious or critical violations\n")
    return serious


def walk(page: Page, base: str) -> int:
    """Print what Tab does not reach, or reaches without a visible focus, on each page; returns the number of them."""
    faults = 0
    for address in pages().values():
        _open(page, base, address)
        page.evaluate("() => { window.ampReached = new Set(); }")
        for _ in range(MAX_TABS):
            page.keyboard.press("Tab")
            step = page.evaluate(STEP)
            if step["hidden"]:
                faults += 1
                sys.stdout.write(f"{address}: no visible focus on {step['hidden']!r}\n")
            if step["again"]:  # around the page once
                break
        missed = page.evaluate(REST)
        faults += len(missed)
        sys.stdout.writelines(f"{address}: Tab does not reach {name!r}\n" for name in missed)
    sys.stdout.write(f"{faults} faults of the keyboard walk on {len(pages())} pages\n")
    return faults


def _open(page: Page, base: str, address: str) -> None:
    page.goto(f"{base}/{address}?run={RUN}")
    page.wait_for_selector("h1", timeout=60_000)
    page.wait_for_timeout(SETTLE_MS)
    page.wait_for_function("() => !document.querySelector('[data-testid=\"stStatusWidget\"]')", timeout=60_000)
