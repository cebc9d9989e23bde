"""System calls that programs in bubblewrap are refused."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from functools import cache
from typing import Any

LIBRARY = "libseccomp.so.2"
# Memory of these belongs to no process, so that neither a process's own limit nor the sum of resident memory has it.
_UNCOUNTED = ("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "io_uring_setup")
_SHARED = ("add_key", "keyctl", "request_key", "syslog")  # keys of the session that started the box; the kernel's log
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
# Of these a sandbox has its own; others, such as the sockets between a virtual machine and its host, have no namespace.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, which Python has on Linux only
_SOL_SOCKET, _SIZES = 1, (7, 8)  # SO_SNDBUF and SO_RCVBUF, by which a socket holds more memory than by default

_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # SCMP_ACT_ALLOW, SCMP_ACT_KILL_PROCESS
_REFUSE = 0x00050000 | errno.EPERM  # SCMP_ACT_ERRNO
_IGNORE = 0x00050000  # as the kernel ignores sizes over its own limit: programs such as `ip` end at a refusal
_BAD_ARCHITECTURE = 2  # SCMP_FLTATR_ACT_BADARCH
_ABOVE, _MASKED = 6, 7  # SCMP_CMP_GT, SCMP_CMP_MASKED_EQ
_LOW = 2**32 - 1  # the kernel reads this half of arguments that are an int


class _Compared(ctypes.Structure):
    """`struct scmp_arg_cmp`: number of the argument, comparison, and what it is compared with."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def has_filters() -> bool:
    """Return whether this machine has libseccomp."""
    try:
        return bool(ctypes.CDLL(LIBRARY))
    except OSError:
        return False


@cache
def call_filter() -> bytes:
    """Return the filter as a program of classic BPF, for `bwrap --seccomp`.

    A program that calls what is refused gets EPERM, as where a machine has turned it off, and sizes of a socket's
    buffers are ignored. One that calls by the numbers of another machine is killed.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    made = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        _check("seccomp_attr_set", library.seccomp_attr_set(made, _BAD_ARCHITECTURE, ctypes.c_uint32(_KILL)))
        for name, action, compared in _rules():
            number = library.seccomp_syscall_resolve_name(name.encode())
            array = (_Compared * len(compared))(*compared)
            added = library.seccomp_rule_add_array(made, ctypes.c_uint32(action), number, len(compared), array)
            _check(name, added)
        file = os.memfd_create("filter")
        with open(file, "rb") as reading:
            _check("seccomp_export_bpf", library.seccomp_export_bpf(made, file))
            reading.seek(0)
            return reading.read()
    finally:
        library.seccomp_release(made)


def _rules() -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """Yield calls, what becomes of them, and what their arguments have to be for that."""
    for name in (*_UNCOUNTED, *_SHARED):
        yield name, _REFUSE, ()
    shared = _MAP_SHARED | _MAP_ANONYMOUS
    yield "mmap", _REFUSE, ((3, _MASKED, shared, shared),)
    for family in set(range(max(_FAMILIES))) - set(_FAMILIES):
        yield "socket", _REFUSE, ((0, _MASKED, _LOW, family),)
    yield "socket", _REFUSE, ((0, _ABOVE, max(_FAMILIES)),)
    for option in _SIZES:
        yield "setsockopt", _IGNORE, ((1, _MASKED, _LOW, _SOL_SOCKET), (2, _MASKED, _LOW, option))


def _check(what: str, code: int) -> None:
    if code < 0:
        raise OSError(-code, f"libseccomp: {what}: {os.strerror(-code)}")
