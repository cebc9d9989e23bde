"""A cache of compiled grammars by content, and of the known results of compiling them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from palestra.errors import EngineFailure, GrammarRefused, InvalidRequest, PalestraError, TooManyRequests
from palestra.grammars.matcher import (
    BOUNDS,
    Bounds,
    GrammarVocabulary,
    Matcher,
    compile_grammar,
    make_tokenizer,
    refusal,
    walk_grammar,
)
from palestra.grammars.worker import GrammarWorker

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


MOST_KEPT = 256  # compiled grammars, of about 20 kB each; every position of a game may have one
MOST_BYTES = 2 * 2**20  # of the texts of those that are kept, unless one alone has more
MOST_WAITING = 256  # grammars that wait to be compiled; more are refused with 429


class _Compiled(NamedTuple):
    """A grammar that `llguidance` walks: a matcher at the beginning of a reply, and its mask there."""

    start: LLMatcher
    mask: bytes
    size: int  # of its text


class _Compilation:
    """A grammar that is being compiled or waits for the thread, and how many callers wait for it."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.waiting = 0
        self.examined = False  # now
        self.given_up = False
        self._wrapped: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}

    def done_here(self) -> asyncio.Future[None]:
        """Return `done` for the running event loop: one future for all callers, who shield it."""
        loop = asyncio.get_running_loop()
        if loop not in self._wrapped:
            self._wrapped[loop] = wrapped = asyncio.wrap_future(self.done)
            # Marks an error as seen, or asyncio would log it where all callers were cancelled.
            wrapped.add_done_callback(lambda d: d.cancelled() or d.exception())
        return self._wrapped[loop]


