"""Learning from pairs which of two recorded replies is better: directly (DPO), or as a reward model.

A step makes one update, with the weights before it, so that the gradient is exact wherever a pair's rows are: what a
pair's loss is differentiated by is known, and the trainer's loss of each reply is its number times that derivative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.base import (
    About,
    Algorithm,
    CriticUpdate,
    ForwardOutputs,
    Group,
    RecordedEpisodes,
    StepOrder,
    TokenAdvantages,
)
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import CrossEntropyLoss, ValueGradientLoss
from palestra.config import DPOConfig, RewardModelConfig
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample

Numbers = NDArray[np.float64]
# Of the square of a pair's summed rewards, which keeps their mean near 0: as in TRL (Eisenstein et al. 2023).
CENTER_REWARDS_COEFFICIENT = 0.01
_METRICS = (
    Metric("pair_loss", "nats", "Mean over pairs of the loss, before the step's update."),
    Metric("pair_accuracy", "share", "Share of pairs whose chosen reply has the larger reward, before the update."),
    Metric("pair_margin", "nats", "Mean over pairs of the reward of chosen minus that of rejected."),
    Metric(
        "chosen_reward",
        "nats",
        "Mean reward of chosen replies: with `dpo` the implicit one, beta (log pi - log reference).",
    ),
    Metric("rejected_reward", "nats", "Mean reward of rejected replies, as that of chosen ones."),
)
_PAIRS = (
    "pairs: tasks with `prompt`, `chosen` and `rejected`, or `from_run`, the folder of a run or the ID of a service's "
    "job"
)


class DPO(Algorithm):
    """DPO on pairs of conversations, or on the best and the worst episode of each group of a run.

    Rafailov et al. 2023, "Direct Preference Optimization", equation 7. With r = beta x (log pi(reply) - log
    reference(reply)), summed over a reply's tokens, the loss of a pair is -log sigmoid(r(chosen) - r(rejected)). With
    w = beta x sigmoid(r(rejected) - r(chosen)), its gradient is that of -w x log pi(chosen) + w x log pi(rejected)
    (section 4).
    """

    config: DPOConfig
    about = About(
        summary="raises a chosen reply over a rejected one, as far as the reference allows",
        formula="loss = -log sigmoid(r(chosen) - r(rejected)), r = beta (log pi(reply) - log reference(reply))",
        paper="Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290",
        needs=(_PAIRS, "a copy of the weights as reference, unless an adapter is trained"),
    )
    metrics = _METRICS
    needs = frozenset({"old_logprobs", "reference_logprobs"})

    def __init__(self, config: DPOConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, which name the recorded pairs. See `Algorithm`."""
        super().__init__(config, step_order)
        self.recorded = RecordedEpisodes(run_dir=config.from_run, pairs=True)

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return w for each token of a chosen reply and -w for each of a rejected one.

        Importance weights turn the mean over each reply's tokens into their sum, and the mean over replies into the
        mean over pairs. A pair of which one reply can't be trained teaches nothing.
        """
        rows = [row for group in groups for row in group.rows]
        sums, tokens = defaultdict[str, float](float), _tokens(groups)
        for row, policy, reference in zip(rows, forward["old_logprobs"], forward["reference_logprobs"], strict=True):
            sums[row.episode_id] += float((policy - reference)[row.loss_mask].sum(dtype=np.float64))
        found = _pairs(groups, tokens)
        better, worse = _of_pairs(found, {name: self.config.beta * total for name, total in sums.items()})
        losses, slopes = _bradley_terry(better - worse)
        signed = defaultdict[str, float](float)
        for (chosen, rejected), slope in zip(found, slopes, strict=True):
            signed[chosen], signed[rejected] = self.config.beta * slope, -self.config.beta * slope
        advantages = [np.full(len(row.ids), signed[row.episode_id], np.float32) for row in rows]
        return TokenAdvantages(
            advantages=advantages,
            importance_weights=[
                2.0 * tokens[row.episode_id] * each for row, each in zip(rows, advantages, strict=True)
            ],
            metrics=_measured(losses, better, worse),
        )

    def loss(self) -> LossSpec:
        """Return the negative log-likelihood, which the signed weights make the loss of pairs."""
        return LossSpec.of(CrossEntropyLoss())


class RewardModeling(Algorithm):
    """A reward model, on pairs of conversations, or on the best and the worst episode of each group of a run.

    Bradley and Terry 1952; Ouyang et al. 2022, "Training language models to follow instructions", equation 1. The
    reward r of a reply is the value of its last token. With m = r(chosen) - r(rejected), s = r(chosen) + r(rejected)
    and the coefficient c of Eisenstein et al. 2023, the loss of a pair is -log sigmoid(m) + c s^2, and its derivative
    by r is -sigmoid(-m) + 2 c s for the chosen reply, and sigmoid(-m) + 2 c s for the rejected one.
    """

    config: RewardModelConfig
    about = About(
        summary="learns rewards from pairs, for use as a judge; the policy stays as it is",
        formula="loss = -log sigmoid(r(chosen) - r(rejected)) + c (r(chosen) + r(rejected))^2, "
        f"c = {CENTER_REWARDS_COEFFICIENT:g}",
        paper="Ouyang et al. 2022, Training language models to follow instructions, arXiv:2203.02155",
        needs=(_PAIRS, "memory for a second model with its optimizer: the reward model"),
    )
    metrics = _METRICS
    needs = frozenset({"action_values"})

    def __init__(self, config: RewardModelConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, which name the recorded pairs. See `Algorithm`."""
        super().__init__(config, step_order)
        self.recorded = RecordedEpisodes(run_dir=config.from_run, pairs=True)
        self.critic = CriticUpdate(
            loss=LossSpec.of(ValueGradientLoss()),
            optimizer=config.critic.optimizer,
            epochs=1,
            warmup_steps=None,
            kind="replies",
        )

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return the derivative of a pair's loss by the value of each reply's last token, and NaN elsewhere."""
        rows = [row for group in groups for row in group.rows]
        tokens = _tokens(groups)
        last = _last_tokens(rows)
        values = {name: float(forward["action_values"][number][place]) for name, (number, place) in last.items()}
        found = _pairs(groups, tokens)
        better, worse = _of_pairs(found, values)
        losses, slopes = _bradley_terry(better - worse)
        factor, sums = CENTER_REWARDS_COEFFICIENT, better + worse
        losses = losses + factor * sums**2
        returns = [np.full(len(row.ids), np.nan, np.float32) for row in rows]
        for (chosen, rejected), slope, centre in zip(found, slopes, 2 * factor * sums, strict=True):
            for name, derivative in ((chosen, centre - slope), (rejected, centre + slope)):
                number, place = last[name]
                returns[number][place] = derivative
        return TokenAdvantages(
            advantages=[np.zeros(len(row.ids), np.float32) for row in rows],
            # The one token with a target has the weight of all of its reply's, and the mean is over pairs.
            importance_weights=[np.full(len(row.ids), 2.0 * tokens[row.episode_id], np.float32) for row in rows],
            returns=returns,
            metrics=_measured(losses, better, worse),
        )

    def loss(self) -> LossSpec:
        """Return a loss that is not used: the policy is not trained."""
        return LossSpec.of(CrossEntropyLoss())


def _last_tokens(rows: Sequence[TrainSample]) -> dict[str, tuple[int, int]]:
    """Return the row and the place of the last trained token of each episode, however its calls are cut into rows."""
    found: dict[str, tuple[int, int, int]] = {}
    for number, row in enumerate(rows):
        if (places := np.flatnonzero(row.loss_mask)).size:
            place = int(max(places, key=lambda at: (row.calls[at], at)))
            found[row.episode_id] = max(found.get(row.episode_id, (-1, -1, -1)), (int(row.calls[place]), place, number))
    return {name: (number, place) for name, (_, place, number) in found.items()}


def _tokens(groups: Sequence[Group]) -> Mapping[str, int]:
    """Return how many trained tokens each episode has; 0 for one that can't be trained."""
    tokens = defaultdict[str, int](int)
    for group in groups:
        for row in group.rows:
            tokens[row.episode_id] += int(row.loss_mask.sum())
    return tokens


