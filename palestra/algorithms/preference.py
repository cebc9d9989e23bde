"""Direct preference optimisation: learns which of two recorded replies is better, without a model of rewards.

Rafailov et al. 2023, "Direct Preference Optimization", equation 7. With r = beta x (log pi(reply) - log
reference(reply)), summed over a reply's tokens, the loss of a pair is -log sigmoid(r(chosen) - r(rejected)). With
w = beta x sigmoid(r(rejected) - r(chosen)), its gradient is that of -w x log pi(chosen) + w x log pi(rejected) (section
4). A step makes one update, with the weights before it, so that the gradient is exact wherever a pair's rows are.
"""

from __future__ import annotations

from collections import defaultdict
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
from palestra.config import DPOConfig
from palestra.types.metrics import Metric


class DPO(Algorithm):
    """DPO on pairs of conversations, or on the best and the worst episode of each group of a run."""

    config: DPOConfig
    about = About(
        summary="raises a chosen reply over a rejected one, as far as the reference allows",
        formula="loss = -log sigmoid(r(chosen) - r(rejected)), r = beta (log pi(reply) - log reference(reply))",
        paper="Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290",
        needs=(
            "pairs: tasks with `prompt`, `chosen` and `rejected`, or `from_run`, the folder of a run or the ID of a "
            "service's job",
            "a copy of the weights as reference, unless an adapter is trained",
        ),
    )
    metrics = (
        Metric("pair_loss", "nats", "Mean over pairs of the loss of DPO, before the step's update."),
        Metric("pair_accuracy", "share", "Share of pairs whose chosen reply has the larger implicit reward."),
        Metric("pair_margin", "nats", "Mean over pairs of the implicit reward of chosen minus that of rejected."),
        Metric("chosen_reward", "nats", "Mean implicit reward of chosen replies, beta (log pi - log reference)."),
        Metric("rejected_reward", "nats", "Mean implicit reward of rejected replies, beta (log pi - log reference)."),
    )
    needs = frozenset({"old_logprobs", "reference_logprobs"})

    def __init__(self, config: DPOConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, which name the recorded pairs. See `Algorithm`."""
        super().__init__(config, step_order)
        self.recorded = RecordedEpisodes(run_dir=config.from_run, policy=config.from_policy, pairs=True)

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return w for each token of a chosen reply and -w for each of a rejected one.

        Importance weights turn the mean over each reply's tokens into their sum, and the mean over replies into the
        mean over pairs. A pair of which one reply can't be trained teaches nothing.
        """
        rows = [row for group in groups for row in group.rows]
        sums, tokens = defaultdict[str, float](float), defaultdict[str, int](int)
        for row, policy, reference in zip(rows, forward["old_logprobs"], forward["reference_logprobs"], strict=True):
            sums[row.episode_id] += float((policy - reference)[row.loss_mask].sum(dtype=np.float64))
            tokens[row.episode_id] += int(row.loss_mask.sum())
        found = [
            (chosen, rejected)
            for chosen, rejected in (_pair(group) for group in groups)
            if tokens[chosen] and tokens[rejected]
        ]
        better = self.config.beta * np.array([sums[chosen] for chosen, _ in found])
        worse = self.config.beta * np.array([sums[rejected] for _, rejected in found])
        margins = better - worse
        losses = np.logaddexp(0.0, -margins)
        # sigmoid(-x) is 1 - exp(-log(1 + exp(-x))), without an overflow for any x.
        factors = self.config.beta * -np.expm1(-losses)
        signed = defaultdict[str, float](float)
        for (chosen, rejected), factor in zip(found, factors, strict=True):
            signed[chosen], signed[rejected] = factor, -factor
        advantages = [np.full(len(row.ids), signed[row.episode_id], np.float32) for row in rows]
        metrics = {
            "pair_loss": losses,
            "pair_accuracy": margins > 0,
            "pair_margin": margins,
            "chosen_reward": better,
            "rejected_reward": worse,
        }
        return TokenAdvantages(
            advantages=advantages,
            importance_weights=[
                2.0 * tokens[row.episode_id] * each for row, each in zip(rows, advantages, strict=True)
            ],
            metrics={name: float(np.mean(values)) if found else float("nan") for name, values in metrics.items()},
        )

    def loss(self) -> LossSpec:
        """Return the negative log-likelihood, which the signed weights make the loss of pairs."""
        return LossSpec.of(CrossEntropyLoss())


def _pair(group: Group) -> tuple[str, str]:
    """Return the ids of the chosen and the rejected episode, which have this order in their group."""
    chosen, rejected = group.trajectories
    return chosen.episode.episode_id, rejected.episode.episode_id
