"""The interface of an algorithm: from groups of episodes to an advantage for each token, and the name of a loss.

An algorithm is pure and knows no trainer. It runs in the learner's process, without torch. Its loss runs in the
trainer, perhaps in another process, and is therefore passed by name, never as a callable (see `LossSpec`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.algorithms.loss import LossSpec
from palestra.config import AlgorithmConfig, OptimizerConfig
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample, Trajectory

StepOrder = Literal["observed", "acted"]
ForwardOutput = Literal[
    "old_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "values",
    "next_values",
    "action_values",
    "target_action_values",
]
ForwardOutputs = Mapping[ForwardOutput, Sequence[Floats]]
"""Outputs of a forward pass before the step, without a gradient: for each output one float32 [N] per row, in the order
of the rows, NaN where a token is not trained. `old_logprobs` are those of the policy that is trained; `values` are the
critic's of the states before the tokens, and `next_values` of the states after them. `action_values` are the smaller of
the two values that a critic with twin heads gives to the action that ends with the token, and `target_action_values`
those of the critic's slowly following copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completed episodes of one task, which are compared with one another.

    Attributes:
        trajectories: the episodes, in order of their sample index.
        rows: the token rows to train. There are none if the algorithm learns nothing from the group, and none of an
            episode that can't be trained. `episode_id` and `calls` of a row tell which call sampled each token.
    """

    trajectories: tuple[Trajectory, ...]
    rows: tuple[TrainSample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """The result of an algorithm: a number for each token of the rows, in the order of the groups and of their rows.

    Attributes:
        advantages: float32 [N] for each row; values of tokens that are not trained are ignored.
        importance_weights: float32 [N] for each row, factors of the loss weights; None: 1 everywhere.
        returns: float32 [N] for each row, what the critic learns to say, NaN where it learns nothing; None: there is
            no critic.
        metrics: values by name, as the algorithm declares them in `metrics`, without `train/`.
    """

    advantages: Sequence[Floats]
    importance_weights: Sequence[Floats] | None = None
    returns: Sequence[Floats] | None = None
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The description of an algorithm, for `palestra algorithms` and the documentation.

    Attributes:
        summary: what is special about the algorithm, in a line.
        formula: its advantage and its loss.
        paper: who has published it, and where.
        needs: what a job has to have for it, beyond what every job has; a line each.
    """

    summary: str
    formula: str
    paper: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticUpdate:
    """How an algorithm's critic is trained in each step, before the policy is.

    Attributes:
        loss: the loss of a value, by its name.
        optimizer: the critic's own, with its own schedule.
        epochs: updates made from one batch.
        warmup_steps: the first of the steps in which the policy is due, in which the critic alone is trained.
        target_rate: share by which the critic's copy, which gives `target_action_values`, moves to the critic after
            each update (Polyak averaging). None: there is no copy, and the critic has one head, which values states.
    """

    loss: LossSpec
    optimizer: OptimizerConfig
    epochs: int
    warmup_steps: int
    target_rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Which completed episodes of a job a step learns from, where they are not only those of the step's manifest.

    Attributes:
        draws: batches that are drawn in a step; each makes the updates that otherwise a step makes.
        episodes: episodes of a batch, drawn without replacement; all, where there are fewer.
        max_age: steps back from the present one; 0: only the present one's episodes.
        max_episodes: only so many of the newest episodes are drawn from.
    """

    draws: int
    episodes: int
    max_age: int
    max_episodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEpisodes:
    """The episodes of the past that an algorithm trains, in place of episodes that are played for it.

    Attributes:
        run_dir: folder of the run that has recorded them; None: the job's training tasks are conversations.
        min_reward: episodes of that run with a smaller reward are left out; None: none are.
        policy: policy of that run whose calls and rewards are learned from, where the run has trained several; None:
            the one with the name of the policy that learns.
    """

    run_dir: Path | None
    min_reward: float | None
    policy: str | None = None


class Algorithm(ABC):
    """Turns rewards into a gradient. Subclass it for an algorithm of your own.

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
                return LossSpec(name="ppo")
        ```

    Attributes:
        about: what the algorithm is; None: of a user's own, which is in no list.
        metrics: the metrics that `TokenAdvantages.metrics` may contain, for the documentation.
        needs: outputs that the trainer computes of the rows before `advantages` is called, and that rows then carry to
            the loss (`old_logprobs`). Empty: no additional forward pass.
        dynamic_sampling: how many groups without anything to learn from may be replaced in a step, as a multiple of
            `rollout.groups_per_step`. 0: none.
        critic: how a critic is trained beside the policy; it computes `values` and `next_values`. None: there is none.
        recorded: the episodes that are trained, if they are not played for the job; None: they are played.
        replay: episodes of earlier steps that are trained again; None: a step trains those of its manifest.
        every_choice: whether the rows have, for each trained call, every reply that could have been sampled, each in a
            row of its own, which needs replies that are held to finitely many choices (see `tokens.choice_rows`).
            False: rows have what was sampled.
    """

    about: ClassVar[About | None] = None
    metrics: ClassVar[tuple[Metric, ...]] = ()
    needs: frozenset[ForwardOutput] = frozenset()
    dynamic_sampling: int = 0
    critic: CriticUpdate | None = None
    recorded: RecordedEpisodes | None = None
    replay: Replay | None = None
    every_choice: bool = False

    def __init__(self, config: AlgorithmConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings in `self.config` and `self.step_order`.

        Args:
            config: the job's section `[algorithm]`.
            step_order: order of the TimeSteps of an episode in which several agents act at the same time.
        """
        self.config = config
        self.step_order = step_order

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether anything can be learned from a group. If not, the group gets no rows. By default always true.

        Args:
            trajectories: the completed episodes of the group.
        """
        return True

    @abstractmethod
    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return the advantage of each token of all rows.

        Args:
            groups: all groups of the batch, in canonical order.
            forward: the outputs that `needs` names, by name; empty if it names none.
        """

    @abstractmethod
    def loss(self) -> LossSpec:
        """Return the name and the parameters of the loss of a token. The trainer looks the loss up in `LOSSES`."""

    def state(self) -> dict[str, Any]:
        """Return what the algorithm has to remember from step to step, as JSON, for the checkpoint. By default nothing.

        `advantages` may change it. A step that is repeated after a crash begins with the state before the step.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # an algorithm without state has nothing to do
        """Take over a state from a checkpoint.

        Args:
            state: the result of `state` at the time of the checkpoint; empty in checkpoints without one.
        """
