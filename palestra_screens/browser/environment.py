"""`BrowserEnvironment`: a task on web pages, for an agent that reads a description of the page and acts with tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from palestra.envs.acting import ActingEnvironment, Actions
from palestra.errors import EnvironmentFailed
from palestra.pictures.parts import Picture
from palestra_screens.browser.actions import MAX_WAIT_SECONDS, PageActions
from palestra_screens.browser.chromium import BrowserDriver, EpisodeBrowser, checked_hosts, chromium_path, shared_driver
from palestra_screens.browser.page import VIEWPORT, BrowserPage, View, open_page


class BrowserEnvironment(ActingEnvironment):
    """A task on web pages.

    Implement `begin`, which opens the first page, and `progress`, which returns the state of the task after each
    action. The agent reads the page as lines with a number for each element, and calls `click`, `type`, `key` and
    others. Each episode has its own Chromium, without cookies, storage, cache, history or clipboard of other episodes.

    A page that crashes, hangs or is closed ends the episode as the agent's loss. A browser that dies fails the episode,
    which is retried in a new one.
    """

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        observation: View = "dom",
        actions: Actions = "tools",
        size: tuple[int, int] = VIEWPORT,
        max_steps: int = 10,
        max_chars: int = 6000,
        timeout_seconds: float = 15.0,
        memory_mib: int = 512,
    ) -> None:
        """Create the environment; a browser is started for each episode.

        Args:
            hosts: hosts that pages may be loaded from, and may connect to: `example.org`, `example.org:8080` or
                `*.example.org`. No other host can be reached, not even this machine.
            observation: `dom`, visible text and controls as lines; `accessibility`, the browser's accessibility tree;
                `screenshot`, a picture of the page, on which the agent acts by pixels.
            actions: `tools`, tool calls; `text`, one line such as `click 3`, which small models write more easily.
            size: of the page in pixels, wide and high.
            max_steps: limit of the agent's replies in an episode.
            max_chars: longer descriptions of a page are truncated, with a note.
            timeout_seconds: limit for one operation of the browser.
            memory_mib: limit of the browser's processes together in MiB, without shared memory; an episode that uses
                more is a forfeit.

        Raises:
            ConfigError: Chromium or playwright is not installed.
            ValueError: a host has the wrong form, or a number is not above 0.
        """
        chromium_path()
        if max_chars < 1 or not timeout_seconds > 0 or memory_mib < 256:
            raise ValueError("max_chars and timeout_seconds are above 0, and memory_mib at least 256")
        tools = PageActions(self.opened).tools(observation)
        # The page's own limit is reached first, whatever a tool does, since `type` is the longest with five operations.
        longest = 6 * timeout_seconds + MAX_WAIT_SECONDS
        super().__init__(tools, actions=actions, max_steps=max_steps, tool_seconds=longest)
        self._hosts, self._view, self._size = checked_hosts(hosts), observation, size
        self._max_chars, self._seconds, self._memory_mib = max_chars, timeout_seconds, memory_mib
        self._driver: BrowserDriver | None = None
        self._browser: EpisodeBrowser | None = None
        self._page: BrowserPage | None = None

    # Methods that a subclass implements or overrides.

    @abstractmethod
    async def begin(self, page: BrowserPage, task: Mapping[str, Any]) -> str:
        """Open the task's first page and return the agent's instructions.

        Args:
            page: an empty page of a new context.
            task: the task.
        """

    def leave_out(self) -> str:
        """Return a CSS selector of elements to leave out of descriptions; "": none."""
        return ""

    def before_page(self, task: Mapping[str, Any]) -> str:
        """Return JavaScript that runs in each document of the task before the page's own; by default none."""
        return ""

    # Methods that a rollout, or a scripted agent, calls.

    def opened(self) -> BrowserPage:
        """Return the page of the present episode.

        Raises:
            EnvironmentFailed: no episode has begun.
        """
        if self._page is None:
            raise EnvironmentFailed("there is no page: the episode has not begun")
        return self._page

    async def screenshot(self) -> bytes:
        """Return a screenshot of the page, as PNG.

        Raises:
            EnvironmentFailed: there is no page, or the browser has died.
        """
        return await self.opened().screenshot()

    async def setup(self) -> None:
        """Start the browsers' driver, if it is not running."""
        driver = shared_driver()
        await driver.enter()
        self._driver = driver

    async def close(self) -> None:
        """Close the page and its browser; after the last environment, also the driver."""
        await self._close_page()
        if (driver := self._driver) is not None:
            self._driver = None
            await driver.leave()

    async def start(self, task: Mapping[str, Any]) -> str:
        """Open the task's first page in a new browser, and return the agent's instructions."""
        await self._close_page()
        if self._driver is None:
            await self.setup()
        assert self._driver is not None, "setup has set it"
        self._browser = await self._driver.launch(self._hosts, self._memory_mib)
        context = await self._browser.new_context(viewport={"width": self._size[0], "height": self._size[1]})
        self._page = page = await open_page(
            self._browser,
            context,
            script=self.before_page(task),
            view=self._view,
            max_chars=self._max_chars,
            seconds=self._seconds,
        )
        return await self.begin(page, task)

    async def observe(self) -> str | Picture:
        """Return the description of the page, or a screenshot."""
        if self._view == "screenshot":
            return Picture.of(await self.screenshot())
        return await self.opened().describe(self.leave_out())

    def check_alive(self) -> None:
        """Check that the browser has not died, and that the page has not crashed or hung.

        Raises:
            EpisodeForfeited: the page has crashed, hung or was closed.
            EnvironmentFailed: the browser has died.
        """
        if (failure := self.opened().failure) is not None:
            raise failure

    async def _close_page(self) -> None:
        if (page := self._page) is not None:
            self._page = None
            await page.close()
        if (browser := self._browser) is not None:
            self._browser = None
            await browser.close()
