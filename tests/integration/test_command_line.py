"""What a person sees who makes a mistake: one line on stderr that says what to do, and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from outcome import assert_complete
from servers import PALESTRA, SCRIPTED, Job, Process, run_through, until

from palestra import __version__
from palestra.cli.main import COMMANDS, main
from palestra.runtime import local
from palestra.store.browsing import browse, list_episodes
from palestra.types.summaries import EpisodeSummary
from palestra_control.control import ControlClient
from palestra_inspect.episode_list import episode_lines

pytestmark = pytest.mark.ci

JOB = """
name = "mine"
run_dir = "{folder}/run"
[tasks]
train = "tasks.jsonl"
[engine]
kind = "fake"
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
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), name, "no such folder")


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
        ("steps", ["KEY=VALUE"]),
        ("name.first=x", ["name"]),
        ("server.port=99999", ["server.port"]),
        ('policies={"a": {}, "b": {}}', ["policies.b", "roles"]),
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
        ('{"text": NaN}', ["can't be stored"]),
        (f'{{"number": {10**30}}}', ["can't be stored"]),
        (b'{"text": "\xff"}', ["utf-8"]),
    ],
    ids=str,
)
def test_a_bad_line_in_a_tasks_file_is_named(job_file, line, words):
    first = b'{"id": "a", "text": "a"}\n'
    (job_file.parent / "tasks.jsonl").write_bytes(first + (line if isinstance(line, bytes) else line.encode()))
    refused(palestra("run", job_file), "tasks.jsonl:2", *words)


def test_an_empty_tasks_file(job_file):
    (job_file.parent / "tasks.jsonl").write_text("\n")
    refused(palestra("run", job_file), "no training tasks")


def test_a_context_longer_than_the_models(job_file):
    setting = 'policies.policy={"model": "tiny-random", "max_context": 100000}'
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), "100000", "2048")


FAILING = [
    ("missing", [], "No such file"),
    ("bad line", [], "not valid JSON"),
    ("empty", [], "no training tasks"),
    ("", ["--set", "engine.kind=embedded", "--set", 'policies.policy={"model": "./nowhere"}'], "./nowhere"),
    ("", ["--set", "server.port={port}"], "server.port"),
    ("", ["--set", "environment.name=gomoku", "--set", "environment.settings.sise=3", "--set", "tasks=none"], "sise"),
]


@pytest.mark.parametrize(("tasks", "settings", "words"), FAILING, ids=[words for _, _, words in FAILING])
def test_a_start_that_fails_leaves_no_folder_and_takes_no_number(tmp_path, monkeypatch, tasks, settings, words):
    monkeypatch.chdir(tmp_path)
    lines = {"bad line": '{"a":', "empty": "\n"}
    if tasks != "missing":
        Path("tasks.jsonl").write_text(lines.get(tasks, '{"text": "a"}\n'))
    Path("job.toml").write_text(JOB.replace('run_dir = "{folder}/run"\n', ""))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = [
            setting.format(port=taken.getsockname()[1]) if "port" in setting else setting for setting in settings
        ]
        before = sorted(tmp_path.iterdir())
        refused(palestra("run", "job.toml", *settings), words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_start_that_fails_leaves_what_was_in_the_folder_before(job_file):
    folder = job_file.parent / "run"
    folder.mkdir()
    (folder / "secret").write_text("ab" * 32 + "\n")
    (folder / "notes.txt").write_text("mine")
    setting = 'policies.policy={"model": "./nowhere"}'
    refused(palestra("run", job_file, "--set", setting, "--set", "engine.kind=embedded"), "./nowhere")
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "secret"]


def test_a_missing_tasks_file_is_found_before_the_model_is_loaded(job_file, monkeypatch):
    (job_file.parent / "tasks.jsonl").unlink()
    monkeypatch.setattr(local, "build_parts", lambda *_: pytest.fail("the model is loaded"))
    refused(palestra("run", job_file), "tasks.jsonl", "No such file")


