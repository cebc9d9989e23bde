"""The process that compiles grammars first, so that an expensive one kills only this process; both sides of it.

`python -P -m palestra.grammars.worker SOCKET` holds the tokenizer, and no torch. It compiles one grammar after another,
each within a limit of time and memory at which the kernel kills it. Its owner says why, and starts another one for the
next grammar. It ends when its owner has ended, or has closed the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from palestra.errors import EngineFailure, GrammarRefused, PalestraError
from palestra.grammars.matcher import Bounds, GrammarVocabulary, compile_grammar, make_tokenizer, refusal, walk_grammar
from palestra.process.channel import BlockingChannel, Call, Failed, Message, Result, raw
from palestra.process.child import die_with_parent, popen, process_memory
from palestra.process.stub import answer_of

_START_SECONDS = 120.0  # enough to load a tokenizer of a few hundred thousand tokens on a busy machine
# The environment variables that the process inherits: none that holds a key.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG")
_STACK = 1 << 20  # less than a thread has, which compiles the same grammar afterwards
_PROBES, _PROBE_TOKENS = 3, 12  # how many random replies of a new grammar are tried, and their length
_KEPT_SHARE = 0.25  # of a grammar's memory: a process that has kept more of it is replaced


class GrammarWorker:
    """Compiles grammars in a process, started for the first one and again after a grammar has ended it.

    `start` and `examine` belong to one thread, which lives as long as the process; other methods are thread-safe.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        """Create the worker without its process. Without a vocabulary every byte is a token."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = self._closed = False
        self._channel: BlockingChannel
        self._answers: Iterator[Message]
        self._ids = itertools.count(1)
        self._loaded = 0  # bytes of resident memory after the start

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it has loaded the tokenizer."""
        if self._process is not None and not self._cancelled and self._process.poll() is None:
            return
        self._end()
        with self._lock, contextlib.ExitStack() as stack:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            # Ctrl-C at a terminal goes to Palestra's server, which ends this process.
            program = ("-P", "-m", "palestra.grammars.worker")
            self._process = process = popen(program, theirs, kept | {"OMP_NUM_THREADS": "1"}, apart=True)
            self._finalizer = weakref.finalize(self, _kill, process, ours)
            self._channel, self._cancelled = BlockingChannel(ours), False
        self._answers = self._channel.messages()
        ours.settimeout(_START_SECONDS)
        if not self._ask("load", self._vocabulary):
            self._end()
            raise EngineFailure("the process for grammars did not start; see the server's log")
        ours.settimeout(None)
        self._loaded = process_memory(process.pid)[1]

    def examine(self, grammar: str, bounds: Bounds) -> None:
        """Compile a grammar, and try some replies; call `start` first.

        Raises InvalidRequest: `llguidance` can't read the grammar. Raises GrammarRefused: the grammar exceeds a limit.
        Raises EngineFailure: the process was ended from outside, or by the caller.
        """
        process = self._process
        if process is None:
            raise EngineFailure("the engine was stopped")
        try:
            if not self._ask("examine", grammar, bounds):
                raise _reason(process.wait(), bounds)
        finally:
            if process_memory(process.pid)[1] - self._loaded > (bounds.memory_mib << 20) * _KEPT_SHARE:
                self._end()

    def _ask(self, method: str, *arguments: Any) -> bool:
        """Call a method of `GrammarCompiler`; return False if the process has ended before its answer."""
        with contextlib.suppress(OSError):
            self._channel.send(Call(next(self._ids), method, raw(arguments)))
        match next(self._answers, None):
            case Result():
                return True
            case Failed(error=error) if error is not None:
                raise error.error()
        return False

    def cancel(self) -> None:
        """End a running `examine`, and the process with it."""
        with self._lock:
            if self._process is not None:
                self._cancelled = True
                self._process.kill()

    def close(self) -> None:
        """End the process; `examine` then raises EngineFailure."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._finalizer()
            self._process = None


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()


def _reason(status: int, bounds: Bounds) -> PalestraError:
    """Return the error of a grammar at which the process has ended with this status."""
    if status == -signal.SIGALRM:
        return GrammarRefused(f"compiling it takes longer than {bounds.compile_wall_seconds:g} s", lasting=False)
    if status == -signal.SIGPROF:
        seconds = bounds.compile_cpu_seconds
        return GrammarRefused(f"compiling it takes more than {seconds:g} s of processor time", lasting=False)
    if status == -signal.SIGABRT:
        return _too_large(bounds)
    if status == -signal.SIGKILL:
        return EngineFailure("the process that compiles grammars was killed; send the call again")
    return GrammarRefused(f"compiling it ends its process (status {status}); it may be nested too deep")


def _too_large(bounds: Bounds) -> GrammarRefused:
    return GrammarRefused(f"compiling it takes more than {bounds.memory_mib} MiB of memory")


# The process


class GrammarCompiler:
    """Executes the calls of `GrammarWorker`, one after the other."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer  # made by `load`, the first call

    def load(self, vocabulary: GrammarVocabulary | None) -> None:
        """Load the tokenizer of a vocabulary; None: every byte is a token."""
        self._tokenizer = make_tokenizer(vocabulary)

    def examine(self, grammar: str, bounds: Bounds) -> None:
        """Compile a grammar, and walk some of its replies; see `GrammarWorker.examine`.

        Some grammars compile quickly, and become expensive after a few tokens.
        """
        try:
            with _confined(bounds):
                start = compile_grammar(self._tokenizer, grammar, bounds.lexer_states)
                for seed in range(_PROBES):
                    _probe(start, self._tokenizer.eos_token, random.Random(seed))
        except ValueError as error:
            raise refusal(str(error)) from None
        except MemoryError:
            raise _too_large(bounds) from None


