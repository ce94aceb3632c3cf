"""Make the README's screenshot: the app with a sample run in a browser.

    python -m tests.browser.picture            # writes sample_runs/loss-scale.png

Needs the test extra (Playwright) and Chromium; starts the app on a free port of this machine and stops it again.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.conftest import FLAGS
from tests.serve.running import app

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "sample_runs" / "loss-scale.png"
ADDRESS = "/loss-scale?run=sample/fp16-overflow"
MAX_BYTES = 300_000


def take(base: str) -> None:
    """Take a screenshot of the page at `base`."""
    with sync_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 840}, color_scheme="light")
        page.goto(base)
        page.wait_for_selector('[data-testid="stMetric"]', timeout=60_000)
        page.goto(base + ADDRESS)
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=60_000)
        page.wait_for_timeout(2000)
        page.screenshot(path=str(PICTURE))
        browser.close()


def main() -> int:
    """Take the screenshot; returns 1 if the file is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ampscope-picture-") as aside, app(Path(aside) / "runs") as server:
        take(server.base)
    size = PICTURE.stat().st_size
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {size / 1000:.0f} kB\n")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
