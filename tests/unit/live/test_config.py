"""What a file with `kind = "live"` may say, and what is private."""

from __future__ import annotations

from io import StringIO

import pytest

from palestra.cli.main import main
from palestra.cli.run import job_of
from palestra.config import parse_config
from palestra.errors import ConfigError
from palestra.runtime.console import Console
from palestra.types.progress import JobProgress, of_steps
from palestra_live.config import read_live
from palestra_live.privacy import Redaction

JUDGE = {"kind": "relative", "url": "http://127.0.0.1:9"}
RUBRIC = {"kind": "rubric", "url": "http://127.0.0.1:9", "criteria": [{"name": "kind", "text": "Is it kind?"}]}
LIVE = {"kind": "live", "engine": {"kind": "fake"}}


def test_a_live_run_needs_no_keys():
    config, terms = job_of(LIVE, {}, "live.toml")
    assert (config.kind, config.rollout.group_size, config.algorithm.name) == ("training", 1, "live")
    assert terms.extension is not None


def test_a_live_run_goes_on_until_it_is_stopped_unless_it_is_given_steps():
    endless, _ = job_of(LIVE, {}, "live.toml")
    said = StringIO()
    with Console(endless, file=said):
        pass
    assert "until it is stopped" in said.getvalue()
    progress = JobProgress(job="bot", steps=endless.steps, run_dir="x", step_seconds=[1.0, 1.0, 1.0])
    assert progress.seconds_left is None
    assert (of_steps(7, endless.steps), of_steps(7, 30)) == ("7", "7/30")
    assert job_of(LIVE | {"steps": 5}, {}, "live.toml")[0].steps == 5


def test_what_is_no_palestra_run_refuses_a_live_run_in_one_line(tmp_path, capsys):
    (tmp_path / "live.toml").write_text('kind = "live"\nmodel = "tiny-random"\n[live]\nidle_seconds = 5\n')
    assert main(["submit", str(tmp_path / "live.toml"), "--control", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == (
        f"palestra: {tmp_path / 'live.toml'}: kind is 'live'; start it with `palestra run`, no service or script can\n"
    )
    with pytest.raises(ConfigError, match="start it with `palestra run`"):
        parse_config({"steps": 1}, {"kind": "live"})


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
    shadowed = {"live": {"gate": {}}, "judge": JUDGE}
    config, _, judge = read_live(LIVE | shadowed, {}, "x")
    assert (config.evaluation.every_steps, config.judge, judge and judge.compares) == (0, None, "rank")
    assert config.checkpoint.every_steps == 1


@pytest.mark.parametrize("gate", [{}, {"gate": {}}])
def test_a_judge_that_compares_nothing_scores_sessions_and_makes_no_shadow(gate):
    config, live, judge = read_live(LIVE | {"live": {"judged": 0.25} | gate, "judge": RUBRIC}, {}, "x")
    assert (config.judge, live.judged, judge and judge.compares) == (None, 0.25, None)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"live": {"idle": 3}}, "unknown key"),
        ({"live": {"idle_seconds": 0}}, "idle_seconds"),
        ({"live": {"redact": ["("]}}, "no regular expression"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
        ({"algorithm": {"name": "grpo"}}, "'grpo'"),
        ({"environment": {"name": "gomoku"}}, "the run has none; add"),
        ({"judge": JUDGE}, "the run has none; add"),
        ({"live": {"gate": {"shadow": True}}}, "unknown key"),
        ({"live": {"gate": {"drop": 0.0005}}, "judge": JUDGE}, "to show"),
        ({"live": {"judged": 0.5}}, "no judge scores sessions"),
        ({"live": {"gate": {}, "judged": 0.5}, "judge": JUDGE}, "no judge scores sessions"),
        ({"live": {"judged": 1.5}, "judge": RUBRIC}, "judged"),
        ({"judge": {"kind": "reward_model", "path": "x"}}, "may be outside"),
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
    redaction = Redaction(f"{tmp_path / 'mine.py'}:hide")
    deep = {"messages": [{"content": [{"type": "text", "text": "I am Ann"}]}]}
    assert redaction.finds(deep)
    assert Redaction([r"\d{4}"]).finds({"a": [1, None, "pin 1234"]})
    assert redaction.finds({"Ann": 1})
    assert not redaction.finds({"messages": [{"content": "I am Bob, 123"}], "seed": 1234})
    assert not Redaction([]).is_on


def test_a_function_that_gives_no_text_is_an_error(tmp_path):
    (tmp_path / "none.py").write_text("def hide(text):\n    return None\n")
    with pytest.raises(ConfigError, match="returned NoneType"):
        Redaction(f"{tmp_path / 'none.py'}:hide").finds({"a": "b"})
