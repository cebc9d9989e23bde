"""Programs that Palestra starts, each at the other end of a socket, and how they end.

A program is a module, run as `python -m MODULE FD …`, where FD is the number of the open socket. It ends when its owner
closes the other end, and so with its owner, however that ends. `start_process` starts one on this machine; a cluster
has a `ProcessStarter` of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from palestra.process import keeper
from palestra.threads import in_thread

HOSTED = (
    "PALESTRA_HOSTED"  # set for a program on another machine, which has to end with the process that keeps it there
)
LAST_BYTES = 16_384  # of a log, in which its last line is looked for
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
        connection: the owner's end of the socket.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, log: Path | None = None) -> None:
        """Stand for a process that runs.

        Args:
            connection: the owner's end of the socket to it.
            log: of the process, which then leads a group of its own; None: it is in the owner's group.
        """
        self._process, self.connection, self.log = process, connection, log
        self.pid, self.address = process.pid, "127.0.0.1"
        self._ended = asyncio.create_task(in_thread(process.wait, "palestra-child"))

    def kill(self) -> None:
        """End the process without waiting, also one that is stopped; with its group, if that is its own."""
        if self.log is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def code(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return await asyncio.shield(self._ended)

    async def how_ended(self) -> str:
        """Wait for the end of the process, and return how it ended, in words, with the last line of its log."""
        words = ending(await self.code())
        return words if self.log is None else f"{words}: {last_line(self.log)}"

    async def end(self, seconds: float, said: bytes = b"") -> None:
        """Close the socket, with which the process ends, and kill what is left of it after some seconds.

        Args:
            said: what the process gets before; see `last_words`.
        """
        with contextlib.suppress(OSError, TimeoutError):
            self.connection.sendall(said)
        self.connection.close()
        try:
            async with asyncio.timeout(seconds):
                await self.code()
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self.code()


async def start_process(
    module: str,
    variables: Mapping[str, str],
    *words: str,
    log: Path | None = None,
    prints: bool = False,
    computes: bool = True,
) -> LocalProcess:
    """Start a program on this machine; see `ProcessStarter`.

    Not in a thread of its own, because the kernel ends a program that asks for it with the thread that has started it.

    Args:
        words: of its command line, after the number of its socket.
        log: gets all that it writes; the program then leads a group of its own, which Ctrl-C does not reach.
        prints: whether its standard output, where there is no log, is that of this process; gloo and vLLM write there.
        computes: see `popen`.

    Raises:
        OSError: it can't be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            environment = {**os.environ, **variables}
            return LocalProcess(popen(module, theirs, environment, words, log, prints, computes=computes), ours, log)
        except OSError:
            ours.close()
            raise


def popen(
    module: str,
    connection: socket.socket,
    environment: Mapping[str, str],
    words: Sequence[str] = (),
    log: Path | None = None,
    prints: bool = False,
    apart: bool = False,
    flags: Sequence[str] = (),
    computes: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a program; see `start_process`.

    Args:
        connection: its end of the socket, which the caller closes.
        environment: all of its variables.
        apart: whether the program leads a group of its own without a log, too.
        flags: of Python.
        computes: whether it trains or samples, for which settings of malloc are added to its environment.
    """
    settings = malloc_without_caches(environment.get(MALLOC_VARIABLE, "")) if computes else ""
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(log.open("wb"))
        return subprocess.Popen(
            [sys.executable, *flags, "-m", module, str(connection.fileno()), *words],
            pass_fds=(connection.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=out or (None if prints else subprocess.DEVNULL),
            stderr=out,
            start_new_session=apart or log is not None,
            env={**environment, MALLOC_VARIABLE: settings} if settings else dict(environment),
        )


def ending(code: int) -> str:
    """Return how a process ended, in words, by its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    names = {one.value: one.name for one in signal.Signals}  # those of real time have none
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def kept_command(lifeline: int, seconds: float, command: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Return the command line that runs somebody else's program under a `keeper`, in a session of its own.

    Args:
        lifeline: number of the end of a pipe that the keeper gets; the program ends when the other end is closed.
        seconds: from SIGTERM to SIGKILL.
        folders: that are removed when all has ended.
    """
    removed = [word for folder in folders for word in ("--remove", str(folder))]
    return [sys.executable, "-I", "-S", keeper.__file__, str(lifeline), str(seconds), *removed, *command]


def kept_ending(code: int) -> str:
    """Return how a program has ended that a `keeper` has run, by the keeper's exit code."""
    return ending(128 - code if code > 128 else code)


def last_line(log: Path) -> str:
    """Return the last line of a log, for people."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(log.stat().st_size - LAST_BYTES, 0))
        lines = file.read(LAST_BYTES).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
    return "what it said can't be read"


# In the program


def with_owner(then: Callable[[bytes], None]) -> socket.socket:
    """Call `then` in a thread when the owner has closed its end of the socket, or has died; return this end.

    Args:
        then: gets what the owner has said before, in bytes; it ends this process.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))

    def wait() -> None:
        said = b""
        with contextlib.suppress(OSError):
            while found := connection.recv(4096):
                said += found
        then(said)

    threading.Thread(target=wait, name="palestra-owner", daemon=True).start()
    return connection


def die_with_parent() -> None:
    """Have the kernel end this process with its parent: a stopped process would not see that its socket is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
