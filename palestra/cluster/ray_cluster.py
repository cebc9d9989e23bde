"""A Ray cluster: one that is there, or one of this machine's own, which goes on when the scheduler ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError

NAMESPACE = "palestra"
START_SECONDS = 60.0
_FILE = "ray.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRay:
    """What this machine gives to jobs, where no cluster is joined. None: all that it has."""

    cpus: float | None = None
    gpus: int | None = None
    memory_gib: float | None = None


def connect(address: str | None, state_dir: Path, local: LocalRay) -> str:
    """Join the cluster at `address`, or the local one that was started before, or start one; returns its address.

    Raises:
        ConfigError: there is no cluster at the address, or none can be started.
    """
    if find_spec("ray") is None:
        raise ConfigError("palestra serve needs Ray; run: pip install 'palestra[cluster]'")
    if address is None:
        _use_own_token(state_dir)
        address = _known(state_dir) or _start(state_dir, local)
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
        raise ConfigError(f"no Ray cluster can be joined at {address}: {error}") from error
    return address


def disconnect() -> None:
    """Leave the cluster, which goes on."""
    import ray

    ray.shutdown()


def stop_local(state_dir: Path) -> None:
    """End the cluster that `connect` started on this machine, with everything that runs on it."""
    found = _read(state_dir)
    if found is None:
        return
    family = {pid: started for pid in _family(int(found["pid"])) if (started := _started(pid)) is not None}
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + seconds
        left = [pid for pid, started in family.items() if _started(pid) == started]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while any(_started(pid) == started for pid, started in family.items()) and time.monotonic() < until:
            time.sleep(0.05)
    (state_dir / _FILE).unlink(missing_ok=True)


def _use_own_token(state_dir: Path) -> None:
    """The local cluster takes nobody who can't read this file; a cluster that is joined has a token of its own."""
    path = state_dir / "ray_token"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _start(state_dir: Path, local: LocalRay) -> str:
    """`ray start --head` in a process group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    for option, value in (("num-cpus", local.cpus), ("num-gpus", local.gpus)):
        command += [] if value is None else [f"--{option}={value:g}"]
    if local.memory_gib is not None:
        command.append(f"--memory={int(local.memory_gib * 2**30)}")
    command.append(f"--object-store-memory={128 * 2**20}")  # nothing of a job goes through it
    log = state_dir / "ray.log"
    with log.open("ab") as out:
        head = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"127.0.0.1:{port}"
    _write(state_dir, {"address": address, "pid": head.pid, "started": _started(head.pid)})
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if head.poll() is not None:
            raise ConfigError(f"Ray could not be started; see {log}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            if "Ray runtime started" in log.read_text(errors="replace"):
                return address
        time.sleep(0.1)
    raise ConfigError(f"Ray did not start within {START_SECONDS:g} s; see {log}")


def _known(state_dir: Path) -> str | None:
    """The address of the cluster that an earlier scheduler started here, if it is still there."""
    found = _read(state_dir)
    return str(found["address"]) if found is not None and _alive(found) else None


def _read(state_dir: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((state_dir / _FILE).read_text())
    except FileNotFoundError:
        return None
    return found


def _write(state_dir: Path, data: dict[str, Any]) -> None:
    (state_dir / _FILE).write_text(json.dumps(data))


def _alive(found: dict[str, Any]) -> bool:
    """Whether it is still the same process, and not another one with its number."""
    return found["started"] is not None and bool(_started(int(found["pid"])) == found["started"])


def _started(pid: int) -> str | None:
    """When a process was started, in ticks of the kernel; None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _family(pid: int) -> list[int]:
    """A process and all that came from it, the youngest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:  # grows while it is walked
        found.extend(children.get(known, ()))
    return found[::-1]
