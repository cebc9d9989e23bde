"""A request that another policy answers than the one it names, because of its agent's role."""

from __future__ import annotations

import json

import pytest

from palestra.server.dialects.chat import ChatCompletions
from palestra.server.dialects.completions import Completions
from palestra.server.dialects.fields import agent_of

BODIES = [
    (ChatCompletions(), {"model": "white", "messages": [{"role": "user", "content": "?"}], "n": 2}),
    (Completions(), {"model": "white", "prompt": ["a", "b"]}),
]


@pytest.mark.parametrize("name", ["gegnér", "spieler-中", "opponent"])
def test_the_name_of_an_agent_may_come_as_utf_8_or_as_latin_1(name):
    assert agent_of({"x-palestra-agent": name.encode().decode("latin-1")}) == name  # as headers are read
    if name != "spieler-中":
        assert agent_of({"x-palestra-agent": name}) == name


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_all_its_calls_are_of_that_policy_and_a_retry_is_known_by_it_too(dialect, body):
    asked = dialect.parse(json.dumps(body).encode(), {"x-palestra-agent": "opponent"})
    assert {(call.policy, call.agent) for call in asked.calls} == {("white", "opponent")}
    other = dialect.parse(json.dumps(body).encode(), {"x-palestra-agent": "opponent"})
    other.set_caller("opponent/sub", "black")
    assert {(call.policy, call.agent) for call in other.calls} == {("black", "opponent/sub")}
    digests = [[call.choice_digest(n) for call in one.calls for n in range(call.choices)] for one in (asked, other)]
    assert len({*digests[0], *digests[1]}) == 4
