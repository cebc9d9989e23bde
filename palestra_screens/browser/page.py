"""`BrowserPage`: one page of one episode, in its own context, and the agent's views of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from palestra.errors import EnvironmentFailed, PalestraError
from palestra.tools import BadArguments
from palestra_screens.browser.chromium import EpisodeBrowser, first_line

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ElementHandle, Page

log = logging.getLogger("palestra.envs")
T = TypeVar("T")
View = Literal["dom", "accessibility", "screenshot"]
VIEWPORT = (1024, 768)  # pixels, wide and high
_NAVIGATED = ("Execution context was destroyed", "Cannot find context", "navigating and changing")
_DESCRIBE = "asked => window.__palestra?.snapshot(asked) ?? ['(no page)', 0]"
_SETTLE = "most => window.__palestra?.settle(most)"
_SETTLE_MS = 1000  # at most, for pictures to come and for what opens or closes to be there
_TRIES = 5  # of reading a page that is being replaced by another
_SNAPSHOT = files("palestra_screens.browser").joinpath("snapshot.js").read_text(encoding="utf-8")


class BrowserPage:
    """A page in its own context, isolated from other episodes.

    Each operation has a time limit. A failure not caused by an action's arguments is stored in `failure`, and raised
    again by every later operation: a page that crashes, hangs or is closed is a forfeit, and a dead browser is a
    failure.

    Attributes:
        failure: why the page cannot be used any more; None: it can.
    """

    def __init__(
        self,
        browser: EpisodeBrowser,
        context: BrowserContext,
        page: Page,
        *,
        view: View,
        max_chars: int,
        seconds: float,
    ) -> None:
        """Take a page; `open_page` creates one. `max_chars`: longer descriptions are truncated, with a note."""
        self.page = page
        self._browser, self._context, self._view, self._max_chars, self._seconds = (
            browser,
            context,
            view,
            max_chars,
            seconds,
        )
        self.failure: PalestraError | None = None
        self._noted: str | None = None  # what the browser has said of the page's end
        page.on("crash", lambda _: self._note("the page has crashed"))
        page.on("close", lambda _: self._note("the page was closed"))

    async def close(self) -> None:
        """Close the page and its context, with its stored data."""
        await close_context(self._context, self._seconds)

    async def describe(self, leave_out: str = "") -> str:
        """Return the page as text, in the form of `view`."""
        await self._settle()
        if self._view == "accessibility":
            text = await self.operate(lambda: self.page.aria_snapshot(mode="ai"))
            length = len(text)
        else:
            text, length = await self.evaluate(_DESCRIBE, [leave_out, self._max_chars])
        if length > self._max_chars:
            text = f"{text[: self._max_chars]}… ({length:,} characters, cut)"
        return text or "(an empty page)"

    async def screenshot(self) -> bytes:
        """Return a screenshot of the page, as PNG."""
        await self._settle()
        return await self.operate(lambda: self.page.screenshot(animations="disabled"))

    async def goto(self, url: str) -> None:
        """Load a page with its resources."""
        await self.operate(lambda: self.page.goto(url, timeout=0))

    async def evaluate(self, expression: str, argument: Any = None) -> Any:
        """Return the value of JavaScript in the page, as JSON. `expression`: an expression, or a function of
        `argument`.
        """
        return await self.operate(lambda: self.page.evaluate(expression, argument))

    async def operate(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an operation of playwright, repeated if the page was replaced meanwhile. `operation`:
        may be called several times. Raises BadArguments if playwright knows no such key.
        """
        for attempt in range(_TRIES):
            if self.failure is not None:
                raise self.failure
            if self._noted is not None:
                raise await self._fail(self._noted)
            try:
                async with asyncio.timeout(self._seconds):
                    return await operation()
            except TimeoutError:
                raise await self._fail(f"the page did not answer within {self._seconds:g} s") from None
            except Exception as error:
                if "Unknown key" in str(error):
                    raise BadArguments(first_line(error)) from None
                if attempt + 1 == _TRIES or not any(text in str(error) for text in _NAVIGATED):
                    raise await self._fail(first_line(error)) from error
                await asyncio.sleep(0.05 * (attempt + 1))
        raise AssertionError("the last attempt returns or raises")

    async def _settle(self) -> None:
        """Wait until the effects of an action are visible, so that fast and slow agents see the same page."""
        await self.evaluate(_SETTLE, _SETTLE_MS)

    def _note(self, reason: str) -> None:
        self._noted = self._noted or reason

    async def _fail(self, reason: str) -> PalestraError:
        self.failure = await self._browser.verdict(reason, self._seconds)
        return self.failure

    async def point(self, ref: int | str) -> tuple[float, float]:
        """Return where to click on an element, in pixels."""
        if str(ref).isdecimal():
            found = await self.evaluate("n => window.__palestra?.point(window.__palestra.elements[n - 1])", int(ref))
        else:
            element = await self.element(ref)
            found = await self.operate(lambda: element.evaluate("element => window.__palestra.point(element)"))
        if found is None:
            raise BadArguments(f"there is no element {ref} that can be clicked: it is gone, or behind another one")
        return found[0], found[1]

    async def element(self, ref: int | str) -> ElementHandle:
        """Return an element by its number in the last description."""
        if str(ref).isdecimal():
            expression = "n => window.__palestra?.elements[n - 1]"
            found = await self.operate(lambda: self.page.evaluate_handle(expression, int(ref)))
            element = found.as_element()
        elif str(ref).isalnum():
            element = await self.operate(lambda: self.page.query_selector(f"aria-ref={ref}"))
        else:
            element = None
        if element is None:
            raise BadArguments(f"there is no element {ref}")
        return element


async def open_page(
    browser: EpisodeBrowser, context: BrowserContext, *, script: str = "", view: View, max_chars: int, seconds: float
) -> BrowserPage:
    """Open an empty page in a new context. `context`: taken over; closed if no page can be opened. `script`: JavaScript
    that runs in each document before the page's own.
    """
    try:
        async with asyncio.timeout(seconds):
            await context.add_init_script(_SNAPSHOT + script)
            page = await context.new_page()
    except Exception as error:
        await close_context(context, seconds)
        raise EnvironmentFailed(f"the browser opened no page: {first_line(error)}") from error
    return BrowserPage(browser, context, page, view=view, max_chars=max_chars, seconds=seconds)


async def close_context(context: BrowserContext, seconds: float) -> None:
    """Close a context with its stored data; no effect if the browser is dead."""
    try:
        async with asyncio.timeout(seconds):
            await context.close()
    except Exception as error:  # noqa: BLE001 - the episode is over; a browser that is dead is replaced
        log.info("a context was not closed: %s", first_line(error))
