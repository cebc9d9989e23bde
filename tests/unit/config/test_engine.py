"""Each kind of engine has its own keys; what an earlier version wrote, when there was one set of keys, still counts."""

from __future__ import annotations

import pytest

from palestra.config import (
    UNSET,
    EmbeddedEngineConfig,
    FakeEngineConfig,
    JobConfig,
    dump_config,
    load_config,
    parse_config,
)
from palestra.config.renames import in_present_names
from palestra.errors import ConfigError

# As the version before wrote them into a run's config.toml, and the digests in the stores of these runs.
FIRST_EMBEDDED = """
[engine]
kind = "embedded"
dtype = "float32"
device = "auto"
threads = 1
max_batch = 64
prefill_tokens = 2048
prefill_chunk = 512
in_flight_updates = "continue"
prefix_cache_tokens = 32768
scripted_delay_seconds = 0.0
scripted_tokens = 32
"""
FIRST_SCRIPTED = """
[engine]
kind = "scripted"
dtype = "bfloat16"
device = "auto"
max_batch = 64
prefill_tokens = 2048
prefill_chunk = 512
in_flight_updates = "continue"
prefix_cache_tokens = 32768
scripted_delay_seconds = 0.5
scripted_tokens = 9
"""
DIGESTS = {
    FIRST_EMBEDDED: "48b32a213a21f45bd595f608eca44928bf675da7e34171dd7a5fea43a938e0ed",
    FIRST_SCRIPTED: "e77cbbd6b087516496a71ea472949f03648b3dbd800687f202108affd25cf09d",
}


def test_an_engine_is_embedded_unless_it_says_otherwise():
    assert JobConfig().engine == EmbeddedEngineConfig()
    assert parse_config({"engine": {"threads": 2}}).engine == EmbeddedEngineConfig(threads=2)
    assert parse_config({}, {"engine.kind": "fake", "engine.reply_tokens": 3}).engine == FakeEngineConfig(
        reply_tokens=3
    )
    assert JobConfig(engine=FakeEngineConfig(delay_seconds=1)).engine.kind == "fake"
    assert parse_config({"engine": {"kind": "fake", "reply_tokens": 3}}, {"engine.reply_tokens": UNSET}).engine == (
        FakeEngineConfig()
    )


@pytest.mark.parametrize("engine", [EmbeddedEngineConfig(threads=2, cache_gib=0.5), FakeEngineConfig(reply_tokens=3)])
def test_a_written_configuration_is_read_as_it_was(engine, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(dump_config(JobConfig(engine=engine)))
    assert load_config(path).engine == engine


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"max_batch": 1}, "engine.max_batch: Input should be greater than or equal to 2; it is 1"),
        (
            {"kind": "fake", "reply_tokens": 0},
            "engine.reply_tokens: Input should be greater than or equal to 1; it is 0",
        ),
        ({"max_batsh": 8}, "unknown key 'engine.max_batsh'; did you mean 'max_batch'?"),
        ({"knd": "fake"}, "unknown key 'engine.knd'; did you mean 'kind'?"),
        ({"kind": "fake", "threads": 2}, "'engine.threads' is a key of kind = 'embedded', 'vllm' only"),
        ({"reply_tokens": 2}, "'engine.reply_tokens' is a key of kind = 'fake' only"),
        ({"kind": "vlm"}, "engine: kind is 'vlm' (known kinds: 'embedded', 'vllm', 'sglang', 'mixed', 'fake')"),
        ({"kind": ["fake"]}, "engine: kind is ['fake'] (known kinds: 'embedded', 'vllm', 'sglang', 'mixed', 'fake')"),
        ({"kind": "scripted"}, "engine: 'scripted' has a new name; write kind = 'fake'"),
        ({"kind": "fake", "scripted_tokens": 2}, "'engine.scripted_tokens' has a new name; write engine.reply_tokens"),
        ({"kind": "fake", "scripted_delay_seconds": 2}, "has a new name; write engine.delay_seconds"),
        ({"scripted_tokens": 2}, "'engine.scripted_tokens' has a new name; write engine.reply_tokens"),
        (3, "engine: it is a table, such as {kind = 'fake'}, and not 3"),
    ],
)
def test_a_mistake_is_said_by_the_key_that_was_written(engine, said):
    for read in (lambda: parse_config({"engine": engine}), lambda: JobConfig(engine=engine)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_key_of_the_engine_at_the_top_is_found():
    with pytest.raises(ConfigError, match=r"did you mean 'engine.max_batch'\?"):
        JobConfig(max_batch=3)


@pytest.mark.parametrize("text", DIGESTS, ids=["embedded", "scripted"])
def test_the_config_of_a_run_of_the_version_before_is_read_and_is_the_same_job(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "run.db").touch()
    config = load_config(tmp_path / "config.toml")
    expected = (
        EmbeddedEngineConfig(dtype="float32", threads=1)
        if "embedded" in text
        else FakeEngineConfig(delay_seconds=0.5, reply_tokens=9)
    )
    assert config.engine == expected
    assert config.digest() == DIGESTS[text]
    assert config == load_config(tmp_path / "config.toml", {})
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


def test_in_any_other_file_an_old_name_is_an_error(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(FIRST_SCRIPTED)
    with pytest.raises(ConfigError, match="write kind = 'fake'"):
        load_config(path)


def test_names_of_this_version_are_left_as_they_are():
    for engine in ({"kind": "fake", "reply_tokens": 3}, {"threads": 2}, {"kind": "embedded", "dtype": "float32"}):
        assert in_present_names({"engine": engine, "steps": 3}) == {"engine": engine, "steps": 3}
    assert in_present_names({"steps": 3}) == {"steps": 3}


def test_the_digest_changes_with_every_key_of_the_fake_engine():
    digests = [
        JobConfig(engine=FakeEngineConfig(**how)).digest() for how in ({}, {"delay_seconds": 0.5}, {"reply_tokens": 9})
    ]
    assert len({JobConfig().digest(), *digests}) == 4
