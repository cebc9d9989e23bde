"""Algorithms whose baseline is the group: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and RLOO.

Group relative policy optimisation (GRPO): the mean return of a group of episodes is the group's baseline.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.

Dr. GRPO, "GRPO done right": neither the group's deviation nor a rollout's length divides a gradient.

Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2: dividing by the deviation
prefers groups that are nearly solved or nearly hopeless, and dividing by the length prefers long wrong rollouts.

Decoupled clip and dynamic sampling policy optimisation (DAPO): GRPO with four changes for long replies.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale": the upper bound of the ratio is
higher (section 3.1), groups without variance are replaced (3.2), every token of the batch weighs the same (3.3), and
replies near the limit of length lose reward (3.4).

Group sequence policy optimisation (GSPO): clips the probability ratio of the whole sequence.

Zheng et al. 2025, "Group Sequence Policy Optimization": rewards are given to sequences, so the off-policy correction
should be per sequence too; the geometric mean over tokens keeps it in one range for all lengths.

Clipped importance sampling policy optimisation (CISPO): the weight of a gradient is bounded, but never dropped.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", section 3.1: clipping as in
PPO drops the gradient of rare tokens whose probability has grown, and these begin new thoughts.

REINFORCE leave-one-out (RLOO): the baseline of an episode is the mean return of the other episodes of its group.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs". The baseline does not depend on the episode itself, so the gradient is unbiased.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from palestra.algorithms.base import About, Group
from palestra.algorithms.baselines import centred_returns, left_out_returns
from palestra.algorithms.credit import Returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import CISPOLoss, GSPOLoss
from palestra.algorithms.policy_gradient import GroupBaseline, PolicyGradient, ScaledGroupBaseline, clipped_loss
from palestra.config import CISPOConfig, DAPOConfig, DrGRPOConfig, GRPOConfig, GSPOConfig, RLOOConfig
from palestra.types.calls import Chat
from palestra.types.metrics import Metric
from palestra.types.records import Trajectory


class GRPO(ScaledGroupBaseline):
    """GRPO, with credit by episode, TimeStep, agent or branch."""

    config: GRPOConfig
    about = About(
        summary="a group's mean return is its baseline",
        formula="A = (R - mean(R)) / (std(R) + 1e-4) within a group, std of the sample (n - 1); "
        "loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi(token) / pi_old(token)",
        paper="Shao et al. 2024, DeepSeekMath, section 4.1, arXiv:2402.03300",
        needs=("groups of at least two episodes",),
    )

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


class DrGRPO(GroupBaseline):
    """Dr. GRPO: GRPO with unscaled advantages and equal weights of tokens, whatever the length."""

    config: DrGRPOConfig
    about = About(
        summary="GRPO without division by the deviation or by the length",
        formula="A = R - mean(R) within a group; loss as in grpo, each token's divided by "
        "(rollouts with trained tokens) x max_tokens",
        paper="Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2, arXiv:2503.20783",
        needs=("groups of at least two episodes",),
    )

    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return each value minus the group's mean; see `centred_returns`."""
        return centred_returns(values_G, "none")

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


class DAPO(ScaledGroupBaseline):
    """DAPO: GRPO with a higher upper bound, equal token weights, and a soft length penalty."""

    config: DAPOConfig
    about = About(
        summary="GRPO that clips higher, weighs tokens equally, replaces groups without variance, and penalises length",
        formula="A as in grpo, of R - min(1, max(0, (tokens - (max_tokens - buffer)) / buffer)), "
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
            values={key: value - most[key] * (key.baseline_group in differ) for key, value in returns.values.items()},
        )

    def _excess(self, chat: Chat) -> float:
        """Return how far a reply reaches into the last share of its limit, from 0 to 1."""
        limit = chat.sampling.max_tokens
        buffer = self.config.overlong_share * limit
        return min(1.0, max(0.0, (len(chat.completion_ids) - (limit - buffer)) / buffer)) if buffer else 0.0


class GSPO(ScaledGroupBaseline):
    """GSPO; a sequence is an episode, of any number of calls, as in `loss_agg_mode`. Where calls of an episode are
    credited apart, each token has its own call's advantage (GSPO-token, equation 13).
    """

    config: GSPOConfig
    about = About(
        summary="GRPO with one probability ratio for the whole sequence",
        formula="A as in grpo; loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), "
        "s = exp(mean over the sequence's tokens of log(pi / pi_old))",
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        needs=("groups of at least two episodes",),
    )

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of sequences, with the configured bounds."""
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        return LossSpec.of(GSPOLoss(clip_low_threshold=low, clip_high_threshold=high))


class CISPO(ScaledGroupBaseline):
    """CISPO with the group's mean as baseline; by default ratios have an upper bound only."""

    config: CISPOConfig
    about = About(
        summary="GRPO whose ratios are bounded weights of the gradient, so that no token is left out",
        formula="A as in grpo; loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi(token), "
        "mean over all tokens of the batch",
        paper="MiniMax 2025, MiniMax-M1, section 3.1, arXiv:2506.13585",
        needs=("groups of at least two episodes",),
    )

    def loss(self) -> LossSpec:
        """Return the policy gradient with bounded weights."""
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        return LossSpec.of(CISPOLoss(clip_low_threshold=low, clip_high_threshold=high))


class RLOO(GroupBaseline):
    """RLOO, with the clipped loss that keeps several updates of one batch near its samples."""

    config: RLOOConfig
    about = About(
        summary="an episode's baseline is the mean return of the other episodes of its group",
        formula="A = R - mean of the other episodes' R; loss as in grpo, each token's divided by "
        "(rollouts with trained tokens) x max_tokens",
        paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
        needs=("groups of at least two episodes",),
    )

    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return each value minus the mean of the other episodes; see `left_out_returns`."""
        return left_out_returns(values_G)

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)
