"""Decoupled clip and dynamic sampling policy optimisation (DAPO): GRPO with four changes for long replies.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale": the upper bound of the ratio is
higher (section 3.1), groups without variance are replaced (3.2), every token of the batch weighs the same (3.3), and
replies near the limit of length lose reward (3.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from palestra.algorithms.base import About, Group
from palestra.algorithms.credit import Returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import PolicyGradient, ScaledGroupBaseline, clipped_loss
from palestra.config import DAPOConfig
from palestra.types.calls import Chat
from palestra.types.metrics import Metric
from palestra.types.records import Trajectory


class DAPO(ScaledGroupBaseline):
    """DAPO: GRPO with a higher upper bound, equal token weights, and a soft length penalty."""

    config: DAPOConfig
    about = About(
        summary="GRPO that clips higher, weighs tokens equally, replaces groups without variance, and penalises length",
        formula="A as in grpo, of R - overlong_penalty x min(1, max(0, (tokens - (max_tokens - buffer)) / buffer)), "
        "buffer = overlong_share x max_tokens, where the R that are compared differ; loss as in grpo with "
        "clip_high 0.28, mean over all tokens of the batch",
        paper="Yu et al. 2025, DAPO, arXiv:2503.14476",
        needs=("groups of at least two episodes",),
    )
    metrics = (
        *PolicyGradient.metrics,
        Metric(
            "overlong_replies",
            "ratio",
            "Share of calls whose reply is longer than (1 - `overlong_share`) x max_tokens.",
        ),
    )

    def shaped(self, trajectories: Sequence[Trajectory], returns: list[Returns]) -> list[Returns]:
        """Return the returns of the episodes, each lowered by the longest reply that it credits.

        Equal outcomes stay equal: otherwise their lengths alone would be learned, scaled to a whole advantage.
        """
        (found,) = self.estimate([returns])
        differ = {key.baseline_group for advantages in found.by_key for key, value in advantages.items() if value}
        return [self._lowered(trajectory, of, differ) for trajectory, of in zip(trajectories, returns, strict=True)]

    def batch_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the share of calls with a length penalty."""
        calls = [chat for group in groups for trajectory in group.trajectories for chat in trajectory.chats]
        return {"overlong_replies": sum(self._excess(chat) > 0.0 for chat in calls) / max(len(calls), 1)}

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)

    def _lowered(self, trajectory: Trajectory, returns: Returns, differ: Container[str]) -> Returns:
        """Return the returns of an episode, minus the penalties of replies where outcomes differ."""
        most: defaultdict[object, float] = defaultdict(float)
        for chat in trajectory.chats:
            key = returns.key_of[chat.index]
            most[key] = max(most[key], self._excess(chat))
        return replace(
            returns,
            values={
                key: value - self.config.overlong_penalty * most[key] * (key.baseline_group in differ)
                for key, value in returns.values.items()
            },
        )

    def _excess(self, chat: Chat) -> float:
        """Return how far a reply reaches into the last share of its limit, from 0 to 1."""
        limit = chat.sampling.max_tokens
        buffer = self.config.overlong_share * limit
        return min(1.0, max(0.0, (len(chat.completion_ids) - (limit - buffer)) / buffer)) if buffer else 0.0
