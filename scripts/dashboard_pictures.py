"""Draw the pictures of docs/dashboard.md from a run, in the machine's Chromium.

python scripts/dashboard_pictures.py RUN EPISODE docs

"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTH = 1180


def main() -> None:
    """Draw the curves of a run and the tokens of one of its episodes."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/dashboard.md.")
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("episode", help="an episode of it")
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    options = parser.parse_args()
    command = [Path(sys.executable).with_name("palestra"), "dashboard", options.run, "--no-browser", "--port", "0"]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served, sync_playwright() as driver:
        assert served.stdout is not None
        found = re.search(r"http\S+", served.stdout.readline())
        assert found is not None
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 860})
        page.goto(found[0])
        page.wait_for_selector(".plot canvas")
        _picture(page, options.folder / "dashboard-curves.png")
        name = options.run.absolute().name
        page.evaluate("address => { location.hash = address }", f"#/run/{name}/episode/{options.episode}")
        page.wait_for_selector(".tokens .t")
        page.locator(".tokens").focus()
        for _ in range(8):
            page.keyboard.press("ArrowRight")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        _picture(page, options.folder / "dashboard-tokens.png", ".tokenpart")
        browser.close()
        served.terminate()


def _picture(page: Page, path: Path, selector: str | None = None) -> None:
    """Write a picture of what a page shows, or of one part of it."""
    page.wait_for_timeout(600)  # until all that is in sight is drawn
    if selector is None:
        page.screenshot(path=path)
    else:
        page.locator(selector).screenshot(path=path)


if __name__ == "__main__":
    main()
