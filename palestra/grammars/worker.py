"""Palestra's side of the process that compiles grammars first: start it, ask it, and explain why it could not."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from palestra.errors import EngineFailure
from palestra.grammars.bounds import Bounds
from palestra.grammars.vocabulary import GrammarVocabulary
from palestra.process.channel import BlockingChannel, Call, Cancel, Failed, Message, Result, raw
from palestra.process.child import popen

_START_SECONDS = 120.0  # enough to load a tokenizer of a few hundred thousand tokens on a busy machine
# The environment variables that the process inherits: none that holds a key.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG")


class GrammarWorker:
    """Compiles grammars in a process, started for the first one and restarted after it was killed.

    `start` and `examine` belong to one thread; other methods are thread-safe.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        """Create the worker without its process.

        Args:
            vocabulary: None: every byte is a token.
        """
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of what follows, and of writing
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: BlockingChannel | None = None
        self._answers: Iterator[Message] = iter(())
        self._ids = itertools.count(1)
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None before its start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it has loaded the tokenizer."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        with self._lock, contextlib.ExitStack() as stack:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            # Ctrl-C at a terminal goes to Palestra's server, which ends this process.
            self._process = process = popen(
                ("-P", "-m", "palestra.grammars.child"),
                theirs,
                kept | {"OMP_NUM_THREADS": "1"},
                apart=True,
            )
            self._finalizer = weakref.finalize(self, _kill, process, ours)
            self._channel = channel = BlockingChannel(ours)
        self._answers = channel.messages()
        ours.settimeout(_START_SECONDS)
        try:
            self._ask("load", self._vocabulary)
        except EngineFailure as error:
            raise EngineFailure("the process for grammars did not start; see the server's log") from error
        ours.settimeout(None)

    def examine(self, grammar: str, bounds: Bounds) -> None:
        """Compile a grammar and try some replies; call `start` first.

        Raises:
            InvalidRequest: `llguidance` cannot read the grammar.
            GrammarRefused: the grammar exceeds a limit.
        """
        self._ask("examine", grammar, bounds)

    def _ask(self, method: str, *arguments: Any) -> None:
        """Wait for the answer to a call, or raise its error."""
        with contextlib.suppress(OSError), self._lock:
            if self._channel is not None:
                self._channel.send(Call(next(self._ids), method, raw(arguments)))
        match next(self._answers, None):
            case Result():
                return
            case Failed(error=error) if error is not None:
                raise error.error()
        self._end()
        raise EngineFailure("the process that compiles grammars has ended; send the call again")

    def cancel(self) -> None:
        """Cancel the running `examine`."""
        with self._lock, contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(Cancel(0))

    def close(self) -> None:
        """End the process; `examine` then raises EngineFailure."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._finalizer()
            self._process = self._channel = None


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()
