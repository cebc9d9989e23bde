"""A real control plane on a real, local Ray cluster, started and killed as an operator would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import servers
from servers import PALESTRA, Process, free_port

from palestra_control.control import ControlClient

T = TypeVar("T")
GAMES = {  # a job of about a second that plays itself
    "steps": 3,
    "deterministic": True,
    "engine": {"kind": "fake", "reply_tokens": 3},
    "environment": {
        "name": "frozen-lake",
        "settings": {"impossible_reward": -1.0},
        "train_tasks": 9,
        "validation_tasks": 3,
    },
    "rollout": {"group_size": 8, "groups_per_step": 2},
    "evaluation": {"every_steps": 1},
    "checkpoint": {"every_steps": 1},
}
LONG = GAMES | {"steps": 100_000, "engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.02}}


def until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """As in `servers`, and slower: a key may send 20 requests a second."""

    def asked() -> T:
        time.sleep(0.1)
        return condition()

    return servers.until(asked, what, seconds)


def lives(process: psutil.Process) -> bool:
    """Not so where it is dead, and its parent has not asked how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Service:
    """`palestra serve`, and its clients."""

    folder: Path
    options: tuple[str, ...] = ("--cpus", "6", "--gpus", "2")
    port: int = field(default_factory=free_port)
    cwd: Path | None = None  # of `palestra serve`
    settings: dict[str, str] = field(default_factory=dict)  # its variables, beside the usual
    key: str = ""
    processes: list[Process] = field(default_factory=list)
    clients: list[ControlClient] = field(default_factory=list)

    def start(self, fault: str | None = None) -> Service:
        command = [PALESTRA, "serve", "--state-dir", self.state, "--port", self.port, *self.options]
        log = self.folder / f"serve-{len(self.processes)}.log"
        self.processes.append(Process.start(command, log, fault, cwd=self.cwd, settings=self.settings))
        process = self.processes[-1]
        until(lambda: "control plane at" in process.output or process.popen.poll() is not None, "it listens", 90)
        assert "control plane at" in process.output, process.output
        if found := re.search(r"pk_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", process.output):
            self.key = found[0]
        return self

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None) -> ControlClient:
        self.clients.append(ControlClient(self.url, key or self.key, retry_seconds=30))
        return self.clients[-1]

    def command(self, *words: object, key: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command of ours, as somebody with a key runs it."""
        settings = {**os.environ, "PALESTRA_URL": self.url, "PALESTRA_KEY": key or self.key}
        whole = [str(PALESTRA), *map(str, words)]
        return subprocess.run(whole, env=settings, capture_output=True, text=True, timeout=120, check=False)

    def processes_of(self, job_id: str) -> list[psutil.Process]:
        """Those that have a file of the job open: its model server."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(job_id in file.path for file in process.open_files()):
                    found.append(process)
        return found

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.kill()
        stop = "from pathlib import Path; from palestra_service.ray.cluster import stop_local; "
        subprocess.run([sys.executable, "-c", f"{stop}stop_local(Path({str(self.state)!r}))"], check=True)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics_of(service: Service, job_id: str) -> list[dict[str, Any]]:
    """The rows of a job's metrics, times left out."""
    text = (service.state / "jobs" / job_id / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    differs = ("time/", "wall_seconds", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(differs)} for row in rows]
