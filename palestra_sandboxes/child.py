"""A child process, its descriptors, and its output up to a limit, under any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from palestra.sandbox import Finished
from palestra.waiting import race

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_CHUNK = 65_536
_NOBODY = 65534  # the limit of processes does not hold for root, so root's sandboxes run as this user


class Descriptors:
    """Owned file descriptors.

    A number closed twice may belong to another file by then, so each is forgotten when closed.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()

    def add(self, descriptor: int) -> int:
        """Take ownership of a descriptor and return it."""
        self._open.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """Return both ends of a new pipe, the read end first."""
        reading, writing = os.pipe()
        return self.add(reading), self.add(writing)

    def filled_pipe(self, data: bytes) -> int:
        """Return the read end of a new pipe with the data and an end; at most 4,096 bytes."""
        reading, writing = self.pipe()
        os.write(writing, data)
        self.close(writing)
        return reading

    def close(self, *descriptors: int) -> None:
        """Close some of the descriptors now; closed ones are ignored."""
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    def close_all(self) -> None:
        """Close all that are open."""
        self.close(*self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_all()


def filled_file(data: bytes) -> int:
    """Return a descriptor of a file in memory, at its beginning, that no one can change."""
    descriptor = os.memfd_create("palestra-input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


class CommandOutput:
    """Standard output and standard error of a command, each up to a limit, read while other tasks run.

    Attributes:
        written: descriptors for the command, which the caller closes with `start` when the command has them.
        streams: what was read of both.
    """

    def __init__(self, most: int, most_errors: int | None = None, *, ends: bool = False) -> None:
        """Make two pipes.

        Args:
            most: bytes of each.
            most_errors: of standard error, if it differs.
            ends: whether the end of each is kept, however long it is, and not its beginning.
        """
        self._ends = ends
        self._most = (most, most if most_errors is None else most_errors)
        self._pipes = Descriptors()
        (out, out_end), (errors, errors_end) = self._pipes.pipe(), self._pipes.pipe()
        self.written = (out_end, errors_end)
        self._reading: tuple[int, ...] = (out, errors)
        self.streams = (bytearray(), bytearray())
        self._full = asyncio.Event()

    def start(self) -> None:
        """Begin to read; the command has its ends."""
        self._pipes.close(*self.written)
        for number, descriptor in enumerate(self._reading):
            os.set_blocking(descriptor, False)
            asyncio.get_running_loop().add_reader(descriptor, self._take, number)

    async def wait(self, ended: asyncio.Future[int], seconds: float | None) -> str:
        """Return why the command is over: `ended`, or what asks for its end, `timeout` or `cut`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await race(asyncio.shield(ended), self._full.wait())
        if ended.done():
            self._drain()
        return "cut" if self._full.is_set() else "ended" if ended.done() else "timeout"

    def close(self) -> None:
        """Stop reading: processes that have the pipes still open get SIGPIPE."""
        for descriptor in self._reading:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._reading = ()
        self._pipes.close_all()

    def _drain(self) -> None:
        """Read what is in the pipes already: the command has ended, and others may keep them open."""
        for number in (0, 1):
            while not self._full.is_set() and self._take(number):
                pass

    def _take(self, number: int) -> bool:
        """Read one piece; return whether there may be more."""
        kept, most = self.streams[number], self._most[number]
        try:
            chunk = os.read(self._reading[number], _CHUNK)
        except BlockingIOError:
            return False
        if self._ends:
            kept += chunk
            del kept[:-most]
        else:
            kept += chunk[: most - len(kept) + 1]
        if len(kept) > most:
            del kept[most:]
            self._full.set()
        if not chunk or self._full.is_set():
            asyncio.get_running_loop().remove_reader(self._reading[number])
        return bool(chunk)


def last_words_of(done: Finished) -> str:
    """Return the last lines that a command wrote, of at most 2,000 characters."""
    lines = (done.output + b"\n" + done.errors).decode(errors="replace").strip().splitlines()
    return "\n".join(line.rstrip() for line in lines[-12:])[-2000:] or f"it ended with {done.code}"


async def read_pipe(descriptor: int, most: int = 10_000) -> bytes:
    """Read a pipe to its end, or its first bytes, without a thread that could not be stopped."""
    loop, found = asyncio.get_running_loop(), bytearray()
    os.set_blocking(descriptor, False)
    while len(found) < most:
        await readable(loop, descriptor)
        try:
            chunk = os.read(descriptor, most - len(found))
        except BlockingIOError:
            continue
        if not chunk:
            break
        found += chunk
    return bytes(found)


async def readable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    """Wait until a descriptor can be read from."""
    waiting: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await waiting
    finally:
        loop.remove_reader(descriptor)


class Program:
    """A running child process.

    asyncio's processes cannot be used: jobs run on uvloop, which does not support `user`, and passes on every
    inheritable descriptor of the job.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Take a started process; `Program.start` starts one."""
        self._process = process
        self.pid = process.pid
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        # A thread and no task: a killed process is waited for to its end, also where all tasks were cancelled.
        threading.Thread(target=self._reap, name="palestra-sandbox", daemon=True).start()

    def _reap(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for it any more
            self._loop.call_soon_threadsafe(self._end.set_result, code)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        streams: tuple[int, int, int],
        pass_fds: Iterable[int] = (),
        variables: Mapping[str, str],
        folder: str | None = None,
        unprivileged: bool = False,
    ) -> Self:
        """Start a program in its own session.

        Args:
            streams: standard input, output and error.
            pass_fds: further descriptors that it inherits.
            variables: its whole environment.
            folder: in which it starts; None: that of this process.
            unprivileged: whether it runs as the user `nobody`, if this process is root's.
        """
        as_root = unprivileged and os.geteuid() == 0
        return cls(
            subprocess.Popen(  # in the loop's thread, because bubblewrap ends with the thread that started it
                command,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                env=dict(variables),
                cwd=folder,
                user=_NOBODY if as_root else None,
                group=_NOBODY if as_root else None,
                extra_groups=[] if as_root else None,
            )
        )

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or minus the signal; None: the process runs, or its end is not known here yet."""
        return self._process.returncode if self._end.done() else None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    @property
    def ended(self) -> asyncio.Future[int]:
        """Return what becomes the exit code, or minus the signal, when the process has ended."""
        return self._end

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code, or minus the signal."""
        return await asyncio.shield(self._end)
