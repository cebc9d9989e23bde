"""The known results of compiling grammars."""

from __future__ import annotations

import time
from collections import OrderedDict

from palestra.errors import GrammarRefused, InvalidRequest

MOST_KNOWN = 1024
# Time depends on the machine's load as well as on the grammar: a less busy machine might be inside the bound. So a
# refusal for time is forgotten after a while; until then the same grammar is refused without being compiled again.
FORGET_SECONDS = 60.0


class KnownGrammars:
    """Compilation results by grammar digest; evicts the least recently used. Not thread-safe: callers hold a lock."""

    def __init__(self) -> None:
        # None: the grammar can be used. The number says until when (monotonic seconds) the verdict counts.
        self._known: OrderedDict[bytes, tuple[InvalidRequest | None, float]] = OrderedDict()

    def is_usable(self, key: bytes) -> bool:
        """Return whether a grammar is known to be usable; False: compile it first."""
        refused, until = self._known.get(key, (None, 0.0))
        if until < time.monotonic():
            self._known.pop(key, None)
            return False
        self._known.move_to_end(key)
        if refused is None:
            return True
        raise _renewed(refused)

    def learn(self, key: bytes, error: InvalidRequest | None) -> None:
        """Store whether a grammar is usable. Without an error it is usable."""
        forgotten = isinstance(error, GrammarRefused) and not error.lasting
        until = time.monotonic() + FORGET_SECONDS if forgotten else float("inf")
        self._known[key] = (None if error is None else _renewed(error), until)
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Remove all results."""
        self._known.clear()


def _renewed(error: InvalidRequest) -> InvalidRequest:
    """Return a copy of the error without the traceback of earlier raises."""
    if isinstance(error, GrammarRefused):
        return GrammarRefused(str(error), lasting=error.lasting)
    return InvalidRequest(str(error))
