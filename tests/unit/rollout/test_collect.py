"""Several agents at once in one episode: each sees its own conversation, and everything is recorded and credited."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from palestra.agents import Agent, ModelAgent, RandomAgent
from palestra.config import GRPOConfig, Roles
from palestra.envs import ConcurrentEnvironment, Environment, Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import simultaneous, turns
from palestra.errors import ContextOverflow, RolloutFailed
from palestra.rollout import RolloutSpec, Termination
from palestra.rollout.result import LONGEST_INFO
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.types.calls import ForkReason
from palestra.types.messages import text_message
from palestra.types.states import EpisodeState
from unit.building import TASK, FakeClock, rows_of
from unit.session.conftest import STOP, Bench
from unit.session.test_policies import TwoPolicies


class Split(ConcurrentEnvironment):
    """The first action starts two subagents; when both have answered, the parent sees it, and its answer ends all."""

    async def start(self, task):
        self.answers, self.parents = [], []
        self.emit("planner", (text_message("user", "split"),))

    async def on_action(self, observation, action):
        if observation.agent != "planner":
            await asyncio.sleep(0.01 if observation.agent.endswith("0") else 0)
            self.answers.append(observation.agent)
            self.parents.append(observation.id)
            if len(self.answers) == 2:
                told = text_message("user", " ".join(self.answers))
                self.emit("planner", (told,), parents=tuple(self.parents))
        elif not self.answers:
            for number in range(2):
                self.emit(
                    f"planner/part-{number}", (text_message("user", f"part {number}"),), parents=(observation.id,)
                )
        else:
            self.emit("planner", (), parents=(observation.id,), reward=2.0, terminated=True)


async def test_subagents_run_side_by_side_and_the_whole_tree_is_recorded(bench):
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Split))
    trajectory = await runner.play_episode()
    chats = trajectory.chats
    assert [chat.agent for chat in chats] == ["planner", "planner/part-0", "planner/part-1", "planner"]
    assert [chat.time_step for chat in chats] == [0, 1, 2, 3]
    assert chats[3].extends is chats[0]
    assert [m.text for m in chats[3].messages] == ["split", "go", "planner/part-1 planner/part-0"]
    assert [chat.fork.reason for chat in chats if chat.fork] == [ForkReason.NEW_CONVERSATION] * 2
    assert len(rows_of(chats)) == 3
    assert trajectory.episode.rewards == {"planner": 2.0}
    assert trajectory.episode.step_rewards == (0.0, 0.0, 0.0, 2.0)


async def test_an_agent_may_take_several_calls_for_one_step_and_answer_with_something_else(bench):
    class Thoughtful(Agent):
        async def step(self, observation, policy):
            thought = await policy.chat((*observation.content, text_message("user", "think")))
            chat = await policy.chat((*policy.history, *observation.content, text_message("user", thought.reply.text)))
            return [thought, chat], text_message("assistant", "left")

    class One(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("agent", (text_message("user", "?"),))

        async def on_action(self, observation, action):
            self.said = action.text
            self.emit("agent", (), parents=(observation.id,), reward=float(action.text == "left"), truncated=True)

    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=One, agents={"": Thoughtful()}))
    trajectory = await runner.play_episode()
    assert [chat.time_step for chat in trajectory.chats] == [0, 0]
    assert trajectory.episode.reward == 1.0
    assert trajectory.episode.metadata == {"termination": "max_steps"}


async def test_an_agent_that_fails_ends_the_episode_and_nothing_of_it_runs_on(bench):
    hanging = []

    class Fails(Agent):
        async def step(self, observation, policy):
            if observation.agent.endswith("1"):
                raise ValueError("confused")
            if observation.agent.endswith("0"):
                hanging.append(asyncio.current_task())
                await asyncio.sleep(60)
            return await ModelAgent().step(observation, policy)

    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Split, agents={"": Fails()}))
    with pytest.raises(RolloutFailed, match="confused") as failed:
        await asyncio.wait_for(runner.play_episode(), 60)
    assert failed.value.termination == Termination.AGENT_FAILED
    assert isinstance(failed.value.__cause__, ValueError)
    assert all(task.done() for task in hanging)
    assert (await bench.store.episodes.get("train-000000-00")).state is EpisodeState.REGISTERED


async def test_a_conversation_that_fills_the_context_ends_with_the_reward_so_far(tmp_path):
    class Endless(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("agent", (text_message("user", "x" * 30),))

        async def on_action(self, observation, action):
            self.emit("agent", (text_message("user", "x" * 30),), parents=(observation.id,), reward=1.0)

    bench = Bench(tmp_path, FakeClock(), max_context=200)
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Endless))
    trajectory = await runner.play_episode({"n": 1})
    assert trajectory.episode.kind == "adhoc"
    assert trajectory.episode.metadata["termination"] == "context_full"
    assert trajectory.episode.full_contexts == ("agent",)
    assert trajectory.episode.reward == len(trajectory.chats) == len(trajectory.episode.step_rewards) - 1 > 1
    bench.store.close()


async def test_a_full_context_without_any_reward_is_a_reward_of_zero_for_the_agent_that_filled_it(tmp_path):
    class Endless(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("solver", (text_message("user", "x" * 30),))

        async def on_action(self, observation, action):
            self.emit("solver", (text_message("user", "x" * 30),), parents=(observation.id,))

    bench = Bench(tmp_path, FakeClock(), max_context=200)
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Endless)).play_episode({"n": 1})
    assert trajectory.episode.rewards == {"solver": 0.0}
    bench.store.close()


class Duel(MultiAgentEnvironment):
    """`loser` and `winner` act in turns and see more and more; `loser`, at whose turn it ends, has lost."""

    roles = ("loser", "winner")
    zero_sum = True

    def begin(self, task):
        self.actions = 0

    def view(self, role):
        return "x" * 50 if role == "loser" else "x"

    def apply(self, actions):
        self.actions += 1
        return Outcome(rewards={"loser": -1.0, "winner": 1.0}, over=True) if self.actions == 40 else None


async def test_a_full_context_in_a_game_fails_the_episode_and_does_not_save_the_loser(tmp_path):
    bench = Bench(tmp_path, FakeClock(), max_context=400)
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Duel))
    with pytest.raises(RolloutFailed, match=r"'loser'.*policies\.policy\.max_context.*400") as failed:
        await runner.play_episode({"n": 1})
    assert failed.value.termination == Termination.AGENT_FAILED
    bench.store.close()


async def test_a_full_context_in_a_game_is_a_forfeit_where_the_environment_says_so(tmp_path):
    class Forfeits(Duel):
        forfeits = frozenset({Fault.FAILED})

        def forfeit(self, role, fault):
            return Outcome(rewards={role: -1.0, "winner": 1.0}, over=True)

    bench = Bench(tmp_path, FakeClock(), max_context=400)
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Forfeits))
    episode = (await runner.play_episode({"n": 1})).episode
    assert episode.rewards == {"loser": -1.0, "winner": 1.0}
    assert (episode.metadata["termination"], episode.full_contexts) == ("done", ("loser",))
    bench.store.close()


async def test_a_frozen_policy_whose_context_is_full_fails_the_episode_instead_of_scoring_it(tmp_path):
    class Endless(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("opponent", (text_message("user", "x" * 30),))

        async def on_action(self, observation, action):
            self.emit("opponent", (text_message("user", "x" * 30),), parents=(observation.id,), reward=1.0)

    bench = TwoPolicies(tmp_path, FakeClock())  # the opponent's model has 300 tokens of context, the trained one 4,096
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Endless))
    with pytest.raises(RolloutFailed, match="frozen policy") as failed:
        await runner.play_episode({"n": 1})
    assert failed.value.termination == Termination.AGENT_FAILED
    assert isinstance(failed.value.__cause__, ContextOverflow)
    bench.grammars.close()
    bench.store.close()


async def test_a_subagent_whose_context_is_full_is_given_up_and_its_parent_goes_on(tmp_path):
    class Long(Split):
        def emit(self, agent, content, **more):
            if agent.endswith("1"):
                content = (text_message("user", "x" * 300),)
            return super().emit(agent, content, **more)

        def cancel(self, observation_id):
            super().cancel(observation_id)
            self.answers.append("none")
            self.parents.append(observation_id)

    bench = Bench(tmp_path, FakeClock(), max_context=200)
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Long))
    trajectory = await asyncio.wait_for(runner.play_episode({"n": 1}), 60)
    assert trajectory.episode.metadata == {
        "termination": "done",
        "unanswered_observations": 1,
        "context_full": ["planner/part-1"],
    }
    assert trajectory.episode.reward == 2.0
    bench.store.close()


async def test_a_first_prompt_that_does_not_fit_is_a_failure_and_no_reward_of_zero(tmp_path):
    class Long(Split):
        async def start(self, task):
            self.emit("planner", (text_message("user", "x" * 300),))

    bench = Bench(tmp_path, FakeClock(), max_context=200)
    with pytest.raises(RolloutFailed, match="200; shorten") as failed:
        await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Long)).play_episode({"n": 1})
    assert failed.value.termination == Termination.AGENT_FAILED
    bench.store.close()


class Tells(Environment):
    """Ends after three steps, and says something for people at each."""

    said: ClassVar[dict[str, Any]] = {}

    def reset(self, task):
        self.steps = 0
        return "?", {"world": "é"}

    def step(self, action):
        self.steps += 1
        return "?", 0.0, self.steps == 3, False, {} if self.steps == 2 else {"step": self.steps} | self.said


async def test_what_an_environment_says_for_people_is_recorded_by_time_step(bench):
    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Tells)).play_episode()
    recorded = trajectory.episode.metadata["info"]
    assert {name: json.loads(text) for name, text in recorded.items()} == {
        "reset": {"world": "é"},
        "0": {"step": 1},
        "2": {"step": 3},
    }
    assert "é" not in " ".join(message.text for chat in trajectory.chats for message in chat.messages)


@pytest.mark.parametrize(
    "said",
    [{"x": "y" * 10**6}, {(1, 2): "\ud800"}, {"x": float("nan")}, {"x": object()}, {"x": b"\x1b[2J"}, {"x": 10**30}],
    ids=["long", "no text as key", "nan", "object", "bytes", "large number"],
)
async def test_whatever_an_environment_says_for_people_can_be_stored_and_is_not_long(bench, monkeypatch, said):
    monkeypatch.setattr(Tells, "said", said)
    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Tells)).play_episode()
    recorded = trajectory.episode.metadata["info"]
    assert set(recorded) >= {"reset", "0"}
    assert sum(map(len, recorded.values())) <= LONGEST_INFO
    assert all(text.isascii() and text.isprintable() for text in recorded.values())


async def test_each_agent_is_played_by_the_policy_of_its_role_and_only_rewards_that_are_learned_from_are_returns(
    tmp_path,
):
    class Two(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("agent", (text_message("user", "a"),))

        async def on_action(self, observation, action):
            if observation.agent == "agent":
                self.emit("opponent", (text_message("user", action.text),), parents=(observation.id,))
                return
            self.emit("agent", (), parents=(observation.id,), reward=0.25, terminated=True)
            self.emit("opponent", (), parents=(observation.id,), reward=-7.0, terminated=True)

    bench = TwoPolicies(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Two)).play_episode()
    assert [(chat.agent, chat.policy) for chat in trajectory.chats] == [("agent", "policy"), ("opponent", "old")]
    assert trajectory.episode.rewards == {"agent": 0.25, "opponent": -7.0}
    assert trajectory.episode.step_rewards == (0.0, 0.25)
    assert list(bench.store.episodes.recent_rewards) == [({"agent": 0.25, "opponent": -7.0}, {})]
    bench.grammars.close()
    bench.store.close()


class Rivals(TwoPolicies):
    """Two policies that are both trained."""

    def new_context(self):
        context = super().new_context()
        roles = Roles(default="policy", named={"opponent": "old"}, rivals=("policy", "old"))
        return replace(context, policies=replace(context.policies, roles=roles))


@pytest.mark.parametrize("kind", [Rivals, TwoPolicies])
async def test_it_is_recorded_which_of_several_agents_has_earned_what_by_an_action(tmp_path, kind):
    class Two(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("agent", (text_message("user", "a"),))

        async def on_action(self, observation, action):
            self.emit("agent", (), parents=(observation.id,), reward=1.0, terminated=True)
            self.emit("opponent", (), parents=(observation.id,), reward=-1.0, terminated=True)

    bench = kind(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    episode = (await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Two)).play_episode()).episode
    # The sums leave out what a frozen policy has earned, and else say nothing of who has won.
    assert episode.step_rewards == ((1.0,) if kind is TwoPolicies else (0.0,))
    assert episode.agent_step_rewards == ((0, "agent", 1.0), (0, "opponent", -1.0))
    bench.grammars.close()
    bench.store.close()


# Rewards by name


def steps(*rewards: Any) -> type[Environment]:
    """An environment whose steps have these rewards."""

    class Steps(Environment):
        blocking = False

        def reset(self, task):
            self.number = 0
            return "go", {}

        def step(self, action):
            self.number += 1
            return "on", rewards[self.number - 1], self.number == len(rewards), False, {}

    return Steps


def named(bench, environment, **algorithm) -> Runner:
    play = RolloutSpec(environment=environment)
    return Runner(Sessions(bench.context, 10), play, algorithm_of=lambda policy: GRPOConfig.model_validate(algorithm))


async def test_rewards_by_name_are_added_up_weighed_and_kept(bench):
    environment = steps({"right": 1, "style": None}, 0.0, {"right": 0.5, "length": 4.0})
    trajectory = await named(bench, environment, reward_weights={"length": -0.25}).play_episode()
    episode = trajectory.episode
    assert episode.named_rewards == {"right": 1.5, "style": None, "length": 4.0}
    assert (episode.rewards, episode.step_rewards) == ({"agent": 0.5}, (1.0, 0.0, -0.5))


async def test_what_was_scored_in_one_step_is_scored(bench):
    environment = steps({"style": None}, {"style": 2.0}, {"style": None})
    assert (await named(bench, environment).play_episode()).episode.named_rewards == {"style": 2.0}


async def test_an_episode_of_which_no_name_was_scored_is_left_out(bench):
    episode = (await named(bench, steps({"right": None}, {"style": None})).play_episode()).episode
    assert (episode.state, episode.rewards) == (EpisodeState.DISCARDED, None)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (({"right": 1.0}, 2.0), r"some.*.'right'"),
        (({"a/b": 1.0},), "reward's name"),
        (({"right": float("inf")},), "is finite"),
        (tuple({f"n{number}": 1.0} for number in range(33)), r"32.*33"),
    ],
)
async def test_what_rewards_by_name_can_not_be_fails_the_episode(bench, rewards, said):
    with pytest.raises(RolloutFailed, match=said):
        await named(bench, steps(*rewards)).play_episode()


class Team(ConcurrentEnvironment):
    """Both agents are rewarded by name, and style was not scored of one."""

    style: float | None = None

    async def start(self, task):
        self.emit("agent", (text_message("user", "a"),))

    async def on_action(self, observation, action):
        if observation.agent == "agent":
            self.emit("opponent", (text_message("user", action.text),), parents=(observation.id,))
            return
        self.emit("agent", (), parents=(observation.id,), reward={"right": 1.0, "style": self.style}, terminated=True)
        self.emit("opponent", (), parents=(observation.id,), reward={"right": 0.5}, terminated=True)


@pytest.mark.parametrize("credit", ["episode", "step", "team-step", "agent", "branch"])
async def test_whose_reward_was_not_scored_has_to_be_known_where_agents_are_credited(bench, credit):
    runner = named(bench, Team, credit=credit)
    if credit in ("agent", "branch", "step"):
        with pytest.raises(RolloutFailed, match=r"'style'.*agents"):
            await runner.play_episode()
        return
    episode = (await runner.play_episode()).episode
    assert episode.rewards == {"agent": 1.0, "opponent": 0.5}
    assert episode.named_rewards == {"right": 1.5, "style": None}


async def test_names_of_what_a_frozen_policy_earns_are_no_ones(tmp_path):
    bench = TwoPolicies(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    episode = (await named(bench, Team, credit="agent").play_episode()).episode
    assert episode.rewards == {"agent": 1.0, "opponent": 0.5}
    assert episode.named_rewards == {"right": 1.0, "style": None}
    bench.grammars.close()
    bench.store.close()


async def test_rewards_by_name_are_weighed_by_the_policy_that_plays_the_agent_and_have_to_be_scored(tmp_path):
    bench = Rivals(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 2)
    weights = {"policy": {"right": 2.0}, "old": {"right": 10.0}}

    def algorithm_of(policy: str) -> GRPOConfig:
        return GRPOConfig(reward_weights=weights[policy])

    class Scored(Team):
        style = 0.0

    made = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Scored), algorithm_of=algorithm_of)
    assert (await made.play_episode()).episode.rewards == {"agent": 2.0, "opponent": 5.0}
    made = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Team), algorithm_of=algorithm_of)
    with pytest.raises(RolloutFailed, match=r"'style'.*where"):
        await made.play_episode()
    bench.grammars.close()
    bench.store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ((float("nan"), 0.0), "and a reward is finite"),
        ((1.0, float("inf")), "and a reward is finite"),
        ((10**400, 0.0), "is no reward"),
        (("0.5", 0.0), "is no reward"),
        ((b"1", 0.0), "is no reward"),
        ((1e308, 1e308), "a reward is from -1,000,000,000 to 1,000,000,000"),
        ((6e8, 6e8), "a reward is from -1,000,000,000 to 1,000,000,000"),
    ],
)
async def test_rewards_of_an_environment_that_are_out_of_range_are_its_failure(bench, rewards, why):
    class Odd(ConcurrentEnvironment):
        async def start(self, task):
            self.emit("agent", (text_message("user", "a"),))

        async def on_action(self, observation, action):
            self.emit("agent", (), parents=(observation.id,), reward=rewards[0])
            self.emit("agent", (), parents=(observation.id,), reward=rewards[1], terminated=True)

    with pytest.raises(RolloutFailed, match=why) as caught:
        await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Odd)).play_episode()
    assert caught.value.termination == "environment_failed"


class Pair(MultiAgentEnvironment):
    """Both choose once, and are paid."""

    roles = ("first", "second")

    def begin(self, task):
        pass

    def view(self, role):
        return "choose"

    def legal(self, role):
        return ("go", "stay")

    def apply(self, actions):
        return Outcome(rewards={"first": 1.0, "second": 2.0}, over="second" in actions)


@pytest.mark.parametrize("protocol", [simultaneous(("first", "second"), 1), turns(("first", "second"), 1)])
async def test_what_an_agent_earns_before_it_acts_follows_the_actions_that_earned_it(bench, protocol):
    """With pooled credit (`team-step`) it counts; no call of the agent itself answers for it."""

    class Paid(Pair):
        roles = ("first", "second", "audience")

        def protocol(self, task):
            return protocol

        def apply(self, actions):
            return Outcome(rewards={"first": 1.0, "second": np.float32(2), "audience": np.int64(4)})

    episode = (await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Paid)).play_episode()).episode
    at_once = len(protocol.begin(Paid.roles)) == 2
    if at_once:  # both act, and all are paid once
        assert (episode.step_rewards, sum(episode.rewards.values())) == ((1.0, 6.0), 7.0)
        assert (1, "audience", 4.0) in episode.agent_step_rewards
    else:  # the first move pays the second agent, which acts later; the audience gets all of it at the end
        assert (episode.step_rewards, sum(episode.rewards.values())) == ((2.0 + 2.0, 2.0 + 8.0), 14.0)
        assert (0, "second", 2.0) in episode.agent_step_rewards


async def test_a_reward_that_names_no_action_follows_the_last_one(bench):
    class Late(Split):
        async def on_action(self, observation, action):
            self.emit("planner", (), reward=2.0, terminated=True)

    episode = (await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Late)).play_episode()).episode
    assert episode.step_rewards == (2.0,)


@pytest.mark.parametrize("drawn", [(), ("second",)])
async def test_it_is_recorded_which_agents_no_policy_has_played(bench, drawn):
    agents = {"": ModelAgent(), **{name: RandomAgent() for name in drawn}}
    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=Pair, agents=agents)).play_episode()
    episode = trajectory.episode
    assert episode.metadata.get("without_policy") == (list(drawn) or None)
    assert episode.rewards == {"first": 2.0, "second": 4.0}
    assert episode.rewards_by_policies == ({"first": 2.0} if drawn else episode.rewards)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("where", ["start", "on_action", "agent"])
async def test_code_that_would_end_its_task_without_a_word_fails_the_episode_instead(bench, kind, where):
    class Quits(ConcurrentEnvironment):
        async def start(self, task):
            if where == "start":
                raise kind
            self.emit("planner", (text_message("user", "?"),))
            self.emit("other", (text_message("user", "?"),))

        async def on_action(self, observation, action):
            raise kind

    class Player(Agent):
        async def step(self, observation, policy):
            if where == "agent":
                raise kind
            return [], text_message("assistant", "left")

    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=Quits, agents={"": Player()}))
    async with asyncio.timeout(30):
        if where == "on_action":  # the action may have caused it
            assert (await runner.play_episode()).episode.metadata["termination"] == "forfeit"
            return
        with pytest.raises(RolloutFailed, match=kind.__name__) as failed:
            await runner.play_episode()
    whose = Termination.AGENT_FAILED if where == "agent" else Termination.ENVIRONMENT_FAILED
    assert failed.value.termination == whose
