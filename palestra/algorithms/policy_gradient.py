"""Base of algorithms that credit calls with returns and compare these with a baseline.

Such an algorithm has four exchangeable parts: the credit (`credit.episode_returns`), the baseline (`baselines`), the
loss of a token, and the off-policy correction (`importance`). The rows' weights decide how token losses are added up
(`loss.token_weights`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs, Group, StepOrder, TokenAdvantages
from palestra.algorithms.baselines import GroupAdvantages, batch_advantages, centred_returns, group_advantages
from palestra.algorithms.credit import Returns, episode_returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.algorithms.named_rewards import (
    filled_rewards,
    normalised_rewards,
    with_batch_means,
    with_missing_rewards,
)
from palestra.config import ClippedConfig, GroupConfig, PolicyGradientConfig, PPOConfig, ScaledGroupConfig
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample, Trajectory

ImportanceMode = Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
IMPORTANCE_METRICS = (
    Metric(
        "importance_mean",
        "ratio",
        "Mean over trained tokens of pi(before the step) / mu(sampled), of the token or its reply; where corrected.",
    ),
    Metric(
        "importance_limited",
        "ratio",
        "Share of trained tokens whose ratio was truncated to `importance_limit`, or masked: weight 0.",
    ),
)
_LARGEST = 20.0  # bound of |log ratio|: e^20 is far beyond any limit, and finite


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceWeights:
    """The weights w, float32 [N] for each row, and the values of `IMPORTANCE_METRICS` by name."""

    weights: list[Floats]
    metrics: dict[str, float]


def importance_weights(
    rows: Sequence[TrainSample], old_logprobs: Sequence[Floats], mode: ImportanceMode, limit: float
) -> ImportanceWeights:
    """Return the factors of the token losses.

    Args:
        rows: with the logprobs recorded at sampling.
        old_logprobs: float32 [N] for each row: logprobs of the same tokens under the policy before the step; NaN where
            a token is not trained.
        mode: `token`: w is a token's ratio; `sequence`: the product of the ratios of all tokens of the call's reply, in
            whichever rows they are. `truncate`: min(w, limit); `mask`: w where 1 / limit <= w <= limit, else 0.
        limit: the largest weight, above 1.
    """
    raw = _ratios(rows, old_logprobs, whole_replies=mode.startswith("sequence"))
    weights: list[Floats] = []
    for ratios in raw:
        if mode.endswith("mask"):
            weights.append(np.where((ratios >= 1.0 / limit) & (ratios <= limit), ratios, np.float32(0.0)))
        else:
            weights.append(np.minimum(ratios, np.float32(limit)))
    kept = [ratios[row.loss_mask] for row, ratios in zip(rows, raw, strict=True)]
    ratios = np.concatenate([np.zeros(0, np.float32), *kept])
    outside = (ratios > limit) | ((ratios < 1.0 / limit) if mode.endswith("mask") else False)
    return ImportanceWeights(
        weights=weights,
        metrics={
            "importance_mean": float(ratios.mean()) if len(ratios) else 1.0,
            "importance_limited": float(np.mean(outside)) if len(ratios) else 0.0,
        },
    )


def _ratios(rows: Sequence[TrainSample], old_logprobs: Sequence[Floats], *, whole_replies: bool) -> list[Floats]:
    """Return float32 [N] for each row: pi / mu of each trained token, or of the reply it belongs to; else 1."""
    logs = [
        np.where(row.loss_mask, old.astype(np.float64) - row.logprobs, 0.0)
        for row, old in zip(rows, old_logprobs, strict=True)
    ]
    if whole_replies:
        sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        # A reply may be cut into several rows, so all sums are complete before one is written back.
        for row, log in zip(rows, logs, strict=True):
            for call in np.unique(row.calls[row.loss_mask]):
                sums[row.episode_id, int(call)] += float(log[row.loss_mask & (row.calls == call)].sum())
        for row, log in zip(rows, logs, strict=True):
            for call in np.unique(row.calls[row.loss_mask]):
                log[row.loss_mask & (row.calls == call)] = sums[row.episode_id, int(call)]
    return [np.exp(np.clip(log, -_LARGEST, _LARGEST)).astype(np.float32) for log in logs]


class PolicyGradient(Algorithm):
    """An algorithm that gives every token of a call the advantage of the call's return over a baseline.

    Attributes:
        across_groups: whether returns of several groups are compared; a reward that a whole group lacks then gets the
            batch's mean.
    """

    config: PolicyGradientConfig
    across_groups: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "calls_without_peers",
            "calls",
            "Calls without another episode to be compared with, because their agent (with `credit = agent | branch | "
            "step`) is in one episode of its group only: advantage 0. In place of the group it is the batch with "
            "`reinforce_pp` and `baseline = none`; of `rae`, which compares with earlier returns, it is always 0.",
        ),
        *IMPORTANCE_METRICS,
    )

    def __init__(self, config: PolicyGradientConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and ask for `old_logprobs` if importance sampling is configured. See `Algorithm`."""
        super().__init__(config, step_order)
        if config.importance_sampling != "none":
            self.needs = frozenset({"old_logprobs"})

    @abstractmethod
    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return the advantages of the calls of each group of a batch."""

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return for each token the advantage of its call, and the weights of importance sampling if configured.
        `forward` has `old_logprobs` if importance sampling is configured.
        """
        metrics = {"calls_without_peers": 0.0, **self.batch_metrics(groups)}
        if self.across_groups:
            groups = _by_environment(groups, lambda own: with_batch_means(own, self.config))
        advantages: list[Floats] = []
        estimated = _by_environment(groups, self._estimated)
        for group, found in zip(groups, estimated, strict=True):
            metrics["calls_without_peers"] += found.calls_without_peers
            names = (trajectory.episode.episode_id for trajectory in group.trajectories)
            by_episode = dict(zip(names, map(_by_index, found.by_call), strict=True))
            # `calls` is -1 where a token was not sampled, which picks the 0 at the end (`_by_index`).
            advantages += [by_episode[row.episode_id][row.calls] for row in group.rows]
        rows = [row for group in groups for row in group.rows]
        if self.config.importance_sampling == "none" or not rows:
            return TokenAdvantages(advantages=advantages, metrics=metrics)
        return self._weighed(rows, advantages, forward, metrics)

    def _estimated(self, groups: Sequence[Group]) -> list[GroupAdvantages]:
        """Return the advantages of the calls of groups, of shaped returns."""
        return self.estimate([self.shaped(group.trajectories, self.returns(group.trajectories)) for group in groups])

    def batch_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return an algorithm's own metrics of a batch, as declared in `metrics`; by default none."""
        return {}

    def returns(self, trajectories: Sequence[Trajectory]) -> list[Returns]:
        """Return the returns of the episodes of a group, by the configured credit."""
        found = [
            episode_returns(trajectory, self.config.credit, self.config.discount, self.step_order)
            for trajectory in with_missing_rewards(trajectories, self.config)
        ]
        rewards = self.named(trajectories)
        if rewards is None:
            return found
        return [
            replace(returns, values=dict.fromkeys(returns.values, reward))
            for returns, reward in zip(found, rewards, strict=True)
        ]

    def shaped(self, trajectories: Sequence[Trajectory], returns: list[Returns]) -> list[Returns]:
        """Return the shaped returns, of which advantages are made; by default unchanged.

        `learns_from` uses returns that are not shaped.
        """
        return returns

    def named(self, trajectories: Sequence[Trajectory]) -> list[float] | None:
        """Return the return of each episode of a group if it is made of named rewards; None: use the
        configured credit.
        """
        if self.config.credit != "episode" or all(t.episode.named_rewards is None for t in trajectories):
            return None
        return filled_rewards(trajectories, self.config)

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


