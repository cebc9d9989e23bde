"""Compiled grammars by their content: each is compiled once, in its own process, and kept while there is room."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import count

import numpy as np
from numpy.typing import NDArray

from palestra.errors import EngineFailure, GrammarRefused, InvalidRequest, PalestraError, TooManyRequests
from palestra.grammars.bounds import BOUNDS, Bounds
from palestra.grammars.matcher import Matcher
from palestra.grammars.process import (
    GrammarProcess,
    GrammarServer,
    GrammarVocabulary,
    ProcessMatcher,
    refusal,
)
from palestra.grammars.tree import GrammarTrees, TreeMatcher
from palestra.grammars.verdicts import Refusal, Verdicts

MOST_PROCESSES = 32
MOST_COMPILING = 2
MOST_WAITING = 256  # grammars that wait to be compiled; more are refused with 429
_CHUNK = 64  # tokens of one request of the trainer, whose masks are all in memory at the same time


class _Compilation:
    """A grammar that is being compiled or waits for a thread, and how many callers wait for it."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.waiting = 0
        self.process: GrammarProcess | None = None
        self.given_up = threading.Event()
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
    """Makes matchers for the grammars of one tokenizer. No process is started before the first grammar."""

    def __init__(self, vocabulary: GrammarVocabulary | None = None, bounds: Bounds = BOUNDS) -> None:
        """Create an empty pool.

        Args:
            vocabulary: the model's tokens; None: every byte is a token, which is enough to check grammars.
            bounds: what one grammar may cost.
        """
        self._vocabulary, self._bounds = vocabulary, bounds
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._server: GrammarServer | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        # By digest of the grammar's text; processes least recently used first.
        self._alive: OrderedDict[bytes, GrammarProcess] = OrderedDict()
        self._trees, self._verdicts = GrammarTrees(), Verdicts()
        self._compiling: dict[bytes, _Compilation] = {}
        self._queue: OrderedDict[Future[None], None] = OrderedDict()  # callers that wait until a process is released
        self._numbers = count()

    async def check(self, grammar: str, field: str) -> None:
        """Compile a grammar, unless its content is known. Compiling stops when no caller waits for it any more.

        Args:
            grammar: in a form that `llguidance` reads.
            field: path of the request's field that asks for the grammar, for the error.

        Raises:
            InvalidRequest: llguidance can't read the grammar.
            GrammarRefused: the grammar is over a bound.
            TooManyRequests: too many others wait to be compiled.
        """
        key = _key(grammar)
        try:
            with self._lock:
                usable = self._verdicts.is_usable(key)
            if not usable:
                await self._compiled(key, grammar)
        except InvalidRequest as error:
            raise Refusal.of(error).error(field) from None

    async def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a reply. Waits while all processes are in use.

        The caller has to `release` the matcher when the reply is finished.

        Raises:
            InvalidRequest, GrammarRefused, TooManyRequests: see `check`.
        """
        key = _key(grammar)
        try:
            while not isinstance(found := self._take(key), Matcher):
                if found is None:
                    await self._compiled(key, grammar)
                else:
                    await self._released(found)
        except GrammarRefused:
            raise
        except InvalidRequest as error:
            raise InvalidRequest(f"the grammar can't be used: {error}", "response_format") from None
        return found

    def release(self, matcher: Matcher) -> None:
        """Forget a matcher whose reply is finished.

        Its process becomes free for another grammar if it has no other matcher.
        """
        with self._lock:
            if matcher.closed:
                return
            matcher.closed = True
            if not isinstance(matcher, ProcessMatcher):
                return
            matcher.process.users -= 1
            # In this order, `closed` before `walked`: see `_open`.
            if matcher.walked:
                matcher.process.drop(matcher.number)
            self._wake_next()

    async def _released(self, waiting: Future[None]) -> None:
        """Wait until a process is released for this caller; one that is cancelled leaves its turn to the next."""
        try:
            await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            with self._lock:
                if waiting in self._queue:
                    del self._queue[waiting]
                else:
                    self._wake_next()
            raise

    def _wake_next(self) -> None:
        """Wake the caller that has waited longest for a process; the caller of this method holds the lock."""
        while self._queue:
            waiting, _ = self._queue.popitem(last=False)
            if waiting.set_running_or_notify_cancel():
                waiting.set_result(None)
                return

    def advance(self, matchers: Sequence[Matcher]) -> list[PalestraError | None]:
        """Accept the pending tokens of matchers and renew their masks.

        Blocks the calling thread. The processes of different grammars work at the same time.

        Returns:
            For each matcher None, or the error with which its reply has to end.
        """
        errors: list[PalestraError | None] = [None] * len(matchers)
        walked: dict[int, ProcessMatcher] = {}
        for place, matcher in enumerate(matchers):
            if not matcher.pending or matcher.closed:
                continue
            if isinstance(matcher, ProcessMatcher):
                walked[place] = matcher
            elif isinstance(matcher, TreeMatcher):
                errors[place] = _advanced(matcher)
        self._advance_processes(walked, errors)
        return errors

    def _advance_processes(self, matchers: Mapping[int, ProcessMatcher], errors: list[PalestraError | None]) -> None:
        """Advance the matchers of processes, which work at the same time, and enter the errors at their places."""
        by_process: dict[GrammarProcess, list[int]] = {}
        for place, matcher in matchers.items():
            by_process.setdefault(matcher.process, []).append(place)
        for process, places in by_process.items():
            process.lock.acquire()
            places[:] = [place for place in places if _open(matchers[place])]
            process.ask([(m.number, m.pending, [len(m.pending)]) for m in (matchers[place] for place in places)])
        for process, places in by_process.items():
            try:
                problems, masks = process.answer()
            except PalestraError as error:
                self._ended(process, error)
                for place in places:
                    errors[place] = error
                continue
            finally:
                process.lock.release()
            width, start = len(process.first_mask), 0
            for place, problem in zip(places, problems, strict=True):
                if problem is not None:
                    errors[place] = GrammarRefused(str(refusal(problem)))
                    continue
                matchers[place].mask, matchers[place].pending = masks[start : start + width], []
                start += width

    def walk(self, grammar: str, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks with which tokens of a reply could have been sampled. Blocks the calling thread.

        Args:
            grammar: the grammar that the reply had to match.
            wanted: ascending indices in `tokens` whose masks are wanted.
            keep: whether the masks are returned; False: they are computed only to find out whether the reply matches.

        Returns:
            int32 [W, B], a bit for each token, where W is the number of `wanted` (0 without `keep`) and B is ceil(V /
                32).

        Raises:
            InvalidRequest: the tokens do not match the grammar.
            GrammarRefused: a bound was reached.
            EngineFailure: the process was ended from outside.
        """
        matcher = self._blocking_matcher(grammar)
        if not isinstance(matcher, ProcessMatcher):
            found = matcher.tree.walk(
                [int(token) for token in tokens], [int(place) for place in wanted] if keep else []
            )
            return np.frombuffer(found, "<i4").reshape(-1, len(matcher.mask) // 4)
        parts = []
        try:
            for start in range(0, len(tokens), _CHUNK):
                piece = [int(token) for token in tokens[start : start + _CHUNK]]
                places = [int(place) - start for place in wanted if start <= place < start + len(piece)]
                parts.append(np.frombuffer(self._walked(matcher, piece, places, keep), "<i4"))
        finally:
            self.release(matcher)
        width = len(matcher.mask) // 4
        return np.concatenate([np.zeros(0, np.int32), *parts]).reshape(-1, width)

    def following(self, grammar: str, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Return the mask of the tokens that may follow some tokens of a reply. Blocks the calling thread.

        Args:
            grammar: the grammar that the reply has to match.
            tokens: the reply from its beginning, at most 64 tokens.

        Returns:
            int32 [B], a bit for each token; B is ceil(V / 32).

        Raises:
            InvalidRequest, GrammarRefused, EngineFailure: see `walk`.
        """
        matcher = self._blocking_matcher(grammar)
        if not isinstance(matcher, ProcessMatcher):
            return matcher.tree.walk(tokens, [len(tokens)]).ravel()
        try:
            return np.frombuffer(self._walked(matcher, [*tokens], [len(tokens)], keep=True), "<i4")
        finally:
            self.release(matcher)

    def close(self) -> None:
        """End all processes. Callers that wait for one get an EngineFailure."""
        with self._lock:
            self._closed = True
            processes = [*self._alive.values(), *(c.process for c in self._compiling.values() if c.process is not None)]
            self._alive.clear()
            while self._queue:
                self._wake_next()
        for process in processes:
            process.kill()
        with self._starting:
            if self._server is not None:
                self._server.close()
            if self._threads is not None:
                self._threads.shutdown(wait=False)  # queued work still runs, and fails because the pool is closed

    def _walked(self, matcher: ProcessMatcher, tokens: list[int], wanted: list[int], keep: bool) -> bytes:
        """Advance a matcher by tokens, and return the masks at the places of `wanted`, one after another."""
        with matcher.process.lock:
            matcher.walked = True
            matcher.process.ask([(matcher.number, tokens, wanted)], masks=keep)
            (problem,), masks = matcher.process.answer()
        if problem is not None:
            raise refusal(problem)
        return masks

    # Compiling.

    def _ended(self, process: GrammarProcess, error: PalestraError) -> None:
        """Drop a process that ended during a reply, and refuse its grammar from now on if the grammar is to blame."""
        with self._lock:
            for key in [key for key, alive in self._alive.items() if alive is process]:
                del self._alive[key]
                if isinstance(error, GrammarRefused):
                    self._verdicts.learn(key, error)

    def _take(self, key: bytes) -> ProcessMatcher | TreeMatcher | Future[None] | None:
        """Return a matcher if the grammar's tree is known or its process runs, None if it may be compiled, else a
        future to wait for.

        The future is done when another caller releases a process.
        """
        with self._lock:
            self._verdicts.is_usable(key)
            if (tree := self._trees.get(key)) is not None:
                return TreeMatcher(tree)
            process = self._alive.get(key)
            if process is not None and process.usable:
                self._alive.move_to_end(key)
                process.users += 1
                return ProcessMatcher(process, next(self._numbers))
            if sum(p.users > 0 for p in self._alive.values()) < MOST_PROCESSES:
                return None
            waiting: Future[None] = Future()
            self._queue[waiting] = None
            return waiting

    def _blocking_matcher(self, grammar: str) -> ProcessMatcher | TreeMatcher:
        """Return a matcher for a thread that may block, as `matcher` does for tasks."""
        key = _key(grammar)
        while not isinstance(found := self._take(key), Matcher):
            (self._join(key, grammar).done if found is None else found).result()
        return found

    async def _compiled(self, key: bytes, grammar: str) -> None:
        """Wait until the grammar is compiled, and stop compiling if this caller was the last that waited."""
        compilation = self._join(key, grammar)
        try:
            await asyncio.shield(compilation.done_here())
        finally:
            self._leave(key, compilation)

    def _join(self, key: bytes, grammar: str) -> _Compilation:
        """Join the callers that wait for a grammar, and have it compiled if this is the first one."""
        with self._lock:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            compilation = self._compiling.get(key)
            if compilation is None:
                if len(self._compiling) >= MOST_COMPILING + MOST_WAITING:
                    raise TooManyRequests(f"{MOST_WAITING} other grammars wait to be compiled")
                compilation = self._compiling[key] = _Compilation()
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(MOST_COMPILING, "palestra-grammar")
                self._threads.submit(self._compile, key, grammar, compilation)
            compilation.waiting += 1
            return compilation

    def _leave(self, key: bytes, compilation: _Compilation) -> None:
        """Stop waiting for a grammar. If no caller is left, its compilation is cancelled and its process is killed."""
        with self._lock:
            compilation.waiting -= 1
            if compilation.waiting or compilation.done.done():
                return
            compilation.given_up.set()
            if self._compiling.get(key) is compilation:
                del self._compiling[key]
            process = compilation.process
        if process is not None:
            process.kill()

    def _compile(self, key: bytes, grammar: str, compilation: _Compilation) -> None:
        """Compile a grammar in a thread of the pool, and settle the future of the callers that wait."""
        error: BaseException | None = None
        try:
            if compilation.given_up.is_set():
                raise CancelledError
            process = compilation.process = self._running_server().fork(self._bounds)
            if compilation.given_up.is_set():
                process.kill()
            process.compile(grammar)
        except BaseException as caught:  # noqa: BLE001 - raised in the callers that wait
            error = caught
        with self._lock:
            if self._compiling.get(key) is compilation:
                del self._compiling[key]
            if error is None or isinstance(error, InvalidRequest):
                self._verdicts.learn(key, error)
            unused = [] if error is not None or compilation.process is None else self._keep(key, compilation.process)
        for process in unused:
            process.kill()
        if error is None:
            compilation.done.set_result(None)
        else:
            compilation.done.set_exception(error)

    def _keep(self, key: bytes, process: GrammarProcess) -> list[GrammarProcess]:
        """Keep a process for further replies, and return the processes to kill in its place.

        The caller holds the lock.
        """
        if self._closed:
            return [process]
        if process.tree is not None:
            self._trees.keep(key, process.tree)
            return [process]
        gone = [self._alive.pop(key)] if key in self._alive else []
        self._alive[key] = process
        idle = [other for other, p in self._alive.items() if not p.users]
        return gone + [self._alive.pop(other) for other in idle[: max(0, len(self._alive) - MOST_PROCESSES)]]

    def _running_server(self) -> GrammarServer:
        """Return the server from which processes are forked, after starting it if it does not run."""
        with self._starting:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            if self._server is not None and not self._server.alive:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = GrammarServer(self._vocabulary)
            return self._server


def _advanced(matcher: TreeMatcher) -> PalestraError | None:
    """Advance a matcher of a tree; returns the error with which its reply has to end, or None."""
    try:
        matcher.advance()
    except InvalidRequest as error:
        return GrammarRefused(str(error))
    return None


def _open(matcher: ProcessMatcher) -> bool:
    """Return whether a matcher is still in use, and note that its process has one from now on.

    A reply may be over at any moment, in another thread. Noted first, and then looked: so either this sees that the
    matcher is closed, or `release` sees that it was walked and has it dropped.
    """
    matcher.walked = True
    return not matcher.closed


def _key(grammar: str) -> bytes:
    """Return a digest of 16 bytes by which a grammar's text, which may be long, is known."""
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()
