"""Soft actor-critic (SAC) for finite actions: an action is one of finitely many replies, and all are weighted exactly.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"; for finite actions Christodoulou 2019, "Soft
Actor-Critic for Discrete Action Settings".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.base import (
    About,
    Algorithm,
    CriticUpdate,
    ForwardOutputs,
    Group,
    Replay,
    StepOrder,
    TokenAdvantages,
)
from palestra.algorithms.credit import step_places
from palestra.algorithms.gae import earned_by
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ImportanceSamplingLoss, TwinValueLoss
from palestra.algorithms.named_rewards import scored_episodes
from palestra.config import SACConfig, TokenCredit
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """One call: its choices, and the outcome of the chosen one.

    Attributes:
        rows: int64 [A], row index of each choice.
        places: positions of each choice's tokens in its row, A arrays.
        taken: index into `rows` of the sampled choice.
        reward: earned between this decision and the agent's next one.
        discount: factor from this decision to the next one.
        following: the agent's next decision; None: this is the last.
        ended: whether the episode ended after the last decision; False: it was cut off, and further rewards are
            unknown.
    """

    rows: NDArray[np.int64]
    places: tuple[NDArray[np.int64], ...]
    taken: int
    reward: float
    discount: float
    following: Decision | None
    ended: bool

    def logprobs(self, columns: Mapping[int, Floats]) -> NDArray[np.float64]:
        """Return the log-probability of each choice, float64 [A], from those of tokens, [N] by row index."""
        return np.array([columns[row][place].sum(dtype=np.float64) for row, place in self._choices()], np.float64)

    def at_ends(self, columns: Mapping[int, Floats]) -> NDArray[np.float64]:
        """Return the number at the last token of each choice, float64 [A], from columns [N] by row index."""
        return np.array([columns[row][place[-1]] for row, place in self._choices()], np.float64)

    def _choices(self) -> list[tuple[int, NDArray[np.int64]]]:
        return list(zip(self.rows.tolist(), self.places, strict=True))


def decisions_of(
    trajectory: Trajectory,
    rows: Mapping[int, TrainSample],
    credit: TokenCredit,
    discount: float,
    order: StepOrder = "observed",
) -> list[Decision]:
    """Return the decisions of an episode, agent by agent in order of time. `rows` has one for each choice of each call
    (`tokens.choice_rows`); `credit` is as in `gae.chains_of`.
    """
    if trajectory.episode.reward is None:
        raise ValueError(f"episode {trajectory.episode.episode_id} has no reward")
    place_of = step_places(trajectory, order)
    of_call: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in rows.items():
        of_call[int(row.calls[np.argmax(row.loss_mask)])].append(number)
    calls: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # (time, call) by agent
    for chat in trajectory.chats:
        if chat.index in of_call:
            calls[chat.agent].append((place_of[chat.time_step], chat.index))
    found: list[Decision] = []
    for agent in sorted(calls):
        ordered = sorted(calls[agent])
        times = np.array([time for time, _ in ordered], np.int64)
        earned = earned_by(agent, times, trajectory, place_of, credit, discount, order)
        discounts = np.power(discount, np.append(np.diff(times), 1).astype(np.float64))
        following: Decision | None = None
        own: list[Decision] = []
        for place in reversed(range(len(ordered))):
            numbers = of_call[ordered[place][1]]
            following = Decision(
                rows=np.array(numbers, np.int64),
                places=tuple(np.flatnonzero(rows[number].loss_mask) for number in numbers),
                taken=_taken([rows[number] for number in numbers]),
                reward=float(earned[place]),
                discount=float(discounts[place]),
                following=following,
                ended=not trajectory.episode.truncated,
            )
            own.append(following)
        found += reversed(own)
    return found


def _taken(rows: list[TrainSample]) -> int:
    """Return which of a call's rows was sampled."""
    return next(place for place, row in enumerate(rows) if np.isfinite(row.logprobs[row.loss_mask]).all())


Doubles = NDArray[np.float64]
MAX_AGE = 16  # steps back from which episodes are drawn, as the largest `rollout.max_staleness`
TARGET_RATE = 0.1  # by which the critic's copy moves to it after each update (tau)
TEMPERATURE_RATE = 0.002  # by which the logarithm of the temperature follows the entropy after each batch
_FURTHEST = 20.0  # bound of the logarithm of the temperature: where no reward is like it, it would run away


