"""`SandboxedProgram`: a program in namespaces of its own (bubblewrap), and its folder in memory."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import stat
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from palestra.errors import ConfigError, EnvironmentFailed
from palestra.process.child import process_memory
from palestra.threads import in_thread
from palestra_sandboxes.bubblewrap.filters import LIBRARY, call_filter, has_filters
from palestra_sandboxes.child import Descriptors, Program, read_pipe

HOME = "/work"  # the only place, beside /tmp, at which a process in a sandbox can write
VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": HOME, "TERM": "dumb", "PAGER": "cat"}
_START_SECONDS = 30.0
_WATCH_SECONDS = 0.25
_MIB = 1024 * 1024
_MAX_DEPTH = 32  # of folders in the home folder that are read
_PASSWD = f"agent:x:1000:1000::{HOME}:/bin/bash\n"
_UNFIT = 99  # exit code of `_BEGIN` for files that can't be unpacked
# Unpacks the files, says that all is ready, waits until the home folder has been opened, and becomes the program.
_BEGIN = (
    f'tar -x <&"$2" 2> /dev/null || exit {_UNFIT}; '
    'echo >&"$0" && read -r _ <&"$1"; eval "exec $0>&- $1<&- $2<&-"; shift 2; exec "$@"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Resource limits of a sandbox's processes."""

    memory_mib: int = 512  # resident memory of all processes together
    disk_mib: int = 64  # of the home folder, and again of /tmp; both are in memory
    files: int = 20_000  # in the home folder, and again in /tmp
    processes: int = 64
    sockets: int = 64  # of all processes together; the kernel holds up to some megabytes for each
    cpu_seconds: int = 60  # of one process


class SandboxedProgram:
    """A running program without access to the network and to the machine's files, except for read-only programs.

    Files are copied in before the program starts, and read after all processes have ended, through a descriptor of the
    home folder and without following links: programs in the sandbox can neither fake them nor lead out of the folder.

    Attributes:
        process: bubblewrap's process on the machine.
        ended_for: limit that ended the sandbox; None: it was not ended.
        end_processes: called in place of the end, with the limit, when processes are over one of memory or sockets.
    """

    def __init__(self, process: Program, init: int, home: int, limits: ProgramLimits) -> None:
        """Take a started program; `start_program` starts one. `init`: pid, on the machine, of the first process in the
        sandbox. `home`: descriptor of the home folder, taken over by the sandbox.
        """
        self.process = process
        self.ended_for: str | None = None
        self.end_processes: Callable[[str], None] | None = None
        self._init, self._home, self._limits = init, home, limits
        self._watching = asyncio.ensure_future(self._watch())

    @property
    def running(self) -> bool:
        """Return whether the program runs."""
        return self.process.returncode is None

    async def end(self) -> None:
        """Kill all processes and wait for their end; the files can still be read."""
        self._watching.cancel()
        if self.running:
            # The first process of a namespace of processes takes all others with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

    async def close(self) -> None:
        """Kill all processes, and remove the files."""
        await self.end()
        if self._home >= 0:
            os.close(self._home)
            self._home = -1

    async def read_files(self) -> dict[str, bytes]:
        """Return the regular files of the home folder by their relative paths; call `end` before."""
        if self.running or self._home < 0:
            raise EnvironmentFailed("the files of a sandbox are read between `end` and `close`")
        return await in_thread(lambda: _files(self._home, self._limits))

    async def _watch(self) -> None:
        """End the sandbox when its processes together, or its files, are over a limit that the kernel does not keep."""
        while self.running:
            if any(found.f_files - found.f_ffree > self._limits.files for found in self._folders()):
                self.ended_for = f"more than {self._limits.files} files"
            elif (over := self._processes_over()) is not None:
                if self.end_processes is None:
                    self.ended_for = over
                else:
                    self.end_processes(over)
            if self.ended_for is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._init, signal.SIGKILL)
                return
            await asyncio.sleep(_WATCH_SECONDS)

    def _processes_over(self) -> str | None:
        """Return the limit that all processes together are over."""
        if _sockets(self._init) > self._limits.sockets:
            return f"more than {self._limits.sockets} sockets"
        if _resident(self._init) > self._limits.memory_mib * _MIB:
            return f"more than {self._limits.memory_mib} MiB of memory"
        return None

    def _folders(self) -> Iterator[os.statvfs_result]:
        """Yield the file systems that a process can write to; empty without a process."""
        for folder in (HOME, "/tmp", "/dev/shm"):
            with contextlib.suppress(OSError):
                yield os.statvfs(f"/proc/{self._init}/root{folder}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def start_program(
    command: Sequence[str],
    files: Mapping[str, bytes],
    limits: ProgramLimits,
    *,
    stdin: int,
    stdout: int,
    pass_fds: Iterable[int] = (),
    privileged: bool = False,
) -> SandboxedProgram:
    """Start a program in its own sandbox. Its working folder is the home folder, which has `files` by relative path.

    A `privileged` program may make namespaces of processes, and limits its own children (`inside.py`).
    """
    check_bubblewrap()
    with Descriptors() as ours:
        (info, info_in), (ready, ready_in), (go_out, go) = (ours.pipe() for _ in range(3))
        names, calls = ours.filled_pipe(_PASSWD.encode()), ours.filled_pipe(call_filter())
        archive = ours.add(await in_thread(lambda: _archive(files)))
        theirs = (info_in, ready_in, go_out, names, calls, archive)
        process = Program.start(
            [
                *_bubblewrap(limits, info_in, names, calls),
                *(("--cap-add", "CAP_SYS_ADMIN") if privileged else ()),
                *("bash", "-c", _BEGIN, str(ready_in), str(go_out), str(archive)),
                *(() if privileged else ("prlimit", *(f"--{name}={n}" for name, n in rlimits(limits).items()), "--")),
                *command,
            ],
            streams=(stdin, stdout, stdout),
            pass_fds=(*theirs, *pass_fds),
            variables=VARIABLES,
            unprivileged=True,
        )
        ours.close(*theirs)
        try:
            async with asyncio.timeout(_START_SECONDS):
                init = int(json.loads(await read_pipe(info))["child-pid"])
                if not await read_pipe(ready, 1):
                    if (code := await process.wait()) == _UNFIT:
                        raise EnvironmentFailed("no sandbox was started: the files can't be unpacked in it")
                    raise EnvironmentFailed(f"bubblewrap started no program; it ended with {code}")
                home = os.open(f"/proc/{init}/root{HOME}", os.O_RDONLY | os.O_DIRECTORY)
                os.write(go, b"\n")
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, OSError | ValueError | TimeoutError):
                raise EnvironmentFailed(f"no sandbox was started: {str(error) or 'it took too long'}") from error
            raise
        return SandboxedProgram(process, init, home, limits)


