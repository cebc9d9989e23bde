"""What people wait for who look at a large run: 100,000 episodes, one of 100,000 tokens, in a real browser.

    python bench/page_on_screen.py [--times 7]

Chromium opens the page of `palestra dashboard`, on the same machine. Measured are the time from the navigation to the
first view with its curves; from a click to the list of the newest 50 episodes, with the share of the server's answer;
to a long episode with its first 2,000 tokens coloured; and from the commit of a step to its row on the screen.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from large_run import long_of, run_of
from open_pages import serve_link
from playwright.sync_api import sync_playwright

from palestra.disk import RUN_LOCK

CALLS = 500_000  # of 100,000 episodes
SHOW = """([address, selector]) => new Promise((resolve) => {
    const began = performance.now();
    location.hash = address;
    const look = () => {
        if (document.documentElement.dataset.ready === address && document.querySelector(selector) !== null) {
            requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)));
        } else requestAnimationFrame(look);
    };
    look();
})"""
ANSWER = (
    """(part) => performance.getEntriesByType("resource").filter((one) => one.name.includes(part)).at(-1).duration"""
)


def main() -> None:
    """Make the run, look at it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "large"
        long = long_of(run_of(folder, CALLS))
        lock = stack.enter_context((folder / RUN_LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that the run counts as running
        process, link = serve_link(folder)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        driver = stack.enter_context(sync_playwright())
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(link)
        page.wait_for_selector("html[data-ready]", state="attached")
        show(measured(page, link.partition("#")[0], folder, long, times))


def measured(page: Any, address: str, folder: Path, long: str, times: int) -> dict[str, list[float]]:
    """Return the milliseconds of each thing that is waited for."""
    found: dict[str, list[float]] = {}

    def add(what: str, milliseconds: float) -> None:
        found.setdefault(what, []).append(milliseconds)

    for _ in range(times):
        page.goto("about:blank")
        page.goto(f"{address}#/")
        page.wait_for_selector(".plot canvas")
        add("the first page", page.evaluate("performance.getEntriesByName('palestra-ready')[0].startTime"))
    for _ in range(times):
        page.evaluate(SHOW, ["#/run/large/settings", ".tabs"])
        add(
            "the list of episodes on the screen",
            page.evaluate(SHOW, ["#/run/large/episodes", "tbody tr:nth-child(50)"]),
        )
        add("the server's answer to it", page.evaluate(ANSWER, "/episodes?"))
        add("the episode of 100,000 tokens", page.evaluate(SHOW, [f"#/run/large/episode/{long}", ".tokens .t"]))
    page.evaluate(SHOW, ["#/run/large/steps", "tbody tr"])
    page.wait_for_selector("#live.live")
    for number in range(times):
        time.sleep(1.0 + 0.13 * number)  # at different moments between two looks of the server
        step = 5000 + number
        commit(folder, step)
        began = time.perf_counter()
        page.wait_for_selector(f'tbody a[href="#/run/large/step/{step}"]')
        add("a step, from its commit", (time.perf_counter() - began) * 1000)
    return found


def commit(folder: Path, step: int) -> None:
    """Write what a learner writes at the end of a step."""
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        (newest,) = connection.execute("SELECT data FROM metric_rows ORDER BY step DESC LIMIT 1").fetchone()
        row = json.dumps(json.loads(newest) | {"step": step})
        connection.execute("INSERT INTO metric_rows (step, data) VALUES (?, ?)", (step, row))
        connection.execute("INSERT INTO events (at, kind, data) VALUES (?, 'step', ?)", (time.time(), row))


def show(found: dict[str, list[float]]) -> None:
    """Print the table."""
    print(f"{'waited for':38} {'first':>9} {'median':>9} {'longest':>9}")
    for what, values in found.items():
        numbers = (values[0], statistics.median(values), max(values))
        print(f"{what:38} " + " ".join(f"{value:6.0f} ms" for value in numbers))


if __name__ == "__main__":
    main()
