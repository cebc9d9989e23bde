"""Environment `desktop`: a window on a screen of its own, which an agent acts on with mouse and keyboard."""

from __future__ import annotations

import asyncio
import json
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from palestra.envs.acting import DONE, ActingEnvironment, Actions, Progress
from palestra.envs.desktop.display import KILLED, Display, check_installed, end, start_display
from palestra.errors import EnvironmentFailed, EpisodeForfeited, PalestraError
from palestra.pictures.parts import Picture
from palestra.threads import in_thread
from palestra.tools import BadArguments, FunctionTool

SIZE = (320, 200)  # pixels of the screen, wide and high
_NOTICE_SECONDS = 0.2
_PROGRAM = Path(__file__).parent / "window.py"
# Known names alone: other ones are commands of xdotool, or keys that end the screen, and its own list of keys is short.
MODIFIERS = ("ctrl", "shift", "alt")
KEYS = frozenset(
    {
        *(string.ascii_letters + string.digits),
        *("Tab", "Return", "space", "BackSpace", "Delete", "Insert", "Escape"),
        *("Home", "End", "Prior", "Next", "Up", "Down", "Left", "Right"),
        *("minus", "plus", "equal", "comma", "period", "slash", "colon", "semicolon", "underscore", "at", "apostrophe"),
        *(f"F{number}" for number in range(1, 13)),
    }
)


class DesktopEnvironment(ActingEnvironment):
    """A window with fields, boxes and buttons; the reward is 1 if the right button is pressed over the right contents.

    Each episode has a screen (Xvfb) and a program of its own; the agent's actions go through xdotool. Pressing a button
    ends the episode.
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
        """Create the environment; a screen is made for each episode.

        Args:
            observation: what the agent reads: `widgets`, the window's parts with their places, as a tree of
                accessibility has them; `screenshot`, a picture of the screen.
            actions: `tools`, tool calls; `text`, one line such as `click 40 20`.
            max_steps: replies that the agent may make in an episode.
            timeout_seconds: limit for one action, and for one answer of the window.

        Raises:
            ConfigError: Xvfb, xdotool or tkinter is not installed.
            ValueError: a number is not above 0.
        """
        check_installed()
        if not timeout_seconds > 0:
            raise ValueError("timeout_seconds is above 0")
        tools = [FunctionTool(self.click), FunctionTool(self.type), FunctionTool(self.key)]
        super().__init__(tools, actions=actions, max_steps=max_steps, tool_seconds=2 * timeout_seconds)
        self._shows, self._seconds = observation, timeout_seconds
        self._task: Mapping[str, Any] = {}
        self._display: Display | None = None
        self._window: asyncio.subprocess.Process | None = None
        self._failure: PalestraError | None = None

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
        """Return what the screen shows now, as PNG.

        Raises:
            EnvironmentFailed: there is no screen.
        """
        if self._display is None:
            raise EnvironmentFailed("there is no screen: the episode has not begun")
        return await in_thread(self._display.screenshot)

    async def start(self, task: Mapping[str, Any]) -> str:
        """Start a screen with the task's window, and return what the agent is to do."""
        await self.close()
        self._task, self._failure = task, None
        self._display = await start_display(*SIZE)
        pipe = asyncio.subprocess.PIPE
        shown = {"width": SIZE[0], "height": SIZE[1], **{key: task[key] for key in ("fields", "boxes", "buttons")}}
        program = [sys.executable, "-I", str(_PROGRAM), json.dumps(shown)]
        self._window = await self._display.start(program, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        await self._ask()
        return str(task["prompt"])

    async def observe(self) -> str | Picture:
        """Return the window's parts, one a line, or what the screen shows."""
        if self._shows == "screenshot":
            return Picture.of(await self.screenshot())
        lines = []
        for one in (await self._ask())["widgets"]:
            value = {"field": f' "{one["value"]}"', "box": " (ticked)" if one["value"] else ""}.get(one["kind"], "")
            lines.append(f"{one['kind']} {one['name']}{value} at {one['x']} {one['y']}")
        return "\n".join(lines)

    async def progress(self, answer: str | None) -> Progress:
        """Return 1 if the button that was pressed is the right one and the window held the right contents."""
        state = await self._ask()
        found = {"pressed": state["pressed"], "values": state["values"]}
        return Progress(reward=float(found == self._task["expected"]), over=state["pressed"] is not None)

    def check_alive(self) -> None:
        """Check that the screen and the window are there.

        Raises:
            EpisodeForfeited: one has ended.
            EnvironmentFailed: one was killed from outside.
        """
        if self._failure is not None:
            raise self._failure
        assert self._display is not None, "the episode has begun"
        assert self._window is not None, "the episode has begun"
        codes = (self._display.exit_code, self._window.returncode)
        if any(code in KILLED for code in codes):
            raise EnvironmentFailed("the screen, or the program in it, was killed from outside")
        if codes != (None, None):
            raise self._fail("the screen, or the program in it, has ended")

    async def close(self) -> None:
        """End the window and the screen."""
        if (window := self._window) is not None:
            self._window = None
            await end(window)
        if (display := self._display) is not None:
            self._display = None
            await display.close()

    async def _xdotool(self, *arguments: str) -> str:
        """Run xdotool on the screen.

        Raises:
            BadArguments: xdotool knows no such key.
            EpisodeForfeited: it takes too long, or fails.
        """
        self.check_alive()
        assert self._display is not None, "check_alive has looked"
        process = await self._display.start(
            ["xdotool", *arguments], stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(self._seconds):
                _, errors = await process.communicate()
        except TimeoutError:
            await end(process)
            raise self._fail(f"xdotool took longer than {self._seconds:g} s") from None
        if "No such key name" in errors.decode(errors="replace"):
            raise BadArguments(f"there is no key {arguments[-1]!r}")
        if process.returncode:
            await asyncio.sleep(_NOTICE_SECONDS)  # until it is known how the screen has ended, where it has
            self.check_alive()
            raise self._fail(f"xdotool failed: {errors.decode(errors='replace').strip()}")
        return DONE

    async def _ask(self) -> dict[str, Any]:
        """Return what the window says of itself.

        Raises:
            EpisodeForfeited: it does not answer.
        """
        self.check_alive()
        window = self._window
        assert window is not None, "check_alive has looked"
        assert window.stdin is not None, "the window was started with pipes"
        assert window.stdout is not None, "the window was started with pipes"
        window.stdin.write(b"\n")
        try:
            async with asyncio.timeout(self._seconds):
                found: dict[str, Any] = json.loads(await window.stdout.readline())
        except (TimeoutError, ValueError, OSError) as error:
            raise self._fail("the window does not answer") from error
        return found

    def _fail(self, reason: str) -> PalestraError:
        self._failure = EpisodeForfeited(reason)
        return self._failure
