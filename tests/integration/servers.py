"""Starts the real server, and workers, as processes; kills them, starts them again, and reads what they left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import preloaded

from palestra.config import dump_config, parse_config

T = TypeVar("T")
HERE = Path(__file__).parent
PALESTRA = Path(sys.executable).with_name("palestra")
KEY = "job-key-of-the-tests"
DEADLINE_SECONDS = 60.0
SCRIPTED = {  # a job of about a second: 20 episodes, 12 of them trained, with two calls each
    "steps": 3,
    "deterministic": True,
    "engine": {"kind": "fake", "reply_tokens": 8},
    "rollout": {"group_size": 2, "groups_per_step": 2},
    "evaluation": {"every_steps": 1},
}
TINY = {  # the same with a real, tiny model
    "steps": 3,
    "deterministic": True,
    "policies": {
        "policy": {
            "model": "tiny-random",
            "max_context": 256,
            "sampling": {"max_tokens": 24},
            "optimizer": {"learning_rate": 1e-2},  # so that one step more or less is seen in what is sampled
        }
    },
    "engine": {"threads": 1},
    "trainer": {"threads": 1, "micro_batch_tokens": 1},  # so that a step takes a while
    "rollout": {"group_size": 3, "groups_per_step": 2},
    "evaluation": {"every_steps": 1},
}


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """Poll until `condition` gives something true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}"
        time.sleep(0.005)
    return found


def free_port() -> int:
    """A port that nothing listens on, below those that the kernel gives to outgoing connections."""
    draw = random.Random()
    while True:
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


PRODUCTS = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")  # a deterministic job sets them itself


def environment(fault: str | None = None, key: str = KEY) -> dict[str, str]:
    """One thread for arithmetic, no network, and the job's key known to all."""
    quiet = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PALESTRA_API_KEY": key}
    kept = {name: value for name, value in os.environ.items() if name not in ("PALESTRA_FAULT", *PRODUCTS)}
    return kept | quiet | ({"PALESTRA_FAULT": fault} if fault else {})


Started = subprocess.Popen[bytes] | preloaded.Forked


@dataclass
class Process:
    """A process of ours, with its output in a file."""

    popen: Started
    log: Path

    @classmethod
    def start(
        cls,
        command: Sequence[object],
        log: Path,
        fault: str | None = None,
        key: str = KEY,
        cwd: Path | None = None,
        settings: Mapping[str, str] | None = None,
        fresh: bool = True,
    ) -> Process:
        """`settings`: more variables; `fresh`: the process imports everything itself, and is not forked."""
        with log.open("wb") as out:
            words = [str(word) for word in command]
            variables = environment(fault, key) | dict(settings or {})
            popen: Started | None = None if fresh else preloaded.start(words, variables, out, cwd)
            if popen is None:
                popen = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=variables, cwd=cwd)
        return cls(popen, log)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """The exit code; that of a signal is negative."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.output}") from None

    def kill(self) -> None:
        """SIGKILL, which is certain; a process that has ended is left alone."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


