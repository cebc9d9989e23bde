"""SIGKILL of either side of a remote environment: episodes are played again, and no reward comes from a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from env_servers import KEY, EnvServer, Ledger, played
from servers import PALESTRA, Process
from test_env_wire import ACTIONS, TASKS, WHOLE, job, rewards

from palestra import train
from palestra.store.browsing import read_episodes
from palestra.types.messages import text_message
from palestra_remote import RemoteEnvironment

HERE = Path(__file__).parent
KILLED = -9
RIGHT = [10.0] * 8  # an undisturbed episode has rewards of 1, 2, 3 and 4


def run(script: str, *arguments: object, **more) -> subprocess.Popen:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
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
    with Restarted(6) as server:  # killed at the reset and at each of the four steps
        environment = RemoteEnvironment(f"http://127.0.0.1:{server.port}", "env-test-key", retry_seconds=30)
        groups = {"group_size": 2, "groups_per_step": 2, "max_attempts": 20}
        config = job(tmp_path / "run", environment={"max_concurrency": 1}, rollout=groups)
        train(environment=environment, tasks=TASKS, config=config, quiet=True)
        assert server.codes == [KILLED] * 5
    assert rewards(tmp_path / "run") == RIGHT
    assert len(read_episodes(tmp_path / "run", "train", None)) == 8


@pytest.mark.slow
def test_a_job_that_is_killed_at_any_message_ends_with_the_rewards_of_one_that_was_not(tmp_path):
    with EnvServer(Ledger) as server:
        for number in (1, 2, 3, 4, 5, 6, 0):  # the first reset, each act, and the message after an episode
            words = [sys.executable, HERE / "env_job_process.py", server.url, tmp_path / "run", number]
            process = Process.start(words, tmp_path / f"job-{number}.log", fresh=False)
            assert process.wait() == (KILLED if number else 0), process.output
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


@pytest.mark.slow
async def test_the_command_drains_after_sigterm_and_ends_now_after_a_second_one(tmp_path):
    for second in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [
            PALESTRA,
            "env",
            "serve",
            f"{HERE / 'env_servers.py'}:Ledger",
            "--port",
            str(port),
            "--drain-seconds",
            "60",
        ]
        variables = os.environ | {"PALESTRA_ENVIRONMENT_KEY": KEY}
        with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as process:
            assert "whose page shows the sessions" in process.stdout.readline()
            environment = RemoteEnvironment(f"http://127.0.0.1:{port}", KEY, retry_seconds=0.2)
            await environment.setup()
            await environment.reset({"name": "x"})
            first = await environment.observe()
            process.send_signal(signal.SIGTERM)
            assert "draining: no new sessions; 1 open" in process.stdout.readline()
            if second:
                process.send_signal(signal.SIGTERM)
                assert "1 sessions were ended in the middle of an episode" in process.stdout.readline()
            else:
                for action in ACTIONS:
                    environment.act(first.id, text_message("assistant", action))
                    first = await environment.observe()
                assert first.terminated
                await environment.abandon()
            assert process.wait(20) == 0
            await environment.close()
