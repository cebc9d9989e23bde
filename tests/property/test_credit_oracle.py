"""Batches against a naive oracle: the pages on exactness and configuration in numpy, with none of the project's code.

Episodes are trees of agents that go on, try again and start others. The oracle takes each call as its own sequence;
it knows no trie and no rows. Rewards are quarters and discounts halves, so that equal values are equal in floats, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from drawing import examples
from hypothesis import event, given
from hypothesis import strategies as st
from unit.building import make_chat, make_episode, make_train_batch

from palestra.config import GRPOConfig
from palestra.store.calls import time_steps
from palestra.types.calls import AgentStepReward, PolicyVersion, StepTimes
from palestra.types.records import Trajectory

NAMES = ("a", "a/b", "a/b/c", "a/d", "e", "e/f", "e/g")
LIMIT = 10  # max_tokens
quarters = st.integers(-8, 8).map(lambda n: n / 4)
tokens = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@dataclass
class Call:
    agent: str
    step: int
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]  # no two tokens of a batch have the same: it names the token


@dataclass
class Played:
    """An episode."""

    group: int
    calls: list[Call]
    rewards: dict[str, float]
    step_rewards: list[float] | None
    by_agent: list[tuple[int, str, float]] | None  # of which `step_rewards` are the sums
    acted_at: list[float | None] | None


@st.composite
def batches(draw) -> list[Played]:
    number = 0
    out = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            calls: list[Call] = []
            for _ in range(draw(st.integers(0, 6))):
                before = draw(st.sampled_from([None, *calls, *calls[-1:]]))
                history = [] if before is None else [*before.prompt, *before.completion]
                completion = draw(tokens)
                logprobs = [-float(number := number + 1) for _ in completion]
                agent = draw(st.sampled_from(NAMES if before is None else (before.agent, *NAMES)))
                calls.append(Call(agent, draw(st.integers(0, 3)), [*history, *draw(tokens)], completion, logprobs))
            steps = max((call.step for call in calls), default=-1) + 1 + draw(st.integers(0, 1))
            rewards = draw(st.dictionaries(st.sampled_from(NAMES), quarters, min_size=1, max_size=3))
            in_time, by_agent = None, None
            if steps and draw(st.booleans()):
                in_time = draw(st.lists(quarters, min_size=steps, max_size=steps))
            if in_time and draw(st.booleans()):
                by_agent = [(n, name, draw(quarters)) for n in range(steps) for name in rewards]
                in_time = [sum(reward for at, _, reward in by_agent if at == n) for n in range(steps)]
            timed = draw(st.booleans())
            out.append(
                Played(
                    group,
                    calls,
                    rewards,
                    in_time,
                    by_agent,
                    draw(st.lists(st.none() | st.integers(0, 3).map(float), min_size=steps, max_size=steps))
                    if timed
                    else None,
                )
            )
    return out


def as_trajectory(played: Played, sample: int) -> Trajectory:
    chats = [
        make_chat(
            index=n,
            prompt=call.prompt,
            completion=call.completion,
            logprobs=call.logprobs,
            agent=call.agent,
            time_step=call.step,
        )
        for n, call in enumerate(played.calls)
    ]
    episode = make_episode(
        played.group,
        sample,
        rewards=played.rewards,
        step_rewards=None if played.step_rewards is None else tuple(played.step_rewards),
        agent_step_rewards=None if played.by_agent is None else tuple(AgentStepReward(*one) for one in played.by_agent),
        step_times=None if played.acted_at is None else tuple(StepTimes(0.0, at) for at in played.acted_at),
    )
    return Trajectory(episode=episode, steps=time_steps(episode, chats))


# The oracle


def return_of(played: Played, step: int, discount: float, order: str, agent: str | None) -> float:
    """r_t + discount x r_(t+1) + ... over the TimeSteps in their order, of one agent or of all."""
    rewards = played.step_rewards
    count = max(call.step for call in played.calls) + 1 if rewards is None else len(rewards)
    paid = {*played.rewards} if agent is None else {name for name in [payee(played, agent)] if name}
    if rewards is None or (paid != {*played.rewards} and played.by_agent is None):
        rewards = [0.0] * (count - 1) + [sum(played.rewards[name] for name in paid)]
    elif paid != {*played.rewards}:
        rewards = [sum(r for at, name, r in played.by_agent if at == n and name in paid) for n in range(count)]
    sequence = list(range(len(rewards)))
    if agent is None and order == "observed" and played.step_rewards and played.acted_at is not None:
        # All were observed at 0: the rewards of those that acted later count in the last TimeStep.
        late = [at is not None and at > 0 for at in played.acted_at]
        rewards = [0.0 if moved else reward for reward, moved in zip(rewards, late, strict=True)]
        rewards[-1] += sum(r for r, moved in zip(played.step_rewards, late, strict=True) if moved)
    if order == "acted" and played.acted_at is not None:
        acted = dict(enumerate(played.acted_at))
        sequence.sort(key=lambda t: (acted.get(t) is None, acted.get(t) or 0.0, t))
    place = sequence.index(step)
    return sum(discount ** (k - place) * rewards[sequence[k]] for k in range(place, len(sequence)))


def payee(played: Played, agent: str) -> str | None:
    """Whose reward an agent has: its own, or that of the nearest that has started it."""
    parts = agent.split("/")
    names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in played.rewards), None)


def unit_and_value(played: Played, call: Call, credit: str, discount: float, order: str) -> tuple[Any, Any, float]:
    """With which calls it is compared, which calls of its episode count as one with it, and what it is worth."""
    if credit == "episode":
        return "all", "all", sum(played.rewards.values())
    if credit == "team-step":
        return "all", call.step, return_of(played, call.step, discount, order, None)
    compared = call.agent
    if credit in ("branch", "step") and "/" in call.agent:
        compared = ("children of", call.agent[: call.agent.rindex("/")])
    if credit == "step":
        return compared, (call.agent, call.step), return_of(played, call.step, discount, order, call.agent)
    return compared, call.agent, played.rewards.get(payee(played, call.agent), 0.0)


def advantages_of(group: list[Played], credit: str, discount: float, order: str, scale: str) -> list[list[float]]:
    """Of each call of each episode of a group."""
    units = [[unit_and_value(p, call, credit, discount, order) for call in p.calls] for p in group]
    out = []
    for mine in units:
        found = []
        for compared, _, value in mine:
            values = []  # of each episode that has any: each unit once
            for theirs in units:
                own = {unit: v for c, unit, v in theirs if c == compared}
                if credit == "episode":
                    own = {}
                if own:
                    values.append(list(own.values()))
            if credit == "episode":  # an episode without calls has a reward, too
                values = [[sum(p.rewards.values())] for p in group]
            if len(values) < 2 or len({v for own in values for v in own}) == 1:
                found.append(0.0)
                continue
            mean = np.mean([np.mean(own) for own in values])
            variance = np.sum([np.mean([(v - mean) ** 2 for v in own]) for own in values]) / (len(values) - 1)
            found.append(float((value - mean) / (np.sqrt(variance) + 1e-4 if scale == "std" else 1.0)))
        out.append(found)
    return out


def is_kept(played: Played, call: Call) -> bool:
    """Whether its tokens stand in the last call of an agent."""
    whole = [*call.prompt, *call.completion]
    last = {other.agent: [*other.prompt, *other.completion] for other in played.calls}
    return any(answer[: len(whole)] == whole for answer in last.values())


Term = tuple[tuple[int, ...], int, float, float]


def terms_of(batch: list[Played], c: GRPOConfig, order: str) -> dict[float, Term]:
    """By token: what came before it, its id, its advantage and its weight."""
    trained = [[c.train_on == "all-calls" or is_kept(p, call) for call in p.calls] for p in batch]
    counts = [
        sum(len(call.completion) for call, is_trained in zip(p.calls, mine, strict=True) if is_trained)
        for p, mine in zip(batch, trained, strict=True)
    ]
    rollouts = sum(count > 0 for count in counts)
    found: dict[float, Term] = {}
    for group in sorted({p.group for p in batch}):
        places = [n for n, p in enumerate(batch) if p.group == group]
        advantages = advantages_of([batch[n] for n in places], c.credit, c.discount, order, c.advantage_scale)
        values = [sum(batch[n].rewards.values()) for n in places]
        varies = len(places) > 1 and len(set(values)) > 1 if c.credit == "episode" else False
        if not varies and not any(value for mine in advantages for value in mine):
            continue
        for n, mine in zip(places, advantages, strict=True):
            weight = {
                "seq-mean-token-mean": 1 / (rollouts * counts[n]) if counts[n] else 0.0,
                "token-mean": 1 / max(sum(counts), 1),
                "seq-mean-token-sum-norm": 1 / (max(rollouts, 1) * LIMIT),
            }[c.loss_agg_mode]
            for call, advantage, is_trained in zip(batch[n].calls, mine, trained[n], strict=True):
                for place, (token, logprob) in enumerate(zip(call.completion, call.logprobs, strict=True)):
                    if is_trained:
                        before = (*call.prompt, *call.completion[:place])
                        found[logprob] = (before, token, advantage, weight)
    return found


@given(
    batches(),
    st.sampled_from(["episode", "step", "team-step", "agent", "branch"]),
    st.sampled_from(["observed", "acted"]),
    st.sampled_from(["std", "none"]),
    st.sampled_from(["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]),
    st.sampled_from(["all-calls", "final-branch"]),
    st.sampled_from([1.0, 0.5, 0.0]),
)
@examples(20, 200)
def test_every_token_of_a_batch_is_what_the_documents_say(
    batch, credit, order, scale, loss_agg_mode, train_on, discount
):
    algorithm = GRPOConfig.model_validate(
        {
            "credit": credit,
            "advantage_scale": scale,
            "loss_agg_mode": loss_agg_mode,
            "train_on": train_on,
            "discount": discount,
        }
    )
    trajectories = [as_trajectory(played, n) for n, played in enumerate(batch)]
    made = make_train_batch(trajectories, algorithm, LIMIT, PolicyVersion(0, 0), order)
    found: dict[float, Term] = {}
    for sample in made.samples:
        for at in np.flatnonzero(sample.loss_mask):
            token = float(sample.logprobs[at])
            assert token not in found, "a token is trained twice"
            before = tuple(sample.ids[:at].tolist())
            found[token] = (before, int(sample.ids[at]), float(sample.advantages[at]), float(sample.loss_weights[at]))
    wanted = terms_of(batch, algorithm, order)
    event(f"{credit}: {'something' if wanted else 'nothing'} to train on")
    assert found.keys() == wanted.keys()
    for token, (before, number, advantage, weight) in wanted.items():
        assert found[token][:2] == (before, number)
        assert found[token][2:] == pytest.approx((advantage, weight), rel=1e-5, abs=1e-6)
