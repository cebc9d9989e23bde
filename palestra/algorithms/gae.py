"""Generalised advantage estimation (GAE) over the sampled tokens of an episode, by token and by turn.

Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16. A chain
has the trained tokens that one agent sampled, in order of time. Other text (prompts, results of tools, other agents) is
not an action; it is between two tokens of the chain, however long it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.base import StepOrder
from palestra.algorithms.credit import agent_reward, rewards_in_time, step_places
from palestra.config import TokenCredit
from palestra.types.calls import Floats
from palestra.types.records import TrainSample, Trajectory

Doubles = NDArray[np.float64]
ActionLevel = Literal["token", "turn"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chain:
    """The T trained tokens that one agent sampled in an episode, in order of time.

    Attributes:
        rows: int64 [T], row index of each token.
        places: int64 [T], position of the token in its row.
        times: int64 [T], position of the token's TimeStep among the episode's.
        end: number of TimeSteps of the episode.
        rewards: float64 [T], earned between the token and the next one of the chain.
        truncated: whether the environment cut the episode off; then the value of the next state counts too.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    times: NDArray[np.int64]
    end: int
    rewards: Doubles
    truncated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Advantages and returns of all rows.

    Attributes:
        advantages: float32 [N] for each row, 0 where a token is not trained.
        returns: float32 [N] for each row, a critic's targets: advantage + value; 0 where a token is not trained.
    """

    advantages: list[Floats]
    returns: list[Floats]


def generalised_advantages(
    rewards: Doubles, values: Doubles, discounts: Doubles, decay: float, last_value: float
) -> Doubles:
    """Return A_t = delta_t + discount_t x decay x A_(t+1), delta_t = r_t + discount_t x V_(t+1) - V_t, float64 [T].

    Arrays are [T]: r_t is earned between actions t and t + 1, V_t is of the state before action t, and the discount is
    that from action t to t + 1.
    """
    following = np.append(values[1:], last_value)
    deltas: Doubles = rewards + discounts * following - values
    found, behind = np.zeros_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        found[t] = behind = deltas[t] + discounts[t] * decay * behind
    return found


def chains_of(
    trajectory: Trajectory,
    rows: Mapping[int, TrainSample],
    credit: TokenCredit,
    discount: float,
    order: StepOrder = "observed",
) -> list[Chain]:
    """Return a chain for each agent of an episode with trained tokens, in the order of the agents' names.

    Args:
        rows: the episode's rows, by index; their `token_rewards` are added to the TimeSteps' rewards.
        credit: `step`: an agent's reward in a TimeStep belongs to its last token before it (or in the last TimeStep, if
            TimeSteps have no rewards). `team-step`: the same for all agents' rewards. `episode`: the sum of all rewards
            belongs to the agent's last token. `agent`: so does the agent's reward.
    """
    if trajectory.episode.reward is None:
        raise ValueError(f"episode {trajectory.episode.episode_id} has no reward")
    place_of = step_places(trajectory, order)
    chats = {chat.index: chat for chat in trajectory.chats}
    tokens: defaultdict[str, list[tuple[int, int, int, int]]] = defaultdict(list)  # (time, call, place, row) by agent
    for number, row in rows.items():
        for place in np.flatnonzero(row.loss_mask).tolist():
            call = int(row.calls[place])
            chat = chats[call]
            tokens[chat.agent].append((place_of[chat.time_step], call, place, number))
    found = []
    for agent in sorted(tokens):
        ordered = sorted(tokens[agent])
        times = np.array([token[0] for token in ordered], np.int64)
        earned = earned_by(agent, times, trajectory, place_of, credit, discount, order)
        for number, (_, _, place, row_number) in enumerate(ordered):
            own = rows[row_number].token_rewards
            earned[number] += 0.0 if own is None else float(own[place])
        found.append(
            Chain(
                rows=np.array([token[3] for token in ordered], np.int64),
                places=np.array([token[2] for token in ordered], np.int64),
                times=times,
                end=len(place_of),
                rewards=earned,
                truncated=trajectory.episode.truncated,
            )
        )
    return found


def generalized_advantages(
    chains: Sequence[Chain],
    rows: Sequence[TrainSample],
    values: Sequence[Floats],
    next_values: Sequence[Floats],
    *,
    discount: float,
    decay: float,
    level: ActionLevel,
) -> Estimates:
    """Return advantages and returns of all trained tokens.

    Args:
        chains: of all episodes; each trained token is in exactly one.
        values: float32 [N] for each row: V of the state before each trained token.
        next_values: float32 [N] for each row: V of the state after each trained token.
        discount: per TimeStep; tokens of the same TimeStep are not discounted.
        level: the unit of action. `token`: each token. `turn`: all tokens that an agent samples in one TimeStep; the
            value is that of the state before the first one, and all have the same advantage and return.
    """
    advantages = [np.zeros(len(row.ids), np.float32) for row in rows]
    returns = [np.zeros(len(row.ids), np.float32) for row in rows]
    for chain in chains:
        before = _gather(values, chain)
        # The number of each token's action, and where each action begins.
        new = np.append(True, np.diff(chain.times) != 0) if level == "turn" else np.ones(len(before), np.bool_)
        action, first = np.cumsum(new) - 1, np.flatnonzero(new)
        steps = np.diff(chain.times[first], append=chain.end).astype(np.float64)
        after = float(next_values[chain.rows[-1]][chain.places[-1]]) if chain.truncated else 0.0
        found = generalised_advantages(
            np.bincount(action, weights=chain.rewards, minlength=len(first)).astype(np.float64),
            before[first],
            np.power(discount, steps),
            decay,
            after,
        )
        targets = found + before[first]
        for token, number in enumerate(action):
            row, place = chain.rows[token], chain.places[token]
            advantages[row][place] = found[number]
            returns[row][place] = targets[number]
    return Estimates(advantages=advantages, returns=returns)


def explained_variance(values: Doubles, returns: Doubles) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one; NaN: no variance.
    Both are [T]: of the critic before the step, and its targets.
    """
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else float("nan")


def earned_by(
    agent: str,
    times: NDArray[np.int64],
    trajectory: Trajectory,
    places: Sequence[int],
    credit: TokenCredit,
    discount: float,
    order: StepOrder = "observed",
) -> Doubles:
    """Return the reward of each action of an agent before its next action, float64 [T]. `times` [T], ascending, are the
    positions of each action's TimeStep among the episode's; `places` are in the order of time.
    """
    if credit in ("step", "team-step"):
        earning = agent if credit == "step" else None
        return _rewards_between(times, rewards_in_time(trajectory, places, earning, order), discount)
    episode = trajectory.episode
    earned = np.zeros(len(times))
    earned[-1] = episode.reward if credit == "episode" else agent_reward(agent, episode)
    return earned


def _rewards_between(times: NDArray[np.int64], step_rewards: Sequence[float], discount: float) -> Doubles:
    """Return rewards of TimeSteps, discounted, at the last action before each, float64 [T]; none before the first."""
    earned = np.zeros(len(times))
    for time, reward in enumerate(step_rewards):
        last = int(np.searchsorted(times, time, side="right")) - 1
        if last >= 0:
            earned[last] += reward * discount ** (time - int(times[last]))
    return earned


def _gather(columns: Sequence[Floats], chain: Chain) -> Doubles:
    """Return the numbers of a chain's tokens, float64 [T], from columns [N] of the rows."""
    return np.array([columns[row][place] for row, place in zip(chain.rows, chain.places, strict=True)], np.float64)
