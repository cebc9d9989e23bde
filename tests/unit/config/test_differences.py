from __future__ import annotations

from palestra.config import JobConfig, PolicyConfig, name_differences, parse_config


def test_equal_configurations_and_those_that_differ_in_free_keys_have_no_differences():
    other = parse_config({"name": "other", "steps": 90, "server": {"port": 0}, "rollout": {"lease_seconds": 5.0}})
    assert name_differences(JobConfig(), JobConfig()) == name_differences(JobConfig(), other) == ""


def test_each_key_is_named_with_both_values_also_where_only_one_has_it():
    before = parse_config({"policies": {"a": {"sampling": {"max_tokens": 8}}}})
    now = parse_config({"policies": {"a": {"model": "tiny-random"}, "judge": {"frozen": True}}})
    assert name_differences(before, now) == (
        "policies.a.model was 'SmolLM2-135M-Instruct' and is 'tiny-random'; "
        "policies.a.sampling.max_tokens was 8 and is 1024; policies.judge was none and is a table"
    )


def test_a_long_list_and_long_values_are_cut():
    before = JobConfig(policies={"a": PolicyConfig(model="/" + "m" * 200)}, seed=1, deterministic=True)
    now = parse_config({"algorithm": {"clip_low": 0.1, "clip_high": 0.1, "epochs": 2}, "policies": {"a": {}}})
    text = name_differences(before, now)
    assert text.startswith("seed was 1 and is 0; deterministic was True and is False; policies.a.model was '/mmm")
    assert "; algorithm." in text
    assert text.endswith("; and 5 more")
    assert len(text) < 300
