"""The process that compiles grammars first, so that one which takes too much ends a process that has nothing else.

It holds the tokenizer, no thread and no torch. For each grammar it forks a process, which the kernel ends at a bound
of time or memory. It ends when its connection is closed, however Palestra's process ended, and its forks end with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from palestra.grammars.vocabulary import GrammarVocabulary
from palestra.grammars.walking import compile_grammar, make_tokenizer, walk

_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()
_STACK = 1 << 20  # less than a thread has, which compiles the same grammar afterwards
_PROBES, _PROBE_TOKENS = 3, 12  # how many random replies of a new grammar are tried, and their length
_MOST_BRANCHES = 64  # tokens that may follow at one place of a grammar that is walked whole
_libc = ctypes.CDLL(None)


def main(connection: Connection) -> None:
    """Answer each request, a grammar and its bounds, until the connection is closed.

    An empty message while a grammar is compiled ends that; the answer then says how its process ended.
    """
    vocabulary = json.loads(connection.recv_bytes())
    tokenizer = make_tokenizer(None if vocabulary is None else GrammarVocabulary(**vocabulary))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
            if request:  # else it has ended before the message came
                connection.send_bytes(_answer(connection, tokenizer, json.loads(request)))
        except (EOFError, ConnectionError):
            return


def _answer(connection: Connection, tokenizer: LLTokenizer, request: dict[str, Any]) -> bytes:
    """Return what a fork says of a grammar, or else its exit status."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _fork(theirs, tokenizer, request["grammar"], request["bounds"])
    theirs.close()
    with ours:
        if connection in wait([connection, ours]):
            os.kill(pid, signal.SIGKILL)
        try:
            answer = ours.recv_bytes()
        except EOFError:
            answer = b""
    _, status = os.waitpid(pid, 0)
    return answer or json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode()


def _fork(answer: Connection, tokenizer: LLTokenizer, grammar: str, bounds: dict[str, Any]) -> None:
    """Compile a grammar and send what was found. Ends this process and does not return."""
    code = 2  # stays if llguidance panics
    try:
        _confine(bounds)
        found = _examine(tokenizer, grammar, bounds)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0.0)
        answer.send_bytes(json.dumps(found).encode())
        code = 0
    except MemoryError:
        code = 1
    finally:
        os._exit(code)


def _confine(bounds: dict[str, Any]) -> None:
    """Limit this process: its time and memory are bounded, it ends with its parent, and prints nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "wb") as nowhere:  # for llguidance's warnings and Rust's backtraces
        os.dup2(nowhere.fileno(), 2)
    with open("/proc/self/statm", encoding="utf-8") as statm:
        most = int(statm.read().split()[0]) * _PAGE + (bounds["memory_mib"] << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for timer, seconds in ((signal.ITIMER_PROF, "compile_cpu_seconds"), (signal.ITIMER_REAL, "compile_wall_seconds")):
        signal.setitimer(timer, bounds[seconds])


def _examine(tokenizer: LLTokenizer, grammar: str, bounds: dict[str, Any]) -> dict[str, Any]:
    """Return why a grammar can't be used, "" if it can, and its tree, if it has few replies.

    A few random replies are walked, because some grammars compile quickly and become expensive after a few tokens.
    """
    try:
        start = compile_grammar(tokenizer, grammar, bounds["lexer_states"])
        masks = [mask for seed in range(_PROBES) for mask in _probe(start, tokenizer.eos_token, random.Random(seed))]
    except ValueError as error:
        return {"problem": str(error)}
    tree = _tree(start, tokenizer.eos_token, bounds["tree_places"])
    return {"problem": "", "tree": tree, "mask_bytes": len(masks[0])}


def _probe(start: LLMatcher, eos: int, draw: random.Random) -> Iterator[bytes]:
    """Walk a random reply, and yield its masks."""
    matcher, tokens = start.deep_copy(), list[int]()
    for _ in range(_PROBE_TOKENS):
        (mask,) = walk(matcher, tokens[-1:], [len(tokens[-1:])])
        yield mask
        tokens.append(_choose(mask, draw))
        if matcher.is_stopped() or tokens[-1] == eos:
            break


def _tree(start: LLMatcher, eos: int, most: int) -> list[list[tuple[int, int]]] | None:
    """Return all places of the grammar's replies: for each the tokens that may follow, and where each leads to.

    That is the number of a place, or -1 for the end of the reply.

    Returns None if there are too many places, or one of them is over a limit: a reply that comes to it gets the error.
    """
    nodes: list[list[tuple[int, int]]] = [[]]
    open_places = [(0, start)]
    while open_places:
        number, matcher = open_places.pop()
        tokens = _tokens_of(matcher.compute_bitmask(), _MOST_BRANCHES)
        if tokens is None or matcher.is_error():
            return None
        for token in tokens:
            if token == eos:
                nodes[number].append((token, -1))
                continue
            after = matcher.deep_copy()
            if len(nodes) >= most or not after.consume_token(token):
                return None
            nodes[number].append((token, len(nodes)))
            open_places.append((len(nodes), after))
            nodes.append([])
    return nodes


def _tokens_of(mask: bytes, most: int) -> list[int] | None:
    """Return the tokens that a mask allows, in order; None: more than `most`."""
    bits = int.from_bytes(mask, "little")
    if bits.bit_count() > most:
        return None
    tokens = []
    while bits:
        tokens.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return tokens


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


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as inherited:
        main(inherited)
