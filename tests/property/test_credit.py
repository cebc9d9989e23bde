"""Credit: the baselines, the returns, and that nobody weighs more for having called more often."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from drawing import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.building import make_chat, make_episode, make_train_batch

from palestra.algorithms.baselines import centred_returns, group_advantages
from palestra.algorithms.credit import BaselineKey, Returns, agent_reward, episode_returns, step_returns
from palestra.config import GRPOConfig, Roles
from palestra.store.calls import time_steps
from palestra.types.calls import Chat, PolicyVersion
from palestra.types.records import TrainSample, Trajectory
from property.calls import Drawn, episodes, orders, record

pytestmark = pytest.mark.ci

VERSION = PolicyVersion(0, 0)
rewards = st.integers(-20, 20).map(lambda tenths: tenths / 10)
scales = st.sampled_from(["std", "none"])
values = st.lists(st.lists(rewards, max_size=4), min_size=1, max_size=6)
agents = st.sampled_from(["a", "a/b", "a/b/c", "a/d", "e", "e/f"])


def trajectory(
    sample: int, chats: Sequence[Chat], by_agent: dict[str, float], steps=None, group: int = 0
) -> Trajectory:
    episode = make_episode(group, sample, rewards=by_agent, step_rewards=steps)
    return Trajectory(episode=episode, steps=time_steps(episode, sorted(chats, key=lambda chat: chat.index)))


def near(wanted):
    return pytest.approx(wanted, rel=1e-6, abs=1e-7)


# Advantages


def plain_advantages(values_G, scale) -> list[list[float]]:
    present = [own for own in values_G if own]
    if len(present) < 2:
        return [[0.0] * len(own) for own in values_G]
    mean = math.fsum(math.fsum(own) / len(own) for own in present) / len(present)
    squares = math.fsum(math.fsum((v - mean) ** 2 for v in own) / len(own) for own in present)
    divisor = math.sqrt(squares / (len(present) - 1)) + 1e-4 if scale == "std" else 1.0
    return [[(v - mean) / divisor for v in own] for own in values_G]


@given(values, scales)
def test_advantages_of_several_values_agree_with_plain_arithmetic(values_G, scale):
    for found, wanted in zip(centred_returns(values_G, scale), plain_advantages(values_G, scale), strict=True):
        assert found == near(wanted)


@given(values, st.integers(0, 5), st.integers(2, 4), scales)
def test_an_episode_that_says_the_same_more_often_counts_the_same(values_G, which, times, scale):
    which %= len(values_G)
    more = [own * times if n == which else own for n, own in enumerate(values_G)]
    for place, (few, many) in enumerate(
        zip(centred_returns(values_G, scale), centred_returns(more, scale), strict=True)
    ):
        assert many == near(few * times if place == which else few)


@given(values, st.integers(-50, 50), scales)
def test_what_all_get_alike_changes_no_advantage(values_G, bonus, scale):
    shifted = centred_returns([[v + bonus for v in own] for own in values_G], scale)
    for found, wanted in zip(shifted, centred_returns(values_G, scale), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@given(st.lists(rewards, min_size=1, max_size=8), scales)
def test_one_value_an_episode_is_a_group_of_rewards(rewards_G, scale):
    key = BaselineKey("", None)
    returns = [Returns(values={key: r}, key_of={3: key, 5: key}) for r in rewards_G]
    credit = group_advantages(returns, partial(centred_returns, scale=scale))
    wanted = [found for (found,) in centred_returns([[reward] for reward in rewards_G], scale)]
    assert [found[3] for found in credit.by_call] == wanted
    assert [found[5] for found in credit.by_call] == wanted
    assert credit.calls_without_peers == (2 if len(rewards_G) == 1 else 0)


# Which reward is whose


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.lists(rewards, min_size=7, max_size=7), st.floats(0, 1))
def test_a_call_answers_for_the_discounted_rewards_from_its_own_step_on(steps, all_rewards, discount):
    chats = [make_chat(index=n, time_step=step) for n, step in enumerate(steps)]
    given_rewards = tuple(all_rewards[: max(steps) + 1])
    one = trajectory(0, chats, {"agent": 9.0}, given_rewards)
    returns = episode_returns(one, "step", discount)
    for chat in chats:
        t = chat.time_step
        wanted = math.fsum(discount ** (k - t) * r for k, r in enumerate(given_rewards) if k >= t)
        assert returns.values[returns.key_of[chat.index]] == near(wanted)
    assert len(returns.values) == len(set(steps))
    last = max(steps)
    whole = episode_returns(trajectory(0, chats, {"a": 1.5, "b": 0.5}), "team-step", discount)
    for chat in chats:
        assert whole.values[whole.key_of[chat.index]] == near(2.0 * discount ** (last - chat.time_step))
    assert len(step_returns(one, discount)) == last + 1


def owner(agent: str, known) -> str | None:
    """The nearest that has a reward: itself, who started it, who started that."""
    names = ["/".join(agent.split("/")[:n]) for n in range(agent.count("/") + 1, 0, -1)]
    return next((name for name in names if name in known), None)


@given(
    st.lists(agents, min_size=1, max_size=6),
    st.dictionaries(agents, rewards, min_size=1),
    st.sampled_from(["agent", "branch"]),
)
@examples(20, 200)
def test_an_agent_has_its_own_reward_or_that_of_who_started_it(names, by_agent, mode):
    chats = [make_chat(index=n, agent=name) for n, name in enumerate(names)]
    returns = episode_returns(trajectory(0, chats, by_agent), mode, 1.0)
    for chat in chats:
        key = returns.key_of[chat.index]
        mine = owner(chat.agent, by_agent)
        wanted = 0.0 if mine is None else by_agent[mine]
        assert returns.values[key] == agent_reward(chat.agent, make_episode(rewards=by_agent)) == wanted
        started_by = chat.agent.rpartition("/")[0]
        assert key.baseline_group == (f"{started_by}/" if mode == "branch" and started_by else chat.agent)
    assert len(returns.values) == len(set(names))


@given(st.data(), st.sampled_from(["agent", "branch"]), scales)
def test_an_agents_calls_are_compared_with_its_peers_and_nobody_else(data, mode, scale):
    group = [
        (data.draw(st.lists(agents, max_size=5)), data.draw(st.dictionaries(agents, rewards, min_size=1)))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    trajectories = [
        trajectory(k, [make_chat(index=n, agent=name) for n, name in enumerate(names)], by_agent)
        for k, (names, by_agent) in enumerate(group)
    ]
    credit = group_advantages(
        [episode_returns(t, mode, 1.0) for t in trajectories], partial(centred_returns, scale=scale)
    )

    def peers(name: str) -> str:
        return name.rpartition("/")[0] + "/" if mode == "branch" and "/" in name else name

    alone = 0
    for k, (names, _) in enumerate(group):
        for n, name in enumerate(names):
            compared = [
                [agent_reward(other, t.episode) for other in sorted(set(theirs)) if peers(other) == peers(name)]
                for t, (theirs, _) in zip(trajectories, group, strict=True)
            ]
            place = sorted(other for other in set(names) if peers(other) == peers(name)).index(name)
            assert credit.by_call[k][n] == near(plain_advantages(compared, scale)[k][place])
            alone += sum(map(bool, compared)) < 2
    assert credit.calls_without_peers == alone


# Terms of the loss


TWO = ("policy", "old")  # a policy that is trained, and a frozen one
ROLES = Roles(default="policy", frozen=frozenset({"old"}))


def batch_of(*trajectories: Trajectory, max_tokens: int = 10, **algorithm):
    return make_train_batch(trajectories, GRPOConfig.model_validate(algorithm), max_tokens, VERSION, roles=ROLES)


Term = tuple[tuple[int, ...], int, float, float, float]


def terms(samples: Sequence[TrainSample]) -> Counter[Term]:
    """Everything that the gradient is made of: context, token, advantage, weight, logprob at sampling."""
    return Counter(
        (
            tuple(s.ids[:t].tolist()),
            int(s.ids[t]),
            round(float(s.advantages[t]), 6),
            round(float(s.loss_weights[t]), 7),
            float(s.logprobs[t]),
        )
        for s in samples
        for t in np.flatnonzero(s.loss_mask)
    )


def own_terms(chats: Sequence[Chat], advantage: float, weight: float) -> Counter[Term]:
    """The same straight from the calls, without rows."""
    return Counter(
        (
            (*chat.prompt_ids.tolist(), *chat.completion_ids[:place].tolist()),
            int(token),
            round(float(np.float32(advantage)), 6),
            round(float(np.float32(weight)), 7),
            float(chat.logprobs[place]),
        )
        for chat in chats
        for place, token in enumerate(chat.completion_ids)
    )


other_single = [make_chat(prompt=(1,), completion=(2, 2, 1), logprobs=[-1, -2, -3])]


@given(st.data(), st.sampled_from(["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]))
@examples(15, 100)
def test_the_terms_of_the_loss_are_the_calls_however_they_are_cut(data, loss_agg_mode):
    calls = data.draw(episodes(policies=("policy",), media=False))
    relabelled = [replace(call, agent=data.draw(agents), time_step=data.draw(st.integers(0, 3))) for call in calls]
    plain = list(record(calls).values())
    orphans = data.draw(st.sets(st.sampled_from([call.number for call in calls])))
    variants = [
        plain,
        list(record(calls, data.draw(orders(calls))).values()),
        list(record(calls, orphans=range(len(calls))).values()),
        list(record(relabelled, data.draw(orders(calls)), orphans).values()),
    ]
    own = sum(len(call.completion) for call in calls)
    weight = {
        "seq-mean-token-mean": 1 / (2 * own),
        "token-mean": 1 / (own + 3),
        "seq-mean-token-sum-norm": 1 / (2 * 10),
    }[loss_agg_mode]
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    for chats in variants:
        batch = batch_of(
            trajectory(0, chats, {"x": 1.0}), trajectory(1, other_single, {"x": 0.0}), loss_agg_mode=loss_agg_mode
        )
        mine = [s for s in batch.samples if s.episode_id.endswith("-00")]
        assert terms(mine) == own_terms(plain, advantage, weight)


@st.composite
def cut_conversations(draw) -> tuple[list[Chat], list[Chat]]:
    """One reply after another, and the same tokens where each reply was sampled in several calls."""
    whole: list[Chat] = []
    pieces: list[Chat] = []
    for turn in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        completion = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        logprobs = [-(10.0 * turn + n) for n in range(len(completion))]
        whole.append(
            make_chat(
                index=turn,
                parent=whole[-1] if whole else None,
                prompt=prompt,
                completion=completion,
                logprobs=logprobs,
            )
        )
        cuts = sorted({0, len(completion)} | draw(st.sets(st.integers(1, len(completion)), max_size=4)))
        for start, stop in pairwise(cuts):
            pieces.append(
                make_chat(
                    index=len(pieces),
                    parent=pieces[-1] if pieces else None,
                    prompt=() if start else prompt,
                    completion=completion[start:stop],
                    logprobs=logprobs[start:stop],
                    agent=draw(agents),
                )
            )
    return whole, pieces


@given(
    cut_conversations(),
    st.sampled_from(["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]),
    st.booleans(),
)
def test_a_rollout_that_was_sampled_in_more_calls_has_the_same_terms(cut, loss_agg_mode, unlinked):
    whole, pieces = cut
    if unlinked:
        pieces = [replace(c, parent=None, shared=0, shared_messages=0, prompt_tail=c.prompt_ids) for c in pieces]
    found = [
        terms(
            batch_of(
                trajectory(0, chats, {"x": 1.0}), trajectory(1, other_single, {"x": 0.0}), loss_agg_mode=loss_agg_mode
            ).samples
        )
        for chats in (whole, pieces)
    ]
    assert found[0] == found[1]


@given(
    st.data(), st.sampled_from(["episode", "step", "agent", "branch"]), st.sampled_from(["all-calls", "final-branch"])
)
@examples(15, 100)
def test_every_rollout_weighs_the_same_however_much_it_called(data, credit, train_on):
    group = [
        list(record(data.draw(episodes(most=5, policies=TWO))).values()) for _ in range(data.draw(st.integers(2, 4)))
    ]
    rewards_G = data.draw(st.lists(rewards, min_size=len(group), max_size=len(group)))
    trajectories = [
        trajectory(k, chats, {"a": reward}) for k, (chats, reward) in enumerate(zip(group, rewards_G, strict=True))
    ]
    batch = batch_of(*trajectories, credit=credit, train_on=train_on, discount=0.9)
    assume(batch.samples)
    totals: dict[str, float] = {}
    for s in batch.samples:
        assert (s.loss_weights[~s.loss_mask] == 0).all()
        assert (s.advantages[~s.loss_mask] == 0).all()
        assert len(set(s.loss_weights[s.loss_mask].tolist())) == 1
        totals[s.episode_id] = totals.get(s.episode_id, 0.0) + float(s.loss_weights.sum(dtype=np.float64))
    spoke = {k for k, chats in enumerate(group) if any(chat.policy == "policy" for chat in chats)}
    assert totals.keys() == {f"train-000000-{k:02d}" for k in spoke}
    assert all(total == pytest.approx(1 / len(spoke), rel=1e-5) for total in totals.values())


@given(st.data(), st.sampled_from(["step", "agent", "branch"]))
def test_every_token_has_the_advantage_of_the_call_that_sampled_it(data, mode):
    calls: list[list[Drawn]] = [data.draw(episodes(most=5, policies=("policy",))) for _ in range(2)]
    group = [record(drawn, data.draw(orders(drawn))) for drawn in calls]
    trajectories = [trajectory(k, chats.values(), {"a": float(k), "a/b": 3.0}) for k, chats in enumerate(group)]
    credit = group_advantages(
        [episode_returns(t, mode, 0.5) for t in trajectories], partial(centred_returns, scale="std")
    )
    batch = batch_of(*trajectories, credit=mode, discount=0.5)
    for k, (chats, advantages) in enumerate(zip(group, credit.by_call, strict=True)):
        wanted = {float(p): np.float32(advantages[chat.index]) for chat in chats.values() for p in chat.logprobs}
        mine = [s for s in batch.samples if s.episode_id == f"train-000000-{k:02d}"]
        found = {
            float(p): a for s in mine for p, a in zip(s.logprobs[s.loss_mask], s.advantages[s.loss_mask], strict=True)
        }
        assert found == (wanted if batch.samples else {})


@given(st.data())
@examples(15, 100)
def test_abandoned_calls_are_left_out_whole_and_each_call_and_token_is_counted(data):
    calls = data.draw(episodes(policies=TWO))
    chats = record(calls, data.draw(orders(calls)))
    last: dict[str, Drawn] = {}
    own = [call for call in calls if call.policy == "policy"]
    for number, chat in sorted(chats.items(), key=lambda pair: pair[1].index):
        if chat.policy == "policy":
            last[chat.agent] = calls[number]
    answers = [call.edges for call in last.values()]
    kept = [call for call in own if any(answer[: len(call.edges)] == call.edges for answer in answers)]
    trajectories = [trajectory(0, chats.values(), {"x": 1.0}), trajectory(1, other_single, {"x": 0.0})]
    batch = batch_of(*trajectories, train_on="final-branch")
    found = sorted(float(p) for s in batch.samples if s.episode_id.endswith("-00") for p in s.logprobs[s.loss_mask])
    assert found == sorted(p for call in kept for p in call.logprobs)
    left = [call for call in own if call not in kept]
    assert batch.metrics["train/calls_abandoned"] == len(left)
    assert batch.metrics["train/tokens_abandoned"] == sum(len(call.completion) for call in left)
    frozen = [call for call in calls if call.policy == "old"]
    assert batch.metrics["train/calls_frozen"] == len(frozen)
    assert batch.metrics["train/tokens_frozen"] == sum(len(call.completion) for call in frozen)
    trained = sum(int(s.loss_mask.sum()) for s in batch.samples)
    left_out = batch.metrics["train/tokens_abandoned"] + batch.metrics["train/tokens_frozen"]
    assert trained + left_out == batch.metrics["rollout/completion_tokens"]
    everything = batch_of(*trajectories)
    assert everything.metrics["train/calls_abandoned"] == everything.metrics["train/tokens_abandoned"] == 0
