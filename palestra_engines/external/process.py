"""The process of an engine's server: started with a log in the run's folder, watched, and ended with the job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx2

from palestra.errors import EngineFailure, ModelError
from palestra.http_clients import http_client
from palestra_engines.external.connection import Address
from palestra_engines.external.supervisor import LAST_SECONDS, members_of

SUPERVISOR = Path(__file__).with_name("supervisor.py")
STOP_SECONDS = 15.0  # the supervisor kills what is left earlier
_LOOK_SECONDS = 0.25
_TAIL_BYTES = 65_536
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
        """Start the server; `wait_until_ready` waits for it.

        Args:
            name: for messages, such as `vLLM`.
            folders: of its sockets, and of weights; they are removed when it has ended, also where the job was killed.

        Raises:
            EngineFailure: the process can't be started.
        """
        self._name, self._log = name, log
        removed = [word for folder in folders for word in ("--remove", str(folder))]
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as file:
                self._from = file.tell()
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SUPERVISOR), *removed, *command],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # a group of its own, which Ctrl-C at a terminal does not reach
                    env=dict(variables),
                )
        except OSError as error:
            raise EngineFailure(f"{name} can't be started: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._popen, folders)

    @property
    def pid(self) -> int:
        """Return the process id of the supervisor, which is that of the server's process group."""
        return self._popen.pid

    def wait_until_ready(self, address: Address, path: str, seconds: float) -> None:
        """Block until the server answers.

        Args:
            path: of a route that answers as soon as the server is ready.
            seconds: how long it may take.

        Raises:
            ModelError: the server has ended; the message has the reason that its log names.
            EngineFailure: it does not answer in time, and was ended.
        """
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
                    said = self._last_line()  # before it says that it was ended
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
        """Return what `ended` says, a moment after the server has closed its connections; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(LAST_SECONDS + 1.0)
        return self.ended()

    def kill(self) -> None:
        """End the server and all of its processes without waiting, even if they stand still; `stop` cleans up.

        The supervisor, and Python's process that removes what the server has in shared memory, end by themselves then.
        """
        for process in members_of(self._popen.pid):
            if process != self._popen.pid and not _is_tracker(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGCONT if sys.platform == "linux" else signal.SIGKILL)

    def stop(self) -> None:
        """End the server and all of its processes, and wait for that."""
        self._finalizer()

    def _said(self) -> list[str]:
        """Return the last lines of the log that this process has written."""
        with self._log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(self._from, file.tell() - _TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]

    def _last_line(self) -> str:
        return (self._said() or ["(none)"])[-1].strip()[:300]

    def _reason(self) -> str:
        """Return the first error of the log that is not the consequence of another, or else its last line.

        A setting of the job that causes the error is named.
        """
        found = [match[1] for line in self._said() if (match := _ERROR.search(line.rstrip()))]
        causes = [error for error in found if not any(word in error for word in _CONSEQUENCE)]
        reason = _PYDANTIC.sub("", (causes or found or [self._last_line()])[0])[:300]
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in reason), None)
        return reason if remedy is None else f"{reason.rstrip('.')}; {remedy}"


def _is_tracker(process: int) -> bool:
    """Return whether a process is the one by which Python removes what others have left in shared memory."""
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


def _end(process: subprocess.Popen[bytes], folders: Sequence[Path]) -> None:
    """Close the pipe, upon which the supervisor ends its group, reap the supervisor and remove the folders."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # the supervisor itself is stopped, say
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # the supervisor was killed by another, say, and left the group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