def check_bubblewrap() -> None:
    """Check that this machine has bubblewrap, and that a sandbox has the tasks' programs."""
    missing = [name for name in ("bwrap", "bash", "git", "python3") if shutil.which(name, path="/usr/bin:/bin") is None]
    if not sys.platform.startswith("linux") or missing:
        raise ConfigError(
            f"this environment needs Linux, and {', '.join(missing)} in /usr/bin; run: "
            "apt-get install bubblewrap bash git python3"
        )
    if not has_filters():
        raise ConfigError(
            f"this environment needs {LIBRARY}, by which system calls are refused; run: apt-get install libseccomp2"
        )


def _bubblewrap(limits: ProgramLimits, info: int, names: int, calls: int) -> list[str]:
    """Return the command that makes the namespaces."""
    size = str(limits.disk_mib * _MIB)
    known = [f"--ro-bind-try /{name} /{name}" for name in ("etc/alternatives", "etc/ld.so.cache", "etc/ld.so.conf.d")]
    linked = [f"--symlink usr/{name} /{name}" for name in ("bin", "sbin", "lib", "lib64")]
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--info-fd", str(info)),
        *("--ro-bind", "/usr", "/usr", *" ".join([*linked, *known]).split()),
        *("--ro-bind-data", str(names), "/etc/passwd"),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(_MIB), "--tmpfs", "/dev/shm"),
        # It reads the same, and can't be mapped: shared mappings of /dev/zero are memory that no limit counts.
        *("--dev-bind", "/dev/full", "/dev/zero", "--seccomp", str(calls)),
        *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", HOME, "--chdir", HOME),
        *("--remount-ro", "/dev", "--remount-ro", "/"),  # both are folders in memory, without a limit of their own
    ]


def rlimits(limits: ProgramLimits) -> dict[str, int]:
    """Return the kernel's limits of each process, by their names in `prlimit`."""
    return {
        "nproc": limits.processes,
        "as": limits.memory_mib * _MIB,
        "fsize": limits.disk_mib * _MIB,
        "cpu": limits.cpu_seconds,
        "nofile": 256,
        "core": 0,
    }


def _archive(files: Mapping[str, bytes]) -> int:
    """Return a descriptor of a file in memory that has the files as a tar archive, to be read from its beginning."""
    descriptor = os.memfd_create("palestra-files")
    with open(descriptor, "wb", closefd=False) as written, tarfile.open(fileobj=written, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _files(home: int, limits: ProgramLimits) -> dict[str, bytes]:
    """Return the regular files below a folder's descriptor, without following links.

    Files that could harm the reader are left out: unreadable ones, folders deeper than `_MAX_DEPTH`, and those beyond
    the limits of files and bytes, such as files with holes.
    """
    found: dict[str, bytes] = {}
    room = limits.disk_mib * _MIB
    for path, folder, name in _walk(home, "", _MAX_DEPTH):
        # A pipe without a writer would block for ever if it were opened in the usual way.
        with (
            contextlib.suppress(OSError),
            open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file,
        ):
            state = os.fstat(file.fileno())
            if stat.S_ISREG(state.st_mode) and state.st_size <= room and len(found) < limits.files:
                found[path] = file.read(state.st_size)
                room -= state.st_size
    return found


def _walk(folder: int, path: str, depth: int) -> Iterator[tuple[str, int, str]]:
    """Give the path, the folder's descriptor and the name of everything below a folder that is no folder itself."""
    names = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(folder))
    for name in names:
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError:  # no folder, or one that can't be read
            yield f"{path}{name}", folder, name
            continue
        try:
            if depth:
                yield from _walk(inner, f"{path}{name}/", depth - 1)
        finally:
            os.close(inner)


def _sockets(process: int) -> int:
    """Return how many sockets there are in the network of a process; 0 once it has ended."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open(f"/proc/{process}/net/sockstat", encoding="utf-8") as file,
    ):
        return int(file.readline().split()[2])
    return 0


def _resident(process: int) -> int:
    """Return the resident memory of a process and all below it, in bytes."""
    return sum(process_memory(one)[1] for one in family_of(process))


def own_memory(processes: Iterable[int]) -> int:
    """Return the memory of processes together in bytes, without mapped files, which programs share."""
    total = 0
    for one in processes:
        with (
            contextlib.suppress(OSError, ValueError, IndexError),
            open(f"/proc/{one}/status", encoding="utf-8") as file,
        ):
            total += sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))
    return total * 1024


def family_of(process: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    waiting = [process]
    while waiting:
        one = waiting.pop()
        yield one
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="utf-8") as file:
                    waiting += map(int, file.read().split())
