"""Finds what is private in a request or a reply, before anything of it is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from palestra.errors import ConfigError
from palestra.extensions import load_function
from palestra.threads import in_thread


class Redaction:
    """The patterns or the function of a run that say which texts are private."""

    def __init__(self, redact: str | Sequence[str]) -> None:
        """Load the function, or compile the patterns. Raises ConfigError: the function can't be loaded, or can't be
        called with one text.
        """
        function = redact if isinstance(redact, str) else ""
        self._patterns = [] if function else [re.compile(pattern) for pattern in redact]
        self._change: Callable[[str], str] | None = None
        self._name = function
        if function:
            self._change = load_function(function)
            if not callable(self._change) or inspect.iscoroutinefunction(self._change):
                raise ConfigError(f"live.redact: {function} is no function from a text to a text")

    @property
    def is_on(self) -> bool:
        """Return whether anything is looked for."""
        return bool(self._patterns) or self._change is not None

    def finds(self, value: Any) -> bool:
        """Return whether a text in a JSON value is private. Raises ConfigError: the function returns no text."""
        return any(self._is_private(text) for text in _texts(value))

    async def finds_in_thread(self, value: Any) -> bool:
        """Return what `finds` returns, without a thread if nothing is looked for."""
        return self.is_on and await in_thread(partial(self.finds, value))

    def _is_private(self, text: str) -> bool:
        if any(pattern.search(text) for pattern in self._patterns):
            return True
        if self._change is None:
            return False
        changed = self._change(text)
        if not isinstance(changed, str):
            raise ConfigError(f"live.redact: {self._name} returned {type(changed).__name__}, and not a text")
        return changed != text


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            stack += one.keys()
            stack += one.values()
        elif isinstance(one, list | tuple):
            stack += one
