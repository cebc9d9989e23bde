"""Environment `miniwob`: the small web tasks of MiniWoB++, each a page that makes a problem from a seed."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from palestra.envs.acting import Actions, Progress
from palestra.envs.tasks import Split, draw_tasks
from palestra.errors import ConfigError
from palestra_screens.browser.environment import BrowserEnvironment
from palestra_screens.browser.page import BrowserPage, View

# Tasks that are read and acted on as text: no dragging, no canvas, no time that has to be waited for.
PAGES = (
    *("click-button", "click-link", "enter-text", "choose-list", "focus-text", "click-test", "click-test-2"),
    *("click-dialog", "click-dialog-2", "click-checkboxes", "click-option", "click-tab", "click-tab-2", "click-widget"),
    *("click-button-sequence", "click-collapsible", "click-collapsible-2", "click-menu", "click-scroll-list"),
    *("enter-password", "enter-text-dynamic", "focus-text-2", "login-user", "login-user-popup", "navigate-tree"),
    *("search-engine", "social-media", "email-inbox-delete", "simple-arithmetic", "read-table"),
)
SIZE = (160, 210)  # pixels of a page's area, for which MiniWoB's pages are made
_NAME = re.compile(r"[a-z0-9-]+")
_FURNITURE = "#query, #reward-display, #click-canvas, #sync-task-cover"  # the goal, and what is not part of the task
_FOREVER_MS = 2_000_000_000  # the page's clock must not end an episode: a slow machine would change the reward
# Some pages draw from `Math.random` while they load, before MiniWoB's own generator can be seeded.
_RANDOM = """
(() => { let state = %d; Math.random = () => {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
}; })();
"""


class MiniWoB(BrowserEnvironment):
    """A task of MiniWoB++: a task names the page and the seed of its problem.

    The reward is the page's own without its decay by time: 1 for a solved problem, 0 for an unsolved one, and values in
    between if a page gives partial rewards. A wrong action ends the episode, as in the page.
    """

    answers = False

    def __init__(
        self,
        *,
        observation: View = "dom",
        actions: Actions = "tools",
        max_steps: int = 10,
        timeout_seconds: float = 15.0,
    ) -> None:
        """Create the environment; `setup` starts the browser.

        Args:
            observation: `dom`, `accessibility` or `screenshot`; see `BrowserEnvironment`.
            actions: `tools`, tool calls; `text`, one line such as `click 3`, which small models write more easily.
            max_steps: limit of the agent's replies in an episode.
            timeout_seconds: limit for one operation of the browser.

        Raises:
            ConfigError: Chromium, playwright or MiniWoB's pages are not installed.
            ValueError: a number is not above 0.
        """
        pages_folder()
        super().__init__(
            hosts=[page_server()],
            observation=observation,
            actions=actions,
            size=SIZE,
            max_steps=max_steps,
            timeout_seconds=timeout_seconds,
        )

    def leave_out(self) -> str:
        """Return a selector of the goal, which the agent has read, and of MiniWoB's reward display."""
        return _FURNITURE

    def before_page(self, task: Mapping[str, Any]) -> str:
        """Return a script that seeds the page's randomness with the task's seed."""
        return _RANDOM % _seed(task)

    async def begin(self, page: BrowserPage, task: Mapping[str, Any]) -> str:
        """Open the task's page, create the problem of its seed, and return the page's instruction."""
        await page.goto(f"http://{page_server()}/miniwob/{checked_page(task.get('page'))}.html")
        return str(await page.evaluate(_BEGIN, [_seed(task), _FOREVER_MS]))

    async def progress(self, answer: str | None) -> Progress:
        """Return the page's own reward, once the page has ended its episode."""
        over, reward = await self.opened().evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        return Progress(reward=max(0.0, float(reward)) if over else 0.0, over=bool(over))


_BEGIN = """async ([seed, forever]) => {
  while (!WOB_TASK_READY) await new Promise((resolve) => setTimeout(resolve, 10));
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = forever;
  core.startEpisodeReal();
  return core.getUtterance();
}"""


def _seed(task: Mapping[str, Any]) -> int:
    return int(task["seed"])


def checked_page(name: Any) -> str:
    """Return the name of a page of MiniWoB."""
    found = isinstance(name, str) and _NAME.fullmatch(name) and (pages_folder() / f"miniwob/{name}.html").is_file()
    if not found:
        raise ConfigError(f"MiniWoB has no page {name!r}; its pages are in {pages_folder() / 'miniwob'}")
    return str(name)


def miniwob_tasks(page: str | None, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw problems of a page, or of the thirty pages in `PAGES`; keys `id`, `page` and `seed`.

    The splits share no seed. `page` = None: each of `PAGES` with the same probability.
    """
    name = None if page is None else checked_page(page)
    return draw_tasks(split, count, seed, partial(_draw, name))


def _draw(page: str | None, source: random.Random) -> dict[str, Any]:
    chosen, number = page or source.choice(PAGES), source.randrange(2**31)
    return {"id": f"{chosen}-{number}", "page": chosen, "seed": number}


def pages_folder() -> Path:
    """Return the folder with MiniWoB's pages.

    The package is found by its metadata, because importing it needs Selenium, and could find another module of this
    name, such as a user's script.
    """
    try:
        return Path(str(distribution("miniwob").locate_file("miniwob/html")))
    except PackageNotFoundError:
        raise ConfigError("this environment needs MiniWoB's pages; run: pip install --no-deps miniwob==1.1") from None


class _Pages(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection serves all files of a page

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of closed connections, which every ending browser causes."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@lru_cache(maxsize=1)
def page_server() -> str:
    """Serve MiniWoB's pages on this machine, for the rest of the process, and return `host:port`.

    Unlike files on disk, pages with an HTTP origin cannot reach other files of the machine, and have their own storage.
    """
    server = _PageServer(("127.0.0.1", 0), partial(_Pages, directory=str(pages_folder())))
    threading.Thread(target=server.serve_forever, name="palestra-miniwob-pages", daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"
