from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from palestra.errors import ConfigError
from palestra_service.ray import cluster
from palestra_service.ray.cluster import LocalRay, connect


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # and as it was, afterwards


def of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.service
def test_a_cluster_that_takes_too_long_to_start_is_ended_and_forgotten(tmp_path, monkeypatch):
    written, write = [], cluster._write
    monkeypatch.setattr(cluster, "_write", lambda folder, data: (written.append(data), write(folder, data)))
    monkeypatch.setattr(cluster, "START_SECONDS", 3.0)
    monkeypatch.setattr(cluster.Path, "read_text", _never_started(cluster.Path.read_text))
    with pytest.raises(ConfigError, match=r"within.*3"):
        connect(None, tmp_path, LocalRay(cpus=1.0))
    (head,) = written
    until = time.monotonic() + 60
    while (left := of_session(head["pid"])) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ray.log", "ray_token", "work"]


def _never_started(read):
    """So that it takes too long on a fast machine, too."""
    return lambda path, **more: read(path, **more).replace("Ray runtime started", "")


@pytest.mark.service
def test_a_start_that_is_broken_off_leaves_nothing_in_the_cluster(tmp_path):
    moments = ["group", "actor", "server"]  # that is being made when it is broken off
    command = [sys.executable, str(Path(__file__).with_name("broken_off_starts.py")), str(tmp_path), *moments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    left = [json.loads(line) for line in done.stdout.splitlines()]
    assert left == [{moment: {"cancelled": True, "known": []}} for moment in moments]


def test_a_cluster_that_ends_at_once_is_forgotten_and_told_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"ray\.log"):
        connect(None, tmp_path, LocalRay())
    assert not (tmp_path / "ray.json").exists()


def test_what_is_known_of_a_cluster_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    known = {"address": "127.0.0.1:1", "pid": 1, "started": 2.0}
    cluster._write(tmp_path, known)
    monkeypatch.setattr(cluster.Path, "replace", _killed)
    with pytest.raises(KeyboardInterrupt):
        cluster._write(tmp_path, known | {"pid": 2})
    assert cluster._read(tmp_path) == known


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
