"""Runs in a bubblewrap sandbox and starts its commands, in a namespace of processes that it can end as a whole.

A program of its own, `python3 -I -S -c TEXT SOCKET`, that imports nothing of Palestra. Commands can't see, signal or
trace it: it is outside of their namespace. It has one capability, to make namespaces, which commands do not get.

Messages on the socket are JSON, one a packet. `{"run": N}` comes with four descriptors: a file with the request, and
the command's input, output and errors; the answer is `{"run": N, "code": CODE}`. `{"kill": N}` ends a command's group.
`{"stop": N}` ends all processes, and `{"listen": N, "port": P}` is answered with a listening socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys

_NEW_PROCESSES, _NEW_MOUNTS = 0x20000000, 0x00020000  # CLONE_NEWPID, CLONE_NEWNS
_PRIVATE = 0x40000 | 0x4000  # MS_PRIVATE, MS_REC
_NO_RIGHTS = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_CLEAR_AMBIENT = (47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
_NOT_TRACED = (4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
_MAX_MESSAGE, _AGAIN = 4096, 75
_LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _first_process() -> int:
    """Let later children of this process be in a new namespace of processes; return its first one."""
    _call("unshare", _NEW_PROCESSES | _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    ready, told = os.pipe()
    first = os.fork()
    if first == 0:
        _be_first(told)
    os.close(told)
    if not os.read(ready, 1):
        raise OSError("the first process of a namespace has not started")
    os.close(ready)
    return first


def _be_first(told: int) -> None:
    """Be the first process of a namespace: show its processes in /proc, and reap what ends."""
    try:
        _call("mount", b"proc", b"/proc", b"proc", _NO_RIGHTS, None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # which a first process ignores
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _LIBC.prctl(*_CLEAR_AMBIENT)
        nothing = (ctypes.c_uint32 * 6)()
        _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), nothing)
        _LIBC.prctl(*_NOT_TRACED)
        os.write(told, b"+")
        os.closerange(0, 256)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _become(file: int, streams: list[int]) -> None:
    """Turn this process, a new one, into the command of a request."""
    try:
        with open(file, "rb", closefd=False) as opened:
            request = json.load(opened)
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 256)
        for name, value in request["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))
        _LIBC.prctl(*_CLEAR_AMBIENT)
        os.chdir(request["folder"])
        os.execvpe(request["command"][0], request["command"], request["variables"])
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else request["command"][0]
        os.write(2, f"{path}: {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 - this is a copy of the server
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


class _Commands:
    """Starts commands in one namespace of processes, until it is told to end them all."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._first = control, _first_process()
        self._running: dict[int, tuple[int, int]] = {}  # descriptor of a process: the number of its request, its id
        self._waiting = select.poll()
        self._waiting.register(control, select.POLLIN)

    def serve(self) -> int:
        """Do what messages say; return an exit code: 0 at the end of the messages, `_AGAIN` after a stop."""
        while True:
            for descriptor, _ in self._waiting.poll():
                if descriptor != self._control.fileno():
                    self._report(descriptor)
                    continue
                message, given, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 4)
                if not message:
                    return 0
                if not self._handle(json.loads(message), given):
                    return _AGAIN

    def _handle(self, request: dict[str, int], given: list[int]) -> bool:
        """Do what one message says; return whether processes go on."""
        if "run" in request:
            self._start(request["run"], given)
        elif "kill" in request:
            for number, process in self._running.values():
                if number == request["kill"]:
                    _kill_group(process)
        elif "stop" in request:
            os.kill(self._first, signal.SIGKILL)  # the kernel ends all others of the namespace
            for descriptor in list(self._running):
                self._report(descriptor)
            os.waitpid(self._first, 0)  # which ends after those whose end this process has to see
            self._answer(request)
            return False
        else:
            with socket.create_server(("127.0.0.1", request["port"])) as listening:
                self._answer(request, [listening.fileno()])
        return True

    def _start(self, number: int, given: list[int]) -> None:
        process = os.fork()
        if process == 0:
            _become(given[0], given[1:])
        for one in given:
            os.close(one)
        opened = os.pidfd_open(process)
        self._running[opened] = number, process
        self._waiting.register(opened, select.POLLIN)

    def _report(self, descriptor: int) -> None:
        """Wait for the end of a command, and say its code."""
        self._waiting.unregister(descriptor)
        os.close(descriptor)
        number, process = self._running.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self._answer({"run": number, "code": code if code >= 0 else 128 - code})

    def _answer(self, message: dict[str, int], descriptors: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors or [])


def _main() -> None:
    # Below the numbers that commands close: the number here is the machine's, and may be a high one.
    control = socket.socket(fileno=os.dup2(int(sys.argv[1]), 3))
    os.closerange(4, 1 << 20)
    control.send(b'{"ready": 0}')
    code = _AGAIN
    while code == _AGAIN:  # a process can make one such namespace for its children
        child = os.fork()
        if child == 0:
            os._exit(_Commands(control).serve())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_group(process: int) -> None:
    """Kill a command with its group, or alone if it leads none yet."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _main()