@contextlib.contextmanager
def _confined(bounds: Bounds) -> Iterator[None]:
    """Limit this process's time and memory inside the block, and silence the warnings and backtraces of llguidance."""
    limits = {
        resource.RLIMIT_AS: process_memory(os.getpid())[0] + (bounds.memory_mib << 20),
        resource.RLIMIT_STACK: _STACK,
        resource.RLIMIT_CORE: 0,
    }
    before = {kind: resource.getrlimit(kind) for kind in limits}
    errors = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    signal.setitimer(signal.ITIMER_PROF, bounds.compile_cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, bounds.compile_wall_seconds)
    for kind, limit in limits.items():
        most = before[kind][1]
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        yield
    finally:
        for kind, both in before.items():
            resource.setrlimit(kind, both)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0.0)
        os.dup2(errors, 2)
        os.close(errors)


def _probe(start: LLMatcher, eos: int, draw: random.Random) -> None:
    """Walk a random reply."""
    matcher, tokens = start.deep_copy(), list[int]()
    for _ in range(_PROBE_TOKENS):
        (mask,) = walk_grammar(matcher, tokens[-1:], [len(tokens[-1:])])
        tokens.append(_choose(mask, draw))
        if matcher.is_stopped() or tokens[-1] == eos:
            break


def _choose(mask: bytes, draw: random.Random) -> int:
    """Return a random token that the mask allows."""
    bits = int.from_bytes(mask, "little")
    if not bits:
        raise ValueError("no token fits it")
    start = draw.randrange(len(mask) * 8)
    rest = bits >> start
    if not rest:
        rest, start = bits, 0
    return start + (rest & -rest).bit_length() - 1


def _main(connection: socket.socket) -> None:
    """Answer calls until the connection closes."""
    die_with_parent()  # it does not look at its connection while it compiles
    channel, compiler = BlockingChannel(connection), GrammarCompiler()
    for message in channel.messages():
        if isinstance(message, Call):
            channel.send(answer_of(compiler, message))


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