class SAC(Algorithm):
    """SAC over the replies of `choices`, with a twin critic and experience replay."""

    config: SACConfig
    about = About(
        summary="maximises rewards and entropy, off policy: every choice of a call is weighed by a critic's value",
        formula="y = r + gamma V'(s'), V(s) = sum over choices of pi(a) (Q(s, a) - alpha log pi(a)), Q the smaller of "
        "two heads, V' with the critic's copy; critic: sum over heads of (Q - y)^2 / 2 at the choice that was taken; "
        "policy: loss = -sum over choices of sg(pi(a) (Q(s, a) - alpha log pi(a) - V(s))) log pi(a); "
        f"log alpha <- log alpha - {TEMPERATURE_RATE:g} (H - target_entropy x log A), H = entropy of the A choices",
        paper="Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905; Christodoulou "
        "2019, Soft Actor-Critic for Discrete Action Settings, arXiv:1910.07207",
        needs=(
            "replies that are held to `choices`, at most 256 of them, token by token",
            "memory for a second model with its optimizer, the critic, and for a third, which follows it",
        ),
    )
    metrics = (
        Metric("temperature", "reward/nat", "Weight alpha of the entropy, in the last batch of the step."),
        Metric("choice_entropy", "nats", "Mean over decisions of the entropy of their choices, last batch."),
        Metric("choice_entropy_target", "nats", "What the temperature is tuned to: `target_entropy` x mean of log A."),
        Metric("decisions", "calls", "Calls of the last batch, each with all of its choices."),
        Metric(
            "decisions_cut",
            "calls",
            "Decisions of the last batch that taught the critic nothing, because their episode was cut off there: a "
            "reward that only comes at the end of such an episode is never learned.",
        ),
        Metric(
            "state_value_mean", "reward", "Mean over decisions of V(s), which has the bonus of entropy, last batch."
        ),
        Metric("target_mean", "reward", "Mean over decisions of y, which the critic learns, last batch."),
    )
    needs = frozenset({"old_logprobs", "action_values", "target_action_values"})
    every_choice = True

    def __init__(self, config: SACConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and begin with the configured temperature. See `Algorithm`."""
        super().__init__(config, step_order)
        critic, replay = config.critic, config.replay
        self.critic = CriticUpdate(
            loss=LossSpec.of(TwinValueLoss()),
            optimizer=critic.optimizer,
            epochs=1,
            warmup_steps=critic.warmup_steps,
            kind="actions",
            target_rate=TARGET_RATE,
        )
        self.replay = Replay(draws=replay.draws, episodes=replay.episodes, max_age=MAX_AGE)
        self._log_temperature = math.log(config.temperature)

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return each choice's share of the policy's gradient for its tokens, and the critic's targets for the sampled
        ones.

        The gradient of V by the policy is the sum over choices of pi(a) (Q - alpha log pi(a) - V) grad log pi(a). V is
        a baseline and adds zero, because probabilities sum to 1. Groups are all of the batch, in canonical order, with
        a row for each choice; `forward` has `old_logprobs`, `action_values` and `target_action_values`.
        """
        rows = [row for group in groups for row in group.rows]
        advantages = [np.zeros(len(row.ids), np.float32) for row in rows]
        returns = [np.full(len(row.ids), np.nan, np.float32) for row in rows]
        decisions = self._decisions(groups)
        if not decisions:
            return TokenAdvantages(advantages=advantages, returns=returns, metrics={})
        alpha = math.exp(self._log_temperature)
        logprobs, values, targets = (
            dict(enumerate(forward[name])) for name in ("old_logprobs", "action_values", "target_action_values")
        )
        state_values, learned = list[float](), list[float]()
        for decision in decisions:
            log_pi = decision.logprobs(logprobs)
            soft = decision.at_ends(values) - alpha * log_pi
            value = float(np.exp(log_pi) @ soft)
            state_values.append(value)
            for row, places, share in zip(decision.rows, decision.places, np.exp(log_pi) * (soft - value), strict=True):
                advantages[row][places] = share
            if decision.following is not None or decision.ended:
                following = _soft_value(decision.following, logprobs, targets, alpha)
                learned.append(decision.reward + decision.discount * following)
                returns[decision.rows[decision.taken]][decision.places[decision.taken][-1]] = learned[-1]
        entropy, wanted = self._tune([decision.logprobs(logprobs) for decision in decisions])
        return TokenAdvantages(
            advantages=advantages,
            returns=returns,
            metrics={
                "temperature": alpha,
                "choice_entropy": entropy,
                "choice_entropy_target": wanted,
                "decisions": float(len(decisions)),
                "decisions_cut": float(len(decisions) - len(learned)),
                "state_value_mean": float(np.mean(state_values)),
                "target_mean": float(np.mean(learned)) if learned else math.nan,
            },
        )

    def loss(self) -> LossSpec:
        """Return the policy gradient's loss; its ratio is to the policy before the update, and so 1."""
        return LossSpec.of(ImportanceSamplingLoss())

    def state(self) -> dict[str, Any]:
        """Return the logarithm of the temperature."""
        return {"log_temperature": self._log_temperature}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the temperature from a checkpoint; see `Algorithm.restore`."""
        self._log_temperature = float(state.get("log_temperature", self._log_temperature))

    def _decisions(self, groups: Sequence[Group]) -> list[Decision]:
        """Return the decisions of all episodes; rows are numbered over all groups."""
        return [
            decision
            for trajectory, rows in scored_episodes(groups, self.config)
            for decision in decisions_of(trajectory, rows, self.config.credit, self.config.discount, self.step_order)
        ]

    def _tune(self, logprobs: Sequence[Doubles]) -> tuple[float, float]:
        """Move the temperature towards the target entropy; return the present entropy and the target, in nats."""
        entropy = float(np.mean([-(np.exp(own) @ own) for own in logprobs]))
        wanted = self.config.target_entropy * float(np.mean([math.log(len(own)) for own in logprobs]))
        if wanted > 0:
            moved = self._log_temperature - TEMPERATURE_RATE * (entropy - wanted)
            self._log_temperature = min(max(moved, -_FURTHEST), _FURTHEST)
        return entropy, wanted


def _soft_value(
    decision: Decision | None, logprobs: Mapping[int, Floats], values: Mapping[int, Floats], alpha: float
) -> float:
    """Return V of the state of a decision: the mean over its choices of Q - alpha log pi; 0 after the last decision."""
    if decision is None:
        return 0.0
    log_pi = decision.logprobs(logprobs)
    return float(np.exp(log_pi) @ (decision.at_ends(values) - alpha * log_pi))
