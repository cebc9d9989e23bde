"""Joins a Ray cluster, or starts a local one on this machine, which survives the scheduler."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.disk import read_own, write_whole
from palestra.errors import ConfigError
from palestra.process.child import MALLOC_VARIABLE, malloc_without_caches
from palestra_service.ray.job_environment import job_environment

log = logging.getLogger("palestra.runtime")
NAMESPACE = "palestra"
START_SECONDS = 60.0
_FILE = "ray.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRay:
    """Resources of this machine for jobs, if no cluster is joined. None: all of it."""

    cpus: float | None = None
    gpus: int | None = None
    memory_gib: float | None = None


def connect(address: str | None, state_dir: Path, local: LocalRay, pass_env: Collection[str] = ()) -> str:
    """Join a Ray cluster and return its address; start a local one if none is running.

    Args:
        address: of a cluster; None: the local one, which an earlier scheduler may have started.
        state_dir: folder with the record of the local cluster.
        pass_env: the operator's variables for jobs, in addition to those of `job_environment`.
    """
    if find_spec("ray") is None:
        raise ConfigError("palestra serve needs Ray; run: pip install 'palestra[cluster]'")
    started = False
    if address is None:
        _use_own_token(state_dir)
        known = _known(state_dir)
        started, address = known is None, known or _start(state_dir, local, pass_env)
    import ray  # reads its environment when it is imported

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if started:
            stop_local(state_dir)
        raise ConfigError(f"no Ray cluster can be joined at {address}: {error}") from error
    return address


def disconnect() -> None:
    """Leave the cluster, which continues with its jobs."""
    import ray

    ray.shutdown()


def stop_local(state_dir: Path) -> None:
    """End the cluster that `connect` started on this machine, with all its processes."""
    found = _read(state_dir)
    if found is None:
        return
    family: dict[int, str] = {}  # every process ever seen: children outlive their parents
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        until, signalled = time.monotonic() + seconds, set[int]()
        while True:
            family |= _family(found)  # again each time, because new processes may start
            left = [pid for pid, started in family.items() if _started(pid) == started]
            for pid in left:
                if pid not in signalled:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            signalled.update(left)
            if not left or time.monotonic() > until:
                break
            time.sleep(0.05)
    (state_dir / _FILE).unlink(missing_ok=True)


def _use_own_token(state_dir: Path) -> None:
    """Make clients of the local cluster need a token that only this user can read. A joined cluster has its own."""
    path = state_dir.resolve() / "ray_token"  # absolute: Ray has another working directory
    token = read_own(path).decode(errors="replace") if path.exists() else None
    if token is None or re.fullmatch("[0-9a-f]{64}", token) is None:
        if token is not None:
            log.warning("%s is damaged, so it is written anew", path)
        write_whole(path, secrets.token_hex(32).encode(), 0o600)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's token would take precedence


def _start(state_dir: Path, local: LocalRay, pass_env: Collection[str]) -> str:
    """Run `ray start --head` in a session of its own, with the variables and the working directory for its jobs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    for option, value in (("num-cpus", local.cpus), ("num-gpus", local.gpus)):
        command += [] if value is None else [f"--{option}={value:g}"]
    if local.memory_gib is not None:
        command.append(f"--memory={int(local.memory_gib * 2**30)}")
    command.append(f"--object-store-memory={128 * 2**20}")  # jobs do not use the object store
    said, work = state_dir / "ray.log", state_dir / "work"
    work.mkdir(mode=0o700, exist_ok=True)  # empty, so that no relative name finds a file
    variables = job_environment(os.environ, pass_env)
    if settings := malloc_without_caches(variables.get(MALLOC_VARIABLE, "")):  # which its processes inherit
        variables[MALLOC_VARIABLE] = settings
    with said.open("ab") as out:
        head = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
            cwd=work,
        )
    _write(state_dir, {"address": f"127.0.0.1:{port}", "pid": head.pid, "started": _started(head.pid)})
    try:
        _wait(head, port, said)
    except BaseException:
        stop_local(state_dir)
        head.wait()
        raise
    return f"127.0.0.1:{port}"


def _wait(head: subprocess.Popen[bytes], port: int, said: Path) -> None:
    """Wait until the cluster can be joined."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if head.poll() is not None:
            raise ConfigError(f"Ray could not be started; see {said}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            if "Ray runtime started" in said.read_text(encoding="utf-8", errors="replace"):
                return
        time.sleep(0.1)
    raise ConfigError(f"Ray did not start within {START_SECONDS:g} s; see {said}")


def _known(state_dir: Path) -> str | None:
    """Return the address of an earlier scheduler's cluster, if it is still running."""
    found = _read(state_dir)
    return str(found["address"]) if found is not None and _alive(found) else None


def _read(state_dir: Path) -> dict[str, Any] | None:
    """Return the record of the local cluster; None: missing or damaged."""
    path = state_dir / _FILE
    try:
        found = json.loads(read_own(path))
        return {"address": str(found["address"]), "pid": int(found["pid"]), "started": found["started"]}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        log.warning("%s can't be read (%s), so a local cluster that still runs is not found again", path, error)
        return None


def _write(state_dir: Path, data: dict[str, Any]) -> None:
    write_whole(state_dir / _FILE, json.dumps(data).encode())


def _alive(found: dict[str, Any]) -> bool:
    """Return whether the cluster's process is still running; its pid may be reused."""
    return found["started"] is not None and bool(_started(int(found["pid"])) == found["started"])


def _started(pid: int) -> str | None:
    """Return a process's start time, in kernel ticks, or None without the process."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/PID/stat` from the state on, or None without the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _family(found: dict[str, Any]) -> dict[int, str]:
    """Return the start time of each process of a cluster, youngest first: the head's session and its descendants.

    The session exists until it is empty, even without the head, and its pid is not reused before.
    """
    head = int(found["pid"])
    if _started(head) not in (None, found["started"]):
        return {}
    known = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, fields in known.items():
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    family = [pid for pid, fields in known.items() if pid == head or (fields is not None and int(fields[3]) == head)]
    for pid in family:  # the list grows during the loop
        family.extend(child for child in children.get(pid, ()) if child not in family)
    stats = {pid: fields for pid in reversed(family) if (fields := known[pid]) is not None and fields[0] != "Z"}
    return {pid: fields[19] for pid, fields in stats.items()}
