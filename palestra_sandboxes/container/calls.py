"""Podman's filter of system calls, without the sockets that know no namespaces, such as those of virtual machines."""

from __future__ import annotations

import json
import socket
from functools import cache
from pathlib import Path
from typing import Any

_PROFILES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")  # the first one is podman's
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_NETLINK, _AUDIT = 16, 9  # AF_NETLINK, of whose protocols podman refuses this one
_CALLS = ("socket", "socketcall")  # the second one's arguments can't be seen by a filter


@cache
def call_profile() -> bytes | None:
    """Return the filter as JSON; None: podman has one compiled into it, which can't be changed."""
    path = next((path for path in map(Path, _PROFILES) if path.is_file()), None)
    if path is None:
        return None
    profile: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rules = [rule | {"names": [name for name in rule["names"] if name not in _CALLS]} for rule in profile["syscalls"]]
    allowed = [[_compared(0, family)] for family in _FAMILIES]
    allowed.append([_compared(0, _NETLINK), _compared(2, _AUDIT, "SCMP_CMP_NE")])
    own = [{"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": compared} for compared in allowed]
    profile["syscalls"] = [*(rule for rule in rules if rule["names"]), *own]
    return json.dumps(profile).encode()


def _compared(argument: int, value: int, how: str = "SCMP_CMP_EQ") -> dict[str, Any]:
    return {"index": argument, "value": value, "valueTwo": 0, "op": how}
