"""The filter of system calls of a sandbox, which refuses those that get memory outside of the sandbox's limits."""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

# Memory of these belongs to no process, so that neither a process's own limit nor the sum of resident memory has it.
_REFUSED = ("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "io_uring_setup")
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
_REFUSE = 0x00050000 | errno.EPERM  # SECCOMP_RET_ERRNO
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_ALU | BPF_AND, BPF_RET
_IF_EQUAL, _IF_NOT_BELOW = 0x15, 0x35  # BPF_JMP | BPF_JEQ, BPF_JMP | BPF_JGE
_NUMBER, _MACHINE, _MMAP_FLAGS = 0, 4, 16 + 3 * 8  # offsets in `struct seccomp_data`; the low half of the argument
_X32 = 0x40000000  # numbers from here on are those of a second table, which would go round the filter


class _Machine(NamedTuple):
    """The numbers of a kind of machine.

    Attributes:
        audit: AUDIT_ARCH of the kernel.
        mmap: number of the call.
        refused: numbers of `_REFUSED`, in this order.
    """

    audit: int
    mmap: int
    refused: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 9, (319, 447, 29, 64, 68, 425)),
    "aarch64": _Machine(0xC00000B7, 222, (279, 447, 194, 190, 186, 425)),
}


def known_machine() -> bool:
    """Return whether there is a filter for this kind of machine."""
    return platform.machine() in _MACHINES


def memory_filter() -> bytes:
    """Return the filter as a program of classic BPF, for `bwrap --seccomp`.

    A program that calls what is refused gets EPERM, as where a machine has turned it off; one that calls by the numbers
    of another machine is killed.

    Raises:
        KeyError: there is none for this kind of machine.
    """
    machine = _MACHINES[platform.machine()]
    mapped = (
        _step(_IF_EQUAL, machine.mmap, otherwise=3),
        _step(_LOAD, _MMAP_FLAGS),
        _step(_AND, _MAP_SHARED | _MAP_ANONYMOUS),
        _step(_IF_EQUAL, _MAP_SHARED | _MAP_ANONYMOUS, then=1),
        _step(_RETURN, _ALLOW),
    )
    to_the_end = len(machine.refused) + len(mapped)  # steps between the first comparison and the refusal
    return b"".join(
        (
            _step(_LOAD, _MACHINE),
            _step(_IF_EQUAL, machine.audit, then=1),
            _step(_RETURN, _KILL),
            _step(_LOAD, _NUMBER),
            _step(_IF_NOT_BELOW, _X32, then=to_the_end),
            *(_step(_IF_EQUAL, call, then=to_the_end - place) for place, call in enumerate(machine.refused, 1)),
            *mapped,
            _step(_RETURN, _REFUSE),
        )
    )


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return an instruction.

    Args:
        code: what it does.
        value: its operand.
        then: steps that a jump leaves out where its condition holds.
        otherwise: the same, where it does not.
    """
    return struct.pack("=HBBI", code, then, otherwise, value)
