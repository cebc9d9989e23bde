"""What a person sees who makes a mistake: one line on stderr that says what to do, and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from outcome import assert_complete
from servers import PALESTRA, SCRIPTED, Job, Process, run_through, until

from palestra.cli.main import COMMANDS, main

JOB = """
name = "mine"
run_dir = "{folder}/run"
[tasks]
train = "tasks.jsonl"
[engine]
kind = "scripted"
[server]
port = 0
"""


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    stdout: str
    stderr: str


def palestra(*arguments: object) -> Done:
    """Run a command in this process, which is quicker; `test_the_installed_command` runs it as a person does."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done, *words: str) -> None:
    assert done.code == 2, done.stderr
    assert done.stderr.startswith("palestra: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def test_the_installed_command(job_file):
    command = [str(PALESTRA), "run", str(job_file), "--set", "setps=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    refused(Done(done.returncode, done.stdout, done.stderr), "'setps'", "'steps'")
    assert done.stdout == ""


@pytest.fixture
def job_file(tmp_path) -> Path:
    (tmp_path / "tasks.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=tmp_path))
    return path


@pytest.mark.parametrize("name", ["SmolLM-135M", "./nowhere", "/nowhere/at/all", "~/model"])
def test_a_wrong_model_name(job_file, name):
    setting = f'policies.policy={{"model": "{name}"}}'
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), name, "tiny-random")


def test_a_model_that_is_not_in_the_cache_and_cant_be_downloaded(job_file):
    setting = 'policies.policy={"model": "nobody/has-this-model"}'
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), "nobody/has-this-model")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("setps=3", ["'setps'", "'steps'"]),
        ("rollout.group_sise=3", ["'rollout.group_sise'", "'group_size'"]),
        ('policies.policy={"optimiser": {}}', ["optimiser", "'optimizer'"]),
        ("steps=many", ["steps", "integer"]),
        ("steps=0", ["steps"]),
        ("rollout.min_group_size=100", ["min_group_size"]),
        ("steps", ["KEY=VALUE"]),
        ("name.first=x", ["name"]),
        ("server.port=99999", ["server.port"]),
        ('policies={"a": {}, "b": {}}', ["one policy"]),
    ],
)
def test_a_wrong_key_or_value_in_the_configuration(job_file, setting, words):
    refused(palestra("run", job_file, "--set", setting), *words)


def test_a_configuration_that_is_not_toml(job_file):
    job_file.write_text("steps = = 3")
    refused(palestra("run", job_file), "job.toml", "TOML", "line 1")


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_configuration_that_is_not_there(tmp_path, command):
    arguments = (
        ["run", tmp_path / "no.toml"] if command == "run" else ["train", "m:f", "--config", tmp_path / "no.toml"]
    )
    refused(palestra(*arguments), "no.toml", "no such file")


def test_a_tasks_file_that_is_not_there(job_file):
    (job_file.parent / "tasks.jsonl").unlink()
    refused(palestra("run", job_file), "tasks.jsonl", "No such file")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', ["not valid JSON"]),
        ('["text"]', ["JSON object", "list"]),
        ("3", ["JSON object", "int"]),
        ('{"id": "a", "text": "another a"}', ["'a'", "other data"]),
        ('{"text": NaN}', ["can't be stored"]),
        (f'{{"number": {10**30}}}', ["can't be stored"]),
        ('{"id": ""}', ["1 character"]),
        (b'{"text": "\xff"}', ["utf-8"]),
    ],
    ids=str,
)
def test_a_bad_line_in_a_tasks_file_is_named(job_file, line, words):
    first = b'{"id": "a", "text": "a"}\n'
    (job_file.parent / "tasks.jsonl").write_bytes(first + (line if isinstance(line, bytes) else line.encode()))
    where = [] if "other data" in words else ["tasks.jsonl:2"]
    refused(palestra("run", job_file), *where, *words)


def test_an_empty_tasks_file(job_file):
    (job_file.parent / "tasks.jsonl").write_text("\n")
    refused(palestra("run", job_file), "no training tasks")


def test_a_context_longer_than_the_models(job_file):
    setting = 'policies.policy={"model": "tiny-random", "max_context": 100000}'
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), "100000", "2048")


@pytest.mark.parametrize("reference", ["nothing", "no_such_module:f", "nowhere.py:f", "json:no_such_function"])
def test_a_rollout_function_that_is_not_there(job_file, reference):
    refused(palestra("train", reference, "--config", job_file), reference.partition(":")[0])


@pytest.mark.parametrize("command", [["episodes"], ["export"]])
def test_a_folder_that_is_no_run(tmp_path, command):
    more = [tmp_path / "target"] if command == ["export"] else []
    refused(palestra(*command, tmp_path, *more), "not the folder of a run")


def test_every_help_has_an_example():
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        done = palestra(name, "--help")
        assert done.code == 0
        assert "example:" in done.stdout
        assert f"palestra {name}" in done.stdout.partition("example:")[2]


