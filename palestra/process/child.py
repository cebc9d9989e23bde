"""Programs that Palestra starts, and their sockets.

A program is a module, run as `python -m MODULE FD …` with the number of its socket. It ends when its owner closes the
other end, so it never outlives its owner. `start_process` starts one on this machine; a cluster has its own
`ProcessStarter`.
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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.process import keeper
from palestra.threads import in_thread

# Set for a program on another machine, which has to end with the process that keeps it there.
HOSTED = "PALESTRA_HOSTED"
LAST_BYTES = 65_536  # of a log, in which its last lines are looked for
MALLOC_VARIABLE = "GLIBC_TUNABLES"  # read by glibc alone, when a process starts
NO_CACHES = "glibc.malloc.tcache_count=0"


def malloc_without_caches(given: str) -> str:
    """Return settings of glibc's malloc (`GLIBC_TUNABLES`) for a process that trains or samples.

    torch allocates at multiples of 64 bytes, and glibc cuts the rest off both ends of a block. Small rests in a
    thread's cache are reused and prevent freed blocks from merging, so a pass needs fresh memory. Without these caches
    a training step of 135 M parameters takes 150 to 300 MB less, and the same time (docs/benchmarks.md). With a GPU,
    which holds the large blocks, the caches stay: small operators are slower without them. Settings that are given and
    set these caches take precedence.
    """
    if "tcache_count" in given or Path("/dev/nvidiactl").exists():
        return given
    return f"{given}:{NO_CACHES}" if given else NO_CACHES


class ChildProcess:
    """A started program and the job's end of its socket.

    Attributes:
        pid: on its machine.
        address: of its machine, for other machines of the job.
    """

    def __init__(
        self, pid: int, address: str, connection: socket.socket, ended: Coroutine[Any, Any, tuple[int | None, str]]
    ) -> None:
        """Wrap a running program. `ended` waits for its end, and returns what `code` and `how_ended` do."""
        self.pid, self.address, self.connection = pid, address, connection
        self._ended = asyncio.create_task(ended)

    def kill(self) -> None:
        """Kill the process without waiting, even if it is stopped."""
        raise NotImplementedError

    async def code(self) -> int | None:
        """Wait for the end of the process, and return its exit code; None: it is gone with its machine."""
        return (await asyncio.shield(self._ended))[0]

    async def how_ended(self) -> str:
        """Wait for the end of the process, and describe it: `was killed by SIGKILL`."""
        return (await asyncio.shield(self._ended))[1]

    async def how_lost(self, seconds: float) -> str:
        """Describe how a process has ended that has closed its end of the socket, if it ends within some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.how_ended()
        return "has closed its connection"


ProcessStarter = Callable[[str, Mapping[str, str]], Awaitable[ChildProcess]]
"""(module, variables) -> starts a program with these environment variables beside those of the job. Raises
ServerFailed: it can't be started now, for the reason in the message."""


class LocalProcess(ChildProcess):
    """A program on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, log: Path | None = None) -> None:
        """Wrap a running process. A process with a `log` leads its own group; otherwise it is in the owner's."""
        self._process, self.log = process, log
        super().__init__(process.pid, "127.0.0.1", connection, self._end())

    async def _end(self) -> tuple[int, str]:
        code = await in_thread(self._process.wait, "palestra-child")
        return code, ending(code) if self.log is None else f"{ending(code)}: {last_line(self.log)}"

    def kill(self) -> None:
        """Kill the process, and its group if it leads one, without waiting."""
        if self.log is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Close the socket, which ends the process; kill what is left after some seconds."""
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

    Call it from a long-lived thread: the kernel kills the program when the thread that started it ends. `words` are
    arguments after the number of its socket. `log` receives all output; the program then leads its own group, which
    Ctrl-C does not reach. `prints`: without a log, it shares this process's standard output, to which gloo and vLLM
    write.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            environment = {**os.environ, **variables}
            if computes:
                environment = computing(environment)
            return LocalProcess(popen(("-m", module), theirs, environment, words, log, prints), ours, log)
        except OSError:
            ours.close()
            raise


def computing(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that trains or samples: with settings of malloc."""
    settings = malloc_without_caches(environment.get(MALLOC_VARIABLE, ""))
    return {**environment, MALLOC_VARIABLE: settings} if settings else dict(environment)


def popen(
    program: Sequence[str],
    connection: socket.socket,
    environment: Mapping[str, str],
    words: Sequence[str] = (),
    log: Path | None = None,
    prints: bool = False,
    apart: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program; see `start_process`. `program` has flags of Python, `-m`, and the module; the caller closes
    `connection`, the program's end. `apart`: it leads its own group even without a log.
    """
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(log.open("wb"))
        return subprocess.Popen(
            [sys.executable, *program, str(connection.fileno()), *words],
            pass_fds=(connection.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=out or (None if prints else subprocess.DEVNULL),
            stderr=out,
            start_new_session=apart or log is not None,
            env=dict(environment),
        )


def ending(code: int) -> str:
    """Describe how a process ended by its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    names = {one.value: one.name for one in signal.Signals}  # those of real time have none
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def kept_command(lifeline: int, seconds: float, command: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Return the command line that runs somebody else's program under a `keeper`, in a session of its own.

    `lifeline` is the number of the end of a pipe that the keeper gets; the program ends when the other end is closed.
    `folders` are removed when all has ended.
    """
    removed = [word for folder in folders for word in ("--remove", str(folder))]
    return [sys.executable, "-I", "-S", keeper.__file__, str(lifeline), str(seconds), *removed, *command]


def kept_code(code: int) -> int:
    """Return the exit code of a program that a `keeper` or a box has run, or minus its signal, by their exit code."""
    return 128 - code if 128 < code <= 192 else code  # 255 is a code that programs end with


def kept_ending(code: int) -> str:
    """Return how a program has ended that a `keeper` has run, by the keeper's exit code."""
    return ending(kept_code(code))


def last_lines(log: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log that are not empty, of those after some bytes."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(log.stat().st_size - LAST_BYTES, start))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return ["what it said can't be read"]


def last_line(log: Path, start: int = 0) -> str:
    """Return the last line of a log; see `last_lines`."""
    return (last_lines(log, start) or ["it said nothing"])[-1].strip()[:500]


def process_memory(pid: int) -> tuple[int, int]:
    """Return the address space of a process and its resident memory, in bytes; 0: it has ended."""
    with contextlib.suppress(OSError, ValueError):
        total, resident, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()
        return int(total) * os.sysconf("SC_PAGE_SIZE"), int(resident) * os.sysconf("SC_PAGE_SIZE")
    return 0, 0


def with_owner(then: Callable[[], None]) -> socket.socket:
    """Call `then`, which ends this process, in a thread when the owner has closed its end of the socket or died; return
    this end.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))

    def wait() -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)
        then()

    threading.Thread(target=wait, name="palestra-owner", daemon=True).start()
    return connection


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent: a stopped process does not notice a closed socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(keeper.DIE_WITH_PARENT, signal.SIGKILL)
