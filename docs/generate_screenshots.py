"""Take the pictures of a report that the README shows, in Debian's Chromium.

python docs/generate_screenshots.py report/strong-scaling.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1200, "height": 1020}
LATER = "Step by step"
"""The heading that the second picture begins with."""


def main(report: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(Path(report).absolute().as_uri())
        page.wait_for_function("document.querySelectorAll('.plot svg, .plot canvas').length > 3")
        page.screenshot(path=IMAGES / "report-scaling.png")
        heading = page.get_by_role("heading", name=LATER, exact=True)
        heading.evaluate("element => element.scrollIntoView()")
        page.wait_for_timeout(1500)
        page.screenshot(path=IMAGES / "report-steps.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
