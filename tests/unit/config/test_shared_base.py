"""Which settings a job on a base server may have."""

from __future__ import annotations

import tomllib

import pytest

from palestra.config import JobConfig, dump_config, parse_config
from palestra.errors import ConfigError

BASE = {"base": "unix:runs/base/socket", "adapter": {"rank": 4}}
ALONE = {"policies": {"policy": {"adapter": {"rank": 4}}}}


def test_the_address_is_kept_and_is_no_part_of_what_is_trained():
    job = parse_config({"policies": {"policy": BASE}})
    assert job.base == "unix:runs/base/socket"
    assert parse_config(tomllib.loads(dump_config(job))) == job
    moved = parse_config({"policies": {"policy": BASE | {"base": "wss://10.0.0.5:7413"}}})
    assert job.digest() == moved.digest() == parse_config(ALONE).digest()
    assert parse_config(ALONE).base is None
    assert "base" not in dump_config(parse_config(ALONE))


@pytest.mark.parametrize("frozen", ["unix:a", "ws://b:1"])
def test_the_address_of_a_frozen_policy_is_no_part_of_what_is_trained(frozen):
    jobs = [
        parse_config({"policies": {"policy": BASE | {"base": base}, "judge": {"base": base, "frozen": True}}})
        for base in (frozen, "unix:other")
    ]
    assert jobs[0].digest() == jobs[1].digest()


def test_a_served_model_needs_no_adapter():
    assert parse_config({"kind": "inference", "policies": {"policy": {"base": "shared"}}}).base == "shared"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"policies": {"policy": {"base": "unix:a"}}}, "policies.policy.*give"),
        ({"policies": {"policy": BASE | {"base": "http://a:1"}}}, "ws://.*wss://"),
        ({"policies": {"policy": BASE}, "engine": {"dtype": "float32"}}, "engine.dtype.*set"),
        ({"policies": {"policy": BASE}, "trainer": {"micro_batch_tokens": 9}}, "trainer.micro_batch_tokens"),
        ({"policies": {"policy": BASE, "judge": {"frozen": True}}}, "same base"),
        (
            {"policies": {"policy": BASE, "judge": {"frozen": True, "base": "unix:b"}}},
            "policies.policy.base.*'unix:runs/base/socket'.*policies.judge.base.*'unix:b'",
        ),
    ],
)
def test_what_a_base_server_can_not_do_is_refused(data, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(data)


def test_a_fake_engine_needs_no_base_server():
    assert JobConfig.model_validate({"policies": {"policy": BASE}, "engine": {"kind": "fake"}}).base is None
