"""The server from which grammar processes are forked, and the code of these processes.

The server holds the tokenizer, prepared once, and nothing else: no thread, no torch. For each grammar it forks a
process that compiles and walks the grammar, and that the kernel may end at any moment without harm to another grammar.
The server ends when its control socket is closed, however Palestra's process ended, and the grammar processes end with
it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from palestra.grammars.frames import receive_frame, receive_json, send_frame, send_json

_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()
_PROBES, _PROBE_TOKENS = 3, 12  # how many random replies of a new grammar are tried, and their length
_MOST_BRANCHES = 64  # tokens that may follow at one place of a grammar that is walked whole
_libc = ctypes.CDLL(None)


def main(control: socket.socket) -> None:
    """Serve requests on the control socket until it is closed.

    A request that carries a socket forks a grammar process, which speaks on that socket. Every other request names a
    process to end, and is answered with its exit status.
    """
    vocabulary = receive_json(control)
    tokenizer = _tokenizer(vocabulary)
    send_json(control, {"ready": True})
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        except ConnectionResetError:
            return
        if not data:
            return
        request = json.loads(data)
        if descriptors:
            with socket.socket(fileno=descriptors[0]) as own:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _grammar_process(own, tokenizer, request)
            send_json(control, {"pid": pid})
        else:
            os.kill(request["end"], signal.SIGKILL)  # harmless if the process has ended by itself
            _, status = os.waitpid(request["end"], 0)
            send_json(control, {"status": os.waitstatus_to_exitcode(status)})


def _tokenizer(vocabulary: dict[str, Any] | None) -> LLTokenizer:
    """Return the tokenizer of a vocabulary; None: one in which every byte is a token."""
    if vocabulary is None:
        return LLTokenizer("byte")
    return LLTokenizer(vocabulary["tokenizer"], n_vocab=vocabulary["size"], eos_token=vocabulary["eos"])


def _grammar_process(own: socket.socket, tokenizer: LLTokenizer, bounds: dict[str, Any]) -> None:
    """Serve one grammar until its socket is closed. Ends this process and does not return."""
    code = 2  # stays if llguidance panics
    try:
        _confine(bounds["memory_mib"] << 20)
        _Grammar(own, tokenizer, bounds).serve()
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    except MemoryError:
        code = 1
    finally:
        os._exit(code)


def _confine(memory: int) -> None:
    """Limit this process: it ends with its parent, prints nothing, and may use `memory` further bytes."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "wb") as nowhere:  # of llguidance's warnings and of Rust's backtraces
        os.dup2(nowhere.fileno(), 2)
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (present + memory, present + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


class _Grammar:
    """One compiled grammar, and a matcher for each reply that has to match it."""

    def __init__(self, own: socket.socket, tokenizer: LLTokenizer, bounds: dict[str, Any]) -> None:
        self._own, self._tokenizer, self._bounds = own, tokenizer, bounds
        self._matchers: dict[int, LLMatcher] = {}

    def serve(self) -> None:
        """Compile the grammar of the first frame, and answer requests to walk it until the socket is closed."""
        grammar = receive_frame(self._own).decode()
        self._allow(self._bounds["compile_cpu_seconds"])
        start, first, problem = self._compile(grammar)
        nodes = None if problem else self._tree(start)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        send_json(self._own, {"problem": problem})
        if problem:
            return
        send_frame(self._own, first)
        send_json(self._own, nodes)
        while True:
            request = receive_json(self._own)
            # A reply that ends while its walk is asked for stands in both: it is walked, and then forgotten, for a walk
            # makes a matcher that is not there.
            late = {name for name, _, _ in request["walk"]}.intersection(request["drop"])
            self._forget(name for name in request["drop"] if name not in late)
            problems: list[str | None] = []
            masks: list[bytes] = []
            for name, tokens, wanted in request["walk"]:
                if name not in self._matchers:
                    self._matchers[name] = start.deep_copy()
                try:
                    masks += self._walk(self._matchers[name], tokens, wanted)
                    problems.append(None)
                except ValueError as error:
                    problems.append(str(error))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            self._forget(late)
            send_json(self._own, {"problems": problems, "matchers": len(self._matchers)})
            send_frame(self._own, b"".join(masks) if request["masks"] else b"")

    def _forget(self, names: Iterable[int]) -> None:
        """Free the matchers of replies that are over."""
        for name in names:
            self._matchers.pop(name, None)

    def _allow(self, seconds: float) -> None:
        """Have the kernel end this process when it has used this many more seconds of processor time."""
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def _compile(self, grammar: str) -> tuple[LLMatcher, bytes, str]:
        """Return a matcher at the grammar's beginning, the mask there, and why the grammar can't be used, or "".

        A few random replies are walked, because some grammars compile quickly and become expensive after a few tokens.
        """
        limits = LLParserLimits(max_lexer_states=self._bounds["lexer_states"], verbose_errors=False)
        start = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if start.is_error():
            return start, b"", start.get_error()
        first: bytes = b""
        for seed in range(_PROBES):
            matcher = start.deep_copy()
            draw = random.Random(seed)
            tokens: list[int] = []
            try:
                while len(tokens) < _PROBE_TOKENS:
                    (mask,) = self._walk(matcher, tokens[-1:], [len(tokens[-1:])], renew=False)
                    first = first or mask
                    tokens.append(_choose(mask, draw))
                    if matcher.is_stopped() or tokens[-1] == self._tokenizer.eos_token:
                        break
            except ValueError as error:
                return start, b"", str(error)
        return start, first, ""

    def _tree(self, start: LLMatcher) -> list[list[tuple[int, int]]] | None:
        """Return all places of the grammar's replies: for each the tokens that may follow, and where each leads to.

        That is the number of a place, or -1 for the end of the reply.

        Returns None if there are too many places, or one of them is over a limit: a reply that comes to it gets the
        error.
        """
        nodes: list[list[tuple[int, int]]] = [[]]
        open_places = [(0, start)]
        while open_places:
            number, matcher = open_places.pop()
            tokens = _tokens_of(matcher.compute_bitmask(), _MOST_BRANCHES)
            if tokens is None or matcher.is_error():
                return None
            for token in tokens:
                if token == self._tokenizer.eos_token:
                    nodes[number].append((token, -1))
                    continue
                after = matcher.deep_copy()
                if len(nodes) >= self._bounds["tree_places"] or not after.consume_token(token):
                    return None
                nodes[number].append((token, len(nodes)))
                open_places.append((len(nodes), after))
                nodes.append([])
        return nodes

    def _walk(self, matcher: LLMatcher, tokens: list[int], wanted: list[int], renew: bool = True) -> list[bytes]:
        """Accept tokens, and return the token mask at each place in `wanted`."""
        masks, places = [], set(wanted)
        for place in range(len(tokens) + 1):
            if renew:
                self._allow(self._bounds["step_cpu_seconds"])
            if place in places:
                masks.append(matcher.compute_bitmask())
                if matcher.is_error():
                    raise ValueError(f"at a token of the reply: {matcher.get_error()}")
            if place < len(tokens) and not matcher.consume_token(tokens[place]):
                raise ValueError(f"token {tokens[place]} does not fit the grammar: {matcher.get_error()}")
        return masks


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
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        main(inherited)