# What depends on a run that is there


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("finished"), SCRIPTED | {"checkpoint": {"every_steps": 1}}) as job:
        run_through(job, [])
        yield job


@pytest.fixture
def copied(tmp_path, finished) -> Iterator[Job]:
    """A finished run of one's own, to be damaged or gone on with."""
    with Job(tmp_path, finished.settings) as job:
        shutil.copytree(finished.run_dir, job.run_dir)
        yield job


def test_a_port_in_use(tmp_path):
    with Job(tmp_path / "first", SCRIPTED) as first, Job(tmp_path / "second", SCRIPTED, port=first.port) as second:
        first.start()
        refused(palestra("run", second.config_file), str(first.port), "in use", "server.port")


def test_a_port_that_another_server_has_taken_but_does_not_listen_on_yet(tmp_path):
    loads = {"engine": {"kind": "embedded"}, "policies": {"policy": {"model": "tiny-random", "max_context": 256}}}
    with Job(tmp_path / "first", loads) as first, Job(tmp_path / "second", SCRIPTED, port=first.port) as second:
        server = first.serve()
        until(lambda: (first.run_dir / ".lock").exists(), "the first server begins")
        quick = second.serve()
        until(lambda: quick.popen.poll() is not None or server.popen.poll() is not None, "one of them gives up")
        ended, other = (quick, first) if quick.popen.poll() is not None else (server, second)
        assert ended.wait() == 2
        assert "server.port" in ended.output
        other.wait_until_it_listens()


def test_a_run_that_is_there_without_resume_and_resume_without_a_run(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        refused(palestra("run", job.config_file, "--resume"), str(job.run_dir), "leave --resume out")
        server = job.start()
        refused(palestra("run", job.config_file), str(job.run_dir), "--resume")
        refused(palestra("run", job.config_file, "--resume", "--set", "server.port=0"), "another process")
        server.send(signal.SIGINT)
        assert server.wait() == 130


def test_resuming_with_another_learning_rate(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        server = job.start()
        server.send(signal.SIGINT)
        assert server.wait() == 130
        kept = (job.run_dir / "config.toml").read_text()
        setting = 'policies.policy={"optimizer": {"learning_rate": 0.5}}'
        refused(palestra("run", job.config_file, "--resume", "--set", setting), "another configuration", "config.toml")
        assert (job.run_dir / "config.toml").read_text() == kept
        run_through_resumed(job)


def run_through_resumed(job: Job) -> None:
    job.start("--resume")
    job.work()
    job.finish()
    assert_complete(job)


@pytest.mark.parametrize("damage", ["weights.txt", "checkpoint.json", "truncated", "missing"])
def test_a_damaged_checkpoint_is_passed_over_and_the_run_still_ends_right(copied, finished, tmp_path, damage):
    newest = copied.checkpoints()[-1]
    if damage == "missing":
        (newest / "weights.txt").unlink()
    else:
        path = newest / ("weights.txt" if damage == "truncated" else damage)
        path.write_text(path.read_text()[:10] if damage == "truncated" else "x" * 64)
    exported = palestra("export", copied.run_dir, tmp_path / "model")
    assert "step 2" in exported.stdout
    resumed = copied.start("--resume")
    copied.finish()
    assert "after step 2" in resumed.output
    assert copied.weights() == finished.weights()
    assert [row["step"] for row in copied.metrics()] == [0, 1, 2, 3]


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(copied, finished, tmp_path):
    for path in copied.checkpoints():
        (path / "weights.txt").write_text("damaged")
    refused(palestra("run", copied.config_file, "--resume"), "every checkpoint", "move the folder away")
    shutil.move(copied.run_dir / "checkpoints", tmp_path / "away")
    copied.start("--resume")
    copied.finish()
    assert copied.weights() == finished.weights()


def test_a_damaged_run_store(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        job.run_dir.mkdir()
        (job.run_dir / "run.db").write_bytes(b"not a database" * 1000)
        refused(palestra("run", job.config_file, "--resume"), "run.db", "damaged")


def test_a_finished_run_can_be_read_and_goes_on_with_more_steps(copied):
    listed = palestra("episodes", copied.run_dir, "--kind", "train")
    assert listed.code == 0
    assert "train-000005-01" in listed.stdout
    shown = palestra("episodes", copied.run_dir, "train-000005-01")
    assert "trained in step 3" in shown.stdout
    refused(palestra("episodes", copied.run_dir, "train-999999-00"), "train-999999-00")
    copied.start("--resume", "--set", "steps=4")
    copied.work()
    copied.finish()
    assert list(copied.manifests()) == [1, 2, 3, 4]
    assert [row["step"] for row in copied.metrics()] == [0, 1, 2, 3, 4]
    assert json.loads((copied.checkpoints()[-1] / "checkpoint.json").read_text())["step"] == 4


def test_a_scripted_job_loads_no_torch(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        server: Process = job.start()
        maps = Path(f"/proc/{server.popen.pid}/maps")
        if not maps.exists():
            pytest.skip("no /proc here")
        assert "libtorch" not in maps.read_text()
