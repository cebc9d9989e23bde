"""Engines that are programs or servers of other projects: the operator names them, and no job does."""

from __future__ import annotations

import json

import pytest

from palestra.cli.main import main
from palestra.config import parse_config
from palestra.errors import ConfigError
from palestra.types.states import JobState
from palestra_service.jobs.engine_rules import EngineRules
from palestra_service.jobs.launcher import Ending
from palestra_service.jobs.rules import Rules, load_rules
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, is_true, scheduling, submit
from unit.waiting import until

RULES = """
[engines.vllm]
python = "venv/bin/python"

[[engines.servers]]
kind = "vllm"
url = "http://10.0.0.7:8000"
key_variable = "SERVER_KEY"
weights_dir = "/shared/weights"

[[engines.servers]]
kind = "vllm"
url = "http://10.0.0.8:8000"
key_variable = "SERVER_KEY"
weights_dir = "/shared/weights"

[[engines.servers]]
kind = "vllm"
url = "http://127.0.0.1:8000"

[[engines.servers]]
kind = "sglang"
url = "http://localhost:30000"
"""
SEVEN, EIGHT, HERE, SGLANG = (
    "http://10.0.0.7:8000",
    "http://10.0.0.8:8000",
    "http://127.0.0.1:8000",
    "http://localhost:30000",
)
PLACE = {"key_variable": "SERVER_KEY", "weights_dir": "/shared/weights"}


