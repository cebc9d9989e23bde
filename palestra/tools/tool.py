"""What a tool is."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any


class BadArguments(ValueError):
    """Arguments that a tool can't be called with; the message is for the model."""


class Tool(ABC):
    """A function that a model may call. Implement `get_json_schema`, and `apply` or `apply_async`."""

    @abstractmethod
    def get_json_schema(self) -> dict[str, Any]:
        """OpenAI's shape: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.get_json_schema()["function"]["name"])

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to call it with.

        Raises:
            BadArguments: one is missing, or not known. Types are the tool's own matter.
        """
        parameters = self.get_json_schema()["function"].get("parameters") or {}
        known = set(parameters.get("properties") or {})
        if missing := [name for name in parameters.get("required") or () if name not in arguments]:
            raise BadArguments(f"the argument {missing[0]!r} is missing")
        if unknown := [name for name in arguments if name not in known]:
            raise BadArguments(f"there is no argument {unknown[0]!r}; known are {', '.join(sorted(known)) or 'none'}")
        return dict(arguments)

    def apply(self, **arguments: Any) -> Any:
        """Do it. May block; runs in a thread of its own."""
        raise NotImplementedError(f"{type(self).__name__} has neither apply nor apply_async")

    async def apply_async(self, **arguments: Any) -> Any:
        """Do it, on the event loop. Unless overridden, `apply` in a thread."""
        return await in_thread(lambda: self.apply(**arguments))


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run something that blocks in a thread of its own.

    Not in a pool: a call that hangs for ever would take a place in it for ever. The thread is a daemon, so what hangs
    does not hold up the end of the process, either.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # whoever waited may have given up
            set_it(value)

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome: tuple[Callable[[Any], None], Any] = (done.set_exception, _raisable(error))
        else:
            outcome = (done.set_result, result)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    threading.Thread(target=run, name="palestra-tool", daemon=True).start()
    return await done


def _raisable(error: BaseException) -> BaseException:
    """A future can't hold StopIteration, and an exit in a tool must not end the program."""
    return error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RuntimeError(repr(error))
