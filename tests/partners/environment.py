"""The environments of other projects, each in a virtual environment of its own, and their programs as processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers" / "partners"
BEHIND = Path(__file__).parent / "behind"


def python_of(partner: str) -> str:
    """Return the interpreter of a partner's environment, or skip the test where `make partners` has not made it."""
    found = FOLDER / partner / "bin" / "python"
    if not found.exists():
        pytest.skip(f"`make partners` has made no environment of {partner}")
    return str(found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def running(partner: str, script: str, *arguments: str, port: int, seconds: float = 90.0) -> Iterator[None]:
    """Run a script of `behind` in a partner's environment until the end of the block, once it listens on a port."""
    command = [python_of(partner), str(BEHIND / script), *arguments]
    process = subprocess.Popen(command, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                pytest.fail(f"{script} does not listen: {process.communicate()[0][-3000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def run(partner: str, script: str, *arguments: str, seconds: float = 150.0, **variables: str) -> str:
    """Run a script of `behind` in a partner's environment to its end, and return what it printed."""
    command = [python_of(partner), str(BEHIND / script), *arguments]
    done = subprocess.run(
        command, env={**clean(), **variables}, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def clean() -> dict[str, str]:
    """Return the variables of this process without those that belong to its own environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