@pytest.fixture
def rules(tmp_path) -> Rules:
    (tmp_path / "rules.toml").write_text(RULES)
    return load_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engines]\nvlm = 1", "tables vllm"),
        ('[engines.vllm]\nargs = "-x"', r"\[engines.vllm\]"),
        ("[engines.vllm]\npython = 3", "engines.vllm.python.*3"),
        ("[engines]\nservers = 3", r"\[\[engines.servers\]\]"),
        ('[[engines.servers]]\nurl = "http://a:1"', "engines.servers.0.kind.*'sglang'.*'vllm'"),
        ('[[engines.servers]]\nkind = "vllm"', "engines.servers.0.*keys"),
        ('[[engines.servers]]\nkind = "vllm"\nurl = "http://a:1"\npython = "/x"', "keys kind"),
        ('[[engines.servers]]\nkind = "vllm"\nurl = "a:1"', "'a:1'.*address"),
        ('[[engines.servers]]\nkind = "vllm"\nurl = "http://a:1"', "http://a:1.*wei"),
        ('[[engines.servers]]\nkind = "vllm"\nurl = "http://[::1]:1"\nkey_variable = "a b"', "key_variable"),
        ('[[engines.servers]]\nkind = "vllm"\nurl = "http://a:1"\nweights_dir = "w"', "absolute path"),
        (2 * '[[engines.servers]]\nkind = "vllm"\nurl = "http://[::1]:1"\n', r"engines.servers.*http://\[::1\]:1"),
    ],
)  # fmt: skip
def test_what_can_be_no_rule_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_rules(tmp_path / "rules.toml")
    assert str(tmp_path / "rules.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_interpreter_is_the_link_in_its_environment_and_not_where_it_leads(tmp_path, rules):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    assert rules.engines.programs["vllm"] == tmp_path / "venv" / "bin" / "python"


TAKEN = [
    ({"kind": "vllm", "replicas": 2, "threads": 1}, None),
    ({"kind": "vllm", "url": SEVEN}, PLACE),
    ({"kind": "vllm", "url": [SEVEN, EIGHT]}, PLACE),
    ({"kind": "vllm", "url": HERE}, {}),
    ({"kind": "sglang", "url": SGLANG}, {}),
]


@pytest.mark.parametrize(("engine", "place"), TAKEN)
async def test_a_job_is_taken_as_it_was_written_and_started_with_what_the_operator_names(
    http, plane, rules, tmp_path, engine, place
):
    object.__setattr__(plane, "rules", rules)
    answer = await http.post("/jobs", json={"config": {"engine": engine}})
    assert answer.status_code == 201, answer.text
    stored = answer.json()["config"]["engine"]
    assert stored == engine  # nobody is shown paths and variables of the service
    filled = {"python": str(tmp_path / "venv/bin/python")} if place is None else place
    assert rules.engines.filled({"engine": stored})["engine"] == engine | filled
    again = await http.post(f"/jobs/{answer.json()['job_id']}/resubmit")
    assert (again.status_code, again.json()["config"]["engine"]) == (201, engine)


async def test_each_table_of_a_mixed_pool_gets_its_own(http, plane, rules, tmp_path):
    object.__setattr__(plane, "rules", rules)
    workers = [{"replicas": 2}, {"kind": "vllm"}, {"kind": "vllm", "url": SEVEN}, {"kind": "sglang", "url": SGLANG}]
    answer = await http.post("/jobs", json={"config": {"engine": {"workers": workers}}})
    assert answer.status_code == 201, answer.text
    filled = rules.engines.filled(answer.json()["config"])["engine"]
    python = {"python": str(tmp_path / "venv/bin/python")}
    assert filled == {"workers": [workers[0], workers[1] | python, workers[2] | PLACE, workers[3]]}
    assert parse_config({"engine": filled}).engine.worker_count == 5


@pytest.mark.parametrize(
    ("engine", "param", "said"),
    [
        ({"kind": "vllm", "python": "/bin/sh"}, "python", "config.engine.python names a program, which only the op"),
        ({"kind": "vllm", "url": SEVEN, "key_variable": "HF_TOKEN"}, "key_variable", "names a variable of the"),
        ({"kind": "vllm", "url": SEVEN, "weights_dir": "/etc"}, "weights_dir", "names a folder of the server"),
        ({"kind": "sglang", "url": SGLANG, "weights_dir": "/etc"}, "weights_dir", "names a folder of the server"),
        ({"kind": "vllm", "url": SEVEN, "weight_transfer": "gloo", "weights_address": "a"}, "weights_address", "names"),
        ({"kind": "vllm", "url": HERE, "weight_transfer": "gloo"}, "weight_transfer", "is 'gloo', and new weights"),
        ({"kind": "vllm", "url": "http://169.254.169.254"}, "url", "url names http://169.254.169.254; the operator"),
        ({"kind": "vllm", "url": [SEVEN, "http://10.0.0.7:8001"]}, "url", "url names http://10.0.0.7:8001"),
        ({"kind": "vllm", "url": "http://10.0.0.7:8000.evil.org"}, "url", "the operator of this service allows http:"),
        ({"kind": "sglang", "url": SEVEN}, "url", f"allows {SGLANG} "),
        ({"kind": "vllm", "url": [SEVEN, HERE]}, "url", "have not the same key or folder; write each as a table of"),
    ],
)  # fmt: skip
async def test_what_a_job_may_not_name_is_refused_in_one_line(http, plane, rules, engine, param, said):
    object.__setattr__(plane, "rules", rules)
    for config, key in (
        ({"engine": engine}, "config.engine"),
        ({"engine": {"workers": [{}, engine]}}, "config.engine.workers.1"),
    ):
        answer = await http.post("/jobs", json={"config": config})
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert error["param"] == f"{key}.{param}"
        assert said.replace("config.engine", key) in error["message"]
        assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "vllm"}, "config.engine: this service starts no vLLM; take engine.kind = 'embedded', or ask its op"),
        ({"kind": "vllm", "url": SEVEN}, "the operator of this service allows none"),
        ({"kind": "sglang", "url": SGLANG}, "the operator of this service allows none"),
    ],
)
async def test_without_rules_a_service_has_the_embedded_engine_alone(http, engine, said):
    answer = await http.post("/jobs", json={"config": {"engine": engine}})
    assert answer.status_code == 422, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "vllm", "tensor_parallel": 65}, "engine.tensor_parallel is 65, and this service allows at most 64"),
        ({"kind": "vllm", "startup_seconds": 601}, "engine.startup_seconds is 601"),
        ({"workers": [{}, {"kind": "vllm", "cache_gib": 513}]}, "engine.workers.1.cache_gib is 513"),
        ({"workers": [{"replicas": 9}, {"kind": "vllm", "replicas": 9}]}, "engine.replicas is 18"),
    ],
)
async def test_numbers_of_servers_have_caps(http, plane, rules, engine, said):
    object.__setattr__(plane, "rules", rules)
    answer = await http.post("/jobs", json={"config": {"engine": engine}})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


async def test_a_waiting_job_is_started_by_the_rules_of_its_start(sqlite_store, tmp_path, rules):
    launcher = FakeLauncher()
    async with scheduling(sqlite_store, tmp_path, launcher, rules=rules):
        job = await submit(sqlite_store, config={"engine": {"kind": "vllm", "url": SEVEN}})
        await until(in_state(sqlite_store, job.job_id, JobState.RUNNING))
        assert launcher.servers[job.job_id].order.config["engine"] == {"kind": "vllm", "url": SEVEN} | PLACE
        assert "SERVER_KEY" not in json.dumps((await sqlite_store.job(None, job.job_id)).config)
        gone = await submit(sqlite_store, config={"engine": {"kind": "vllm", "url": "http://10.0.0.9:8000"}})
        await until(in_state(sqlite_store, gone.job_id, JobState.FAILED))
        assert "url names http://10.0.0.9:8000" in (await sqlite_store.job(None, gone.job_id)).reason


