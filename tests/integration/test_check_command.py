"""`palestra check` as a person runs it: the tables, JSON, exit codes, and a real model that is tried."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sqlite3
import subprocess

import pytest
from servers import PALESTRA, until

from palestra.cli.main import main
from palestra_inspect import check as command

pytestmark = pytest.mark.ci

JOB = """
name = "tried"
steps = 3
model = "tiny-random"
[environment]
name = "arithmetic"
[policies.policy.sampling]
max_tokens = 8
[rollout]
group_size = 4
groups_per_step = 2
[server]
port = 0
"""
FAKE = JOB.replace('model = "tiny-random"', "") + '[engine]\nkind = "fake"\n'


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(FAKE)
    return tmp_path / "job.toml"


@pytest.mark.slow
def test_a_real_model_is_tried_for_two_steps(job_file):
    job_file.write_text(JOB)
    done = subprocess.run(
        [str(PALESTRA), "check", "job.toml", "--json"], cwd=job_file.parent, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    trial = found["trial"]
    assert found["works"]
    assert (trial["episodes"], trial["calls"], len(trial["rows"])) == (16, 16, 2)
    assert 16 <= trial["completion_tokens"] <= 128
    for row in trial["rows"]:
        assert 0 < row["time/rollout_seconds"] < row["time/step_seconds"]
    assert 10**8 < trial["memory_bytes"] < 4 * 2**30  # torch, transformers and two small models
    assert trial["checkpoint_bytes"] > 10**5
    assert [path.name for path in job_file.parent.iterdir()] == ["job.toml"]


@pytest.mark.parametrize("seconds", ["nan", "-1", "0"])
def test_a_time_for_the_trial_that_makes_no_sense_is_a_mistake_of_usage(job_file, capsys, seconds):
    assert main(["check", "job.toml", f"--trial-seconds={seconds}"]) == 2
    assert "--trial-seconds" in capsys.readouterr().err


def test_a_job_whose_trained_policy_plays_no_one_will_not_work(job_file, capsys):
    job_file.write_text(FAKE + '[policies.before]\nfrozen = true\n[roles]\nagent = "before"\n')
    assert main(["check", "job.toml"]) == 1
    assert "the policy that is trained was not called in the trial" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_a_check_that_is_ended_leaves_nothing(job_file):
    job_file.write_text(JOB)
    process = subprocess.Popen(
        [str(PALESTRA), "check", "job.toml"], cwd=job_file.parent, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    until(lambda: len(list(job_file.parent.iterdir())) == 2 or process.poll() is not None, "the folder of the trial")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert [path.name for path in job_file.parent.iterdir()] == ["job.toml"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_ended_says_what_it_has_measured(job_file, number):
    words = ["check", "job.toml", "--json", "--set", "engine.delay_seconds=1.5"]
    process = subprocess.Popen([str(PALESTRA), *words], cwd=job_file.parent, stdout=subprocess.PIPE, text=True)
    until(lambda: process.poll() is not None or stored_calls(job_file.parent) > 8, "a call of the second step")
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    found = json.loads(out)
    assert process.returncode == 128 + number
    assert found["trial"]["stopped"]
    assert len(found["trial"]["rows"]) == 1
    assert found["trial"]["calls"] > 8
    assert any(number.name in finding["text"] for finding in found["findings"])
    assert [path.name for path in job_file.parent.iterdir()] == ["job.toml"]


def stored_calls(folder) -> int:
    """Return how many calls are in the store of the trial."""
    for path in folder.glob(".palestra-check-*/run/run.db"):
        with (
            contextlib.suppress(sqlite3.OperationalError),  # it is being made
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
        ):
            return connection.execute("SELECT count(*) FROM chats").fetchone()[0]
    return 0


def test_a_job_that_works_is_shown_with_what_its_steps_took(job_file, capsys):
    assert main(["check", "job.toml"]) == 0
    out, progress = capsys.readouterr()
    assert "nothing stands against this job here" in out
    for word in ("step 1", "step 2", "tokens sampled", "memory", "checkpoint", "time of the job"):
        assert word in out
    assert "palestra: loading the model" in progress
    assert max(map(len, out.splitlines())) <= 200


def test_what_will_not_work_is_named_with_its_key_and_nothing_is_tried(job_file, capsys, monkeypatch):
    monkeypatch.setattr(command, "_tried", lambda *_: pytest.fail("it is tried"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"server.port={taken.getsockname()[1]}"
        assert main(["check", "job.toml", "--set", port, "--set", "environment.name=gomuko"]) == 1
    out = capsys.readouterr().out
    assert "will not work  server.port: " in out
    assert "will not work  environment: " in out
    assert "nothing stands" not in out


def test_no_trial_looks_only(job_file, capsys, monkeypatch):
    monkeypatch.setattr(command, "_tried", lambda *_: pytest.fail("it is tried"))
    assert main(["check", "job.toml", "--no-trial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"works": True, "findings": [], "trial": None, "estimate": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.toml"], "no such file"),
        (["job.toml", "--set", "setps=3"], "'steps'"),
        (["job.toml", "--trail-seconds", "3"], "did you mean --trial-seconds?"),
        (["job.toml", "--rollout", "json:dumps"], "--rollout: the job's own environment"),
    ],
)
def test_mistakes_of_usage_have_another_exit_code(job_file, capsys, words, said):
    try:
        code = main(["check", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_all_mistakes_are_listed_once_with_what_else_will_not_work(job_file, capsys):
    words = ["--set", "setps=3", "--set", "rollout.group_sise=2", "--set", "tasks.train=none.jsonl"]
    assert main(["check", "job.toml", *words]) == 2
    out, error = capsys.readouterr()
    assert (error.count("'setps'"), error.count("'rollout.group_sise'")) == (1, 1)
    assert (out.count("none.jsonl"), out.count("will not work")) == (1, 1)
    assert "nothing stands" not in out
    assert main(["check", "job.toml", *words, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert sorted(finding["key"] for finding in found["findings"]) == ["rollout.group_sise", "setps", "tasks"]
    assert not found["works"]


def test_a_trial_that_takes_too_long_is_a_note(job_file, capsys):
    assert main(["check", "job.toml", "--set", "engine.delay_seconds=30", "--trial-seconds", "0.5"]) == 0
    assert "longer than 0.5 s" in capsys.readouterr().out


def test_a_start_that_fails_is_named_with_its_key(job_file, capsys):
    assert main(["check", "job.toml", "--set", "algorithm.name=my.module:Algorithm", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["key"] == "algorithm.name"


def test_a_model_that_is_only_served_is_loaded(job_file, capsys):
    assert main(["check", "job.toml", "--set", "kind=inference"]) == 0
    out, progress = capsys.readouterr()
    assert "nothing stands" in out
    assert "loading the model" in progress


TINY = """
steps = 3
[policies.student]
model = "tiny-random"
max_context = 256
sampling = {max_tokens = 8}
[rollout]
group_size = 4
groups_per_step = 2
[evaluation]
every_steps = 0
[server]
port = 0
"""


def tried(job_file, text: str) -> tuple[dict, list[str]]:
    """What the trial took, and the keys of what was found, of a trial with a real model."""
    job_file.write_text(TINY + text)
    done = subprocess.run(
        [str(PALESTRA), "check", "job.toml", "--json"], cwd=job_file.parent, capture_output=True, text=True, timeout=150
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["works"]) == (0, True), (done.stdout, done.stderr)
    return found["trial"], [finding["key"] for finding in found["findings"]]


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_conversations_are_tried_without_playing(job_file, known):
    """Those of a file, or one that stands in for those that a client will push."""
    said = {"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]}
    (job_file.parent / "said.jsonl").write_text(json.dumps(said))
    files = '[tasks]\ntrain = "said.jsonl"\n' if known else ""
    trial, keys = tried(job_file, files + '[algorithm]\nname = "sft"\n')
    assert keys == []
    assert (trial["episodes"], trial["calls"]) == (4, 4)
    assert (trial["completion_tokens"] < 20) == known  # that of the file has one token and the end
    assert trial["rows"][1]["train/trained_tokens"] > 0


@pytest.mark.slow
def test_a_teacher_is_tried_and_rewards_have_no_say(job_file):
    """All rewards of the untrained model are 0, and yet it learns: nothing is to be noted."""
    teacher = '[policies.big]\nmodel = "tiny-random"\nmax_context = 256\nfrozen = true\n'
    rest = '[algorithm]\nname = "distill"\n[environment]\nname = "arithmetic"\n'
    trial, keys = tried(job_file, teacher + rest)
    assert "rollout.group_size" not in keys
    assert trial["episodes"] == 16
    assert trial["rows"][1]["train/trained_tokens"] > 0


def test_a_live_run_is_looked_at_and_not_tried(job_file, capsys):
    job_file.write_text('kind = "live"\n[engine]\nkind = "fake"\n[server]\nport = 0\n[live.gate]\ncanary = 0.1\n')
    assert main(["check", "job.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["works"], found["trial"]) == (True, None)
    assert main(["check", "job.toml", "--set", "live.gate.canary=0.6"]) == 2
    assert "gate.canary" in capsys.readouterr().err
