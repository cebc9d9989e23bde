"""What `palestra worker` is told to play: found, or refused in one line before a server is asked."""

from __future__ import annotations

import pytest

from palestra.agents import ModelAgent
from palestra.cli.main import main
from palestra.cli.worker import load_played
from palestra.envs.arithmetic import CalculatorEnvironment
from palestra.errors import ConfigError
from palestra.rollout import RolloutSpec
from palestra.types.wire import RolloutFacts
from palestra_worlds import Gomoku

FACTS = RolloutFacts(seed=0, default="policy")
NAMED = RolloutFacts(seed=0, default="policy", environment="gomoku", settings={"size": 5})
OWN = """
from palestra.agents import Agent, ModelAgent
from palestra_worlds import Gomoku
from palestra_remote import SeatEnvironment
from palestra.rollout import RolloutSpec

class Own(Gomoku):
    pass

class Thinks(Agent):
    async def step(self, observation, policy): ...

class Takes(Thinks):
    def __init__(self, tools): ...

class Neither: ...

def rollout(task, endpoint): ...
def make(): return Own(size=6)
def scores(task): ...

one = Own(size=5)
seat = SeatEnvironment("black", "http://127.0.0.1:1", "key")
short = ModelAgent(max_tokens=3)
spec = RolloutSpec(environment=Own)
number = 7
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def test_an_environment_is_played_by_the_model_with_the_settings_that_are_given(own):
    spec = load_played(own("Own"), None, '{"size": 5}')(FACTS)
    assert isinstance(spec, RolloutSpec)
    assert isinstance(spec.environment(), Gomoku)
    assert spec.environment()._defaults["size"] == 5
    assert spec.agents is None


def test_an_environment_that_makes_others_is_played_by_one_for_each_episode(own):
    make = load_played(own("seat"), None, "{}")(FACTS).environment
    one, other = make(), make()
    assert one is not other
    assert (one.roles, other.roles) == (("black",), ("black",))


def test_a_function_that_makes_an_environment_is_told_from_a_rollout_function(own):
    assert load_played(own("make"), None, "{}")(FACTS).environment()._defaults["size"] == 6
    assert load_played(own("rollout"), None, "{}")(FACTS).__name__ == "rollout"


def test_a_spec_is_played_as_it_is(own):
    assert isinstance(load_played(own("spec"), None, "{}")(FACTS).environment(), Gomoku)


def test_an_agent_acts_in_the_environment_of_the_job_or_in_one_that_is_named(own):
    for name, environment in (("Thinks", None), ("short", own("make"))):
        spec = load_played(own(name), environment, "{}")(NAMED)
        assert isinstance(spec.environment(), Gomoku)
        assert set(spec.agents) == {""}
    assert isinstance(spec.agents[""], ModelAgent)


def test_what_ships_is_played_by_name_and_without_a_name_what_the_job_names():
    assert isinstance(load_played("calculator", None, "{}")(FACTS).environment(), CalculatorEnvironment)
    assert load_played(None, None, "{}")(NAMED).environment()._defaults["size"] == 5
    assert load_played(None, None, '{"size": 7}')(NAMED).environment()._defaults["size"] == 7


@pytest.mark.parametrize(
    ("name", "environment", "settings", "said"),
    [
        ("no_such_module:Thing", None, "{}", "module named"),
        ("Missing", None, "{}", "'Missing'"),
        ("Neither", None, "{}", "none.*played"),
        ("number", None, "{}", "int.*none"),
        ("scores", None, "{}", "none.*played"),
        ("one", None, "{}", "episode.*name"),
        ("Takes", None, "{}", "made without"),
        ("Thinks", None, "{}", "job names"),
        ("Own", "calculator", "{}", "--environment"),
        ("Own", None, "[1]", "settings.*JSON"),
        ("gomuku", None, "{}", "you.*'gomoku'"),
        ("gomoku", None, '{"sise": 3}', "sise"),
        (None, "calculator", "{}", "--environment"),
        (None, None, "{}", "job names"),
    ],
)
def test_anything_else_is_refused_in_a_line(own, name, environment, settings, said):
    reference = own(name) if name is not None and name[0] != "g" and ":" not in name else name
    with pytest.raises(ConfigError, match=said) as refused:
        load_played(reference, environment, settings)(FACTS)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--score", "score.py"], "--score is for --harness"),
        (["--harness", "pi"], "--harness needs --score"),
        (["--harness", "pie", "--score", "score.py"], "did you mean pi"),
        (["--harness", "pi", "--score", "none.py"], "none.py"),
        (["--harness", "pi", "--score", "score.py", "--settings", '{"max_cals": 3}'], "max_calls"),
        (["--harness", "pi", "--score", "score.py", "gomoku"], "--harness says what is played"),
    ],
)
def test_what_is_wrong_with_a_harness_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text("def score(task, result): ...")
    assert main(["worker", *words]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
