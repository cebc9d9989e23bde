"""From the episodes of a manifest to the rows of the loss. Rows are in canonical order: (group index, sample index)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from palestra.algorithms.grpo import group_advantages, token_weights
from palestra.config import AlgorithmConfig
from palestra.schemas.records import PolicyVersion, TrainSample, Trajectory
from palestra.trajectory import TokenRow, rows_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step trains on, and what was left out of it."""

    samples: list[TrainSample]
    metrics: dict[str, float]


def make_batch(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, max_tokens: int, version: PolicyVersion
) -> Batch:
    """Rows with advantages and weights; groups without variance are left out and counted.

    They still count in the weights, as the rollouts with advantage 0 that they are: a batch in which little can be
    learned makes a small step, not one that a few rollouts decide.

    Args:
        trajectories: completed episodes in canonical order.
        algorithm: how rewards become advantages, and tokens a loss.
        max_tokens: the divisor of the `constant` aggregation.
        version: the policy before the step, to which staleness is counted.
    """
    left_out: Counter[str] = Counter()
    entering: list[tuple[Trajectory, float, float]] = []  # with advantage and weight
    tokens = [sum(len(chat.completion_ids) for chat in t.chats) for t in trajectories]
    weighted = zip(trajectories, token_weights(tokens, algorithm.aggregation, max_tokens), strict=True)
    for _, group in groupby(weighted, key=lambda pair: pair[0].episode.group_index):
        members = list(group)
        advantages = group_advantages([_reward(t) for t, _ in members], algorithm.advantage_scale)
        if not any(advantages):
            left_out["groups_zero_variance"] += 1
            continue
        left_out["episodes_without_tokens"] += sum(not weight for _, weight in members)
        entering += [(t, a, w) for (t, w), a in zip(members, advantages, strict=True)]
    samples = [
        _sample(trajectory.episode.episode_id, row, advantage, weight)
        for trajectory, advantage, weight in entering
        for row in rows_of(trajectory.chats)
    ]
    metrics = {f"train/{name}": float(left_out[name]) for name in ("groups_zero_variance", "episodes_without_tokens")}
    return Batch(samples=samples, metrics=metrics | _rollout_metrics(trajectories, samples, version))


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.episode.reward
    assert reward is not None, f"episode {trajectory.episode.episode_id} has no reward"
    return reward


def _sample(episode_id: str, row: TokenRow, advantage: float, weight: float) -> TrainSample:
    trained = row.sampled.astype(np.float32)
    return TrainSample(
        episode_id=episode_id,
        policy=row.policy,
        ids=row.ids,
        loss_mask=row.sampled,
        logprobs=row.logprobs,
        versions=row.versions,
        advantages=trained * np.float32(advantage),
        weights=trained * np.float32(weight),
        temperature=row.temperature,
    )


def _rollout_metrics(
    trajectories: Sequence[Trajectory], samples: Sequence[TrainSample], version: PolicyVersion
) -> dict[str, float]:
    rewards = [_reward(t) for t in trajectories]
    calls = [chat for t in trajectories for chat in t.chats]
    stale = [version.n - int(s.versions[s.loss_mask, 1].min()) for s in samples]
    return {
        "train/reward_mean": float(np.mean(rewards)),
        "train/reward_std": float(np.std(rewards)),
        "train/episodes": float(len(trajectories)),
        "rollout/prompt_tokens": float(sum(len(c.prompt_ids) for c in calls)),
        "rollout/completion_tokens": float(sum(len(c.completion_ids) for c in calls)),
        "rollout/truncated_share": float(np.mean([c.finish_reason == "length" for c in calls])) if calls else 0.0,
        "rollout/staleness_max": float(max(stale, default=0)),
    }