class Grammars:
    """Creates matchers for the grammars of one tokenizer; starts its process for the first grammar."""

    def __init__(self, vocabulary: GrammarVocabulary | None = None, bounds: Bounds = BOUNDS) -> None:
        """Create an empty pool. Without a vocabulary every byte is a token, which is enough for checking grammars."""
        self._vocabulary, self._bounds = vocabulary, bounds
        self._lock = threading.Lock()
        self._closed = False
        self._worker = GrammarWorker(vocabulary)
        self._thread = ThreadPoolExecutor(1, "palestra-grammar")
        self._tokenizer: LLTokenizer | None = None
        # By digest of the grammar's text; least recently used first.
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._known_grammars = KnownGrammars()
        self._compiling: dict[tuple[bytes, bool], _Compilation] = {}

    async def check(self, grammar: str, field: str) -> None:
        """Compile a grammar, unless its content is known; stop if all callers have left. `field` is the path of the
        request's field, for the error.

        Raises:
            InvalidRequest: llguidance cannot read the grammar.
            GrammarRefused: the grammar exceeds a limit.
            TooManyRequests: too many other grammars wait to be compiled.
        """
        key = _key(grammar)
        try:
            with self._lock:
                usable = self._known_grammars.is_usable(key)
            if not usable:
                await self._done(key, grammar, compiled=False)
        except GrammarRefused as error:
            raise error.of_field(field) from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: this schema can't be used: {error}", field) from None

    async def matcher(self, grammar: str) -> Matcher:
        """Return a matcher for a new reply; call `release` when the reply is finished. Raises InvalidRequest,
        GrammarRefused, TooManyRequests: see `check`.
        """
        key = _key(grammar)
        try:
            while (found := self._take(key)) is None:
                await self._done(key, grammar, compiled=True)
        except GrammarRefused:
            raise
        except InvalidRequest as error:
            raise InvalidRequest(f"the grammar can't be used: {error}", "response_format") from None
        return found

    def release(self, matcher: Matcher) -> None:
        """Exclude a finished reply's matcher from `advance`. Any thread may call this."""
        matcher.closed = True

    def advance(self, matchers: Sequence[Matcher]) -> list[PalestraError | None]:
        """Accept the pending tokens of matchers, update their masks, and return an error or None for each."""
        errors: list[PalestraError | None] = [None] * len(matchers)
        for place, matcher in enumerate(matchers):
            if not matcher.pending or matcher.closed:
                continue
            try:
                matcher.advance()
            except InvalidRequest as error:
                errors[place] = GrammarRefused(str(error))
        return errors

    def walk(self, grammar: str, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks from which tokens of a reply were sampled, int32 [W, B]. Blocks the calling thread.

        One bit for each token; W is the number of `wanted` (0 without `keep`), B is ceil(V / 32). `wanted` are
        ascending indices in `tokens`. Without `keep`, only check that the reply matches. Raises InvalidRequest: the
        tokens do not match the grammar. Raises GrammarRefused: a limit was reached.
        """
        places = [int(place) for place in wanted]
        return self._blocking_matcher(grammar).walk([int(token) for token in tokens], places, keep)

    def following(self, grammar: str, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Return the mask after the first tokens of a reply, int32 [ceil(V / 32)]. Blocks the calling thread. Raises
        InvalidRequest, GrammarRefused, EngineFailure: see `walk`.
        """
        return self._blocking_matcher(grammar).walk(tokens, [len(tokens)]).ravel()

    def close(self) -> None:
        """End the process. Callers that wait for a grammar get an EngineFailure."""
        with self._lock:
            self._closed = True
        self._worker.close()
        self._thread.shutdown(wait=False)  # queued work still runs, and fails because the pool is closed

    def _take(self, key: bytes) -> Matcher | None:
        """Return a matcher of a compiled grammar, else None."""
        with self._lock:
            self._known_grammars.is_usable(key)
            if (found := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
        return Matcher(found.start.deep_copy(), found.mask)

    def _blocking_matcher(self, grammar: str) -> Matcher:
        """Return a matcher for a thread that may block, as `matcher` does for tasks."""
        key = _key(grammar)
        while (found := self._take(key)) is None:
            self._join(key, grammar, compiled=True).done.result()
        return found

    async def _done(self, key: bytes, grammar: str, compiled: bool) -> None:
        """Wait until a grammar is examined or compiled; if this caller was the last that waits, stop that."""
        compilation = self._join(key, grammar, compiled)
        try:
            await asyncio.shield(compilation.done_here())
        finally:
            self._leave((key, compiled), compilation)

    def _join(self, key: bytes, grammar: str, compiled: bool) -> _Compilation:
        """Join the callers that wait for a grammar, and have the work done if this is the first one."""
        with self._lock:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            compilation = self._compiling.get((key, compiled))
            if compilation is None:
                if len(self._compiling) > MOST_WAITING:
                    raise TooManyRequests(f"{MOST_WAITING} other grammars wait to be compiled")
                compilation = self._compiling[key, compiled] = _Compilation()
                self._thread.submit(self._work, key, grammar, compiled, compilation)
            compilation.waiting += 1
            return compilation

    def _leave(self, name: tuple[bytes, bool], compilation: _Compilation) -> None:
        """Stop waiting for a grammar. If no caller is left, the work is given up."""
        with self._lock:
            compilation.waiting -= 1
            if compilation.waiting or compilation.done.done():
                return
            compilation.given_up = True
            if self._compiling.get(name) is compilation:
                del self._compiling[name]
            if compilation.examined:
                self._worker.cancel()

    def _work(self, key: bytes, grammar: str, compiled: bool, compilation: _Compilation) -> None:
        """Examine or compile a grammar in the pool's thread, and settle the future of the callers that wait."""
        error: BaseException | None = None
        try:
            with self._lock:
                if compilation.given_up:
                    raise CancelledError
                usable = self._known_grammars.is_usable(key)
            if not usable:
                self._examine(key, grammar, compilation)
            if compiled:
                self._compile(key, grammar)
        except BaseException as caught:  # noqa: BLE001 - raised in the callers that wait
            error = caught
        with self._lock:
            if self._compiling.get((key, compiled)) is compilation:
                del self._compiling[key, compiled]
        if error is None:
            compilation.done.set_result(None)
        else:
            compilation.done.set_exception(error)

    def _examine(self, key: bytes, grammar: str, compilation: _Compilation) -> None:
        """Have a grammar compiled where it can do no harm, and remember the verdict."""
        refused = None
        self._worker.start()
        with self._lock:
            if compilation.given_up:
                raise CancelledError
            compilation.examined = True
        try:
            self._worker.examine(grammar, self._bounds)
        except InvalidRequest as error:
            refused = error
        with self._lock:
            compilation.examined = False
            self._known_grammars.learn(key, refused)
        if refused is not None:
            raise refused

    def _compile(self, key: bytes, grammar: str) -> None:
        """Compile a grammar that can be used, and keep it."""
        with self._lock:
            if key in self._compiled:
                return
        if self._tokenizer is None:
            self._tokenizer = make_tokenizer(self._vocabulary)
        try:
            start = compile_grammar(self._tokenizer, grammar, self._bounds.lexer_states)
            (mask,) = walk_grammar(start.deep_copy(), (), (0,))
        except ValueError as error:
            raise refusal(str(error)) from None
        with self._lock:
            self._compiled[key] = _Compiled(start, mask, len(grammar.encode()))
            size = sum(one.size for one in self._compiled.values())
            while len(self._compiled) > 1 and (len(self._compiled) > MOST_KEPT or size > MOST_BYTES):
                size -= self._compiled.popitem(last=False)[1].size


def _key(grammar: str) -> bytes:
    """Return a digest of 16 bytes that identifies a grammar's text."""
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()