def test_a_misspelled_environment_is_found_before_the_model_is_loaded(job_file, monkeypatch):
    monkeypatch.setattr(local, "build_parts", lambda *_: pytest.fail("the model is loaded"))
    settings = ('tasks={"train": null, "validation": null}', 'environment.name="frozen_lake"')
    words = [word for setting in settings for word in ("--set", setting)]
    refused(palestra("run", job_file, *words), "frozen_lake", "frozen-lake")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, ["tasks.jsonl", "No such file"]),
        ('{"a": 1}\n{"a":\n', ["tasks.jsonl:2", "not valid JSON"]),
        ("", ["no training tasks"]),
        (json.dumps({"id": "long", "a": "x" * 8 * 2**20}), ["'long'", "max_body_bytes"]),
    ],
)
def test_tasks_are_checked_before_a_job_is_submitted(job_file, monkeypatch, lines, words):
    monkeypatch.setattr(ControlClient, "submit", lambda *arguments, **more: pytest.fail("it is submitted"))
    path = job_file.parent / "tasks.jsonl"
    path.unlink()
    if lines is not None:
        path.write_text(lines)
    refused(palestra("submit", job_file, "--control", "http://127.0.0.1:1"), *words)


@pytest.mark.slow
def test_a_second_run_says_that_there_is_one_and_names_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"text": "a"}\n')
    Path("job.toml").write_text(JOB.replace('run_dir = "{folder}/run"\n', ""))
    for number, folder in ((0, "runs/mine"), (1, "runs/mine-2")):
        server = Process.start([PALESTRA, "run", "job.toml"], tmp_path / f"{number}.log")
        try:
            until(lambda log=server: "data plane at" in log.output, "the server listens")
            assert f"→ {folder}\n" in server.output
            assert ("runs/mine has a run already" in server.output) == bool(number)
            assert ("resume continues the newest, runs/mine-2" in server.output) == bool(number)
        finally:
            server.send(signal.SIGINT)
            server.wait()


@pytest.mark.slow
def test_the_job_that_trained_a_model_serves_it(tmp_path):
    settings = SCRIPTED | {"environment": {"name": "arithmetic"}}
    with Job(tmp_path, settings) as job:
        folder = tmp_path / "served"
        (tmp_path / "train.jsonl").unlink()  # not read where nothing is trained
        job.start("--set", "kind=inference", "--set", f"run_dir={folder}")
        key = (folder / "api_key").read_text().strip()
        with openai.OpenAI(base_url=f"{job.url}/v1", api_key=key) as ai:
            answer = ai.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("reference", ["nothing", "no_such_module:f", "nowhere.py:f", "json:no_such_function"])
def test_a_rollout_function_that_is_not_there(job_file, reference):
    refused(palestra("train", reference, "--config", job_file), reference.partition(":")[0])


@pytest.mark.parametrize("command", [["episodes"], ["export"]])
def test_a_folder_that_is_no_run(tmp_path, command):
    more = [tmp_path / "target"] if command == ["export"] else []
    refused(palestra(*command, tmp_path, *more), "not the folder of a run")


def test_the_version_the_help_and_a_command_that_does_not_exist():
    assert palestra("--version").stdout == f"palestra {__version__}\n"
    for arguments in ([], ["--verbose"]):
        done = palestra(*arguments)
        assert (done.code, "start here: palestra demo" in done.stdout) == (0, True)
    refused(palestra("trian", "--tasks", "x"), "'trian'", "did you mean `palestra train`")
    refused(palestra("--verbose", "xyzzy"), "'xyzzy'", "demo, run")


@pytest.mark.slow
def test_a_list_of_episodes_is_whole_in_a_pipe_and_fits_into_80_columns(copied, monkeypatch):
    reason = "ValueError: the answer of the tool was " + "long, " * 30 + "and this is its end"
    with sqlite3.connect(copied.run_dir / "run.db") as connection:
        connection.execute(
            "UPDATE episodes SET state = 'discarded', rewards = NULL, reason = ? WHERE episode_id = 'train-000000-00'",
            (reason,),
        )
    listed = palestra("episodes", copied.run_dir).stdout
    assert reason in listed
    rows = list_of(copied)
    for width in (60, 80, 100, 160):
        lines = [line.plain for line in episode_lines(rows, 0.0, width)]
        assert width < 70 or max(map(len, lines)) <= width
        assert width == 160 or "and this is its end" in " ".join(" ".join(lines).split())