def _pairs(groups: Sequence[Group], tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the ids of the chosen and the rejected episode of each pair that can be trained."""
    found = []
    for group in groups:
        chosen, rejected = (one.episode.episode_id for one in group.trajectories)  # they have this order
        if tokens[chosen] and tokens[rejected]:
            found.append((chosen, rejected))
    return found


def _of_pairs(pairs: Sequence[tuple[str, str]], rewards: Mapping[str, float]) -> tuple[Numbers, Numbers]:
    """Return the rewards of the chosen and of the rejected replies, float64 [P] each."""
    better = np.array([rewards[chosen] for chosen, _ in pairs], np.float64)
    return better, np.array([rewards[rejected] for _, rejected in pairs], np.float64)


def _bradley_terry(margins: Numbers) -> tuple[Numbers, Numbers]:
    """Return -log sigmoid(margin), and sigmoid(-margin), minus its derivative; float64 [P] each."""
    losses = np.logaddexp(0.0, -margins)
    # sigmoid(-x) is 1 - exp(-log(1 + exp(-x))), without an overflow for any x.
    return losses, -np.expm1(-losses)


def _measured(losses: Numbers, better: Numbers, worse: Numbers) -> dict[str, float]:
    """Return the metrics of P pairs; NaN without any."""
    values = {
        "pair_loss": losses,
        "pair_accuracy": (better > worse).astype(np.float64),
        "pair_margin": better - worse,
        "chosen_reward": better,
        "rejected_reward": worse,
    }
    return {name: float(np.mean(each)) if len(losses) else float("nan") for name, each in values.items()}
