"""Group relative policy optimisation (GRPO): the mean return of a group of episodes is the group's baseline.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs, Group, StepOrder, TokenAdvantages
from palestra.algorithms.credit import BaselineKey, Returns, episode_returns
from palestra.algorithms.importance import IMPORTANCE_METRICS, importance_weights
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import AlgorithmConfig
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample, Trajectory

# Added to the deviation of a group. TRL adds the same; it matters only where rewards are nearly equal.
EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantages:
    """The advantages of one group.

    Attributes:
        by_key: for each episode, advantages by key of the return; also of an episode without calls.
        by_call: for each episode, advantages by index of the call.
        calls_without_peers: number of calls whose baseline group occurs in no other episode: their advantage is 0.
    """

    by_key: list[dict[BaselineKey, float]]
    by_call: list[dict[int, float]]
    calls_without_peers: int


class GRPO(Algorithm):
    """GRPO; with other settings Dr. GRPO, the loss of DAPO, and credit by TimeStep, agent or branch."""

    metrics = (
        Metric(
            "calls_without_peers",
            "calls",
            "Calls whose agent, with `credit = agent | branch`, is in one episode of its group only: advantage 0.",
        ),
        *IMPORTANCE_METRICS,
    )

    def __init__(self, config: AlgorithmConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and ask for `old_logprobs` if importance sampling is configured. See `Algorithm`."""
        super().__init__(config, step_order)
        if config.importance_sampling != "none":
            self.needs = frozenset({"old_logprobs"})

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether returns in the group differ: equal returns have advantage 0, so no gradient."""
        return any(any(found.values()) for found in self._group(trajectories).by_key)

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return for each token its call's return minus the group's mean, scaled as configured.

        Args:
            groups: all groups of the batch, in canonical order.
            forward: has `old_logprobs` if importance sampling is configured.
        """
        metrics = {"calls_without_peers": 0.0}
        advantages: list[Floats] = []
        for group in groups:
            found = self._group(group.trajectories)
            metrics["calls_without_peers"] += found.calls_without_peers
            names = (trajectory.episode.episode_id for trajectory in group.trajectories)
            by_episode = dict(zip(names, map(_by_index, found.by_call), strict=True))
            # `calls` is -1 where a token was not sampled, which picks the 0 at the end (`_by_index`).
            advantages += [by_episode[row.episode_id][row.calls] for row in group.rows]
        rows = [row for group in groups for row in group.rows]
        if self.config.importance_sampling == "none" or not rows:
            return TokenAdvantages(advantages=advantages, metrics=metrics)
        return self._weighed(rows, advantages, forward, metrics)

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return LossSpec.of(PPOClipLoss(clip_low=self.config.clip_low, clip_high=self.config.clip_high))

    def _group(self, trajectories: Sequence[Trajectory]) -> GroupAdvantages:
        config = self.config
        returns = [episode_returns(t, config.credit, config.discount, self.step_order) for t in trajectories]
        return group_advantages(returns, config.advantage_scale)

    def _weighed(
        self,
        rows: Sequence[TrainSample],
        advantages: Sequence[Floats],
        forward: ForwardOutputs,
        metrics: Mapping[str, float],
    ) -> TokenAdvantages:
        """Return the advantages with the weights and metrics of importance sampling."""
        mode, limit = self.config.importance_sampling, self.config.importance_limit
        assert mode != "none"
        found = importance_weights(rows, forward["old_logprobs"], mode, limit)
        return TokenAdvantages(
            advantages=advantages, importance_weights=found.weights, metrics={**metrics, **found.metrics}
        )


def group_advantages(returns_G: Sequence[Returns], scale: Literal["std", "none"]) -> GroupAdvantages:
    """Return the advantages of the calls of a group: each return compared with its baseline group.

    Args:
        returns_G: the returns of the G episodes of one group.
        scale: see `centred_returns`.
    """
    advantages: list[dict[BaselineKey, float]] = [{} for _ in returns_G]
    alone: set[str] = set()
    for baseline_group in sorted({key.baseline_group for returns in returns_G for key in returns.values}):
        keys = [[key for key in returns.values if key.baseline_group == baseline_group] for returns in returns_G]
        values = [[returns.values[key] for key in mine] for returns, mine in zip(returns_G, keys, strict=True)]
        # In one episode only: there is no other return to compare with, so the advantages are 0.
        if sum(map(bool, keys)) < 2:
            alone.add(baseline_group)
        for place, found in enumerate(centred_returns(values, scale)):
            advantages[place] |= zip(keys[place], found, strict=True)
    by_call = [
        {index: of_key[key] for index, key in returns.key_of.items()}
        for returns, of_key in zip(returns_G, advantages, strict=True)
    ]
    without = sum(key.baseline_group in alone for returns in returns_G for key in returns.key_of.values())
    return GroupAdvantages(by_key=advantages, by_call=by_call, calls_without_peers=without)


def centred_returns(values_G: Sequence[Sequence[float]], scale: Literal["std", "none"]) -> list[list[float]]:
    """Return (value - mean) / (deviation + 1e-4), or value - mean, for the values of a group.

    All values have one baseline, independent of their place: a baseline for each TimeStep would be biased if the policy
    decides when to stop. Episodes have equal weights, however many values they have.

    Args:
        values_G: the values of each of G episodes: one reward, or one value per TimeStep or subagent; may be empty.
        scale: `std` divides by the sample standard deviation (ddof 1; DeepSeekMath, section 4.1.2), in which each value
            weighs 1 / (values of its episode); `none` does not (Liu et al. 2025, "Understanding R1-Zero-Like Training",
            3.1).

    Returns:
        One advantage per value, in the same places. All are 0 if the values are equal, or if fewer than two episodes
        have values: a group of one has nothing to be compared with.
    """
    flat = np.array([value for values in values_G for value in values], np.float64)
    episodes = sum(1 for values in values_G if values)
    if episodes < 2 or flat.max() == flat.min():
        return [[0.0] * len(values) for values in values_G]
    shares = np.array([1.0 / (episodes * len(values)) for values in values_G for _ in values])
    centred = flat - (flat * shares).sum()
    if scale == "std":
        variance = (centred**2 * shares).sum() * episodes / (episodes - 1)
        centred = centred / (np.sqrt(variance) + EPSILON)
    found = iter(centred.tolist())
    return [[next(found) for _ in values] for values in values_G]


def _by_index(advantages: Mapping[int, float]) -> Floats:
    """Return advantages by index of the call, float32 [calls + 1].

    The last one is 0: index -1, no call, leads there.
    """
    by_index = np.zeros(max(advantages, default=-1) + 2, np.float32)
    for index, advantage in advantages.items():
        by_index[index] = advantage
    return by_index
