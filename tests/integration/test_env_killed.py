"""SIGKILL of either side of a remote environment: episodes are played again, and no reward comes from a failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from env_servers import EnvServer, Ledger, played
from test_env_wire import ACTIONS, TASKS, WHOLE, job, rewards

from palestra import train
from palestra.envs.remote import RemoteEnvironment
from palestra.store.browsing import read_episodes

HERE = Path(__file__).parent
KILLED = -9
RIGHT = [10.0] * 8  # an undisturbed episode has rewards of 1, 2, 3 and 4


def run(script: str, *arguments: object, **more) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, HERE / script, *map(str, arguments)], env=environment, **more)


class Restarted:
    """Starts the server again whenever it was killed; life k is killed at its message k, and the last one never."""

    def __init__(self, lives: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.codes: list[int] = []
        self._lives = lives
        self._stopping = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Restarted:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._process.kill()
        self._thread.join(10)

    def _keep(self) -> None:
        for life in range(1, self._lives + 1):
            at = life if life < self._lives else 0
            with run("env_server_process.py", self.port, at, stdout=subprocess.PIPE) as self._process:
                self._process.stdout.readline()
                self._ready.set()
                code = self._process.wait()
            if self._stopping:
                return
            self.codes.append(code)


@pytest.mark.slow
def test_a_server_that_is_killed_at_any_message_costs_attempts_and_no_rewards(tmp_path):
    with Restarted(5) as server:
        environment = RemoteEnvironment(f"http://127.0.0.1:{server.port}", "env-test-key", retry_seconds=30)
        groups = {"group_size": 2, "groups_per_step": 2, "max_attempts": 20}
        config = job(tmp_path / "run", environment={"max_concurrency": 1}, rollout=groups)
        train(environment=environment, tasks=TASKS, config=config, quiet=True)
        assert server.codes == [KILLED] * 4
    assert rewards(tmp_path / "run") == RIGHT
    assert len(read_episodes(tmp_path / "run", "train", None)) == 8


@pytest.mark.slow
def test_a_job_that_is_killed_at_any_message_ends_with_the_rewards_of_one_that_was_not(tmp_path):
    with EnvServer(Ledger, lease_seconds=5) as server:
        for number in (1, 3, 6, 0):  # the first reset, an act, and the message after an episode
            with run("env_job_process.py", server.url, tmp_path / "run", number) as process:
                assert process.wait(60) == (KILLED if number else 0)
        assert rewards(tmp_path / "run") == RIGHT
        assert len(read_episodes(tmp_path / "run", "train", None)) == 8


@pytest.mark.slow
async def test_a_server_that_is_killed_between_two_episodes_costs_nothing():
    with Restarted(2) as server:  # killed at its first call, which begins the first episode
        environment = RemoteEnvironment(f"http://127.0.0.1:{server.port}", "env-test-key", retry_seconds=30)
        await environment.setup()
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        await environment.close()
        assert server.codes == [KILLED]
