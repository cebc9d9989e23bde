"""Each kind of engine has its own keys."""

from __future__ import annotations

import pytest

from palestra.config import UNSET, JobConfig, dump_config, load_config, parse_config
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake import FakeEngineConfig
from palestra.errors import ConfigError


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
        ({"kind": "vlm"}, "engine: kind is 'vlm' (known kinds: 'embedded', 'fake', 'sglang', 'vllm', 'mixed')"),
        ({"kind": ["fake"]}, "engine: kind is ['fake'] (known kinds: 'embedded', 'fake', 'sglang', 'vllm', 'mixed')"),
        (3, "engine: it is a table, such as {kind = 'embedded'}, and not 3"),
    ],
)
def test_a_mistake_is_said_by_the_key_that_was_written(engine, said):
    for read in (lambda: parse_config({"engine": engine}), lambda: JobConfig(engine=engine)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_key_of_the_engine_at_the_top_is_found():
    with pytest.raises(ConfigError, match=r"'engine.max_batch'"):
        JobConfig(max_batch=3)


def test_the_digest_changes_with_every_key_of_the_fake_engine():
    digests = [
        JobConfig(engine=FakeEngineConfig(**how)).digest() for how in ({}, {"delay_seconds": 0.5}, {"reply_tokens": 9})
    ]
    assert len({JobConfig().digest(), *digests}) == 4
