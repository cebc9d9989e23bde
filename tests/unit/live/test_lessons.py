"""Edits have the gradient of SFT, and comparisons the gradient of DPO, however long the replies are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.base import Group
from palestra.algorithms.registry import create_algorithm
from palestra.config import parse_config
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import PolicyVersion
from palestra_live.feedback import Lessons
from palestra_live.lessons import lesson_episodes
from unit.building import make_chat, make_trajectory

ROW = {"session_id": "s", "cluster": "c", "score": None}
LOGPROBS = st.lists(st.floats(-9.0, -0.01), min_size=1, max_size=5)


def run_with(now, max_context=100):
    """A run whose trainer gives these logprobs to the replies, one after the other."""

    class Trainer:
        async def forward(self, policy, rows, outputs):
            assert (policy, outputs) == ("policy", {"old_logprobs"})
            found = [np.full(len(row.ids), np.nan, np.float32) for row in rows]
            for column, row, own in zip(found, rows, now, strict=True):
                column[row.loss_mask] = own
            return {"old_logprobs": found}

    config = SimpleNamespace(max_context=max_context)
    runtime = SimpleNamespace(renderer=None, config=config)
    return SimpleNamespace(trainer=Trainer(), policies=SimpleNamespace(runtime=lambda _: runtime))


def reply(index, sampled, prompt=(1, 2, 3)):
    ids = range(4 + index, 4 + index + len(sampled))
    return make_chat(index=index, prompt=prompt, completion=tuple(ids), logprobs=sampled)


@given(st.data())
async def test_a_comparison_has_the_gradient_of_dpo(data):
    sampled = [data.draw(LOGPROBS) for _ in range(2)]
    now = [data.draw(st.lists(st.floats(-9.0, -0.01), min_size=len(one), max_size=len(one))) for one in sampled]
    calls = [reply(0, sampled[0]), reply(1, sampled[1])]
    made = await lesson_episodes(run_with(now), "policy", PolicyVersion(2, 7), ROW, calls, Lessons({}, [(0, 1)]))
    algorithm = create_algorithm(parse_config({"algorithm": {"name": "dpo", "beta": 0.1}}).algorithm)
    trajectories = [make_trajectory(0, place, 1.0 - place, [call]) for place, call in enumerate(calls)]
    rows = [
        rows_of(TokenTrie([call]), episode_id=one.episode.episode_id)[0]
        for call, one in zip(calls, trajectories, strict=True)
    ]
    forward = {"old_logprobs": [], "reference_logprobs": []}
    for row, own, call in zip(rows, now, calls, strict=True):
        for name, values in (("old_logprobs", own), ("reference_logprobs", call.logprobs)):
            column = np.full(len(row.ids), np.nan, np.float32)
            column[row.loss_mask] = values
            forward[name].append(column)
    wanted = algorithm.advantages([Group(trajectories=tuple(trajectories), rows=tuple(rows))], forward)
    for one, row, weights, own in zip(made, rows, wanted.importance_weights, now, strict=True):
        advantage = one.rewards["agent"] - one.task.data["baseline"]
        assert advantage == pytest.approx(float(weights[row.loss_mask][0]), rel=1e-4, abs=1e-9)
        (call,) = one.calls
        assert call.logprobs == pytest.approx(own, rel=1e-6), "so that the ratio of the first update is 1"
        assert [(span.version, span.tokens) for span in call.versions] == [(PolicyVersion(2, 7), len(own))]
    assert [one.rewards["agent"] for one in made] == [1.0, 0.0]


async def test_replies_to_different_prompts_are_no_pair():
    calls = [reply(0, [-1.0]), reply(1, [-1.0], prompt=(1, 2))]
    assert await lesson_episodes(run_with([]), "policy", PolicyVersion(0, 0), ROW, calls, Lessons({}, [(0, 1)])) == []
    assert await lesson_episodes(run_with([]), "policy", PolicyVersion(0, 0), ROW, calls, Lessons({}, [(0, 5)])) == []


async def test_an_edit_is_a_reply_of_advantage_1_after_the_same_prompt(monkeypatch, caplog):
    monkeypatch.setattr("palestra_live.lessons._shown", lambda renderer, text: np.array([9] * len(text), np.int32))
    first = reply(0, [-1.0, -1.0])
    calls = [first, make_chat(index=1, prompt=(7,), parent=first)]
    edits = Lessons({0: "ab", None: "abc", 5: "no such call"}, [])
    run = run_with([[-3.0, -4.0], [-5.0, -6.0, -7.0]])
    one, other = await lesson_episodes(run, "policy", PolicyVersion(0, 4), ROW, calls, edits)
    for episode, call, own in ((one, first, [-3.0, -4.0]), (other, calls[1], [-5.0, -6.0, -7.0])):
        (given,) = episode.calls
        assert episode.rewards["agent"] - episode.task.data["baseline"] == 1.0
        assert given.prompt_ids.tolist() == call.prompt_ids.tolist()
        assert given.messages == call.messages
        assert (given.completion_ids.tolist(), given.logprobs.tolist()) == ([9] * len(own), own)
    assert caplog.text.count("is not trained") == 1
    long = run_with([], max_context=4)
    assert await lesson_episodes(long, "policy", PolicyVersion(0, 4), ROW, calls, Lessons({0: "ab"}, [])) == []
