"""What a file with `kind = "live"` may say, and what is private."""

from __future__ import annotations

import pytest

from palestra.cli.run import job_of
from palestra.errors import ConfigError
from palestra_live.config import read_live
from palestra_live.privacy import Redaction

JUDGE = {"kind": "relative", "url": "http://127.0.0.1:9"}
RUBRIC = {"kind": "rubric", "url": "http://127.0.0.1:9", "criteria": [{"name": "kind", "text": "Is it kind?"}]}
LIVE = {"kind": "live", "engine": {"kind": "fake"}}


def test_a_live_run_needs_no_keys():
    config, terms = job_of(LIVE, {}, "live.toml")
    assert (config.kind, config.rollout.group_size, config.algorithm.name) == ("training", 1, "live")
    assert terms.extension is not None


def test_an_ordinary_job_is_one_as_before():
    config, terms = job_of({"engine": {"kind": "fake"}}, {}, "job.toml")
    assert (config.kind, config.algorithm.name, terms.extension) == ("training", "grpo", None)


def test_overrides_reach_both_parts():
    config, live, _ = read_live(LIVE, {"live.idle_seconds": 2.0, "rollout.groups_per_step": 3, "kind": "live"}, "x")
    assert (live.idle_seconds, config.rollout.groups_per_step) == (2.0, 3)
    _, live, _ = read_live(LIVE | {"live": {"gate": {"pairs": 9000}}}, {"live.gate.canary": 0.2}, "x")
    assert live.gate is not None
    assert (live.gate.canary, live.gate.pairs) == (0.2, 9000)


def test_a_gate_has_every_version_that_it_is_offered_evaluated_on_held_out_tasks():
    gate = {"live": {"gate": {}}, "environment": {"name": "gomoku"}, "checkpoint": {"every_steps": 3}}
    config, _, judge = read_live(LIVE | gate, {}, "x")
    assert (config.evaluation.every_steps, config.judge, judge) == (3, None, None)
    shadowed = {"live": {"gate": {"shadow": True}}, "judge": JUDGE}
    config, _, judge = read_live(LIVE | shadowed, {}, "x")
    assert (config.evaluation.every_steps, config.judge, judge and judge.compares) == (0, None, "rank")
    assert config.checkpoint.every_steps == 1


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"live": {"idle": 3}}, "unknown key"),
        ({"live": {"idle_seconds": 0}}, "idle_seconds"),
        ({"live": {"redact_patterns": ["("]}}, "no regular expression"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
        ({"algorithm": {"name": "grpo"}}, "'grpo'"),
        ({"environment": {"name": "gomoku"}}, "the run has none; add"),
        ({"judge": JUDGE}, "the run has none; add"),
        ({"live": {"gate": {"shadow": True}}}, "needs a judge that compares"),
        ({"live": {"gate": {"shadow": True}}, "judge": RUBRIC}, "needs a judge that compares"),
        ({"live": {"gate": {}}, "judge": JUDGE}, "nothing to judge"),
        ({"live": {"gate": {}}, "evaluation": {"every_steps": 3}}, "evaluation is set"),
        ({"live": {"gate": {}}, "checkpoint": {"every_steps": 6}}, "set every_steps to 5 or less"),
        ({"policies": {"a": {}, "b": {}}, "roles": {"x": "b"}}, "trains one policy"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_what_can_not_be_is_said_in_one_line(tables, said):
    with pytest.raises(ConfigError, match=said) as error:
        read_live(LIVE | tables, {}, "live.toml")
    assert "\n" not in str(error.value)


def test_private_is_what_a_pattern_matches_or_the_function_changes(tmp_path):
    (tmp_path / "mine.py").write_text("def hide(text):\n    return text.replace('Ann', 'X')\n")
    redaction = Redaction([r"\d{4}"], f"{tmp_path / 'mine.py'}:hide")
    deep = {"messages": [{"content": [{"type": "text", "text": "I am Ann"}]}]}
    assert redaction.finds(deep)
    assert redaction.finds({"a": [1, None, "pin 1234"]})
    assert redaction.finds({"Ann": 1})
    assert not redaction.finds({"messages": [{"content": "I am Bob, 123"}], "seed": 1234})
    assert not Redaction([], None).is_on


def test_a_function_that_gives_no_text_is_an_error(tmp_path):
    (tmp_path / "none.py").write_text("def hide(text):\n    return None\n")
    with pytest.raises(ConfigError, match="returned NoneType"):
        Redaction([], f"{tmp_path / 'none.py'}:hide").finds({"a": "b"})
