"""Algorithms whose baseline is not the group: REINFORCE++, over the batch, and RAE, over the past of a role.

REINFORCE++: advantages are normalised over the whole batch, which is larger than a group and so less biased.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization". The
paper subtracts a KL penalty from the reward of each token; here it is in the loss of each token, as for every algorithm
without a critic (`algorithm.kl`).

Role-conditioned advantage estimation (RAE): the baseline of each role is a moving mean of its returns.

Liu et al. 2025, "SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning via Multi-Agent Multi-Turn Reinforcement
Learning", section 3.3: in a game that favours the first player, one baseline for both sides would reward the side, not
the play. SPIRAL has baselines per game; here the agent's name identifies a role, so agents of different games need
different names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from palestra.algorithms.base import About, StepOrder
from palestra.algorithms.baselines import GroupAdvantages, batch_advantages, centred_returns, group_advantages
from palestra.algorithms.credit import BaselineKey, Returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import PolicyGradient, clipped_loss
from palestra.config import RAEConfig, ReinforcePPConfig
from palestra.types.records import Trajectory

DECAY = 0.95  # the share of a role's baseline that stays at each of its returns: SPIRAL, section 3.3
_NORMALISED = partial(centred_returns, scale="std")
_CENTRED = partial(centred_returns, scale="none")


class ReinforcePP(PolicyGradient):
    """REINFORCE++, and with `baseline = group` REINFORCE++-baseline."""

    config: ReinforcePPConfig
    about = About(
        summary="advantages are normalised over the whole batch, with or without the group's mean as baseline",
        formula="A = (a - mean(a)) / (std(a) + 1e-4) over the batch, std of the sample (n - 1), "
        "a = R, or R - mean of its group; loss as in grpo, mean over all tokens of the batch",
        paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        needs=("with `baseline = group`: groups of at least two episodes",),
    )

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether returns differ within the group, if its mean is the baseline; else true."""
        if self.config.baseline == "none":
            return True
        found = group_advantages(self.returns(trajectories), _CENTRED)
        return any(any(values.values()) for values in found.by_key)

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return advantages that are normalised over the batch; see `PolicyGradient.estimate`."""
        if self.config.baseline == "none":
            return batch_advantages(groups, _NORMALISED)
        centred = [group_advantages(returns, _CENTRED) for returns in groups]
        found = batch_advantages([_over(*of) for of in zip(groups, centred, strict=True)], _NORMALISED)
        return [
            replace(after, calls_without_peers=before.calls_without_peers)
            for after, before in zip(found, centred, strict=True)
        ]

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


def _over(returns_G: Sequence[Returns], centred: GroupAdvantages) -> list[Returns]:
    """Return the returns of a group with their advantages over the group's mean as values."""
    return [replace(each, values=values) for each, values in zip(returns_G, centred.by_key, strict=True)]


class RAE(PolicyGradient):
    """RAE: a role is an agent's name or, with another `credit`, the baseline group of its returns.

    The baselines are in the checkpoint. They move with every batch, in the order of its manifest, so that a step
    repeated after a crash gives the same advantages.
    """

    config: RAEConfig
    about = About(
        summary="each role's baseline is a moving mean of its returns, for self-play",
        formula="b_role <- 0.95 b_role + 0.05 R, from 0 on, in canonical order; A = R - b_role; loss as in grpo",
        paper="Liu et al. 2025, SPIRAL, section 3.3, arXiv:2506.24119",
    )

    def __init__(self, config: RAEConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and start without baselines; see `Algorithm`."""
        super().__init__(config, step_order)
        self._baselines: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return the baseline of each role."""
        return {"baselines": dict(self._baselines)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the baselines from a checkpoint."""
        self._baselines = {str(role): float(value) for role, value in state.get("baselines", {}).items()}

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return each return minus the baseline of its role, after moving the baseline towards it."""
        return [self._group(returns) for returns in groups]

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)

    def _group(self, returns_G: Sequence[Returns]) -> GroupAdvantages:
        """Return the advantages of one group, and move the baselines."""
        by_key = [{key: self._advantage(key, value) for key, value in each.values.items()} for each in returns_G]
        by_call = [
            {index: found[key] for index, key in each.key_of.items()}
            for each, found in zip(returns_G, by_key, strict=True)
        ]
        return GroupAdvantages(by_key=by_key, by_call=by_call, calls_without_peers=0)

    def _advantage(self, key: BaselineKey, value: float) -> float:
        """Move the role's baseline towards a return, and return the difference."""
        role = key.baseline_group
        self._baselines[role] = DECAY * self._baselines.get(role, 0.0) + (1.0 - DECAY) * value
        return value - self._baselines[role]
