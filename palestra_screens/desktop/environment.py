"""Environment `desktop`: a window on its own screen, which an agent controls with mouse and keyboard."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from palestra.envs.acting import DONE, ActingEnvironment, Actions, Progress
from palestra.envs.tasks import Split, draw_tasks
from palestra.errors import EnvironmentFailed, EpisodeForfeited
from palestra.pictures.parts import Picture
from palestra.tools import BadArguments, FunctionTool
from palestra_screens.desktop.display import Display, check_desktop, start_display

_FIELDS = ("Name", "City", "Street", "Phone", "Colour", "Date")
_BOXES = ("Urgent", "Gift", "Copy", "Private")
_BUTTONS = ("Save", "Send", "Cancel", "Delete", "Later")
_TEXTS = ("Ada", "Oslo", "Elm 4", "5550", "blue", "May 7", "Kim", "Lima", "Main 12", "1234", "green", "June 1")


def desktop_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw windows with instructions. The splits share no seed.

    Keys: `id`, `prompt`, `fields`, `boxes`, `buttons` (the window's parts) and `expected` (the button to press, and the
    window's contents then).
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(outer: random.Random) -> dict[str, Any]:
    number = outer.randrange(2**31)
    source = random.Random(number)
    fields, boxes = source.sample(_FIELDS, 2), source.sample(_BOXES, 1)
    buttons = source.sample(_BUTTONS, 3)
    name, text, button = source.choice(fields), source.choice(_TEXTS), source.choice(buttons)
    ticked = source.random() < 0.5
    tick = f" Tick {boxes[0]}." if ticked else ""
    values = {**dict.fromkeys(fields, ""), **dict.fromkeys(boxes, ticked), name: text}
    return {
        "id": f"window-{number}",
        "prompt": f"Write {text} into {name}.{tick} Then press {button}.",
        **{"fields": fields, "boxes": boxes, "buttons": buttons},
        "expected": {"pressed": button, "values": values},
    }


SIZE = (320, 200)  # pixels of the screen, wide and high
# Known names alone: other ones are commands of xdotool, or keys that end the screen, and its own list of keys is short.
MODIFIERS = ("ctrl", "shift", "alt")
KEYS = frozenset(
    {
        *(string.ascii_letters + string.digits),
        *("Tab", "Return", "space", "BackSpace", "Delete", "Insert", "Escape"),
        *("Home", "End", "Prior", "Next", "Up", "Down", "Left", "Right"),
        *("minus", "plus", "equal", "comma", "period", "slash", "colon", "semicolon", "underscore", "at"),
        *(f"F{number}" for number in range(1, 13)),
    }
)


class DesktopEnvironment(ActingEnvironment):
    """A window with fields, boxes and buttons; the reward is 1 if the right button is pressed with the right contents.

    Each episode has its own sandbox with a screen (Xvfb), a program with a window, and xdotool for the agent's actions.
    Pressing a button ends the episode.
    """

    answers: ClassVar[bool] = False

    def __init__(
        self,
        *,
        observation: Literal["widgets", "screenshot"] = "widgets",
        actions: Actions = "tools",
        max_steps: int = 10,
        timeout_seconds: float = 15.0,
    ) -> None:
        """Create the environment; each episode gets a screen.

        Args:
            observation: `widgets`, the window's parts with their positions, like an accessibility tree; `screenshot`, a
                picture of the screen.
            actions: `tools`, tool calls; `text`, one line such as `click 40 20`.
            max_steps: limit of the agent's replies in an episode.
            timeout_seconds: limit for one action, and for one answer of the window.

        Raises:
            ConfigError: Xvfb, xdotool, tkinter or bubblewrap is not installed.
            ValueError: a number is not above 0.
        """
        check_desktop()
        if not timeout_seconds > 0:
            raise ValueError("timeout_seconds is above 0")
        tools = [FunctionTool(self.click), FunctionTool(self.type), FunctionTool(self.key)]
        super().__init__(tools, actions=actions, max_steps=max_steps, tool_seconds=2 * timeout_seconds)
        self._shows, self._seconds = observation, timeout_seconds
        self._task: Mapping[str, Any] = {}
        self._display: Display | None = None
        self._failure: EpisodeForfeited | None = None

    async def click(
        self, x: Annotated[int, Field(ge=0, lt=SIZE[0])], y: Annotated[int, Field(ge=0, lt=SIZE[1])]
    ) -> str:
        """Click at a place of the screen.

        Args:
            x: Pixels from the left.
            y: Pixels from the top.
        """
        return await self._xdotool("mousemove", str(x), str(y), "click", "1")

    async def type(self, text: Annotated[str, Field(max_length=200)]) -> str:
        """Type text where the cursor is.

        Args:
            text: The text.
        """
        if not all(character.isprintable() or character in "\t\n" for character in text):
            raise BadArguments("the text has a character that no key types")
        return await self._xdotool("type", "--delay", "1", "--", text)

    async def key(self, key: Annotated[str, Field(max_length=50)]) -> str:
        """Press a key.

        Args:
            key: Its name, such as Tab, Return, space, BackSpace, ctrl+a.
        """
        *modifiers, name = key.split("+")
        held = {modifier.lower() for modifier in modifiers}
        if name not in KEYS or not held <= set(MODIFIERS) or len(held) < len(modifiers) or held >= {"ctrl", "alt"}:
            raise BadArguments(
                f"there is no key {key!r}; known are {', '.join(sorted(KEYS))}, each after {'+, '.join(MODIFIERS)}+ or "
                "none, and ctrl and alt not together"
            )
        return await self._xdotool("key", "--", "+".join((*sorted(held), name)))

    async def screenshot(self) -> bytes:
        """Return a screenshot, as PNG.

        Raises:
            EnvironmentFailed: there is no screen.
        """
        return await self._opened().screenshot(self._seconds)

    async def start(self, task: Mapping[str, Any]) -> str:
        """Start a screen with the task's window, and return the agent's instructions."""
        await self.close()
        self._task, self._failure = task, None
        self._display = await start_display({key: task[key] for key in ("fields", "boxes", "buttons")}, SIZE)
        await self._ask()
        return str(task["prompt"])

    async def observe(self) -> str | Picture:
        """Return the window's parts, one a line, or a screenshot."""
        if self._shows == "screenshot":
            return Picture.of(await self.screenshot())
        lines = []
        for one in (await self._ask())["widgets"]:
            value = {"field": f' "{one["value"]}"', "box": " (ticked)" if one["value"] else ""}.get(one["kind"], "")
            lines.append(f"{one['kind']} {one['name']}{value} at {one['x']} {one['y']}")
        return "\n".join(lines)

    async def progress(self, answer: str | None) -> Progress:
        """Return 1 if the right button was pressed while the window had the right contents."""
        state = await self._ask()
        found = {"pressed": state["pressed"], "values": state["values"]}
        return Progress(reward=float(found == self._task["expected"]), over=state["pressed"] is not None)

    def check_alive(self) -> None:
        """Check that the screen and the window are running.

        Raises:
            EpisodeForfeited: one has ended, or does not answer.
            EnvironmentFailed: one was killed from outside.
        """
        if self._failure is not None:
            raise self._failure
        self._opened().check_alive()

    async def close(self) -> None:
        """End the window and the screen."""
        if (display := self._display) is not None:
            self._display = None
            await display.close()

    async def _xdotool(self, *arguments: str) -> str:
        """Run xdotool on the screen."""
        found = await self._ask({"xdotool": arguments, "seconds": self._seconds})
        if found.get("code") != 0:
            self._failure = EpisodeForfeited(f"xdotool failed with {found.get('code')}: {found.get('said')}")
            raise self._failure
        return DONE

    async def _ask(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of the window's program; without a request, the window's state."""
        self.check_alive()
        try:
            return await self._opened().ask(request or {}, self._seconds + 1)
        except EpisodeForfeited as error:
            self._failure = error
            raise

    def _opened(self) -> Display:
        if self._display is None:
            raise EnvironmentFailed("there is no screen: the episode has not begun")
        return self._display
