"""The interface of an algorithm: from groups of episodes to an advantage for each token, and the name of a loss.

An algorithm is pure and does not know the trainer. It runs in the learner's process, without torch. Its loss runs in
the trainer, perhaps in another process, so it is passed by name, never as a callable (see `LossSpec`).
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
CriticKind = Literal["states", "actions", "replies"]
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
those of the critic's slowly following copy. A critic of replies has one head, and its `action_values` are those after
the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completed episodes of one task, which are compared with one another.

    Attributes:
        trajectories: the episodes, in order of their sample index.
        rows: the token rows to train. A group has no rows if the algorithm learns nothing from it; episodes that cannot
            be trained have no rows. `episode_id` and `calls` of a row tell which call sampled each token.
        environment: what it plays, in a job with several environments; returns are only compared within one.
    """

    trajectories: tuple[Trajectory, ...]
    rows: tuple[TrainSample, ...] = ()
    environment: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """The result of an algorithm: numbers for each token of the rows, in the order of groups and rows.

    Attributes:
        advantages: float32 [N] for each row; values at tokens that are not trained are ignored.
        importance_weights: float32 [N] for each row, factors of the loss weights; None: 1 everywhere.
        returns: float32 [N] for each row, the critic's targets, NaN where it learns nothing; None: there is no critic.
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
        needs: requirements beyond those of every job, one per line.
    """

    summary: str
    formula: str
    paper: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticUpdate:
    """How an algorithm's critic is trained in each step, before the policy.

    Attributes:
        loss: a loss of values, by name.
        optimizer: the critic's own, with its own schedule.
        kind: what has a value. `states`: the state before a token, by one head; `actions`: the action that ends with
            the token, by twin heads and a target copy; `replies`: all that was said up to the token, by one head.
        warmup_steps: number of first steps that train only the critic; None: the policy is never trained.
        target_rate: fraction by which the target copy of a critic of actions, which computes `target_action_values`,
            moves to the critic after each update (Polyak averaging).
    """

    loss: LossSpec
    optimizer: OptimizerConfig
    epochs: int
    warmup_steps: int | None
    kind: CriticKind = "states"
    target_rate: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Experience replay: which of a job's completed episodes a step trains on.

    Attributes:
        draws: batches drawn per step; each makes the updates that a step makes otherwise.
        episodes: per batch, drawn without replacement; all, if there are fewer.
        max_age: in steps; 0: only the present step's episodes.
    """

    draws: int
    episodes: int
    max_age: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEpisodes:
    """Recorded episodes that an algorithm trains on instead of new ones.

    Attributes:
        run_dir: folder of the recorded run; None: the job's training tasks are conversations.
        pairs: whether a group is a chosen episode and a rejected one: of each group of the run the episodes with the
            largest and the smallest reward, or a task's `chosen` and `rejected`. False: each group is one episode.
        min_reward: episodes with a smaller reward are left out; None: all are used.
    """

    run_dir: Path | None
    min_reward: float | None = None
    pairs: bool = False


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
        about: description for lists; None: not listed.
        metrics: the metrics that `TokenAdvantages.metrics` may contain, for the documentation.
        needs: outputs that the trainer computes for the rows before `advantages`, and that rows then carry to the loss
            (`old_logprobs`). Empty: no additional forward pass.
        dynamic_sampling: how many groups without a learning signal may be replaced in a step, as a multiple of
            `rollout.groups_per_step`. 0: none.
        critic: how a critic is trained; it computes `values` and `next_values`. None: no critic.
        recorded: recorded episodes to train on; None: episodes are sampled.
        replay: experience replay; None: a step trains on the episodes of its manifest.
        every_choice: whether each trained call has one row for every reply that could have been sampled. It needs
            replies restricted to finitely many choices (see `tokens.choice_rows`). False: one row for the sampled
            reply.
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
        """Store the settings in `self.config` and `self.step_order`.

        Args:
            config: the job's section `[algorithm]`.
            step_order: order of an episode's TimeSteps in which several agents act at the same time.
        """
        self.config = config
        self.step_order = step_order

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether a group has a learning signal; otherwise it gets no rows. By default always true.

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
        """Return the loss's name and parameters. The trainer looks it up in `LOSSES`."""

    def state(self) -> dict[str, Any]:
        """Return the state to keep from step to step, as JSON, for the checkpoint. By default empty.

        `advantages` may change it. A step that is repeated after a crash begins with the state before the step.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # an algorithm without state has nothing to do
        """Restore the state from a checkpoint.

        Args:
            state: the result of `state` at the time of the checkpoint; empty in checkpoints without one.
        """
