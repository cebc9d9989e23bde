"""`[engine]` of vLLM and SGLang: which server it names, and which jobs it can play."""

from __future__ import annotations

import pytest

from palestra.config import JobConfig, SglangEngineConfig, VllmEngineConfig, parse_config
from palestra.errors import ConfigError

STARTED = {"kind": "vllm", "python": "/venv/bin/python"}
FOUND = {"kind": "vllm", "url": "http://127.0.0.1:8000"}
SGLANG = {"kind": "sglang", "url": "http://127.0.0.1:30000"}


def test_a_server_is_started_or_found():
    assert isinstance(parse_config({"engine": STARTED}).engine, VllmEngineConfig)
    assert isinstance(parse_config({"engine": FOUND | {"key_variable": "KEY"}}).engine, VllmEngineConfig)
    assert isinstance(parse_config({"engine": SGLANG}).engine, SglangEngineConfig)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "vllm"}, "give python, an interpreter that has vLLM, or url"),
        (STARTED | FOUND, "one of the two"),
        (STARTED | {"key_variable": "KEY"}, "key_variable is of a server that runs already"),
        (STARTED | {"weights_dir": "/mnt"}, "weights_dir is of a server that runs already"),
        (FOUND | {"cache_gib": 1}, "cache_gib is of a server that the job starts"),
        (FOUND | {"compile": False}, "compile is of a server that the job starts"),
        ({"kind": "sglang"}, "engine.url"),
        (SGLANG | {"url": "127.0.0.1:30000"}, "engine.url"),
        (SGLANG | {"url": "http://127.0.0.1:30000/v1"}, "address alone, without a path: http://127.0.0.1:30000"),
        (SGLANG | {"seeds": True}, "seeds"),
        (STARTED | {"cache_gib": 1.5}, "cache_gib"),
        ({"kind": "tgi"}, "known kinds: 'embedded', 'vllm', 'sglang', 'fake'"),
    ],
)
def test_what_names_no_server_is_refused(engine, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({"engine": engine})


TWO = {"policies": {"a": {}, "b": {"frozen": True}}}


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"engine": STARTED, "deterministic": True}, "deterministic = true needs engine.kind = 'embedded'"),
        ({"engine": STARTED, "policies": {"p": {"adapter": {"rank": 4}}}}, "policies.p.adapter needs"),
        ({"engine": FOUND} | TWO, "samples from one policy, and there are 2"),
        ({"engine": SGLANG} | TWO, "samples from one policy, and there are 2"),
        (
            {"engine": STARTED, "roles": {"x": {"policy": "policy", "versions": "pool", "pool": {"every_steps": 1}}}},
            "a pool of past versions",
        ),
    ],
)
def test_what_a_server_can_not_play_is_refused(job, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(job)


def test_a_run_goes_on_where_its_server_has_moved():
    def digest(**engine) -> str:
        return JobConfig.model_validate({"engine": {"kind": "vllm"} | engine}).digest()

    first = digest(url="http://a:1")
    assert digest(url="http://b:2", key_variable="KEY", weights_dir="/mnt") == first
    assert digest(python="/venv/bin/python", startup_seconds=5) == first
    assert digest(url="http://a:1", dtype="float32") != first
    assert digest(url="http://a:1", seeds=True) != first
