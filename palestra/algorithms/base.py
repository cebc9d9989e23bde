"""The interface of an algorithm: from groups of episodes to an advantage for each token, and the name of a loss.

An algorithm is pure and knows no trainer. It runs where the learner runs, without torch; its loss runs where the
trainer runs, perhaps in another process, and is therefore named, never handed over (see `LossSpec`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from palestra.algorithms.loss import LossSpec
from palestra.config import AlgorithmConfig
from palestra.schemas.metrics import Metric
from palestra.schemas.records import Floats, TrainSample, Trajectory

StepOrder = Literal["observed", "acted"]
ForwardOutput = Literal["old_logprobs", "reference_logprobs", "values", "teacher_logprobs"]
ForwardOutputs = Mapping[ForwardOutput, Sequence[Floats]]
"""What a trainer computed of the rows before the step, without a gradient: for each output one [N] a row, in the order
of the rows, NaN where a token is not trained. `old_logprobs` are those of the policy that is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completed episodes of one task, which are compared with one another.

    Attributes:
        trajectories: the episodes, in order of their sample index.
        rows: what is trained of them; none where the algorithm learns nothing from the group, and none of an episode
            that can't be trained. `episode_id` and `calls` of a row say which call sampled each token.
    """

    trajectories: tuple[Trajectory, ...]
    rows: tuple[TrainSample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """What an algorithm says of each token of the rows, in the order of the groups and of the rows in them.

    Attributes:
        advantages: [N] float32 a row; only tokens that are trained count.
        importance_weights: [N] float32 a row, by which the loss weights are multiplied; None: 1 everywhere.
        metrics: names as the algorithm declares them, without `train/`.
    """

    advantages: Sequence[Floats]
    importance_weights: Sequence[Floats] | None = None
    metrics: Mapping[str, float]


class Algorithm(ABC):
    """How rewards become a gradient.

    Example:
        ```python
        class Reinforce(Algorithm):
            def advantages(self, groups, forward):
                rewards = {t.episode.episode_id: t.episode.reward for g in groups for t in g.trajectories}
                rows = [row for group in groups for row in group.rows]
                return TokenAdvantages(
                    advantages=[np.full(len(row.ids), rewards[row.episode_id], np.float32) for row in rows],
                    metrics={},
                )

            def loss(self):
                return LossSpec.of(PPOClipLoss(clip_low=0.2, clip_high=0.2))
        ```

    Attributes:
        metrics: what `TokenAdvantages.metrics` may contain, for the documentation.
        needs: what the trainer has to compute of the rows before `advantages` is called, and what rows then carry to
            the loss (`old_logprobs`). Empty: no additional forward pass.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    needs: frozenset[ForwardOutput] = frozenset()

    def __init__(self, config: AlgorithmConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings.

        Args:
            config: the job's `[algorithm]`.
            step_order: of the TimeSteps of an episode in which several agents act at the same time.
        """
        self.config = config
        self.step_order = step_order

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether anything can be learned from a group; no row is made of one from which nothing can.

        Args:
            trajectories: the completed episodes of the group.
        """
        return True

    @abstractmethod
    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return the advantage of each token of all rows.

        Args:
            groups: all groups of the batch, in canonical order.
            forward: what `needs` names; empty where it names nothing.
        """

    @abstractmethod
    def loss(self) -> LossSpec:
        """Return the name and the parameters of the loss of a token."""
