"""Who can read a run, and how its keys are changed while it runs: a real server, and clients with old and new keys."""

from __future__ import annotations

import concurrent.futures
import re
import stat
import subprocess
from pathlib import Path

import httpx2
import pytest
from servers import PALESTRA, Process, environment, until

pytestmark = pytest.mark.slow
JOB = """
name = "mine"
run_dir = "{folder}/runs/mine"
[engine]
kind = "fake"
[server]
port = 0
"""


def start(folder: Path, *options: str) -> Process:
    """`palestra run` without a key in its environment."""
    log = folder / "server.log"
    variables = {name: value for name, value in environment().items() if name != "PALESTRA_API_KEY"}
    with log.open("wb") as out:
        command = [str(PALESTRA), "run", str(folder / "job.toml"), *options]
        popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables)
    return Process(popen, log)


def url(process: Process) -> str:
    until(lambda: "data plane at" in process.output or process.popen.poll() is not None, "it listens")
    found = re.search(r"data plane at (\S+),", process.output)
    assert found is not None, process.output
    return found[1]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    return tmp_path


def code(base: str, path: str, key: str) -> int:
    return httpx2.get(base + path, headers={"authorization": f"Bearer {key}"}).status_code


def test_a_run_is_its_owners_and_its_key_can_be_changed_while_it_runs(folder):
    run = folder / "runs" / "mine"
    server = start(folder)
    try:
        base = url(server)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.iterdir()}
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert {modes[name] for name in ("run.db", "run.db-wal", "run.db-shm", "secret", "api_key")} == {0o600}
        old = (run / "api_key").read_text().strip()
        task = {"task": {"data": {"question": "1 + 1"}}, "request_id": "r"}
        registered = httpx2.post(f"{base}/register_episode", json=task, headers={"authorization": f"Bearer {old}"})
        assert registered.status_code in (200, 201), registered.text
        claim = {
            "worker_id": "w",
            "request_id": "c",
            "wait_seconds": 1.0,
            "episode_id": registered.json()["episode_id"],
        }
        claimed = httpx2.post(f"{base}/claim_episode", json=claim, headers={"authorization": f"Bearer {old}"})
        assert claimed.status_code == 200, claimed.text
        episode = claimed.json()["episode"]["api_key"]
        assert code(base, "/status", old) == code(base, "/v1/models", episode) == 200
        rotated = subprocess.run([PALESTRA, "rotate-key", run], capture_output=True, text=True, check=False)
        assert rotated.returncode == 0, rotated.stderr
        new = (run / "api_key").read_text().strip()
        assert new != old
        assert [code(base, path, key) for path in ("/status", "/v1/models") for key in (old, episode)] == [401] * 4
        assert code(base, "/status", new) == 200
    finally:
        server.kill()
    server = start(folder, "--resume")
    try:
        base = url(server)
        assert (code(base, "/status", old), code(base, "/status", new)) == (401, 200)
    finally:
        server.kill()


def test_an_empty_secret_is_refused_in_one_line(folder):
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "secret").touch()
    server = start(folder)
    assert server.wait() == 2
    assert server.output.splitlines()[-1].startswith(f"palestra: {run / 'secret'} holds 0 characters")
    assert "Traceback" not in server.output


def test_who_waits_with_the_old_key_gets_nothing_after_it_was_changed(folder):
    run = folder / "runs" / "mine"
    server = start(folder)
    try:
        base = url(server)
        old = {"authorization": f"Bearer {(run / 'api_key').read_text().strip()}"}
        claim = {"worker_id": "w", "request_id": "c", "wait_seconds": 60.0}
        task = {"task": {"data": {"question": "1 + 1"}}, "request_id": "r"}
        with (
            concurrent.futures.ThreadPoolExecutor(1) as threads,
            httpx2.stream("GET", f"{base}/events", headers=old, timeout=60) as events,
        ):
            waiting = threads.submit(httpx2.post, f"{base}/claim_episode", json=claim, headers=old, timeout=60)
            until(lambda: httpx2.get(f"{base}/status", headers=old).json()["workers"] == 1, "it waits")
            rotated = subprocess.run([PALESTRA, "rotate-key", run], capture_output=True, text=True, check=False)
            assert rotated.returncode == 0, rotated.stderr
            new = {"authorization": f"Bearer {(run / 'api_key').read_text().strip()}"}
            assert httpx2.post(f"{base}/register_episode", json=task, headers=new).status_code == 200
            pushed = {"chunk_id": "1", "tasks": [{"data": {"question": "2 + 2"}}], "final": True}
            assert httpx2.post(f"{base}/tasks", json=pushed, headers=new).status_code == 200
            assert waiting.result().status_code == 401, waiting.result().text
            for _ in events.iter_raw():  # ends by itself
                pass
    finally:
        server.kill()


def test_a_new_key_ends_what_a_viewer_follows(folder):
    run = folder / "runs" / "mine"
    server = start(folder)
    try:
        base = url(server)
        headers = {"authorization": f"Bearer {(run / 'api_key').read_text()}"}
        viewer = httpx2.post(f"{base}/dashboard/session", headers=headers).json()["key"]
        page = "/dashboard/api/runs"
        assert code(base, page, viewer) == 200
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            httpx2.stream(
                "GET", f"{base}/dashboard/api/events", headers={"authorization": f"Bearer {viewer}"}, timeout=60
            ) as answer,
        ):
            assert answer.status_code == 200
            ended = pool.submit(lambda: list(answer.iter_bytes()))
            rotated = subprocess.run([PALESTRA, "rotate-key", run], env=environment(), capture_output=True, check=False)
            assert rotated.returncode == 0, rotated.stderr
            ended.result(30)
        assert code(base, page, viewer) == 401
        assert code(base, page, (run / "api_key").read_text()) == 200
    finally:
        server.kill()
