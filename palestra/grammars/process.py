"""The parent's side of the grammar processes: fork them, send them requests, and explain why they ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from palestra.errors import EngineFailure, GrammarRefused, InvalidRequest, PalestraError
from palestra.grammars.bounds import Bounds
from palestra.grammars.frames import receive_frame, receive_json, send_frame, send_json
from palestra.grammars.matcher import Matcher
from palestra.grammars.tree import GrammarTree

_START_SECONDS = 120.0  # enough to load a tokenizer of a few hundred thousand tokens on a busy machine
# The environment variables that the process inherits: none that holds a key.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG")
_LIMITS = ("fuel", "too many", "too large", "too complex", "unable to determine", "max is")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarVocabulary:
    """The tokens to which the bits of a mask belong.

    Attributes:
        tokenizer: a fast tokenizer, as the JSON of its `tokenizer.json`.
        size: number of tokens of the model, V; it may be larger than the tokenizer's.
        eos: the token that ends a reply; None: there is none.
    """

    tokenizer: str
    size: int
    eos: int | None


class GrammarServer:
    """The process from which grammar processes are forked. It ends with this process, or when `close` is called."""

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        """Start the process and wait until it has loaded the tokenizer.

        Args:
            vocabulary: the model's tokens; None: every byte is a token.

        Raises:
            EngineFailure: the process did not start.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "palestra.grammars.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C at a terminal goes to Palestra's server, which then ends this process
                env={name: os.environ[name] for name in _KEPT if name in os.environ} | {"OMP_NUM_THREADS": "1"},
            )
        self._finalizer = weakref.finalize(self, _end_server, self._control, self._popen)
        try:
            self._control.settimeout(_START_SECONDS)
            send_json(self._control, None if vocabulary is None else asdict(vocabulary))
            receive_json(self._control)
        except (EOFError, OSError) as error:
            self.close()
            raise EngineFailure("the process for grammars did not start; see the server's log") from error

    @property
    def alive(self) -> bool:
        """Return whether the process is still running."""
        return self._popen.poll() is None

    def fork(self, bounds: Bounds) -> GrammarProcess:
        """Fork a process for one grammar, with `bounds` on what the grammar may cost.

        Raises:
            EngineFailure: the server has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [json.dumps(asdict(bounds)).encode()], [theirs.fileno()])
                pid = int(receive_json(self._control)["pid"])
        except (EOFError, OSError) as error:
            ours.close()
            raise EngineFailure("the process for grammars has ended; send the call again") from error
        return GrammarProcess(self, pid, ours, bounds)

    def end(self, pid: int) -> int | None:
        """Kill a grammar's process, and return its exit status as `os.waitstatus_to_exitcode` does.

        The status is -SIGKILL if the process was still running, otherwise the one with which it had ended; None: the
        server is gone.
        """
        try:
            with self._lock:
                self._control.sendall(json.dumps({"end": pid}).encode())
                return int(receive_json(self._control)["status"])
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """End the server process, and with it all processes that it forked."""
        self._finalizer()


def _end_server(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the control socket, then kill and reap the server process (a finalizer)."""
    control.close()
    process.kill()
    process.wait()


class ProcessMatcher(Matcher):
    """The position of one reply in the grammar of a process.

    Attributes:
        process: the process of the grammar.
        number: of this matcher in its process.
        walked: whether the process may have a matcher of this number.
    """

    def __init__(self, process: GrammarProcess, number: int) -> None:
        super().__init__(process.first_mask)
        self.process, self.number = process, number
        self.walked = False


