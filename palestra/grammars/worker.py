"""Palestra's side of the process that compiles grammars first: start it, ask it, and explain why it could not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from palestra.errors import EngineFailure, GrammarRefused, PalestraError
from palestra.grammars.bounds import Bounds
from palestra.grammars.matcher import refusal
from palestra.grammars.tree import GrammarTree
from palestra.grammars.vocabulary import GrammarVocabulary

_START_SECONDS = 120.0  # enough to load a tokenizer of a few hundred thousand tokens on a busy machine
# The environment variables that the process inherits: none that holds a key.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG")


class GrammarWorker:
    """Compiles grammars in a process that is started for the first one, and again when it was killed.

    `start` and `examine` are for one thread; the others are for any.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        """Start nothing yet.

        Args:
            vocabulary: the model's tokens; None: every byte is a token.
        """
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of what follows, and of writing
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the id of the process, if one was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if it does not run, and wait until it has loaded the tokenizer.

        Raises:
            EngineFailure: it did not start, or `close` was called.
        """
        if self._process is not None and self._process.poll() is None:
            return
        ours, theirs = Pipe()
        with self._lock, theirs:
            if self._closed:
                raise EngineFailure("the engine was stopped")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "palestra.grammars.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C at a terminal goes to Palestra's server, which ends this process
                env={name: os.environ[name] for name in _KEPT if name in os.environ} | {"OMP_NUM_THREADS": "1"},
            )
            self._finalizer = weakref.finalize(self, _kill, process)
        try:
            ours.send_bytes(json.dumps(None if self._vocabulary is None else asdict(self._vocabulary)).encode())
            if not ours.poll(_START_SECONDS):
                raise EOFError
            ours.recv_bytes()
        except (EOFError, OSError) as error:
            self._end()
            raise EngineFailure("the process for grammars did not start; see the server's log") from error
        with self._lock:
            self._connection = ours

    def examine(self, grammar: str, bounds: Bounds) -> GrammarTree | None:
        """Compile a grammar, walk some of its replies, and return all of them; None: there are too many.

        `start` has to come first.

        Raises:
            InvalidRequest: `llguidance` can't read the grammar.
            GrammarRefused: the grammar is over a bound.
            EngineFailure: the process was ended from outside, or this was cancelled.
        """
        request = json.dumps({"grammar": grammar, "bounds": asdict(bounds)}).encode()
        with self._lock:
            connection = self._connection
        try:
            if connection is None:
                raise EOFError
            with self._lock:
                connection.send_bytes(request)
            found = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._end()
            raise EngineFailure("the process that compiles grammars has ended; send the call again") from error
        if "status" in found:
            raise _reason(found["status"], bounds)
        if found["problem"]:
            raise refusal(found["problem"])
        tree = found["tree"]
        return None if tree is None else GrammarTree(tree, found["mask_bytes"])

    def cancel(self) -> None:
        """End what `examine` waits for."""
        with self._lock, contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.send_bytes(b"")

    def close(self) -> None:
        """End the process; `examine` then raises an EngineFailure."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._finalizer()
            self._process = self._connection = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


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
