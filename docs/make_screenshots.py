"""Write the pictures of pages in docs/images: `python docs/make_screenshots.py`.

It trains the run of `normec train --seed 0` and a private sweep over β and the step size, and takes pictures of their
pages in Chromium, which must be installed; playwright drives it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parent / "images"
GRID = """
data = "digits"
validation = 0.2
seeds = 3
by = "validation_accuracy"

[grid]
beta = [0.002, 0.005, 0.011, 0.03]
lr = [0.01, 0.03, 0.09, 0.3, 1.0]
"""


def normec(*words: str, folder: Path) -> None:
    """Run a command in a folder."""
    subprocess.run([sys.executable, "-m", "normec", *words], cwd=folder, check=True)


def picture(browser: Browser, page: Path, out: Path, height: int) -> None:
    """Take a picture of the top of a page."""
    opened = browser.new_page(viewport={"width": 1240, "height": height})
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-drawn]")
    opened.screenshot(path=out)
    opened.close()


def main() -> None:
    """Train and take the pictures."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with tempfile.TemporaryDirectory() as made, sync_playwright() as started:
        folder = Path(made)
        (folder / "grid.toml").write_text(GRID, encoding="utf-8")
        normec("train", "--seed", "0", "--out", "first", "--quiet", folder=folder)
        normec("sweep", "grid.toml", "--out", "sweep", "--quiet", folder=folder)
        browser = started.chromium.launch(executable_path=chromium, args=quiet)
        picture(browser, folder / "first" / "report.html", IMAGES / "report.png", height=1250)
        picture(browser, folder / "sweep" / "report.html", IMAGES / "report-sweep.png", height=900)
        browser.close()


if __name__ == "__main__":
    main()
