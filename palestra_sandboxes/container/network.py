"""A listening socket in the network of a box, held by this process: nothing in the image is needed for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from palestra.errors import EnvironmentFailed
from palestra_sandboxes.child import CommandOutput, Program

_SECONDS = 30.0
# A process of its own, because threads share their other namespaces. A user's own engine has namespaces of users, too.
_LISTEN = """import ctypes, os, socket, sys
process, port, given = map(int, sys.argv[1:])
calls = ctypes.CDLL(None, use_errno=True)
kinds = [("net", 0x40000000)] if os.geteuid() == 0 else [("user", 0x10000000), ("net", 0x40000000)]
for opened, kind in [(os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]:
    if calls.setns(opened, kind):
        sys.exit(os.strerror(ctypes.get_errno()))
with socket.create_server(("127.0.0.1", port)) as listening:
    socket.send_fds(socket.socket(fileno=given), [b"+"], [listening.fileno()])
"""


async def listen_in(process: int, port: int) -> socket.socket:
    """Return a socket that listens on the loopback address of a process's network.

    Raises:
        EnvironmentFailed: this process may not do that, or the process has ended.
    """
    ours, theirs = socket.socketpair()
    output = CommandOutput(10_000)
    with contextlib.closing(output), ours:
        with theirs:
            helper = Program.start(
                [sys.executable, "-I", "-S", "-c", _LISTEN, str(process), str(port), str(theirs.fileno())],
                streams=(subprocess.DEVNULL, *output.written),
                pass_fds=(theirs.fileno(),),
                variables={"PATH": os.environ.get("PATH", os.defpath)},
            )
        output.start()
        try:
            await output.wait(helper.ended, _SECONDS)
        finally:
            helper.kill()
        if await helper.wait():
            reason = bytes(output.streams[1]).decode(errors="replace").strip()
            raise EnvironmentFailed(f"the network of a sandbox can't be entered: {reason or 'it took too long'}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=descriptors[0])
