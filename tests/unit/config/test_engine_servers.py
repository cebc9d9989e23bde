"""`[engine]` of vLLM and SGLang: which server it names, and which jobs it can play."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.config import JobConfig, dump_config, load_config, parse_config
from palestra.errors import ConfigError
from palestra_engines.sglang.driver import SglangEngineConfig
from palestra_engines.vllm.config import VllmEngineConfig

STARTED = {"kind": "vllm", "python": "/venv/bin/python"}
FOUND = {"kind": "vllm", "url": "http://127.0.0.1:8000"}
GLOO = {"weight_transfer": "gloo"}
SGLANG = {"kind": "sglang", "url": "http://127.0.0.1:30000"}


def test_a_server_is_started_or_found():
    assert isinstance(parse_config({"engine": STARTED}).engine, VllmEngineConfig)
    assert isinstance(parse_config({"engine": FOUND | {"key_variable": "KEY"}}).engine, VllmEngineConfig)
    assert isinstance(parse_config({"engine": SGLANG}).engine, SglangEngineConfig)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "vllm", "key_variable": "KEY"}, "key_variable.*runs"),
        (STARTED | FOUND, "one of the two"),
        (STARTED | {"key_variable": "KEY"}, "key_variable.*runs"),
        (STARTED | {"weights_dir": "/mnt"}, "weights_dir.*runs"),
        (STARTED | GLOO | {"weights_address": "10.0.0.5"}, "weights_address.*already"),
        (STARTED | {"weight_transfer": "auto"}, "engine.weight_transfer"),
        (FOUND | {"weights_address": "10.0.0.5"}, "weights_address.*weight_transfer.*'gloo'.*'nccl'"),
        (FOUND | GLOO | {"weights_dir": "/mnt"}, "weights_dir.*weight_transfer.*'file'"),
        (
            FOUND | GLOO | {"url": ["http://localhost:1", "http://10.0.0.7:2"]},
            "weight_transfer.*'gloo'.*weights_address.*http://10.0.0.7:2",
        ),
        (FOUND | GLOO | {"weights_address": "10.0.0.5:x"}, "engine.weights_address"),
        (FOUND | GLOO | {"weights_address": "10.0.0.5:65536"}, "weights_address.*65535"),
        (SGLANG | GLOO, "engine.weight_transfer"),
        (FOUND | {"cache_gib": 1}, "cache_gib.*job"),
        (FOUND | {"compile": True}, "compile.*job"),
        ({"kind": "sglang"}, "engine.url.*URL.*SGLang"),
        ({"kind": "mixed"}, "engine.workers.*given"),
        ({"kind": "vllm", "python": ""}, "engine.python.*empty"),
        (SGLANG | {"url": "127.0.0.1:30000"}, "engine.url"),
        (
            SGLANG | {"url": "127.0.0.1:30000"},
            "'127.0.0.1:30000'.*http://127.0.0.1:8000",
        ),
        (SGLANG | {"url": "http://127.0.0.1:30000/v1"}, "path.*http://127.0.0.1:30000"),
        (SGLANG | {"seeds": True}, "seeds"),
        (FOUND | {"url": "http://user:password@a:1"}, "key.*password"),
        (STARTED | {"stuck_seconds": 1e300}, "engine.stuck_seconds"),
        (STARTED | {"stuck_seconds": 1e-300}, "engine.stuck_seconds"),
        (STARTED | {"cache_gib": 1.5}, "cache_gib"),
        (FOUND | {"url": []}, "engine.url"),
        (FOUND | {"url": ["http://a:1", "b:2"]}, "engine.url"),
        (FOUND | {"url": ["http://a:1", "http://a:1"]}, "http://a:1.*twice"),
        (FOUND | {"replicas": 2}, "replicas.*2.*1"),
        (SGLANG | {"url": ["http://a:1", "http://b:2"], "replicas": 3}, "replicas.*3.*2"),
        (STARTED | {"replicas": 65}, "engine.replicas"),
        ({"kind": "tgi"}, "'embedded'.*'fake'.*'sglang'.*'vllm'.*'mixed'"),
    ],
)
def test_what_names_no_server_is_refused(engine, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({"engine": engine})


def test_weights_reach_all_workers_together_only_by_a_broadcast():
    for engine, together in (({}, False), (FOUND, False), (FOUND | GLOO, True)):
        assert parse_config({"engine": engine}).engine.broadcasts == together
    for table, together in ((FOUND, False), (FOUND | GLOO, True)):
        assert parse_config({"engine": {"workers": [{"kind": "embedded"}, table]}}).engine.broadcasts == together


def test_servers_on_this_machine_need_no_address_of_the_trainer():
    for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert parse_config({"engine": FOUND | GLOO | {"url": url}}).engine.weights_address is None
    far = FOUND | {"url": "http://10.0.0.7:2", "weight_transfer": "nccl", "weights_address": "trainer.local:29600"}
    assert parse_config({"engine": far}).engine.weights_address == "trainer.local:29600"


TWO = {"policies": {"a": {}, "b": {"frozen": True}}}


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"engine": STARTED, "deterministic": True}, "true.*engine.kind.*'embedded'"),
        ({"engine": FOUND} | TWO, "samples.*2"),
        ({"engine": SGLANG} | TWO, "samples.*2"),
        (
            {"engine": STARTED | GLOO, "policies": {"a": {"adapter": {"rank": 4}}}},
            "engine.weight_transfer.*'gloo'.*sent",
        ),
        (
            {"engine": STARTED, "roles": {"x": {"policy": "policy", "pool": {"every_steps": 1}}}},
            "policies.policy.adapter.*engine.kind.*'vllm'",
        ),
    ],
)
def test_what_a_server_can_not_play_is_refused(job, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(job)


def test_past_versions_of_an_adapter_can_play_on_its_server():
    role = {"policy": "p", "pool": {"every_steps": 1}}
    adapter = {"policies": {"p": {"adapter": {"rank": 4}}}}
    job = parse_config({"engine": STARTED, "roles": {"x": role}, "steps": 3} | adapter)
    assert job.engine.worker_count == 1


def test_several_servers_are_workers(tmp_path):
    urls = ["http://a:1", "http://b:2"]
    for engine in (FOUND | {"url": urls}, SGLANG | {"url": urls, "replicas": 2}):
        config = parse_config({"engine": engine})
        assert config.engine.worker_count == 2
        path = tmp_path / "config.toml"
        path.write_text(dump_config(config))
        assert load_config(path) == config
    assert parse_config({"engine": STARTED | {"replicas": 3}}).engine.worker_count == 3
    assert parse_config({"engine": FOUND}).model_dump(mode="json")["engine"]["url"] == FOUND["url"]


def test_a_run_goes_on_where_its_server_has_moved():
    def digest(**engine) -> str:
        return JobConfig.model_validate({"engine": {"kind": "vllm"} | engine}).digest()

    first = digest(url="http://a:1")
    assert digest(url="http://b:2", key_variable="KEY", weights_dir="/mnt") == first
    assert digest(url="http://b:2", weight_transfer="nccl", weights_address="10.0.0.5:29600") == first
    assert digest(url=["http://b:2", "http://c:3"], stuck_seconds=5) == first
    assert digest(python="/venv/bin/python", replicas=3) == first
    assert digest(python="/venv/bin/python", startup_seconds=5) == first
    assert digest(url="http://a:1", dtype="float32") != first
    assert digest(url="http://a:1", seeds=True) != first


def test_an_interpreter_may_begin_in_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert VllmEngineConfig(python="~/vllm/bin/python").python == Path("/home/me/vllm/bin/python")
    with pytest.raises(ConfigError, match="unknown user"):
        VllmEngineConfig(python="~no-such-user/bin/python")
