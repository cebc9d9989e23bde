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
from palestra.process.child import MALLOC_VARIABLE, kept_command, malloc_without_caches
from palestra.process.keeper import LAST_SECONDS, kill_session, process_start
from palestra_service.ray.job_environment import job_environment

log = logging.getLogger("palestra.runtime")
NAMESPACE = "palestra"
START_SECONDS = 60.0
END_SECONDS = 5.0  # from asking its processes to end to killing them
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
    if _alive(found):
        os.kill(found["pid"], signal.SIGTERM)  # the keeper, which ends all
    until = time.monotonic() + END_SECONDS + 2 * LAST_SECONDS
    while _alive(found) and time.monotonic() < until:
        time.sleep(0.05)
    if process_start(found["pid"]) in (0, found["started"]):  # no other process has its number
        kill_session(found["pid"])  # the keeper was killed by another, say
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
    """Run `ray start --head` under a keeper, with the variables and the working directory for its jobs."""
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
    # Its keeper has both ends of its lifeline, so that the cluster outlives this process.
    lifeline = os.pipe()
    with said.open("ab") as out:
        head = subprocess.Popen(
            kept_command(lifeline[0], END_SECONDS, command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=lifeline,
            env=variables,
            cwd=work,
        )
    for end in lifeline:
        os.close(end)
    _write(state_dir, {"address": f"127.0.0.1:{port}", "pid": head.pid, "started": process_start(head.pid)})
    try:
        _wait(head, port, said)
    except BaseException:
        stop_local(state_dir)
        head.wait()
        raise
    return f"127.0.0.1:{port}"


def _wait(head: subprocess.Popen[bytes], port: int, said: Path) -> None:
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
    return bool(found["started"]) and process_start(found["pid"]) == found["started"]
