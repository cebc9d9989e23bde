"""Clients without a key, against a real server process: they take neither its descriptors nor its memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from servers import KEY, PALESTRA, SCRIPTED, Job, Plane, Process, until

HEADER_BYTES = 32 * 2**20


def memory(process: Process) -> int:
    """Resident bytes."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    made.settimeout(20)
    return made


class Flood:
    """Keeps so many connections open that send nothing, or half a head; those that are closed are made again."""

    def __init__(self, port: int, number: int, says: bytes) -> None:
        self._port, self._number, self._says = port, number, says
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flood)
        self.opened = 0

    def _flood(self) -> None:
        held: list[socket.socket] = []
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                held.append(connect(self._port))
                held[-1].sendall(self._says)
                self.opened += 1
            while len(held) > self._number:
                held.pop(0).close()
            if self.opened > self._number:
                time.sleep(0.005)
        for one in held:
            one.close()

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def limited(job: Job, descriptors: int) -> Process:
    """Start the server with so few descriptors."""
    command = f"ulimit -n {descriptors}; exec {PALESTRA} run {job.config_file}"
    job.servers.append(Process.start(["bash", "-c", command], job.folder / "server-0.log"))
    job.wait_until_it_listens()
    return job.servers[-1]


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"])
def test_a_job_completes_under_more_idle_connections_than_it_has_descriptors(tmp_path, says):
    with Job(tmp_path, SCRIPTED, fresh=True) as job:
        server = limited(job, 256)
        with Flood(job.port, 400, says) as flood:
            until(lambda: flood.opened > 400, "the flood is there")
            job.work()
            job.finish()
        assert [row["step"] for row in job.metrics()] == [0, 1, 2, 3]
        assert (job.run_dir / "curve.png").exists()
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_status_and_ends_are_answered_while_more_workers_wait_than_there_is_room_for(tmp_path):
    with Job(tmp_path, SCRIPTED, fresh=True) as job:
        limited(job, 256)
        with Plane(job.url) as plane, contextlib.ExitStack() as stack:
            played = plane.claim()
            waiting = [stack.enter_context(connect(job.port)) for _ in range(220)]
            for number, one in enumerate(waiting):
                body = b'{"request_id": "r%d", "worker_id": "w%d", "wait_seconds": 30}' % (number, number)
                head = f"POST /claim_episode HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
                with contextlib.suppress(ConnectionError):  # refused, and closed to make room
                    one.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: "waits_refused" in plane.get("/metrics").text, "workers are told to come again")
            for _ in range(10):
                with Plane(job.url) as other:
                    assert other.status()["state"] == "running"
            assert plane.end(played).status_code == 200
        until(lambda: "ulimit -n" in job.servers[-1].output, "the log says what limits")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("hostile"), SCRIPTED | {"steps": 100}) as job:
        job.start()
        yield job


def test_giant_headers_are_not_kept(job):
    with Plane(job.url) as plane:
        plane.status()
        before = memory(job.servers[-1])
        with contextlib.ExitStack() as stack:
            for one in [stack.enter_context(connect(job.port)) for _ in range(8)]:
                with contextlib.suppress(ConnectionError):
                    one.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * HEADER_BYTES)
            assert plane.status()["state"] == "running"
            assert memory(job.servers[-1]) - before < 16 * 2**20
        assert 'palestra_connection_events_total{what="headers_too_large"} 8.0' in plane.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json"])
def test_requests_whose_answers_are_not_taken_are_not_kept(job, path):
    requests = f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 20_000
    with Plane(job.url) as plane:
        plane.status()
        before = memory(job.servers[-1])
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                one = stack.enter_context(connect(job.port))
                one.settimeout(0.3)
                with contextlib.suppress(OSError):  # cut off, or not read any more
                    one.sendall(requests)
            assert plane.status()["state"] == "running"
            assert memory(job.servers[-1]) - before < 24 * 2**20
        assert 'events_total{what="pipelined_too_many"}' in plane.get("/metrics").text


def test_a_few_requests_may_be_sent_before_their_answers_are_taken(job):
    with connect(job.port) as one:
        one.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 16)
        got = b""
        while got.count(b"HTTP/1.1 401") < 16:
            more = one.recv(65_536)
            assert more, got
            got += more


def test_bodies_without_a_key_are_not_kept(job):
    body = b'{"chunk_id": "c", "tasks": [' + b'{"data": {}},' * 300_000 + b'{"data": {}}]}'
    with Plane(job.url) as plane:
        plane.status()
        before = memory(job.servers[-1])
        with contextlib.ExitStack() as stack:
            ones = [stack.enter_context(connect(job.port)) for _ in range(40)]
            for one in ones:
                one.sendall(b"POST /tasks HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
                with contextlib.suppress(ConnectionError):
                    one.sendall(body[:-1])
            for one in ones:
                assert one.recv(12) == b"HTTP/1.1 401"
            assert plane.status()["state"] == "running"
            assert memory(job.servers[-1]) - before < 24 * 2**20


def test_a_body_that_is_never_finished_does_not_hold_up_the_answer_to_a_wrong_key(job):
    paths = httpx2.get(f"{job.url}/openapi.json").json()["paths"]
    for path in (path for path, kinds in paths.items() if "post" in kinds):
        with connect(job.port) as one:
            one.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer no\r\n".encode())
            one.sendall(b"transfer-encoding: chunked\r\n\r\n5\r\n")
            assert one.recv(12) == b"HTTP/1.1 401", path
