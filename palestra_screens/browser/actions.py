"""An agent's actions on a web page, as tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from palestra.envs.acting import DONE
from palestra.tools import BadArguments, FunctionTool, Tool
from palestra_screens.browser.page import BrowserPage, View

MAX_WAIT_SECONDS = 10.0
Text = Annotated[str, Field(max_length=1000)]
Ref = Annotated[int, Field(ge=0, le=1_000_000)] | Annotated[str, Field(max_length=20)]
Pixels = Annotated[int, Field(ge=0, lt=10_000)]


KEYS = frozenset(
    {
        *("Enter", "Tab", "Space", "Backspace", "Delete", "Insert", "Escape", "Home", "End", "PageUp", "PageDown"),
        *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"),
        *(f"F{number}" for number in range(1, 13)),
    }
)
HELD_KEYS = frozenset(
    {
        *("a", "c", "v", "x", "y", "z", "b", "i", "u", "Enter", "Backspace", "Delete", "Insert", "Home", "End"),
        *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"),
    }
)


class PageActions:
    """Actions on the open page.

    Elements are named by the numbers, or references, of the page's last description.
    """

    def __init__(self, page: Callable[[], BrowserPage]) -> None:
        self._page = page

    def tools(self, view: View) -> list[Tool]:
        """Return the actions that fit the agent's view: by element, or by pixel."""
        by_pixel: list[Callable[..., Any]] = [self.click_at]
        by_element: list[Callable[..., Any]] = [self.click, self.type, self.select]
        actions = by_pixel if view == "screenshot" else by_element
        actions += [self.write, self.key, self.scroll, self.wait]
        return [FunctionTool(action) for action in actions]

    async def click(self, ref: Ref) -> str:
        """Click on an element.

        Args:
            ref: The element's number.
        """
        page = self._page()
        x, y = await page.point(ref)
        await page.operate(lambda: page.page.mouse.click(x, y))
        return DONE

    async def click_at(self, x: Pixels, y: Pixels) -> str:
        """Click at a place of the screen.

        Args:
            x: Pixels from the left.
            y: Pixels from the top.
        """
        page = self._page()
        await page.operate(lambda: page.page.mouse.click(x, y))
        return DONE

    async def type(self, ref: Ref, text: Text) -> str:
        """Replace the text of a field.

        Args:
            ref: The field's number.
            text: The new text.
        """
        page = self._page()
        await self.click(ref)
        element = await page.element(ref)
        await page.operate(lambda: element.evaluate("element => window.__palestra.empty(element)"))
        if not text:
            await page.operate(lambda: page.page.keyboard.press("Delete"))
        return await self.write(text)

    async def write(self, text: Text) -> str:
        """Type text where the cursor is.

        Args:
            text: The text.
        """
        page = self._page()
        await page.operate(lambda: page.page.keyboard.type(text))
        return DONE

    async def key(self, key: Annotated[str, Field(max_length=50)]) -> str:
        """Press a key.

        Args:
            key: Its name, such as Enter, Tab, ArrowDown, Backspace, Control+a.
        """
        if not _is_key(key):
            raise BadArguments(
                f"there is no key {key!r}; known are single characters, {', '.join(sorted(KEYS))}, and with Control or "
                f"Alt {', '.join(sorted(HELD_KEYS))}"
            )
        page = self._page()
        await page.operate(lambda: page.page.keyboard.press(key))
        return DONE

    async def select(self, ref: Ref, option: Text) -> str:
        """Select an option of a choice or a list.

        Args:
            ref: The number of the choice.
            option: The option's text.
        """
        page = self._page()
        element = await page.element(ref)
        if not await page.operate(lambda: element.evaluate(_SELECT, option)):
            raise BadArguments(f"element {ref} has no option {option!r}")
        return DONE

    async def scroll(self, direction: Literal["up", "down"], ref: Ref | None = None) -> str:
        """Scroll the page or an element.

        Args:
            direction: up or down.
            ref: The element's number; without it, the page is scrolled.
        """
        page = self._page()
        element = None if ref is None else await page.element(ref)
        down = direction == "down"
        if element is None:
            await page.evaluate("down => window.__palestra?.scroll(null, down)", down)
        else:
            await page.operate(lambda: element.evaluate("(one, down) => window.__palestra.scroll(one, down)", down))
        return DONE

    async def wait(self, seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)] = 1.0) -> str:
        """Wait for the page.

        Args:
            seconds: How long, at most 10.
        """
        await asyncio.sleep(seconds)
        return DONE


def _is_key(key: str) -> bool:
    """Return whether a key is one of the list: others are commands to the browser, and not to the page."""
    *modifiers, name = [key] if key == "+" else key.split("+")
    held = set(modifiers)
    if not held <= {"Control", "Shift", "Alt"} or len(held) < len(modifiers):
        return False
    if held & {"Control", "Alt"}:
        return name in HELD_KEYS
    return name in KEYS or (len(name) == 1 and name.isprintable())


_SELECT = """(element, text) => {
  const wanted = [...(element.options || [])].find((one) => one.text.trim() === text.trim());
  if (!wanted) return false;
  wanted.selected = true;
  element.dispatchEvent(new Event("input", { bubbles: true }));
  element.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
}"""
