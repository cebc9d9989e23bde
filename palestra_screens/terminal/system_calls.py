"""The filter of system calls of a sandbox, which refuses those that lead out of its namespaces or past its limits."""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

# Memory of these belongs to no process, so that neither a process's own limit nor the sum of resident memory has it.
_REFUSED = ("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "io_uring_setup")
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
# Of these a sandbox has its own; others, such as the sockets between a virtual machine and its host, have no namespace.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, which Python has on Linux only
_SOL_SOCKET, _SIZES = 1, (7, 8)  # SO_SNDBUF and SO_RCVBUF, by which a socket holds more memory than by default

_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
_REFUSE, _IGNORE = 0x00050000 | errno.EPERM, 0x00050000  # SECCOMP_RET_ERRNO; 0 is success, and nothing is done
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_ALU | BPF_AND, BPF_RET
_IF_EQUAL, _IF_NOT_BELOW = 0x15, 0x35  # BPF_JMP | BPF_JEQ, BPF_JMP | BPF_JGE
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
_X32 = 0x40000000  # numbers from here on are those of a second table, which would go round the filter


class _Machine(NamedTuple):
    """The numbers of a kind of machine.

    Attributes:
        audit: AUDIT_ARCH of the kernel.
        mmap: number of the call, as the next two.
        socket: see `mmap`.
        setsockopt: see `mmap`.
        refused: numbers of `_REFUSED`, in this order.
    """

    audit: int
    mmap: int
    socket: int
    setsockopt: int
    refused: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 9, 41, 54, (319, 447, 29, 64, 68, 425)),
    "aarch64": _Machine(0xC00000B7, 222, 198, 208, (279, 447, 194, 190, 186, 425)),
}


class _Step(NamedTuple):
    """An instruction; a jump goes to a label, or where that is empty to the next instruction."""

    code: int
    value: int
    then: str = ""
    otherwise: str = ""


def known_machine() -> bool:
    """Return whether there is a filter for this kind of machine."""
    return platform.machine() in _MACHINES


def call_filter() -> bytes:
    """Return the filter as a program of classic BPF, for `bwrap --seccomp`.

    A program that calls what is refused gets EPERM, as where a machine has turned it off, and sizes of a socket's
    buffers are ignored. One that calls by the numbers of another machine is killed.

    Raises:
        KeyError: there is none for this kind of machine.
    """
    return _assembled([*_program(_MACHINES[platform.machine()])])


def _program(machine: _Machine) -> Iterator[_Step | str]:
    """Give the instructions, and labels before those to which jumps go."""
    yield _Step(_LOAD, _MACHINE)
    yield _Step(_IF_EQUAL, machine.audit, otherwise="kill")
    yield _Step(_LOAD, _NUMBER)
    yield _Step(_IF_NOT_BELOW, _X32, then="refuse")
    for call in machine.refused:
        yield _Step(_IF_EQUAL, call, then="refuse")
    yield _Step(_IF_EQUAL, machine.mmap, then="mmap")
    yield _Step(_IF_EQUAL, machine.socket, then="socket")
    yield _Step(_IF_EQUAL, machine.setsockopt, otherwise="allow")
    yield _argument(1)
    yield _Step(_IF_EQUAL, _SOL_SOCKET, otherwise="allow")
    yield _argument(2)
    for option in _SIZES:
        yield _Step(_IF_EQUAL, option, then="ignore")
    yield "allow"
    yield _Step(_RETURN, _ALLOW)
    yield "mmap"
    yield _argument(3)
    yield _Step(_AND, _MAP_SHARED | _MAP_ANONYMOUS)
    yield _Step(_IF_EQUAL, _MAP_SHARED | _MAP_ANONYMOUS, then="refuse", otherwise="allowed")
    yield "socket"
    yield _argument(0)
    for family in _FAMILIES:
        yield _Step(_IF_EQUAL, family, then="allowed")
    yield "refuse"
    yield _Step(_RETURN, _REFUSE)
    yield "allowed"  # again: jumps only go forwards
    yield _Step(_RETURN, _ALLOW)
    yield "ignore"  # as the kernel ignores sizes over its own limit: programs such as `ip` end at a refusal
    yield _Step(_RETURN, _IGNORE)
    yield "kill"
    yield _Step(_RETURN, _KILL)


def _argument(number: int) -> _Step:
    """Return the instruction that takes the low half of an argument; all that are looked at are 32 bits wide."""
    return _Step(_LOAD, _ARGUMENTS + 8 * number)


def _assembled(program: list[_Step | str]) -> bytes:
    """Return the instructions as the kernel reads them, with labels as numbers of instructions to leave out."""
    places: dict[str, int] = {}
    steps: list[_Step] = []
    for one in program:
        if isinstance(one, str):
            places[one] = len(steps)
        else:
            steps.append(one)

    def left_out(place: int, label: str) -> int:
        return places[label] - place - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", step.code, left_out(place, step.then), left_out(place, step.otherwise), step.value)
        for place, step in enumerate(steps)
    )