@dataclass
class Job:
    """A job's folder, and the processes that serve and play it. Its port stays the same over restarts."""

    folder: Path
    settings: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]] = tuple({"text": f"task {i}"} for i in range(7))
    validation: Sequence[Mapping[str, Any]] = tuple({"text": f"held out {i}"} for i in range(2))
    port: int = field(default_factory=free_port)
    servers: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    fresh: bool = False  # whether its processes import everything themselves

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data: dict[str, Any] = {"name": "job", "run_dir": str(self.run_dir), **self.settings}
        data["server"] = {"port": self.port, **self.settings.get("server", {})}
        data["tasks"] = {}
        for split, rows in (("train", self.tasks), ("validation", self.validation)):
            if rows:
                data["tasks"][split] = str(self.folder / f"{split}.jsonl")
                Path(data["tasks"][split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config_file.write_text(dump_config(parse_config(data)))

    # Processes

    def serve(self, *options: str, fault: str | None = None) -> Process:
        """Start the server and return at once."""
        log = self.folder / f"server-{len(self.servers)}.log"
        command = [PALESTRA, "run", self.config_file, *options]
        self.servers.append(Process.start(command, log, fault, fresh=self.fresh))
        return self.servers[-1]

    def start(self, *options: str, fault: str | None = None) -> Process:
        """Start the server and wait until it listens."""
        server = self.serve(*options, fault=fault)
        self.wait_until_it_listens()
        return server

    def wait_until_it_listens(self) -> None:
        server = self.servers[-1]
        until(lambda: "data plane at" in server.output or server.popen.poll() is not None, "the server listens")
        assert "data plane at" in server.output, server.output

    def work(self, *options: str, worker_id: str | None = None) -> Process:
        """Start a worker process; see `worker_process.py` for its options."""
        name = worker_id or f"worker-{len(self.workers)}"
        command = [sys.executable, HERE / "worker_process.py", self.url, self.folder / f"{name}.jsonl", name, *options]
        self.workers.append(Process.start(command, self.folder / f"{name}.log", fresh=self.fresh))
        return self.workers[-1]

    def finish(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until server and workers have ended well."""
        assert self.servers[-1].wait(seconds) == 0, self.servers[-1].output
        for worker in self.workers:
            if worker.popen.returncode is None:
                assert worker.wait() == 0, worker.output

    def close(self) -> None:
        for process in (*self.workers, *self.servers):
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGCONT)
            process.kill()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What can be asked while it runs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def config_file(self) -> Path:
        return self.folder / "job.toml"

    # What it left on disk

    @contextlib.contextmanager
    def store(self) -> Iterator[sqlite3.Connection]:
        """The run store, read-only."""
        connection = sqlite3.connect(f"file:{self.run_dir / 'run.db'}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        try:
            yield connection
        finally:
            connection.close()

    def query(self, sql: str, *values: object) -> list[sqlite3.Row]:
        with self.store() as connection:
            return connection.execute(sql, values).fetchall()

    def manifests(self) -> dict[int, list[str]]:
        """The episodes of each step, in order."""
        rows = self.query("SELECT step, episode_ids FROM manifests ORDER BY step")
        return {row["step"]: json.loads(row["episode_ids"]) for row in rows}

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, policy: str = "") -> list[Path]:
        """Oldest first; of one of several trained policies by its name."""
        return sorted((self.run_dir / "checkpoints" / policy).glob("step-*"))

    def weights(self, policy: str = "") -> str:
        """What the recording trainer was given, in one hash."""
        return (self.checkpoints(policy)[-1] / "weights.txt").read_text()

    def worker_log(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the workers say that they did; one entry per thing, those of one worker in order."""
        lines = [line for path in sorted(self.folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
        entries = [entry for entry in map(json.loads, lines) if "did" in entry]
        return [entry for entry in entries if kind in (None, entry["did"])]


def run_through(job: Job, faults: list[str], *options: str) -> None:
    """Play a job to its end with a server that dies at each of the faults; `options` are the worker's."""
    for number, fault in enumerate(faults):
        server = job.start(*(["--resume"] if number else []), fault=fault)
        if number == 0:
            job.work(*options)
        assert server.wait() == -signal.SIGKILL, f"{fault} was not met:\n{server.output}"
    job.start(*(["--resume"] if faults else []))
    if not faults:
        job.work(*options)
    job.finish()


class Plane:
    """A data plane as raw HTTP, for what no well-behaved client sends."""

    def __init__(self, url: str) -> None:
        self.url, self.http = url, httpx2.Client(timeout=30)

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, path: str, body: Any = None, key: str | None = KEY, **more: Any) -> httpx2.Response:
        """POST JSON; or `content=` and `headers=` as they are."""
        headers = ({"authorization": f"Bearer {key}"} if key else {}) | more.pop("headers", {})
        return self.http.post(self.url + path, json=body, headers=headers, **more)

    def get(self, path: str, key: str | None = KEY, **more: Any) -> httpx2.Response:
        headers = ({"authorization": f"Bearer {key}"} if key else {}) | more.pop("headers", {})
        return self.http.get(self.url + path, headers=headers, **more)

    def status(self) -> dict[str, Any]:
        return dict(_good(self.get("/status")))

    def register(self, **task: Any) -> str:
        """An ad-hoc episode: recorded, never trained on, claimed by its id."""
        body = {"task": {"data": task}, "request_id": os.urandom(8).hex()}
        return str(_good(self.post("/register_episode", body))["episode_id"])

    def claim(self, episode_id: str | None = None, **more: Any) -> dict[str, Any]:
        """Claim an episode; None: a new ad-hoc one."""
        body = {"request_id": os.urandom(8).hex(), "episode_id": episode_id or self.register(), **more}
        return dict(_good(self.post("/claim_episode", body))["episode"])

    def chat(self, episode: Mapping[str, Any], text: str = "hello", **more: Any) -> httpx2.Response:
        body = {"model": episode["model"], "messages": [{"role": "user", "content": text}]}
        return self.post("/v1/chat/completions", body, episode["api_key"], **more)

    def end(self, episode: Mapping[str, Any], reward: Any = 1.0, key: str | None = None) -> httpx2.Response:
        body = {"episode_id": episode["episode_id"], "reward": reward}
        return self.post("/end_episode", body, key or episode["api_key"])


def _good(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()
