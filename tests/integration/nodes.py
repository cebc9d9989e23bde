"""Machines of a Ray cluster, all of them this one: each with an address of its own, started and killed as one."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from servers import free_port, until

# How Ray notices that a machine is gone: after 3 s here, on its own it takes 15 s and more.
HEALTH = {"initial_delay_ms": "1000", "period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}


@dataclass
class Node:
    """`ray start --block`, and what came from it."""

    popen: subprocess.Popen[bytes]
    address: str
    log: Path

    def processes(self) -> list[psutil.Process]:
        """The node's own first, then the rest in the order in which they came."""
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(self.popen.pid)
            return [node, *node.children(recursive=True)]
        return []

    def programs(self, module: str) -> list[psutil.Process]:
        """The programs of ours that the machine runs now, by their module."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def stop(self) -> list[psutil.Process]:
        """All of the machine stands still, as if it were cut off from the others; returns its processes."""
        family: dict[int, psutil.Process] = {}
        while more := [process for process in self.processes() if process.pid not in family]:
            for process in more:  # again, because one that was not stopped yet may have started another
                family[process.pid] = process
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
        return [*family.values()]

    def kill(self) -> None:
        """The machine is gone, at once: it is stopped first, so that none of its processes notices another's end."""
        family = self.stop()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        self.popen.wait()


@dataclass
class Nodes:
    """A Ray cluster with token authentication; the first node is its head."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{self.port}"

    def add(
        self, *, cpus: int, gpus: int = 0, settings: Mapping[str, str] | None = None, labels: str | None = None
    ) -> Node:
        """Start a node; `settings` are variables that its model servers will have, `labels` as Ray takes them."""
        number = len(self.nodes)
        here = f"127.0.0.{number + 2}"  # of 127.0.0.1 Ray makes the address of the network card
        head = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        where = [f"--address={self.address}"] if self.nodes else head
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, f"--node-ip-address={here}"]
        command += ["--disable-usage-stats", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        command += [f"--object-store-memory={128 * 2**20}", *([] if labels is None else [f"--labels={labels}"])]
        log = self.folder / f"node-{number}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | (settings or {})
            )
        node = Node(popen, here, log)
        self.nodes.append(node)
        until(lambda: "Ray runtime started" in log.read_text() or popen.poll() is not None, f"node {number} runs", 90)
        assert popen.poll() is None, log.read_text()
        return node

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Nodes]:
    """A cluster without nodes yet. Whoever is started meanwhile, this process's children, may join it."""
    token = folder / "ray_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        for name, value in HEALTH.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        nodes = Nodes(folder)
        try:
            yield nodes
        finally:
            nodes.close()


def closed(address: str, port: int, seconds: float = 10.0) -> bool:
    """Whether nothing listens there, or soon does not any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)):
                return True
        time.sleep(0.1)
    return False
