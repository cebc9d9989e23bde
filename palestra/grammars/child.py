"""The process that compiles grammars first, so that an expensive grammar kills only this process.

It holds the tokenizer, but no threads and no torch. It forks a process for each grammar, which the kernel kills at a
limit of time or memory. It ends when its connection closes, however Palestra's process ended, and its forks end with
it.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import socket
import sys

from llguidance import LLMatcher, LLTokenizer

from palestra.errors import EngineFailure, GrammarRefused, PalestraError
from palestra.grammars.bounds import Bounds
from palestra.grammars.matcher import refusal
from palestra.grammars.vocabulary import GrammarVocabulary
from palestra.grammars.walking import compile_grammar, make_tokenizer, walk_grammar
from palestra.process.channel import BlockingChannel, Call, Failed, Result, raw
from palestra.process.child import die_with_parent
from palestra.process.codec import SentError
from palestra.process.stub import method_of

_PAGE = resource.getpagesize()
_STACK = 1 << 20  # less than a thread has, which compiles the same grammar afterwards
_PROBES, _PROBE_TOKENS = 3, 12  # how many random replies of a new grammar are tried, and their length


class GrammarCompiler:
    """Executes the calls of `GrammarWorker`, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        """Load nothing yet.

        Args:
            connection: anything that arrives there while a grammar is compiled ends that.
        """
        self._connection = connection
        self._tokenizer: LLTokenizer  # made by `load`, the first call

    def load(self, vocabulary: GrammarVocabulary | None) -> None:
        """Load the tokenizer of a vocabulary; None: every byte is a token."""
        self._tokenizer = make_tokenizer(vocabulary)

    def examine(self, grammar: str, bounds: Bounds) -> None:
        """Compile a grammar in a fork, and walk some of its replies.

        Raises:
            InvalidRequest: `llguidance` can't read the grammar.
            GrammarRefused: the grammar is over a bound.
            EngineFailure: the fork was ended from outside, or by the caller.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            _fork(writing, self._tokenizer, grammar, bounds)
        os.close(writing)
        with open(reading, "rb") as answer:
            ready: list[int] = select.select([self._connection.fileno(), reading], [], [])[0]
            if self._connection.fileno() in ready:
                os.kill(pid, signal.SIGKILL)
            found = answer.read()
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise _reason(status, bounds)
        if found:
            raise refusal(found.decode())


def _main(connection: socket.socket) -> None:
    """Answer calls until the connection closes."""
    channel, compiler = BlockingChannel(connection), GrammarCompiler(connection)
    for message in channel.messages():
        if isinstance(message, Call):  # else what it would end has ended before
            arguments = method_of(GrammarCompiler, message.method).decoded(message.arguments)
            try:
                channel.send(Result(message.id, raw(getattr(compiler, message.method)(*arguments))))
            except PalestraError as error:
                channel.send(Failed(message.id, SentError.of(error)))


def _fork(answer: int, tokenizer: LLTokenizer, grammar: str, bounds: Bounds) -> None:
    """Compile a grammar, send the result, and end this process."""
    code = 2  # stays if llguidance panics
    try:
        _confine(bounds)
        found = _examine(tokenizer, grammar, bounds)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0.0)
        with open(answer, "wb") as file:
            file.write(found.encode())
        code = 0
    except MemoryError:
        code = 1
    finally:
        os._exit(code)


def _confine(bounds: Bounds) -> None:
    """Limit this process's time and memory, tie it to its parent, and silence its output."""
    die_with_parent()
    with open(os.devnull, "wb") as nowhere:  # for llguidance's warnings and Rust's backtraces
        os.dup2(nowhere.fileno(), 2)
    with open("/proc/self/statm", encoding="utf-8") as statm:
        most = int(statm.read().split()[0]) * _PAGE + (bounds.memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, bounds.compile_cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, bounds.compile_wall_seconds)


def _examine(tokenizer: LLTokenizer, grammar: str, bounds: Bounds) -> str:
    """Return why a grammar can't be used, "" if it can.

    A few random replies are walked, because some grammars compile quickly and become expensive after a few tokens.
    """
    try:
        start = compile_grammar(tokenizer, grammar, bounds.lexer_states)
        for seed in range(_PROBES):
            _probe(start, tokenizer.eos_token, random.Random(seed))
    except ValueError as error:
        return str(error)
    return ""


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


def _reason(status: int, bounds: Bounds) -> PalestraError:
    """Return the error for the exit status of a fork."""
    if status == -signal.SIGALRM:
        return GrammarRefused(f"compiling it takes longer than {bounds.compile_wall_seconds:g} s", lasting=False)
    if status == -signal.SIGPROF:
        seconds = bounds.compile_cpu_seconds
        return GrammarRefused(f"compiling it takes more than {seconds:g} s of processor time", lasting=False)
    if status in (1, -signal.SIGABRT):
        return GrammarRefused(f"compiling it takes more than {bounds.memory_mib} MiB of memory")
    if status == -signal.SIGKILL:
        return EngineFailure("this grammar's process was killed from outside; send the call again")
    return GrammarRefused(f"compiling it ends its process (status {status}); it may be nested too deep")


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
