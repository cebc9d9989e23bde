"""Supervised fine-tuning (SFT): raises the likelihood of recorded replies, token by token.

With only the good episodes of the policy itself, this is rejection sampling fine-tuning (Yuan et al. 2023) and the
improvement step of expert iteration.
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
from palestra.algorithms.losses import CrossEntropyLoss
from palestra.config import SFTConfig


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
        self.recorded = RecordedEpisodes(
            run_dir=config.from_run, min_reward=config.min_reward, policy=config.from_policy
        )

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return advantages of 1: every recorded token has the same weight. The loss does not read them."""
        rows = [row for group in groups for row in group.rows]
        return TokenAdvantages(advantages=[np.ones(len(row.ids), np.float32) for row in rows], metrics={})

    def loss(self) -> LossSpec:
        """Return the negative log-likelihood."""
        return LossSpec.of(CrossEntropyLoss())
