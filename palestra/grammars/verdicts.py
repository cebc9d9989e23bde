"""What is known of grammars: which can be used, and why others can't."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from palestra.errors import GrammarRefused, InvalidRequest

MOST_KNOWN = 1024
# Time depends on the machine's load as well as on the grammar: a less busy machine might be inside the bound. So a
# refusal for time is forgotten after a while; until then the same grammar is refused without being compiled again.
FORGET_SECONDS = 60.0


class Refusal(NamedTuple):
    """Why a grammar can't be used. It is kept, so that each later request for the grammar gets the same error.

    Attributes:
        text: the reason, in words.
        bound: True: the grammar is over a bound; False: llguidance can't read it.
        lasting: whether the grammar would also be refused at another time.
    """

    text: str
    bound: bool
    lasting: bool

    @classmethod
    def of(cls, error: InvalidRequest) -> Refusal:
        """Return the refusal that keeps an error of `GrammarProcess` or `refusal`."""
        bound = isinstance(error, GrammarRefused)
        return cls(str(error), bound, not isinstance(error, GrammarRefused) or error.lasting)

    def error(self, field: str) -> InvalidRequest:
        """Return the error for a request that asks for the grammar in `field`."""
        if self.bound:
            return GrammarRefused(self.text, lasting=self.lasting).of_field(field)
        return InvalidRequest(f"{field}: this schema can't be used: {self.text}", field)


class Verdicts:
    """The verdicts on grammars, by digest; those that were asked for least recently are forgotten first.

    Not safe for threads: its user holds a lock.
    """

    def __init__(self) -> None:
        # None: the grammar can be used. The number says until when (monotonic seconds) the verdict counts.
        self._known: OrderedDict[bytes, tuple[Refusal | None, float]] = OrderedDict()

    def is_usable(self, key: bytes) -> bool:
        """Return True if a grammar is known to be usable, False if it has to be compiled.

        Raises:
            InvalidRequest: the grammar is known to be unusable.
        """
        refused, until = self._known.get(key, (None, 0.0))
        if until < time.monotonic():
            self._known.pop(key, None)
            return False
        self._known.move_to_end(key)
        if refused is None:
            return True
        raise GrammarRefused(refused.text, lasting=refused.lasting) if refused.bound else InvalidRequest(refused.text)

    def learn(self, key: bytes, error: InvalidRequest | None) -> None:
        """Remember whether a grammar can be used.

        Args:
            error: why it can't; None: it can.
        """
        refused = None if error is None else Refusal.of(error)
        lasting = refused is None or refused.lasting
        self._known[key] = (refused, float("inf") if lasting else time.monotonic() + FORGET_SECONDS)
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
