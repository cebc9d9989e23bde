"""Processes of ours without the seconds that their imports take: forked from one that has them all in memory.

    python preloaded.py FD

A server of a test computes for two to five seconds before its first line of its own, all of it imports, and a test that
kills servers starts many. So one process imports everything once, and forks for each that is wanted. The fork has the
arguments, variables, folder and output of a process that is started the usual way, its end is that of the program, and
SIGKILL ends it alone. What comes out of the import itself, such as the memory of a process that needs no torch, has to
be tested with a process of its own (`Process.start`).

Two such processes take turns, so that a server and its successor differ in their hash seeds as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import IO, NoReturn

HERE = Path(__file__)
NUMBER = struct.Struct("<i")
MODULES = (
    "openai.resources.chat.completions",
    "palestra.cli.main",
    "palestra.client.client",
    "palestra.engine.embedded.engine",
    "palestra.models.loading",  # torch and transformers
    "palestra_bases.serving",
    "palestra.runtime.local",
    "palestra.runtime.page",
    "palestra_bases.tinker.serving",
    "palestra.trainer.torch_trainer",
    "uvicorn",
    "uvloop",
)
# What Python, its allocator, arithmetic and the clients of the hub read when they are loaded. Other variables are read
# when they are needed, but for `PALESTRA_FAULT`, which a forked process reads again.
AT_IMPORT = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ONEDNN_",
    "OPENBLAS_",
    "TORCH_",
    "CUDA_",
    "HF_",
)


class Forked:
    """A forked process; the part of `subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], pid: int, status: int) -> None:
        """Take over the descriptor `status`, from which the exit status can be read when the process has ended."""
        self.args, self.pid, self.returncode = args, pid, None
        self._status = status
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, that of a signal negative; None: it still runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return None
            with self._reading:
                if self.returncode is None:
                    found = os.read(self._status, NUMBER.size)
                    assert found, "the process that had forked it is gone"
                    self.returncode = os.waitstatus_to_exitcode(*NUMBER.unpack(found))
                    os.close(self._status)
        return self.returncode


class Nursery:
    """A process that has imported everything, and forks."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start it with the variables of the processes to come."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with its:
            words = [sys.executable, str(HERE), str(its.fileno())]
            self._process = subprocess.Popen(
                words, env=dict(variables), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._socket, self._asking = ours, threading.Lock()

    def fork(self, words: Sequence[str], variables: Mapping[str, str], out: IO[bytes], cwd: Path | None) -> Forked:
        """Start a process: the command `palestra`, or Python with the path of a script."""
        status, its_end = os.pipe()
        order = json.dumps({"words": list(words), "variables": dict(variables), "cwd": str(cwd or Path.cwd())}).encode()
        try:
            with self._asking:
                socket.send_fds(self._socket, [NUMBER.pack(len(order))], [out.fileno(), its_end])
                self._socket.sendall(order)
                (pid,) = NUMBER.unpack(_exactly(self._socket, NUMBER.size))
        except (EOFError, ConnectionError):
            os.close(status)
            raise
        finally:
            os.close(its_end)
        return Forked(list(words), pid, status)

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._socket.close()
        self._process.wait()


_nurseries: dict[tuple[tuple[str, str], ...], tuple[Nursery, Nursery]] = {}
_turns = cycle((0, 1))


def start(words: Sequence[str], variables: Mapping[str, str], out: IO[bytes], cwd: Path | None) -> Forked | None:
    """Fork a process from one that has imported everything under such variables.

    None: there is none, because imports start threads on this machine; it has said so on standard error.
    """
    key = tuple(sorted(read_at_import(variables).items()))
    if key not in _nurseries:
        _nurseries[key] = (Nursery(variables), Nursery(variables))
        for nursery in _nurseries[key]:
            atexit.register(nursery.close)
    try:
        return _nurseries[key][next(_turns)].fork(words, variables, out, cwd)
    except (EOFError, ConnectionError):
        return None


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables on which it depends what an import does."""
    return {name: value for name, value in variables.items() if name.startswith(AT_IMPORT)}


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


# In the process that forks.


def _import_everything() -> None:
    """Import what the commands import before they listen."""
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("palestra.models.kernels").kernels().numerics()  # compiled once for all of them
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one of them"


class _Reaper:
    """Tells the ends of children to whoever had them started."""

    def __init__(self) -> None:
        self.children: dict[int, int] = {}  # by process id, the descriptor for its exit status
        self.bell, bell = socket.socketpair()
        for end in (self.bell, bell):
            end.setblocking(False)
        self._bell = bell
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self.children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, NUMBER.pack(status))
            os.close(descriptor)

    def leave(self) -> None:
        """Forget all of it, in a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.bell.close()
        self._bell.close()
        for descriptor in self.children.values():
            os.close(descriptor)


def _serve(connection: socket.socket) -> list[str]:
    """Fork for each order; returns in a child, the words of its command."""
    reaper = _Reaper()
    while True:
        ready = select.select([connection, reaper.bell], [], [])[0]
        if reaper.bell in ready:
            reaper.reap()
        if connection not in ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, 2)
        if not head:
            os._exit(0)  # the tests are over
        order = json.loads(_exactly(connection, *NUMBER.unpack(head)))
        out, status = descriptors
        pid = os.fork()
        if not pid:
            reaper.leave()
            os.close(status)
            connection.close()
            _become(order["variables"], order["cwd"], out)
            return list(order["words"])
        reaper.children[pid] = status
        os.close(out)
        connection.sendall(NUMBER.pack(pid))


def _become(variables: dict[str, str], cwd: str, out: int) -> None:
    import palestra.faults

    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    palestra.faults.armed = palestra.faults._parse(os.environ.get("PALESTRA_FAULT"))


def _run(words: list[str]) -> NoReturn:
    if words[0] == sys.executable:
        words = words[1:]
        sys.path[0] = str(Path(words[0]).parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    from palestra.cli.main import main

    sys.path.pop(0)
    sys.argv = words
    sys.exit(main())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        _import_everything()
        gc.freeze()  # so that a child does not copy all that it never changes
        command = _serve(orders)
    _run(command)
