"""The wheel, installed as a user installs it: the client alone, in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from servers import SCRIPTED, Job

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MOST_BYTES = 30 * 10**6  # of what is installed, without the bytecode that pip makes of it
HEAVY = ("torch", "transformers", "ray", "numpy", "sqlalchemy", "fastapi", "openai")
PLAY = """
import sys
from palestra import Client

with Client(sys.argv[1], api_key=sys.argv[2]) as client:
    client.push_tasks([{"a": 1}])
    played = 0
    while True:
        with client.episode() as episode:
            if episode is None:
                break
            episode.reward = 1.0
            played += 1
print("played", played)
"""


def run(*command: object, **more: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=150, check=False, **more)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").glob("palestra-*.whl")
    venv.create(folder / "env", with_pip=True)
    done = run(folder / "env/bin/pip", "--disable-pip-version-check", "install", "--no-compile", wheel)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_light(installed):
    (packages,) = (installed / "env/lib").glob("python3*/site-packages")
    size = sum(
        file.stat().st_size
        for file in packages.rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and not file.relative_to(packages)
        .parts[0]
        .startswith(("pip", "setuptools", "pkg_resources", "_distutils_hack"))
    )
    assert 10**6 < size < MOST_BYTES
    names = {file.name for file in packages.iterdir()}
    assert not names & set(HEAVY)


def test_it_plays_the_episodes_of_a_server_that_runs_elsewhere(installed, tmp_path):
    with Job(tmp_path, SCRIPTED, tasks=(), validation=()) as job:
        server = job.start()
        done = run(
            installed / "env/bin/python", "-c", PLAY, job.url, (job.run_dir / "api_key").read_text(), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert server.wait() == 0
        assert int(done.stdout.split()[1]) == len(job.query("SELECT state FROM episodes WHERE state = 'completed'"))


def test_it_lists_and_shows_the_run_of_a_server(installed, tmp_path):
    with Job(tmp_path, SCRIPTED, tasks=(), validation=()) as job:
        server = job.start()
        key = (job.run_dir / "api_key").read_text()
        played = run(installed / "env/bin/python", "-c", PLAY.replace("while True", "for _ in range(2)"), job.url, key)
        assert played.returncode == 0, played.stderr
        for words in (["top", "--once"], ["episodes"], ["episodes", "train-000000-00"]):
            command = [installed / "env/bin/palestra", words[0], job.url, *words[1:]]
            done = run(*command, cwd=tmp_path, env=os.environ | {"PALESTRA_API_KEY": key})
            assert (done.returncode, done.stderr) == (0, "")
            assert "train-000000-00" in done.stdout
        server.kill()


MINE = """
from palestra import Environment

def rollout(task, endpoint):
    return 1.0

class Echo(Environment):
    def reset(self, task):
        return "say something", {}

    def step(self, action):
        return "", float(len(action)), True, False, {}
"""


@pytest.mark.parametrize("played", ["mine.py:rollout", "mine.py:Echo", "prisoners-dilemma"])
def test_its_worker_command_plays_functions_and_environments(installed, tmp_path, played):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "key").touch()
    worker = [installed / "env/bin/palestra", "worker", "--key-file", tmp_path / "key"]
    with Job(tmp_path, SCRIPTED) as job:
        server = job.start()
        (tmp_path / "key").write_text((job.run_dir / "api_key").read_text())
        refused = run(*worker, "frozen-lake", "--url", job.url, cwd=tmp_path)
        done = run(*worker, played, "--url", job.url, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert server.wait() == 0
        assert " 0 failed" in done.stdout + done.stderr
    assert refused.returncode == 2
    assert "gymnasium" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_it_does_not_have_it_names_with_what_to_install(installed, tmp_path):
    def said(*words: str) -> str:
        done = run(installed / "env/bin/palestra", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert run(installed / "env/bin/palestra", "worker", "--help").returncode == 0
    (tmp_path / "job.toml").write_text("steps = 1\n")
    for words in (
        ("demo",),
        ("run", "job.toml"),
        ("train", "agent:rollout"),
        ("episodes", "runs/job"),
        ("dashboard", "runs/job"),
        ("serve",),
    ):
        assert "install palestra[train]" in said(*words)
    assert "install 'palestra[env-server]'" in said("env", "serve", "prisoners-dilemma")
    done = run(installed / "env/bin/python", "-c", "from palestra import train", cwd=tmp_path)
    assert "ModuleNotFoundError: palestra.train: this needs" in done.stderr
    assert "install palestra[train]" in done.stderr