class GrammarProcess:
    """One grammar in its process. Only one thread at a time may send requests; see `lock`.

    Attributes:
        pid: id of the process.
        first_mask: the mask at the beginning of a reply, as `Matcher.mask`.
        tree: all places of the grammar's replies; None: there are more than `Bounds.tree_places`.
        users: how many matchers are open.
        matchers: how many the process had at its last answer.
        lock: held around each request and its answer.
        over: the error with which requests fail, because the process has ended; None: it runs.
    """

    def __init__(self, server: GrammarServer, pid: int, channel: socket.socket, bounds: Bounds) -> None:
        self._server, self.pid, self._channel, self._bounds = server, pid, channel, bounds
        weakref.finalize(self, channel.close)
        self.first_mask = b""
        self.tree: GrammarTree | None = None
        self.users = 0
        self.matchers = 0
        self.lock = threading.Lock()
        self._drop: deque[int] = deque()
        self._ended = threading.Lock()  # taken after `lock`, or without it
        self._killed = False  # by `kill`, so that the grammar is not to blame
        self.over: PalestraError | None = None

    @property
    def usable(self) -> bool:
        """Return whether the process is running, as far as this side knows."""
        return self.over is None and self._server.alive

    def compile(self, grammar: str) -> None:
        """Compile the grammar. Has to be the first request.

        Raises:
            InvalidRequest: `llguidance` can't read the grammar.
            GrammarRefused: the grammar is over a bound.
            EngineFailure: the process was ended from outside.
        """
        with self.lock:
            self._channel.settimeout(self._bounds.compile_wall_seconds)
            try:
                send_frame(self._channel, grammar.encode())
                problem = receive_json(self._channel)["problem"]
                if not problem:
                    self.first_mask = bytes(receive_frame(self._channel))
                    nodes = receive_json(self._channel)
                    self.tree = None if nodes is None else GrammarTree(nodes, len(self.first_mask))
                    self._channel.settimeout(self._bounds.step_wall_seconds)
                    return
            except (EOFError, OSError) as error:
                raise self._cause(error, "compiling it", self._bounds.compile_cpu_seconds) from None
        self.kill()
        raise refusal(problem)

    def drop(self, number: int) -> None:
        """Have the process forget a matcher that was walked; the message travels with the next request."""
        self._drop.append(number)

    def ask(self, walks: Sequence[tuple[int, Sequence[int], Sequence[int]]], masks: bool = True) -> None:
        """Send a request to walk matchers; `answer` then receives the result.

        Args:
            walks: for each matcher its number, the tokens to accept, and the places whose masks are wanted.
            masks: whether the masks are sent back.
        """
        drop = [self._drop.popleft() for _ in range(len(self._drop))]
        with contextlib.suppress(OSError):  # `answer` finds out why, and raises it
            send_json(self._channel, {"walk": walks, "drop": drop, "masks": masks})

    def answer(self) -> tuple[list[str | None], bytes]:
        """Return for each walk a problem or None, and the masks of the walks without a problem, one after another.

        Raises:
            GrammarRefused: the process was over a bound and has ended.
            EngineFailure: the process was ended from outside.
        """
        try:
            found = receive_json(self._channel)
            self.matchers = found["matchers"]
            return found["problems"], bytes(receive_frame(self._channel))
        except (EOFError, OSError, ValueError) as error:
            raise self._cause(error, "a token of the reply", self._bounds.step_cpu_seconds) from None

    def kill(self) -> None:
        """End the process.

        May be called at any time and from any thread; a thread that waits for an answer gets an error.
        """
        self._killed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # so that a thread that waits for an answer stops waiting
        with self._ended:
            if self.over is None:
                self.over = EngineFailure("this grammar's process was ended; send the call again")
                self._server.end(self.pid)
        with self.lock:
            self._channel.close()

    def _cause(self, error: Exception, what: str, cpu_seconds: float) -> PalestraError:
        """Return why the process did not answer, and end it if it still runs. The caller holds `lock`."""
        with self._ended:
            if self.over is None:
                status = self._server.end(self.pid)
                self.over = self._reason(error, status, what, cpu_seconds)
            self._channel.close()
            return self.over

    def _reason(self, error: Exception, status: int | None, what: str, cpu_seconds: float) -> PalestraError:
        """Return the error for an exit status: over a bound of time or memory, killed from outside, or crashed."""
        bounds = self._bounds
        if self._killed or status is None:
            return EngineFailure("this grammar's process was ended; send the call again")
        if isinstance(error, TimeoutError):
            waited = bounds.compile_wall_seconds if what == "compiling it" else bounds.step_wall_seconds
            return GrammarRefused(f"{what} takes longer than {waited:g} s", lasting=False)
        if status == -signal.SIGPROF:
            return GrammarRefused(f"{what} takes more than {cpu_seconds:g} s of processor time", lasting=False)
        if status in (1, -signal.SIGABRT):
            replies = f" for {self.matchers} replies at the same time" if self.matchers > 1 else ""
            return GrammarRefused(f"{what} takes more than {bounds.memory_mib} MiB of memory{replies}")
        if status == -signal.SIGKILL:
            return EngineFailure("this grammar's process was killed from outside; send the call again")
        return GrammarRefused(f"{what} ends its process (status {status}); it may be nested too deep")


def refusal(problem: str) -> InvalidRequest:
    """Return the error for a problem that `llguidance` reports: GrammarRefused over a limit, else InvalidRequest."""
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    text = text.rsplit("rror: ", 1)[-1].split("; consider")[0]  # without advice to the author of the grammar
    if "unable to determine" in text.lower():  # what follows is the whole regular expression
        return GrammarRefused("its patterns can't be intersected within the limit of llguidance")
    if any(word in text.lower() for word in _LIMITS):
        return GrammarRefused(text[:300])
    return InvalidRequest(text[:300])
