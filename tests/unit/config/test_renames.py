"""Names of an earlier version: refused with the new one where a person writes them, translated where a run has them."""

from __future__ import annotations

import pytest

from palestra.config import (
    EmbeddedEngineConfig,
    FakeEngineConfig,
    GRPOConfig,
    JobConfig,
    RolloutConfig,
    load_config,
    parse_config,
)
from palestra.config.renames import RENAMES, in_first_names, in_present_names
from palestra.errors import ConfigError

# What the version before wrote into stores as the digest of these configurations, and into config.toml.
BEFORE = {
    "7a55f678be7f88dd608dcae840626420cd2c9b930633f7db548ebc9d4dd39b35": {},
    "a040c55d376641f290b3d715b97da91806814272cb9eb607396b9b3b936e07a4": {
        "algorithm": {
            "aggregation": "token",
            "importance": "token_truncate",
            "abandoned": "exclude",
            "epochs": 3,
            "clip_high": 0.28,
        }
    },
    "622937cf697602d9fb501fcb23c0d13463e6247284f844f40d12c5ec9ef7b547": {
        "algorithm": {"aggregation": "constant", "importance": "sequence_mask", "importance_limit": 3}
    },
    "700a5f635b23eede5ade577fea4181df6295cbe87bcc90e55af3488757f75e57": {
        "algorithm": {"aggregation": "rollout", "importance": "token_mask"},
        "policies": {"a": {"optimizer": {"learning_rate": 1e-7, "epsilon": 1e-12, "betas": [0.9, 0.95]}}},
        "environment": {"name": "gomoku", "settings": {"size": 5, "x": 1e-5}},
    },
    "03e97a8489a7c4fe1d2012519542643d2961f4fffe32a3157f6eddde430e6f54": {
        "algorithm": {"importance": "sequence_truncate"},
        "rollout": {"stripped_whitespace": "keep"},
        "policies": {"policy": {"optimizer": {"schedule": "linear"}}},
        "steps": 7,
    },
}
SECTIONS = {"algorithm": (GRPOConfig,), "engine": (EmbeddedEngineConfig, FakeEngineConfig)}
SAVED = """[algorithm]
name = "grpo"
aggregation = "token"
importance = "token_truncate"
abandoned = "exclude"
epochs = 3
clip_high = 0.28
"""


@pytest.mark.parametrize("digest", sorted(BEFORE))
def test_a_configuration_of_the_version_before_is_the_same_job(digest):
    assert parse_config(in_present_names(BEFORE[digest])).digest() == digest


def test_present_names_are_left_as_they_are_and_translating_twice_is_translating_once():
    for before in BEFORE.values():
        once = in_present_names(before)
        assert in_present_names(once) == once


def test_every_rename_leads_to_a_key_and_values_that_exist_and_back():
    for rename in RENAMES:
        assert any(rename.now in section.model_fields for section in SECTIONS[rename.section])
        for before, now in rename.values.items():
            config = parse_config({rename.section: {rename.now: now}})
            dumped = in_first_names(config.model_dump())
            assert dumped[rename.section][rename.before] == before
            assert parse_config(in_present_names(dumped)) == config


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda: parse_config({"algorithm": {"aggregation": "token"}}),
            "config: 'algorithm.aggregation' has a new name; write algorithm.loss_agg_mode = 'token-mean'",
        ),
        (
            lambda: parse_config({}, {"algorithm.importance": "sequence_mask"}),
            "config: 'algorithm.importance' has a new name; write algorithm.importance_sampling = 'sequence-mask'",
        ),
        (
            lambda: parse_config({"algorithm": {"importance": 3}}),
            "config: 'algorithm.importance' has a new name; write algorithm.importance_sampling",
        ),
        (
            lambda: GRPOConfig(abandoned="exclude"),
            "GRPOConfig: 'abandoned' has a new name; write train_on = 'final-branch'",
        ),
        (
            lambda: JobConfig(algorithm={"abandoned": "train"}),
            "JobConfig: 'algorithm.abandoned' has a new name; write algorithm.train_on = 'all-calls'",
        ),
        (lambda: parse_config({"algorithm": {"loss_agg_mode": "token"}}), "it is 'token', which is 'token-mean' now"),
        (lambda: RolloutConfig(abandoned="train"), "RolloutConfig: unknown key 'abandoned'"),
    ],
)
def test_an_old_name_is_an_error_that_tells_the_new_one(write, said):
    with pytest.raises(ConfigError) as caught:
        write()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_config_of_a_run_is_translated_and_the_same_text_elsewhere_is_refused(tmp_path):
    for name in ("config.toml", "job.toml"):
        (tmp_path / name).write_text(SAVED)
    with pytest.raises(ConfigError, match="new name"):
        load_config(tmp_path / "config.toml")  # no run is here yet
    (tmp_path / "run.db").touch()
    algorithm = load_config(tmp_path / "config.toml").algorithm
    assert (algorithm.loss_agg_mode, algorithm.importance_sampling) == ("token-mean", "token-truncate")
    assert (algorithm.train_on, algorithm.epochs) == ("final-branch", 3)
    with pytest.raises(ConfigError, match="new name"):
        load_config(tmp_path / "job.toml")


POOL = {"replicas": 3, "sync": "all", "stuck_seconds": 5.0}
OTHER_ENGINES = {
    "fake": POOL | {"delay_seconds": 0.5, "reply_tokens": 7},
    "embedded": POOL | {"threads": 1, "max_batch": 8, "prefix_cache_tokens": 128},
    "vllm": POOL | {"python": "/opt/vllm/bin/python", "dtype": "float32", "cache_gib": 3},
    "sglang": {"sync": "all", "stuck_seconds": 5.0, "url": ["http://a:1", "http://b:1"], "weights_dir": "/shared"},
}


@pytest.mark.parametrize("kind", ["fake", "embedded", "vllm", "sglang"])
def test_what_is_written_now_is_read_as_it_is_with_every_key_of_every_engine(kind):
    """A service reads the configurations of its jobs so, and a run that is resumed its own."""
    config = parse_config({"engine": {"kind": kind} | OTHER_ENGINES[kind]})
    dumped = config.model_dump(mode="json")
    assert dumped["engine"].items() >= OTHER_ENGINES[kind].items()
    assert in_present_names(dumped)["engine"] == dumped["engine"]
    assert parse_config(in_present_names(dumped)) == config
