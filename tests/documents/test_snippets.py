"""The Python of the documents, executed as it stands; what stands behind it is small (`documents.small`)."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from env_servers import KEY, EnvServer
from servers import KEY as JOB_KEY
from servers import SCRIPTED, Job, until
from service import Service

from documents.blocks import BY_LANGUAGE, BY_MARK, ROOT, Block, blocks_of, with_rule
from documents.recipes import environment_of
from palestra_worlds import FrozenLake

README, WAYS = ROOT / "README.md", ROOT / "docs/how-to/ways-to-train.md"
URL, RUN = "http://127.0.0.1:7411", "runs/job"  # where the snippets look for a server
SERVED = "http://127.0.0.1:7500"  # where they look for an environment server
JOB_ID = "job-1f3a5c7e9b2d4f60"  # that of a snippet


def named(rule: str) -> pytest.MarkDecorator:
    """Return the blocks of a rule as parameters: those of the first pages, or the first one, in the second tier."""
    blocks = with_rule(rule)
    shown = {block.name for block in blocks if block.page in (README, WAYS)} or {block.name for block in blocks[:1]}
    marks = {block.name: () if block.name in shown else (pytest.mark.long,) for block in blocks}
    return pytest.mark.parametrize("block", [pytest.param(b, id=b.name, marks=marks[b.name]) for b in blocks])


def executed(text: str, folder: Path, *options: str, **variables: str) -> str:
    """Run a script in a process of its own, and return what it printed."""
    script = folder / "snippet.py"
    script.write_text(text)
    command = [sys.executable, *options, script.name]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        env=environment_of(**variables),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@named(BY_LANGUAGE["python"])
def test_a_script(block, tmp_path):
    executed(block.text, tmp_path)


@pytest.mark.slow
@named(BY_MARK["in small"])
def test_a_script_that_trains(block, tmp_path):
    said = executed(block.text, tmp_path, "-m", "documents.small")
    assert "step 1/1" in said
    # In a folder of its policy, where the script trains several; of all weights, or of an adapter.
    assert list(tmp_path.glob("runs/*/checkpoints/**/step-000001/*model.safetensors"))


@pytest.mark.slow
@named(BY_MARK["needs a server"])
def test_a_script_against_a_server(block, tmp_path):
    pushes = "push_tasks" in block.text  # such a script plays the job to its end
    with Job(tmp_path, SCRIPTED, **({"tasks": (), "validation": ()} if pushes else {})) as job:
        server = job.start()
        (tmp_path / RUN).parent.mkdir()
        (tmp_path / RUN).symlink_to(job.run_dir)
        assert URL in block.text
        executed(block.text.replace(URL, job.url), tmp_path)
        states = [row["state"] for row in job.query("SELECT state FROM episodes")]
        if pushes:
            assert server.wait() == 0
            assert set(states) == {"completed"}
            assert list(job.manifests()) == [1, 2, 3]
        else:
            assert states.count("completed") == 1


DUEL = SCRIPTED | {"environment": {"name": "gomoku-duel"}, "seats": {"roles": ["agent"]}, "steps": 1}


@pytest.mark.slow
@named(BY_MARK["needs a seat"])
def test_a_script_that_plays_a_seat(block, tmp_path):
    with Job(tmp_path, DUEL) as job:
        server = job.start()
        assert URL in block.text
        said = executed(block.text.replace(URL, job.url), tmp_path)
        assert server.wait() == 0
        rows = job.query("SELECT rewards FROM episodes WHERE state = 'completed'")
        assert [float(line.split()[0]) for line in said.splitlines()] == [json.loads(row[0])["agent"] for row in rows]


GAME = SCRIPTED | {"environment": {"name": "gomoku-duel", "validation_tasks": 0}, "steps": 20}


@pytest.mark.slow
@named(BY_MARK["needs a game"])
def test_a_script_that_trains_a_role_of_another_job(block, tmp_path):
    seats = {"roles": ["opponent"], "takeover": "replay"}
    with Job(tmp_path, GAME | {"seats": seats, "evaluation": {"every_steps": 0}}) as job:
        job.start()
        assert URL in block.text
        text = block.text.replace(URL, job.url)
        said = executed(text, tmp_path, "-m", "documents.small", PALESTRA_SEAT_KEY=JOB_KEY)
        rows = job.query("SELECT rewards FROM episodes WHERE state = 'completed'")
        earned = [json.loads(row[0])["opponent"] for row in rows]
        assert len(earned) >= 2
        assert float(said.splitlines()[-1]) == sum(earned[:2]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("block", with_rule(BY_MARK["needs an environment server"]), ids=lambda block: block.name)
def test_a_script_against_an_environment_server(block, tmp_path):
    with EnvServer(FrozenLake) as server:
        assert SERVED in block.text
        assert KEY in block.text
        executed(block.text.replace(SERVED, server.url), tmp_path, "-m", "documents.small")
        assert server.table.list().opened > 2


@pytest.mark.slow
@named(BY_MARK["needs a live run"])
def test_a_script_of_the_users_of_a_live_run(block, tmp_path):
    (job,) = (one.text for one in blocks_of(block.page) if one.language == "toml")
    job = job.replace("SmolLM2-135M-Instruct", "tiny-random").replace("server.port = 7411\n", "")
    assert URL in block.text
    assert "range(600)" in block.text
    (tmp_path / "live.toml").write_text(job)
    command = [str(Path(sys.executable).with_name("palestra")), "run", "live.toml"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment_of()) as server,
    ):
        try:
            url = until(
                lambda: re.search(r"data plane at (http://[\d.:]+)", (tmp_path / "log").read_text()), "a start"
            )[1]
            executed(block.text.replace(URL, url).replace("range(600)", "range(12)"), tmp_path)
        finally:
            server.terminate()
    with closing(sqlite3.connect(tmp_path / "runs/bot/live.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM feedback").fetchone() == (12,)


EPISODE = """
import os, openai
from palestra import Client
client = Client(os.environ["URL"], api_key=os.environ["PALESTRA_API_KEY"])
episode = client.begin_episode()
ai = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
messages = [{"role": "user", "content": "hello"}]
"""


@pytest.mark.slow
@named(BY_MARK["needs an episode"])
def test_a_script_in_an_episode(block, tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        executed(EPISODE + block.text, tmp_path, URL=job.url)
        (row,) = job.query("SELECT rewards FROM episodes WHERE state = 'completed'")
        assert json.loads(row["rewards"]) == {"planner": 1.0, "planner/search": 0.5}
        (call,) = job.query("SELECT agent, time_step FROM chats")
        assert (call["agent"], call["time_step"]) == ("planner/search", 3)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as service:
        yield service.start()


@pytest.mark.service
@pytest.mark.timeout(400)
def test_scripts_against_a_service(service, tmp_path):
    done: list[Block] = []
    for block in sorted(with_rule(BY_MARK["needs a service"]), key=lambda block: JOB_ID in block.text):
        jobs = [job.job_id for job in service.client().jobs() if job.state == "completed"]
        text = block.text.replace(JOB_ID, jobs[0] if jobs else JOB_ID)
        executed(text, tmp_path, "-m", "documents.small", PALESTRA_URL=service.url, PALESTRA_KEY=service.key)
        done.append(block)
    assert len(done) >= 2
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert {job.state for job in service.client().jobs()} == {"completed", "cancelled"}


def test_the_first_script_has_at_most_15_lines():
    first = next(block for block in blocks_of(README) if block.language == "python")
    assert "train(rollout" in first.text
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 15


def test_a_page_has_the_four_ways():
    python = [block.text for block in blocks_of(WAYS) if block.language == "python"]
    ways = ("reward=reward", "train(rollout", "environment=Gomoku", "Client(")
    assert [sum(way in text for text in python) for way in ways] == [1, 1, 1, 1]
    assert len(python) == 4