def list_of(job: Job) -> list[EpisodeSummary]:
    with browse(job.run_dir / "run.db") as connection:
        return list_episodes(connection, None, None, 40)


@pytest.mark.slow
def test_an_episode_is_shown_with_its_prompt_folded_in_full_or_as_text(copied):
    folded = palestra("episodes", copied.run_dir, "train-000005-01").stdout
    full = palestra("episodes", copied.run_dir, "train-000005-01", "--unfold").stdout
    (row,) = re.findall(r"row 1: (\d+) tokens, (\d+) sampled", folded)
    tokens, sampled = map(int, row)
    lines = [line for line in full.splitlines() if re.match(r" *\d+ +\d+ ", line)]
    assert len([line for line in lines if "masked" in line]) == tokens - sampled
    runs = re.findall(r"^ *(\d+)-(\d+) +(\d+) tokens: .* masked", folded, re.MULTILINE)
    single = [line for line in folded.splitlines() if re.match(r" *\d+ +\d+ .*masked", line)]
    assert sum(int(count) for _, _, count in runs) + len(single) == tokens - sampled
    assert all(int(last) - int(first) + 1 == int(count) for first, last, count in runs)
    assert len(folded.splitlines()) < len(full.splitlines()) / 2
    text = palestra("episodes", copied.run_dir, "train-000005-01", "--text").stdout
    assert text.count("[user]") == text.count("[assistant]") == 2
    assert "\ntask " in text


def test_every_help_has_an_example():
    for add in COMMANDS:
        name = add.__name__.removeprefix("add_").replace("_", "-")
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


@pytest.mark.slow
def test_a_port_in_use(tmp_path):
    with Job(tmp_path / "first", SCRIPTED) as first, Job(tmp_path / "second", SCRIPTED, port=first.port) as second:
        first.start()
        refused(palestra("run", second.config_file), str(first.port), "in use", "server.port")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_that_is_there_without_resume_and_resume_without_a_run(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        refused(palestra("run", job.config_file, "--resume"), str(job.run_dir), "leave --resume out")
        server = job.start()
        refused(palestra("run", job.config_file), str(job.run_dir), "--resume")
        refused(palestra("run", job.config_file, "--resume", "--set", "server.port=0"), "another process")
        server.send(signal.SIGINT)
        assert server.wait() == 130


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        "weights.txt",
        "checkpoint.json",
        "truncated",
        "missing",
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_run_still_ends_right(copied, finished, tmp_path, damage):
    newest = copied.checkpoints()[-1]
    if damage == "missing":
        (newest / "weights.txt").unlink()
    else:
        path = newest / ("weights.txt" if damage == "truncated" else damage)
        path.write_text(path.read_text()[:10] if damage == "truncated" else "x" * 64)
    refused(palestra("export", copied.run_dir, tmp_path / "newest", "--step", "3"), "no weights of step 3")
    exported = palestra("export", copied.run_dir, tmp_path / "model", "--step", "2")
    assert "step 2" in exported.stdout
    resumed = copied.start("--resume")
    copied.finish()
    assert "after step 2" in resumed.output
    assert copied.weights() == finished.weights()
    assert [row["step"] for row in copied.metrics()] == [0, 1, 2, 3]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_scripted_job_loads_no_torch(tmp_path):
    with Job(tmp_path, SCRIPTED, fresh=True) as job:
        server: Process = job.start()
        maps = Path(f"/proc/{server.popen.pid}/maps")
        if not maps.exists():
            pytest.skip("no /proc here")
        assert "libtorch" not in maps.read_text()
