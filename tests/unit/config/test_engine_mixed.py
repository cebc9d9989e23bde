"""`[engine]` with workers of several kinds: which pools can be, and what belongs to the pool or to one kind."""

from __future__ import annotations

import pytest

from palestra.config import (
    JobConfig,
    MixedEngineConfig,
    dump_config,
    find_mistakes,
    load_config,
    parse_config,
)
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import ConfigError

HERE = {"kind": "embedded", "replicas": 2}
FOUND = {"kind": "vllm", "url": ["http://a:1", "http://b:2"]}
STARTED = {"kind": "vllm", "python": "/venv/bin/python", "replicas": 3}
SGLANG = {"kind": "sglang", "url": "http://c:3"}


def pool(*workers, **more) -> dict:
    return {"engine": {"workers": list(workers)} | more}


def test_a_list_of_workers_is_one_pool():
    engine = parse_config(pool(HERE, FOUND, SGLANG)).engine
    assert isinstance(engine, MixedEngineConfig)
    assert engine == parse_config(pool(HERE, FOUND, SGLANG, kind="mixed")).engine
    assert (engine.worker_count, engine.started_count) == (5, 2)
    assert engine.pooled
    assert parse_config(pool(HERE, STARTED)).engine.started_count == 5
    assert isinstance(parse_config(pool({"threads": 2}, FOUND)).engine.tables[0], EmbeddedEngineConfig)


def test_workers_have_what_is_of_the_whole_pool():
    engine = parse_config(pool(HERE, FOUND, stuck_seconds=5.0)).engine
    assert [(table.kind, table.stuck_seconds) for table in engine.tables] == [
        ("embedded", 5.0),
        ("vllm", 5.0),
    ]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (pool(HERE), "workers.*two tables"),
        (pool(HERE, {"kind": "fake"}), r"engine\.workers\.1.*'fake'.*'embedded'.*'sglang'.*'vl"),
        (pool(HERE, 3), r"engine\.workers\.1.*\{kind.*'embedded'\}.*3"),
        (pool(HERE, FOUND | {"url": "b:2"}), r"engine\.workers\.1\.url\.0.*'b:2'"),
        (pool(HERE, FOUND | {"sed": True}), r"'engine\.workers\.1\.sed'.*'seeds'"),
        (pool({"seeds": True}, FOUND), r"'engine\.workers\.0\.seeds'.*'vllm'"),
        (pool(HERE, FOUND, replicas=2), r"'engine\.replicas'.*'embedded'.*'fake'.*'sglang'.*'vllm'"),
        (pool(HERE, FOUND, dtype="float32"), r"kinds.*engine\.workers"),
        (pool(HERE | {"stuck_seconds": 5}, FOUND), r"workers\.0\.stuck_seconds"),
        (pool(HERE, FOUND | {"dtype": "float32"}), r"workers\.1\.dtype.*'float32'.*workers\.0\.dtype.*'bf"),
        (pool(HERE, HERE), "start.*'embedded'"),
        (pool(STARTED, STARTED), "start.*'vllm'"),
        (pool(FOUND, SGLANG | {"url": "http://b:2"}), "http://b:2"),
        (pool(HERE, FOUND) | {"deterministic": True}, "true.*engine.kind.*'embedded'"),
        (pool(HERE, FOUND) | {"policies": {"a": {}, "b": {"frozen": True}}}, "samples.*policy"),
        (
            pool(HERE, STARTED)
            | {"roles": {"x": {"policy": "policy", "pool": {"every_steps": 1}}}},
            r"policies\.policy\.adapter.*engine\.kind.*'vllm'",
        ),
    ],
)  # fmt: skip
def test_what_is_no_pool_is_refused_by_the_key_that_was_written(job, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(job)
    assert "\n" not in str(caught.value)


def test_servers_of_one_kind_with_different_keys_may_stand_in_two_tables():
    first, second = FOUND | {"url": "http://a:1", "key_variable": "A"}, FOUND | {"url": "http://b:2"}
    assert parse_config(pool(first, second)).engine.worker_count == 2


def test_a_written_configuration_is_read_as_it_was(tmp_path):
    path = tmp_path / "job.toml"
    config = parse_config(pool(HERE, FOUND, SGLANG, stuck_seconds=5.0))
    path.write_text(dump_config(config))
    assert load_config(path) == config
    path.write_text('[[engine.workers]]\nthreads = 1\n[[engine.workers]]\nkind = "vllm"\nurl = "http://a:1"\n')
    assert load_config(path).engine.worker_count == 2
    path.write_text('[[engine.workers]]\nthreads = 0\n[[engine.workers]]\nkind = "vllm"\nurl = "a:1"\n')
    _, mistakes = find_mistakes(path)
    assert [mistake.place for mistake in mistakes] == [
        ("engine", "workers", "0", "threads"),
        ("engine", "workers", "1", "url", "0"),
    ]


def test_a_run_goes_on_with_servers_elsewhere_and_other_numbers_of_workers():
    def digest(*workers, **more) -> str:
        return JobConfig.model_validate(pool(*workers, **more)).digest()

    first = digest(HERE, FOUND)
    assert digest(HERE | {"replicas": 1}, FOUND | {"url": "http://z:9", "key_variable": "KEY"}) == first
    assert digest(HERE, STARTED) == first
    assert digest(HERE, FOUND, SGLANG) != first
    assert digest(HERE, FOUND | {"seeds": True}) != first


def test_a_vllm_that_is_neither_started_nor_found_is_for_a_service():
    for engine in (pool(HERE, {"kind": "vllm"}), {"engine": {"kind": "vllm", "replicas": 2}}):
        with pytest.raises(ConfigError, match=r"python.*submit"):
            parse_config(engine).engine.require_place()
    for engine in (pool(HERE, STARTED), pool(HERE, FOUND), {"engine": STARTED}, {"engine": SGLANG}, {}):
        parse_config(engine).engine.require_place()
