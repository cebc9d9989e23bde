"""Algorithms that learn from what is given: recorded replies (SFT), or a teacher's probabilities (distillation).

Supervised fine-tuning (SFT): raises the likelihood of recorded replies, token by token.

With only the good episodes of the policy itself, this is rejection sampling fine-tuning (Yuan et al. 2023) and the
improvement step of expert iteration.

On-policy distillation: a teacher's probabilities score the student's own tokens (a reverse KL).

Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"; Gu et al. 2024,
"MiniLLM"; each token by itself as in Lu et al. 2025, "On-Policy Distillation" (Thinking Machines Lab).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.algorithms.base import (
    About,
    Algorithm,
    ForwardOutputs,
    Group,
    RecordedEpisodes,
    StepOrder,
    TokenAdvantages,
)
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import CrossEntropyLoss, ImportanceSamplingLoss
from palestra.config import DistillConfig, SFTConfig
from palestra.types.metrics import Metric


class SFT(Algorithm):
    """SFT on conversations, or on the episodes of a run."""

    config: SFTConfig
    about = About(
        summary="raises the likelihood of recorded replies",
        formula="loss = -log pi(token); rewards only choose the episodes",
        paper="Ouyang et al. 2022, InstructGPT, section 3.5, arXiv:2203.02155; on a run's own good episodes: Yuan et "
        "al. 2023, arXiv:2308.01825",
        needs=(
            "recorded episodes: tasks with `messages`, or `from_run`, the folder of a run or the ID of a service's job",
        ),
    )

    def __init__(self, config: SFTConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, which name the recorded episodes. See `Algorithm`."""
        super().__init__(config, step_order)
        self.recorded = RecordedEpisodes(run_dir=config.from_run, min_reward=config.min_reward)

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return advantages of 1: every recorded token has the same weight. The loss does not read them."""
        rows = [row for group in groups for row in group.rows]
        return TokenAdvantages(advantages=[np.ones(len(row.ids), np.float32) for row in rows], metrics={})

    def loss(self) -> LossSpec:
        """Return the negative log-likelihood."""
        return LossSpec.of(CrossEntropyLoss())


class Distill(Algorithm):
    """On-policy distillation from a frozen policy of the job or a served model; rewards are ignored."""

    config: DistillConfig
    about = About(
        summary="a frozen policy or a served model teaches: the reverse KL on the student's own tokens",
        formula="A = log teacher(token) - log pi_old(token), of each token by itself; loss = -r A, r = pi(token) / "
        "pi_old(token)",
        paper="Agarwal et al. 2024, On-Policy Distillation of Language Models, arXiv:2306.13649",
        needs=(
            "a teacher with the same tokenizer: a frozen policy, of which the trainer keeps a copy, or a model that "
            "another server has",
        ),
    )
    metrics = (
        Metric(
            "teacher_kl",
            "nats",
            "Divergence KL(policy || teacher) of a token: mean over trained tokens of log pi_old - log teacher, of the "
            "distribution that the tokens were sampled from.",
        ),
    )
    needs = frozenset({"teacher_logprobs"})

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return for each token the teacher's logprob minus the student's."""
        rows = [row for group in groups for row in group.rows]
        found = [
            np.where(row.loss_mask, teacher - row.logprobs, np.float32(0.0)).astype(np.float32)
            for row, teacher in zip(rows, forward.get("teacher_logprobs", ()), strict=True)
        ]
        trained = [advantages[row.loss_mask] for row, advantages in zip(rows, found, strict=True)]
        mean = float(np.mean(-np.concatenate(trained))) if rows else float("nan")
        return TokenAdvantages(advantages=found, metrics={"teacher_kl": mean})

    def loss(self) -> LossSpec:
        """Return the policy gradient with the ratio to the sampling distribution, without bounds."""
        return LossSpec.of(ImportanceSamplingLoss())
