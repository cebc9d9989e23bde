"""Draw the picture of a service in docs/dashboard.md: `palestra serve` with a few jobs, in the machine's Chromium.

python scripts/service_picture.py docs

"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from palestra.client.control import ControlClient

WIDTH = 1180
CONFIG: dict[str, Any] = {
    "steps": 40,
    "engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05},
    "environment": {"name": "frozen-lake", "train_tasks": 9, "validation_tasks": 3},
    "rollout": {"group_size": 8, "groups_per_step": 2},
}
SECONDS = 120.0


def main() -> None:
    """Start a service and its jobs, draw its page at two widths, and end the service."""
    parser = argparse.ArgumentParser(description="Draw the picture of a service in docs/dashboard.md.")
    parser.add_argument("folder", type=Path, help="where the picture is written")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the window, in pixels")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--view", choices=("jobs", "machines", "job", "log", "start"), default="jobs")
    options = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="service-"))
    command = [str(Path(sys.executable).with_name("palestra")), "serve", "--state-dir", str(state), "--port", "0"]
    with subprocess.Popen([*command, "--cpus", "6", "--gpus", "2"], stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            url = re.search(r"http://\S+?(?=,)", served.stdout.readline())
            key = re.search(r"pk_\S+", served.stdout.readline())
            assert url is not None
            assert key is not None
            with ControlClient(url[0], key[0]) as control:
                job = _start_jobs(control)
                _draw(f"{url[0]}/dashboard", key[0], job, options)
                for one in control.jobs():
                    control.job(one.job_id).cancel()
                _wait(lambda: all(one.state in ("completed", "cancelled") for one in control.jobs()))
        finally:
            served.terminate()
    shutil.rmtree(state)


def _start_jobs(control: ControlClient) -> str:
    """Start jobs of which some run and some wait, and return the id of one that runs."""
    control.submit(CONFIG | {"steps": 4}, name="frozen-lake-short")
    first = control.submit(CONFIG, name="frozen-lake", cpus=2, gpus=1)
    second = control.submit(CONFIG | {"steps": 90}, name="frozen-lake-long", cpus=2, gpus=0.5)
    control.submit(CONFIG, name="two-gpus", cpus=2, gpus=2)
    control.submit(CONFIG, name="wide", cpus=6, priority="low")
    _wait(lambda: all(job.view().state == "running" for job in (first, second)))
    time.sleep(6)  # until a pace is known
    return first.job_id


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the jobs are not so far after {SECONDS:g} s")
        time.sleep(0.5)


def _draw(url: str, key: str, job: str, options: argparse.Namespace) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    addresses = {"jobs": "#/", "machines": "#/machines", "start": "#/start"}
    address = addresses.get(options.view, f"#/run/{job}/{options.view}")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page: Page = browser.new_page(viewport={"width": options.width, "height": 720}, color_scheme=options.scheme)
        page.goto(url + address)
        page.fill("#key", key)
        page.click("form.login button")
        page.wait_for_selector(f'html[data-ready="{address}"]', state="attached")
        page.wait_for_timeout(1500)  # until what is asked for again was answered
        page.evaluate("document.activeElement.blur()")
        page.mouse.move(0, 0)
        name = "dashboard-service.png" if options.view == "jobs" else f"dashboard-service-{options.view}.png"
        page.screenshot(path=options.folder / name)
        browser.close()


if __name__ == "__main__":
    main()
