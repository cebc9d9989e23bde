"""Programs that a job starts beside itself, each at the other end of a socket: inference workers, ranks of a trainer.

A program is a module, run as `python -m MODULE FD`, where FD is the number of the open socket. The program ends when
the job closes its end, and so with the job. `start_process` starts one on this machine; a cluster has a
`ProcessStarter` of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from palestra.threads import in_thread

HOSTED = (
    "PALESTRA_HOSTED"  # set for a program on another machine, which has to end with the process that keeps it there
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
MALLOC_VARIABLE = "GLIBC_TUNABLES"  # read by glibc alone, when a process starts
NO_CACHES = "glibc.malloc.tcache_count=0"


def malloc_without_caches(given: str) -> str:
    """Return settings of glibc's malloc, `GLIBC_TUNABLES`, for a process that trains or samples.

    torch asks for memory that begins at a multiple of 64 bytes, for which glibc cuts a little off both ends of a block.
    A cut that lies in a thread's cache of small blocks is handed out again and stays for as long as a pass does; when
    the block is freed, it can't grow together with its neighbours, and a pass has to take other memory. Without these
    caches a training step of 135 M parameters needs 150 to 300 MB less, and as much time (docs/benchmarks.md). Where
    there is a GPU, which has the large blocks, the caches stay: small operators take longer without them.

    Args:
        given: the settings that there are, which may be none; one of these caches is kept.
    """
    if "tcache_count" in given or Path("/dev/nvidiactl").exists():
        return given
    return f"{given}:{NO_CACHES}" if given else NO_CACHES


class ChildProcess(Protocol):
    """A program that was started, and the job's end of the socket to it."""

    @property
    def pid(self) -> int:
        """Return the id of the process on its machine."""
        ...

    @property
    def address(self) -> str:
        """Return the address of its machine, at which other machines of the job reach it."""
        ...

    @property
    def connection(self) -> socket.socket:
        """Return the job's end of the socket."""
        ...

    def kill(self) -> None:
        """End the process without waiting, also one that is stopped."""
        ...

    async def how_ended(self) -> str:
        """Wait for the end of the process, and return how it ended, in words: `was killed by SIGKILL`."""
        ...


ProcessStarter = Callable[[str, Mapping[str, str]], Awaitable[ChildProcess]]
"""(module, variables) -> starts a program with these environment variables beside those of the job. Raises
ServerFailed: it can't be started now, for the reason in the message."""


class LocalProcess:
    """Implements `ChildProcess` on this machine.

    Attributes:
        pid: of the process.
        address: of this machine for itself.
        connection: the job's end of the socket.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        """Stand for a process that runs.

        Args:
            connection: the job's end of the socket to it.
        """
        self._process, self.connection = process, connection
        self.pid, self.address = process.pid, "127.0.0.1"
        self._ended = asyncio.create_task(in_thread(process.wait, "palestra-child"))

    def kill(self) -> None:
        """End the process without waiting, also one that is stopped."""
        self._process.kill()

    async def how_ended(self) -> str:
        """Wait for the end of the process, and return how it ended, in words."""
        return ending(await asyncio.shield(self._ended))


async def start_process(module: str, variables: Mapping[str, str]) -> LocalProcess:
    """Start a program on this machine; see `ProcessStarter`.

    Not in a thread of its own, because the kernel ends a program that asks for it with the thread that has started it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        return LocalProcess(popen(module, theirs, {**os.environ, **variables}), ours)


def popen(module: str, connection: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        connection: its end of the socket, which the caller closes.
        environment: all of its variables, to which settings of malloc are added.
    """
    settings = malloc_without_caches(environment.get(MALLOC_VARIABLE, ""))
    return subprocess.Popen(
        [sys.executable, "-m", module, str(connection.fileno())],
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # gloo writes to it
        env={**environment, MALLOC_VARIABLE: settings} if settings else dict(environment),
    )


def ending(code: int) -> str:
    """Return how a process ended, in words, by its exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def die_with_parent() -> None:
    """Have the kernel end this process with its parent: a stopped process would not see that its socket is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
