"""From the episodes of a manifest to the rows of the loss. Rows are in canonical order: (group index, sample index)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from palestra.algorithms.credit import StepOrder, episode_credits, group_credit
from palestra.algorithms.grpo import token_weights
from palestra.config import AlgorithmConfig
from palestra.schemas.forks import ForkReason
from palestra.schemas.records import PolicyVersion, TrainSample, Trajectory
from palestra.trajectory import TokenTrie, calls_of_final_answers, rows_of

LEFT_OUT = (
    "groups_zero_variance",
    "episodes_without_tokens",
    "calls_without_peers",
    "calls_abandoned",
    "tokens_abandoned",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step trains on, and what was left out of it."""

    samples: list[TrainSample]
    staleness: dict[int, int]  # trained tokens by age: n of the policy before the step - n of the token
    metrics: dict[str, float]

    def without(self, episodes: Collection[str], version: PolicyVersion) -> Batch:
        """Return the batch without the rows of some episodes, which can't be trained.

        Their tokens stay in the divisor of the loss, and their rewards in the advantages of their groups: to the other
        rows it makes no difference.

        Args:
            episodes: their ids.
            version: the policy before the step.
        """
        samples = [sample for sample in self.samples if sample.episode_id not in episodes]
        staleness = _staleness(samples, version)
        counted = {"train/episodes_untrainable": float(len(episodes))}
        return Batch(
            samples=samples, staleness=staleness, metrics=self.metrics | counted | _staleness_metrics(staleness)
        )


def make_batch(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    max_tokens: int,
    version: PolicyVersion,
    order: StepOrder = "observed",
) -> Batch:
    """Rows with advantages and weights; groups without variance are left out and counted.

    They still count in the weights, as the rollouts with advantage 0 that they are: a batch in which little can be
    learned makes a small step, not one that a few rollouts decide.

    Args:
        trajectories: completed episodes in canonical order.
        algorithm: how rewards become advantages, and tokens a loss.
        max_tokens: the divisor of the `constant` aggregation.
        version: the policy before the step, to which staleness is counted.
        order: of TimeSteps, for credit by step.
    """
    left_out: Counter[str] = Counter()
    rollouts = [_rollout(trajectory, algorithm, left_out) for trajectory in trajectories]
    weights = token_weights([rollout.tokens for rollout in rollouts], algorithm.aggregation, max_tokens)
    weighted = zip(rollouts, weights, strict=True)
    samples: list[TrainSample] = []
    for _, group in groupby(weighted, key=lambda pair: pair[0].trajectory.episode.group_index):
        members = list(group)
        credit = group_credit(
            [episode_credits(r.trajectory, algorithm.credit, algorithm.discount, order) for r, _ in members],
            algorithm.advantage_scale,
        )
        left_out["calls_without_peers"] += credit.calls_without_peers
        if not any(any(advantages.values()) for advantages in credit.advantages):
            left_out["groups_zero_variance"] += 1
            continue
        for (rollout, weight), advantages in zip(members, credit.advantages, strict=True):
            samples += _samples(rollout, advantages, weight)
    metrics = {f"train/{name}": float(left_out[name]) for name in LEFT_OUT}
    metrics |= _rollout_metrics(trajectories)
    return Batch(samples=samples, staleness={}, metrics=metrics).without((), version)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollout:
    trajectory: Trajectory
    trie: TokenTrie
    trained: frozenset[int]  # indices of the calls whose tokens enter the loss
    tokens: int  # that they sampled


def _rollout(trajectory: Trajectory, algorithm: AlgorithmConfig, left_out: Counter[str]) -> _Rollout:
    chats = trajectory.chats
    trie = TokenTrie(chats)
    trained = frozenset(chat.index for chat in chats)
    if algorithm.abandoned == "exclude":
        trained = calls_of_final_answers(trie, chats)
        abandoned = [chat for chat in chats if chat.index not in trained]
        left_out["calls_abandoned"] += len(abandoned)
        left_out["tokens_abandoned"] += sum(len(chat.completion_ids) for chat in abandoned)
    tokens = sum(len(chat.completion_ids) for chat in chats if chat.index in trained)
    left_out["episodes_without_tokens"] += not tokens  # whatever its group's rewards are
    return _Rollout(trajectory=trajectory, trie=trie, trained=trained, tokens=tokens)


def _samples(rollout: _Rollout, advantages: Mapping[int, float], weight: float) -> list[TrainSample]:
    """The rows of a rollout; each of its tokens weighs the same, in whichever row and call it stands."""
    by_call = np.zeros(max(advantages, default=-1) + 2, np.float32)  # the last one for tokens that are not trained
    for index, advantage in advantages.items():
        by_call[index] = advantage
    return [
        TrainSample(
            episode_id=rollout.trajectory.episode.episode_id,
            policy=row.policy,
            ids=row.ids,
            loss_mask=row.sampled,
            logprobs=row.logprobs,
            versions=row.versions,
            calls=row.chats,
            advantages=by_call[row.chats],
            weights=row.sampled * np.float32(weight),
            temperatures=row.temperatures,
            grammars=row.grammars,
        )
        for row in rows_of(rollout.trie, rollout.trained)
    ]


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.episode.reward
    assert reward is not None, f"episode {trajectory.episode.episode_id} has no reward"
    return reward


def _staleness(samples: Sequence[TrainSample], version: PolicyVersion) -> dict[int, int]:
    ages = [version.n - sample.versions[sample.loss_mask, 1] for sample in samples]
    found, tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *ages]), return_counts=True)
    return dict(zip(map(int, found), map(int, tokens), strict=True))


def _staleness_metrics(staleness: Mapping[int, int]) -> dict[str, float]:
    return {
        "rollout/staleness_max": float(max(staleness, default=0)),
        "rollout/staleness_mean": sum(age * n for age, n in staleness.items()) / max(sum(staleness.values()), 1),
    }


def _rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [_reward(t) for t in trajectories]
    calls = [chat for t in trajectories for chat in t.chats]
    forks = Counter(call.fork.reason for call in calls if call.fork is not None)
    return {
        "train/reward_mean": float(np.mean(rewards)),
        "train/reward_std": float(np.std(rewards)),
        "train/episodes": float(len(trajectories)),
        "rollout/prompt_tokens": float(sum(c.prompt_tokens for c in calls)),
        "rollout/reused_tokens": float(sum(c.shared for c in calls)),
        "rollout/completion_tokens": float(sum(len(c.completion_ids) for c in calls)),
        "rollout/truncated_share": float(np.mean([c.finish_reason == "length" for c in calls])) if calls else 0.0,
        "rollout/drift_share": sum(forks[reason] for reason in forks if reason.is_drift) / max(len(calls), 1),
    } | {f"rollout/forks_{reason.value}": float(forks[reason]) for reason in ForkReason}
