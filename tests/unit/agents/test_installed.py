"""Agents by the name that a job's configuration has."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from palestra.agents import ModelAgent, RandomAgent, ToolAgent, named_agents
from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.runtime.arguments import Play, resolve_rollout
from palestra.runtime.tasks import played_of

ONE, PAIR = ModelAgent(max_tokens=3), {"": ModelAgent(), "b": RandomAgent()}
FOUND = {"one": ONE, "pair": PAIR, "made": lambda moves=0: PAIR, "number": lambda: 7, "class": RandomAgent}


@pytest.fixture(autouse=True)
def others(monkeypatch) -> None:
    points = {name: EntryPoint(name, f"stranger:{name}", "palestra.agents") for name in FOUND}
    monkeypatch.setattr("palestra.agents.agent.extensions", lambda group: points)
    monkeypatch.setattr("palestra.agents.agent.load_extension", lambda point: FOUND[point.name])


def test_an_agent_comes_as_it_is_or_is_made_from_its_settings():
    assert named_agents(None, {}) is None
    assert named_agents("one", {}) == {"": ONE}
    assert named_agents("pair", {}) == named_agents("made", {"moves": 2}) == PAIR
    made = named_agents("class", {})
    assert made is not None
    assert isinstance(made[""], RandomAgent)


def test_the_agent_with_installed_tools():
    agents = named_agents("tools", {"tools": "calculator", "max_calls": 2})
    assert agents is not None
    agent = agents[""]
    assert isinstance(agent, ToolAgent)
    assert [tool["function"]["name"] for tool in agent.manager.schemas] == ["calculator"]


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("toools", {}, "agent"),
        ("number", {}, "agent"),
        ("tools", {}, "agent_settings"),
        ("tools", {"tools": "calculator", "max_calls": 0}, "agent_settings"),
        ("tools", {"tools": "calculator, calculator"}, "agent_settings"),
        ("one", {"hint": "a"}, "agent_settings"),
        ("made", {"hint": "a"}, "agent_settings"),
    ],
)
def test_what_cannot_act_is_refused_with_its_key(name, settings, key):
    with pytest.raises(ConfigError, match=rf"^environment\.{key}: "):
        named_agents(name, settings)


def config(**environment: Any) -> JobConfig:
    return JobConfig.model_validate({"environment": environment})


def test_a_job_plays_with_the_agent_that_it_names():
    spec = played_of(config(name="arithmetic", agent="one"))
    assert spec is not None
    assert spec.agents == {"": ONE}
    for play in (Play(reward=lambda task, answer: 1.0), Play(environment=lambda: None)):  # type: ignore[arg-type,return-value]
        found = resolve_rollout(config(agent="one"), play)
        assert found.agents == {"": ONE}  # type: ignore[union-attr]


def test_an_agent_without_an_environment_and_beside_a_rollout_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.agent"):
        played_of(config(agent="one"))
    with pytest.raises(ConfigError, match=r"environment\.agent"):
        resolve_rollout(config(agent="one"), Play(rollout=lambda task, endpoint: 1.0))
    with pytest.raises(ValueError, match=r"environment\.agent_settings"):
        config(name="arithmetic", agent_settings={"a": 1})