async def test_one_job_at_a_time_has_a_server(sqlite_store, tmp_path, rules):
    launcher = FakeLauncher()

    def job(*urls: str):
        return submit(sqlite_store, config={"engine": {"kind": "vllm", "url": list(urls)}})

    first, second, eight = await job(SEVEN), await job(EIGHT, SEVEN), await job(EIGHT)
    workers = [{}, {"kind": "vllm", "url": SEVEN}]
    mixed = await submit(sqlite_store, config={"engine": {"workers": workers}})
    async with scheduling(sqlite_store, tmp_path, launcher, rules=rules) as scheduler:
        await until(in_state(sqlite_store, first.job_id, JobState.RUNNING))
        await until(in_state(sqlite_store, eight.job_id, JobState.RUNNING))
        for waiting in (second, mixed):
            reason = f"waits for the engine's server {SEVEN}, which another job uses"
            await until(lambda waiting=waiting: is_true(waiting.job_id in scheduler.waiting))
            assert scheduler.waiting[waiting.job_id] == reason
            assert await in_state(sqlite_store, waiting.job_id, JobState.QUEUED)()
        launcher.end(first.job_id, Ending.COMPLETED)
        await until(in_state(sqlite_store, mixed.job_id, JobState.RUNNING))
        assert await in_state(sqlite_store, second.job_id, JobState.QUEUED)()
    # Another scheduler finds the jobs that run, and with them the servers that they have.
    async with scheduling(sqlite_store, tmp_path, launcher, rules=rules) as scheduler:
        await until(lambda: is_true(second.job_id in scheduler.waiting))
        assert "which another job uses" in scheduler.waiting[second.job_id]
        launcher.end(mixed.job_id, Ending.COMPLETED)
        launcher.end(eight.job_id, Ending.COMPLETED)
        await until(in_state(sqlite_store, second.job_id, JobState.RUNNING))


async def test_a_job_is_started_with_the_operators_variable_for_its_environment_server(sqlite_store, tmp_path):
    """Not with that of the tenant, which could be any secret of the job's process."""
    launcher, rules = FakeLauncher(), Rules(environment_hosts={"10.0.0.7:7500": "NIM_KEY"})
    async with scheduling(sqlite_store, tmp_path, launcher, rules=rules):
        environment = {"url": "http://10.0.0.7:7500", "key_variable": "HF_TOKEN"}
        job = await submit(sqlite_store, config={"environment": environment})
        await until(in_state(sqlite_store, job.job_id, JobState.RUNNING))
        assert launcher.servers[job.job_id].order.config["environment"] == environment | {"key_variable": "NIM_KEY"}


def test_a_configuration_without_servers_is_left_as_it_is():
    for config in ({}, {"engine": {"threads": 2}}, {"engine": {"kind": "fake"}}, {"steps": 3, "engine": {}}):
        assert EngineRules().filled(config) == config


def test_what_jobs_would_lack_is_said_when_the_service_starts(tmp_path, rules):
    missing, *keys = rules.engines.warnings((), {"SERVER_KEY": "k"})
    assert f"engines.vllm.python is '{tmp_path}/venv/bin/python', and there is no such program on this" in missing
    assert [line.partition(" is in ")[2] for line in keys] == [
        "the variable SERVER_KEY, which jobs do not get; add --pass-env SERVER_KEY"
    ] * 2
    assert "is not set here" in rules.engines.warnings(["SERVER_KEY"], {})[1]
    program = tmp_path / "venv" / "bin" / "python"
    program.mkdir(parents=True)
    (folder,) = rules.engines.warnings(["SERVER_KEY"], {"SERVER_KEY": "k"})
    assert "a folder; give the interpreter in it" in folder
    program.rmdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert rules.engines.warnings(["SERVER_KEY"], {"SERVER_KEY": "k"}) == []
    assert EngineRules().warnings((), {}) == []


def test_the_service_warns_of_its_rules_before_it_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "rules.toml").write_text(RULES)

    async def serve_control(options, ready, show_key):
        pass

    monkeypatch.setattr("palestra_service.ray.serve.serve_control", serve_control)
    assert main(["serve", "--rules", str(tmp_path / "rules.toml"), "--state-dir", str(tmp_path / "state")]) == 0
    assert "palestra: engines.vllm.python is " in capsys.readouterr().err
