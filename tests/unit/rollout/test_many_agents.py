"""Episodes of several agents: legal moves, agents that are late or fail, and what is remembered in their place."""

from __future__ import annotations

import asyncio

import pytest

from palestra.agents import Agent, ModelAgent
from palestra.envs import Fault, MultiAgentEnvironment, Outcome, TimeLimit
from palestra.errors import RolloutFailed
from palestra.renderers import ByteTokenizer
from palestra.renderers.vocabulary import Vocabulary
from palestra.rollout import RolloutSpec, Termination
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.types.messages import text_message
from palestra_worlds import KuhnPoker
from unit.session.conftest import says


class Says(Agent):
    """Says a text after some time, or raises."""

    def __init__(self, text: str, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.text, self.seconds, self.error = text, seconds, error

    async def step(self, observation, policy):
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return [], text_message("assistant", self.text)


class Asks(MultiAgentEnvironment):
    """`a` and `b` act in turns, twice each; the reward of both is how many actions there were."""

    roles = ("a", "b")
    moves = ("x", "y")
    time_limits = {"a": TimeLimit(seconds=0.02, default="y")}  # noqa: RUF012
    forfeits = frozenset({Fault.FAILED})

    def begin(self, task):
        self.record = []

    def view(self, role):
        return " ".join(self.record) or "-"

    def apply(self, actions):
        self.record += [action.text for action in actions.values()]
        return Outcome(rewards=dict.fromkeys(self.roles, 4.0), over=True) if len(self.record) == 4 else None

    def forfeit(self, role, fault):
        return Outcome(rewards={role: -1.0}, over=True, info={"fault": fault})


def runner(bench, environment, **agents) -> Runner:
    return Runner(Sessions(bench.context, 10), RolloutSpec(environment=environment, agents=agents))


async def test_a_model_is_held_to_the_choices_that_the_environment_gives(bench):
    bench.script = says("p")
    trajectory = await runner(bench, KuhnPoker, **{"": ModelAgent()}).play_episode({"cards": [1, 2]})
    assert [(chat.agent, chat.messages[-1].text, chat.reply.text) for chat in trajectory.chats] == [
        ("first", "1", "p"),
        ("second", "2p", "p"),
    ]
    assert all('"p" | "b"' in chat.sampling.grammar for chat in trajectory.chats)
    assert trajectory.episode.rewards == {"second": 1.0, "first": -1.0}


async def test_an_agent_that_is_late_remembers_what_was_done_in_its_place_and_its_turn_is_cancelled(bench):
    seen, over = [], []

    class Slow(Agent):
        async def step(self, observation, policy):
            seen.append([message.text for message in (*policy.history, *observation.content)])
            try:
                await asyncio.sleep(60)
            finally:
                over.append(observation.id)

    played = await runner(bench, Asks, a=Slow(), b=Says("x")).play_episode({})
    assert seen == [["-"], ["-", "y", "y x"]]
    assert len(over) == 2
    assert played.episode.rewards == {"a": 4.0, "b": 4.0}
    assert played.episode.metadata["unanswered_observations"] == 2


async def test_an_agent_that_fails_is_scored_where_the_environment_says_so_and_else_fails_the_episode(bench):
    broken = Says("", error=ValueError("confused"))
    played = await runner(bench, Asks, a=Says("x"), b=broken).play_episode({})
    assert played.episode.rewards == {"b": -1.0, "a": 0.0}

    class Fails(Asks):
        forfeits = frozenset()

    with pytest.raises(RolloutFailed, match="confused") as failed:
        await runner(bench, Fails, a=Says("x"), b=broken).play_episode({})
    assert failed.value.termination == Termination.AGENT_FAILED


async def test_rewards_that_are_not_zero_sum_fail_the_episode(bench):
    class Wrong(Asks):
        zero_sum = True

    with pytest.raises(RolloutFailed, match=r"8.*zero_sum") as failed:
        await runner(bench, Wrong, a=Says("x"), b=Says("y")).play_episode({})
    assert failed.value.termination == Termination.ENVIRONMENT_FAILED


async def test_a_move_that_the_vocabulary_can_not_express_is_refused_before_anything_is_sampled(bench, monkeypatch):
    class Lacks(ByteTokenizer):
        """Has all bytes but `y`."""

    plain = Vocabulary.bytes_of.func

    def lacking(self):
        found = plain(self)
        return lambda token: b"\0" if found(token) == b"y" else found(token)

    monkeypatch.setattr(Vocabulary.bytes_of, "func", lacking)
    with pytest.raises(RolloutFailed, match=r"'policy'.*'b'.*'y'") as failed:
        await runner(bench, Asks, a=Says("x"), b=ModelAgent()).play_episode({})
    assert failed.value.termination == Termination.AGENT_FAILED


def test_a_vocabulary_knows_which_texts_it_can_write():
    words = Vocabulary(ByteTokenizer())
    assert words.first_not_writable(["p", "é", "bet 2"]) is None
    some = Vocabulary(ByteTokenizer())
    some.__dict__["_pieces"] = (frozenset({b"ab", b"c", b"abd"}), 3)
    assert some.first_not_writable(["abc", "cab", "abdc"]) is None
    assert some.first_not_writable(["abc", "abd", "ad", "b"]) == "ad"
