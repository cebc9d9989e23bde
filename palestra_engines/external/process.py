"""The process of an engine's server: started with a log in the run's folder, watched, and ended with the job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx2
from packaging.version import Version as ParsedVersion

from palestra.errors import EngineFailure, ModelError
from palestra.http_clients import http_client
from palestra.process.child import kept_command, kept_ending, last_line, last_lines
from palestra.process.keeper import LAST_SECONDS, kill_session, members_of
from palestra_engines.external.connection import Address


class ProgressClock:
    """Detects when a server's progress has stopped, from repeated checks.

    A server may answer questions while its computing process is stuck, so answers do not count as progress.
    """

    def __init__(self, now: float, progress: tuple[int, ...]) -> None:
        """Begin. `now` are seconds of any clock; some numbers of `progress` grow when the server computes."""
        self._since, self._progress = now, progress

    def seconds(self, now: float, progress: tuple[int, ...], may_move: bool) -> float:
        """Return how long the server has made no progress. `now` is of the same clock. `may_move`: the server has
        requests and is not paused; otherwise the result is 0.
        """
        if progress != self._progress or not may_move:
            self._since, self._progress = now, progress
        return now - self._since


GRACE_SECONDS = 10.0  # between asking the server to end and killing it
STOP_SECONDS = 15.0  # for the keeper to do so
_LOOK_SECONDS = 0.25
# Lines of a traceback's end: "ValueError: Head size 16 is not supported", perhaps behind a logger's prefix; and what
# vLLM says of a process of its own that was killed.
_ERROR = re.compile(
    r"(?:^|[\s\]])((?:[A-Za-z_.]*(?:Error|Exception)|Value error)[:,] .+|Worker proc \S+ died unexpectedly.*)$"
)
# What pydantic appends to a mistake in the server's arguments: "[type=value_error, input_value=…".
_PYDANTIC = re.compile(r"\s*\[type=\w+, input_value=.*$")
# Settings of the job that cause an error, by words of it.
_REMEDIES = {
    "tensor parallel size": "change engine.tensor_parallel",
    "Unsupported CPU attention configuration": "vLLM's build for CPUs can't serve attention heads of this size: take "
    "another model, or engine.kind = 'embedded'",
}
_CONSEQUENCE = (
    "validation error for",
    "See root cause above",
    "Engine core initialization failed",
    "EngineDeadError",
    "CalledProcessError",
    "Error raised in subprocess",
    "cancelled",
)


class ServerProcess:
    """A server that the job has started."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], log: Path, folders: Sequence[Path]
    ) -> None:
        """Start the server; `wait_until_ready` waits for it. `name` is for messages, such as `vLLM`. `folders`, of its
        sockets and of weights, are removed after it has ended, even if the job was killed.
        """
        self._name, self._log = name, log
        theirs, lifeline = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as file:
                self._from = file.tell()
                self._popen = subprocess.Popen(
                    kept_command(theirs, GRACE_SECONDS, command, folders),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=(theirs,),
                    start_new_session=True,  # which Ctrl-C at a terminal does not reach
                    env=dict(variables),
                )
        except OSError as error:
            os.close(lifeline)
            raise EngineFailure(f"{name} can't be started: {error}") from error
        finally:
            os.close(theirs)
        self._finalizer = weakref.finalize(self, _end, self._popen, lifeline, folders)

    @property
    def pid(self) -> int:
        """Return the process id of the keeper, which is that of the session of the server's processes."""
        return self._popen.pid

    def wait_until_ready(self, address: Address, path: str, seconds: float) -> None:
        """Block until the server answers. The route `path` answers as soon as the server is ready."""
        until = time.monotonic() + seconds
        transport = None if address.socket is None else httpx2.HTTPTransport(uds=str(address.socket))
        with http_client(base_url=address.url, transport=transport, timeout=5.0) as http:
            while True:
                if (ended := self.ended()) is not None:
                    raise ModelError(f"{self._name} can't serve this model: {ended}")
                with contextlib.suppress(httpx2.RequestError):
                    if _listens(address) and http.get(path).is_success:
                        return
                if time.monotonic() > until:
                    said = last_line(self._log, self._from)  # before it says that it was ended
                    self.stop()
                    raise EngineFailure(
                        f"{self._name} was not ready after {seconds:.0f} s (engine.startup_seconds); its log is "
                        f"{self._log}, with the last line: {said}"
                    )
                time.sleep(_LOOK_SECONDS)

    def ended(self) -> str | None:
        """Return why the server has ended, in one line that names its log; None: it runs."""
        if self._popen.poll() is None:
            return None
        return f"{self._reason()} (log: {self._log})"

    def how_it_ended(self) -> str | None:
        """Return the result of `ended`, a moment after the server has closed its connections; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(LAST_SECONDS + 1.0)
        return self.ended()

    def kill(self) -> None:
        """End the server and all of its processes without waiting, even if they stand still; `stop` cleans up.

        The keeper, and Python's process that removes what the server has in shared memory, end by themselves then.
        """
        members = members_of(self._popen.pid)
        if not members:  # the system does not tell, or all have ended
            self._popen.send_signal(signal.SIGQUIT)
        for process in members:
            if process != self._popen.pid and not _is_tracker(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server and all of its processes, and wait for that."""
        self._finalizer()

    def _reason(self) -> str:
        """Return the first error of the log that no other caused, or how the server ended; with the setting."""
        found = [match[1] for line in last_lines(self._log, self._from) if (match := _ERROR.search(line.rstrip()))]
        causes = [error for error in found if not any(word in error for word in _CONSEQUENCE)]
        how = f"the server {kept_ending(self._popen.wait())}: {last_line(self._log, self._from)}"
        reason = _PYDANTIC.sub("", (causes or found or [how])[0])[:300]
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in reason), None)
        return reason if remedy is None else f"{reason.rstrip('.')}; {remedy}"


def _is_tracker(process: int) -> bool:
    """Return whether a process is Python's resource tracker, which unlinks other processes' shared memory."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _listens(address: Address) -> bool:
    """Return whether a connection to a server's Unix socket is taken; by TCP, the request itself shows that."""
    if address.socket is None:
        return True
    # Not by a request: httpx leaves the socket of each connection open that is refused.
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(str(address.socket)) == 0


def _end(process: subprocess.Popen[bytes], lifeline: int, folders: Sequence[Path]) -> None:
    """Close the pipe, upon which the keeper ends all, reap the keeper and remove the folders."""
    os.close(lifeline)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the keeper itself is stopped, say
        process.wait(STOP_SECONDS)
    kill_session(process.pid)  # the keeper was killed by another, say
    process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def version_of(text: str) -> tuple[int, int]:
    """Return major and minor number of a version such as `0.32.0+cpu`; (0, 0): invalid."""
    try:
        found = ParsedVersion(text)
    except ValueError:  # also a number of many thousand digits
        return (0, 0)
    return found.major, found.minor
