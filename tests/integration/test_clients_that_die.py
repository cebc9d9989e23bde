"""Worker processes that are killed in the middle of what they ask for leave nothing on the server's console."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from servers import KEY, Job, Plane, until

pytestmark = pytest.mark.slow
SLOW = {
    "steps": 100,
    "engine": {"kind": "fake", "delay_seconds": 30.0},
    "evaluation": {"every_steps": 0},
    "rollout": {"max_claimed": 1},
}
SCRIPT = """
import sys, threading, httpx2
url, path, key, body, number = sys.argv[1:]
def ask():
    httpx2.post(url + path, content=body.encode(), headers={"authorization": "Bearer " + key}, timeout=60)
for _ in range(int(number)):
    threading.Thread(target=ask).start()
"""


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    with Job(tmp_path, SLOW) as job:
        job.start()
        yield job


def asks(job: Job, path: str, key: str, body: str, number: int = 8) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, job.url, path, key, body, str(number)])


MESSAGES = '"messages": [{"role": "user", "content": "hello"}]'
CALLS = {
    "/v1/chat/completions": f'{{"model": "policy", {MESSAGES}}}',
    "/v1/completions": '{"model": "policy", "prompt": ["a", "b"], "max_tokens": 50}',
    "/v1/responses": '{"model": "policy", "input": "hello"}',
    "/v1/messages": f'{{"model": "policy", "max_tokens": 50, {MESSAGES}}}',
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_in_flight(job, stream):
    said = job.servers[-1].output
    with Plane(job.url) as plane:
        episode: dict[str, Any] = plane.claim()
        bodies = {path: body.replace("{", '{"stream": true, ', 1) if stream else body for path, body in CALLS.items()}
        workers = [asks(job, path, episode["api_key"], body) for path, body in bodies.items()]
        calls = 8 * (len(CALLS) + 1)  # of two prompts there are two
        until(lambda: plane.status()["calls"]["in_flight"] == 8 * len(CALLS), "all are in flight")
        for worker in workers:
            worker.kill()
            worker.wait()
        until(lambda: plane.status()["calls"]["in_flight"] == 0, "none is left")
        assert plane.status()["calls"].get("calls_incomplete", 0) == calls
        assert job.servers[-1].output == said


def connections(plane: Plane) -> int:
    (line,) = [line for line in plane.get("/metrics").text.splitlines() if line.startswith("palestra_connections ")]
    return int(float(line.split()[1]))


def test_claims_that_wait_and_bodies_that_are_half_there(job):
    said = job.servers[-1].output
    with Plane(job.url) as plane, contextlib.ExitStack() as stack:
        plane.claim()  # the only one that may be claimed
        worker = asks(job, "/claim_episode", KEY, '{"request_id": "r", "wait_seconds": 50}')
        for path in ("/tasks", "/v1/chat/completions"):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", job.port)))
            half.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode())
            half.sendall(b"content-length: 100\r\n\r\nabc")
        until(lambda: connections(plane) == 1 + 8 + 2, "all are there")
        worker.kill()
        worker.wait()
        stack.close()
        until(lambda: connections(plane) == 1, "none is left")
        assert plane.status()["state"] == "running"
        assert job.servers[-1].output == said