class GroupBaseline(PolicyGradient):
    """An algorithm that compares the episodes of a group only with one another."""

    config: GroupConfig
    across_groups = False

    def __init__(self, config: GroupConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and allow as many groups to be replaced as configured; see `PolicyGradient`."""
        super().__init__(config, step_order)
        self.dynamic_sampling = config.dynamic_sampling

    @abstractmethod
    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the advantages of values with one baseline, at the same positions. `values_G` are those of each of a
        group's G episodes, which may have none.
        """

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether returns in the group differ: equal returns have advantage 0, so no gradient."""
        (found,) = self.estimate([self.returns(trajectories)])
        return any(any(advantages.values()) for advantages in found.by_key)

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return the advantages of each group by itself; see `PolicyGradient.estimate`."""
        return [group_advantages(returns, self.compare) for returns in groups]


class ScaledGroupBaseline(GroupBaseline):
    """An algorithm with the group's mean return as baseline, and advantages scaled as configured."""

    config: ScaledGroupConfig

    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return each value minus the group's mean, scaled as configured; see `centred_returns`."""
        return centred_returns(values_G, "none" if self.config.advantage_scale == "none" else "std")

    def named(self, trajectories: Sequence[Trajectory]) -> list[float] | None:
        """Return the return of each episode, with `gdpo` as the sum of separately normalised rewards.

        With `gdpo` this includes groups without named rewards: `estimate` then compares returns of the whole batch, and
        a return that is not normalised would lack its group's baseline.
        """
        if self.config.advantage_scale == "gdpo":
            return normalised_rewards(trajectories, self.config)
        return super().named(trajectories)

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return the advantages of each group by itself; with `gdpo` over the batch, because returns are normalised by
        group already.
        """
        if self.config.advantage_scale == "gdpo":
            return batch_advantages(groups, self.compare)
        return super().estimate(groups)


T = TypeVar("T")


def _by_environment(groups: Sequence[Group], of: Callable[[Sequence[Group]], Sequence[T]]) -> list[T]:
    """Return what `of` gives for the groups of each environment, in the order of all groups."""
    own: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        own.setdefault(group.environment, []).append(place)
    found: dict[int, T] = {}
    for places in own.values():
        found |= zip(places, of([groups[place] for place in places]), strict=True)
    return [found[place] for place in range(len(groups))]


def clipped_loss(config: ClippedConfig | PPOConfig) -> LossSpec:
    """Return the clipped surrogate loss of PPO, with the configured bounds."""
    return LossSpec.of(
        PPOClipLoss(clip_low_threshold=1.0 - config.clip_low, clip_high_threshold=1.0 + config.clip_high)
    )


def _by_index(advantages: Mapping[int, float]) -> Floats:
    """Return advantages by index of the call, float32 [calls + 1]; the last is 0, for index -1: no call."""
    by_index = np.zeros(max(advantages, default=-1) + 2, np.float32)
    for index, advantage in advantages.items():
        by_index[index] = advantage
    return by_index
