"""Starting what is measured: Palestra's server, the bare server beside it, and children that answer with JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.config import dump_config, parse_config
from palestra.models.catalog import cache_folder

HERE = Path(__file__).parent
ROOT = HERE.parent
KEY = "key-of-the-benchmark"
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class BenchError(RuntimeError):
    """A process of the benchmark failed; the message has its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server under load."""

    name: str
    url: str
    pid: int


@contextmanager
def palestra_server(settings: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> Iterator[Server]:
    """`palestra run` with the fake engine and a durable store, on the disk that this repository is on."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / "runs"))
    try:
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        fixed = {
            "name": "bench",
            "steps": 1_000_000,
            "run_dir": str(folder / "run"),
            "tasks": {"train": str(folder / "tasks.jsonl")},
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": 1_000_000},
            "engine": {"kind": "fake"},
            "server": {"port": 0, "max_waiting_calls": 1024},
        }
        (folder / "job.toml").write_text(dump_config(parse_config({**fixed, **settings})))
        command = [Path(sys.executable).with_name("palestra"), "run", folder / "job.toml"]
        with _listening("Palestra", command, folder / "server.log") as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def bare_server() -> Iterator[Server]:
    """An ASGI app that answers a canned body immediately: what HTTP in Python costs here without a gateway."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / "bare_app.py"]
        with _listening("bare ASGI app (floor)", command, Path(folder) / "server.log") as server:
            yield server


def run_json(command: Sequence[object], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a child to its end; the last line of its output is its result.

    Raises:
        BenchError: it failed.
    """
    result: dict[str, Any] = json.loads(_output(command, environment).splitlines()[-1])
    return result


def run_json_lines(command: Sequence[object], environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Run a child to its end; every line of its output is a result.

    Raises:
        BenchError: it failed.
    """
    return [json.loads(line) for line in _output(command, environment).splitlines()]


def _output(command: Sequence[object], environment: Mapping[str, str] | None) -> str:
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(words, env=kept | dict(environment or {}), capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def shown(command: Sequence[object], environment: Mapping[str, str] | None = None) -> str:
    """A command as one would type it in the root of the repository."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    words = [str(word).replace(f"{ROOT}/", "").replace(str(cache_folder()), "CACHE") for word in command]
    return " ".join([*variables, *words])


@contextmanager
def _listening(name: str, command: Sequence[object], log: Path) -> Iterator[Server]:
    """A server that has said where it listens; it is stopped at the end."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PALESTRA_API_KEY": KEY}
    with log.open("wb") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"data plane at (http://[\w.:\[\]]+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield Server(name=name, url=found[1], pid=process.pid)
        if process.poll() is not None:
            raise BenchError(f"{name} ended by itself:\n{log.read_text(errors='replace')[-2000:]}")
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
