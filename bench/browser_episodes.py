"""Episodes of MiniWoB a second, beside a bare driver that does the same with playwright alone.

    python bench/browser_episodes.py --episodes 120 --contexts 1,4,8
    python bench/browser_episodes.py --program chromium          # a whole browser, where the headless shell is there

An episode is a new context, the page click-test-2 with the problem of a seed, its description, one click, and the
reward. The bare driver loads the page from disk, reads the page's text, and dispatches the click; Palestra serves the
page, describes it with a number for each control, clicks with the mouse, and looks whether the browser is well. Both
take turns, in one browser each. Every reward is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from machine import observed
from playwright.async_api import Browser, async_playwright

from palestra import text_message
from palestra_screens import MiniWoB
from palestra_screens.browser import chromium
from palestra_screens.browser.miniwob import pages_folder

PAGE = "click-test-2"
BEGIN = "seed => { Math.seedrandom(seed); core.EPISODE_MAX_TIME = 100000; core.startEpisodeReal(); }"
Play = Callable[[int], Awaitable[float]]


async def rate(plays: list[Play], episodes: int) -> float:
    """Return episodes a second, where each of `plays` plays one episode at a time."""
    numbers = iter(range(episodes))

    async def work(play: Play) -> None:
        for number in numbers:
            reward = await play(number)
            assert reward == 1.0, f"episode {number} had the reward {reward}"

    started = time.monotonic()
    await asyncio.gather(*map(work, plays))
    return episodes / (time.monotonic() - started)


def bare(browser: Browser) -> Play:
    """Return what plays an episode with playwright alone."""
    url = (pages_folder() / f"miniwob/{PAGE}.html").as_uri()

    async def play(seed: int) -> float:
        context = await browser.new_context(viewport={"width": 160, "height": 210})
        page = await context.new_page()
        await page.goto(url)
        await page.evaluate(BEGIN, seed)
        assert "ONE" in await page.inner_text("#area")
        await page.get_by_text("ONE", exact=True).dispatch_event("click")
        done, reward = await page.evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        await context.close()
        return float(reward) if done else 0.0

    return play


def palestra(environment: MiniWoB) -> Play:
    """Return what plays an episode in an environment."""

    async def play(seed: int) -> float:
        text, _ = await environment.reset({"page": PAGE, "seed": seed})
        line = next(line for line in text.splitlines() if line.endswith("button ONE"))
        action = text_message("assistant", f"click {line[1 : line.index(']')]}")
        return float((await environment.step_message(action))[1])

    return play


async def measure(episodes: int, contexts: list[int], rounds: int) -> dict[str, Any]:
    """Return the medians of some rounds, by number of contexts."""
    found: dict[str, Any] = {}
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=chromium.chromium_path(), args=["--no-sandbox", "--disable-gpu"]
        )
        environments = [MiniWoB(actions="text") for _ in range(max(contexts))]
        for one in environments:
            await one.setup()
        for count in contexts:
            theirs, ours = [bare(browser)] * count, [palestra(one) for one in environments[:count]]
            await rate(theirs, count)  # what is done once is not measured
            await rate(ours, count)
            rates = [(await rate(theirs, episodes), await rate(ours, episodes)) for _ in range(rounds)]
            one, other = (statistics.median(each) for each in zip(*rates, strict=True))
            found[str(count)] = {"bare": round(one, 2), "palestra": round(other, 2), "share": round(other / one, 2)}
        for one in environments:
            await one.close()
        await browser.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=120)
    parser.add_argument("--contexts", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", help="None: the one that environments use")
    arguments = parser.parse_args()
    if arguments.program:
        chromium.NAMES = (arguments.program,)
    on: dict[str, Any] = {}
    with observed(on):
        result = asyncio.run(
            measure(arguments.episodes, [int(one) for one in arguments.contexts.split(",")], arguments.rounds)
        )
    program = chromium.chromium_path()
    print(json.dumps({"program": program, "episodes a second, by contexts": result, "machine": on}, indent=1))
