"""Algorithms that learn from given data: `[algorithm]` of SFT, DPO, reward models and distillation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from palestra.config.algorithm_base import LOSS_AGG_MODE, NAME, AlgorithmConfig, LossAggMode
from palestra.config.networks import KLConfig, OptimizerConfig, TeacherServerConfig
from palestra.config.section import Section

_OF_PAIRS = "Fixed: the loss is a mean over pairs, each with the sums over its replies before the step's one update."
_NO_POLICY = "Fixed: the policy is not trained."
_NO_BONUS = "0: tokens of rejected replies have negative loss weights, with which a bonus would lower their entropy."


class _RecordedConfig(AlgorithmConfig):
    """Keys of algorithms that train recorded episodes, of a run or of the tasks; none is played for training."""

    from_run: Path | None = None  # the subclasses describe it

    @property
    def brings_tasks(self) -> bool:
        """Return whether the training tasks are the episodes of a run."""
        return self.from_run is not None

    @property
    def learns_conversations(self) -> bool:
        """Return whether the tasks are conversations, because there is no run."""
        return not self.brings_tasks


class SFTConfig(_RecordedConfig):
    """Supervised fine-tuning on recorded episodes."""

    name: Literal["sft"] = Field("sft", description=NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    from_run: Path | None = Field(
        None,
        description="Folder of the run whose completed training episodes are learned from; in a service the ID of a "
        "job of the same tenant, whose episodes until the submission are taken. None: the tasks are conversations, "
        "JSON objects with `messages`, and perhaps `tools` and `reward`, whose replies are learned. Each group is one "
        "of them, so that a step has `rollout.groups_per_step`.",
    )
    min_reward: float | None = Field(
        None, description="Episodes with a smaller reward are left out of those of `from_run`. None: all are taken."
    )

    @model_validator(mode="after")
    def _reward_of_a_run(self) -> Self:
        if self.min_reward is not None and self.from_run is None:
            raise ValueError("min_reward chooses among the episodes of `from_run`, and that is not given")
        return self


class _PairsConfig(_RecordedConfig):
    """Keys of algorithms that learn which of two recorded replies is better."""

    learns_pairs: ClassVar[bool] = True

    from_run: Path | None = Field(
        None,
        description="Folder of the run whose pairs are learned from: of each group of completed training episodes the "
        "ones with the largest and the smallest reward; a group of equal rewards is left out. In a service the ID of a "
        "job of the same tenant. None: the tasks are pairs, JSON objects with `prompt`, `chosen` and `rejected`, and "
        "perhaps `tools`: texts or messages, as data sets for TRL have them. Each group is one pair, so that a step "
        "has `rollout.groups_per_step`.",
    )
    loss_agg_mode: Literal["seq-mean-token-mean"] = Field("seq-mean-token-mean", description=_OF_PAIRS)
    epochs: Literal[1] = Field(1, description=_OF_PAIRS)
    minibatches: Literal[1] = Field(1, description=_OF_PAIRS)


class DPOConfig(_PairsConfig):
    """Direct preference optimisation (Rafailov et al. 2023) on recorded pairs."""

    name: Literal["dpo"] = Field("dpo", description=NAME)
    beta: float = Field(
        0.1,
        gt=0,
        le=1e3,
        description="Factor of the log-ratios between policy and reference: the larger, the nearer the policy stays "
        "to the reference.",
    )
    kl: KLConfig = Field(
        KLConfig(), description="The reference policy. `coefficient` is 0: `beta` keeps the policy near the reference."
    )
    entropy_coefficient: float = Field(0.0, ge=0, le=0, description=_NO_BONUS)

    @model_validator(mode="after")
    def _has_no_penalty(self) -> Self:
        if self.kl.coefficient:
            raise ValueError(
                "tokens of rejected replies have negative loss weights, with which a penalty drives the policy away "
                "from the reference; leave kl.coefficient out, and take a larger beta"
            )
        return self


class RewardHeadConfig(Section):
    """The network of `reward_model`: a copy of the policy's model, with one value head."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


class RewardModelConfig(_PairsConfig):
    """A reward model (Bradley and Terry 1952) from recorded pairs; the policy itself is not trained."""

    copied_networks: ClassVar[int] = 1
    trains_policy: ClassVar[bool] = False

    name: Literal["reward_model"] = Field("reward_model", description=NAME)
    entropy_coefficient: float = Field(0.0, ge=0, le=0, description=_NO_POLICY)
    kl: None = Field(None, description=_NO_POLICY)
    critic: RewardHeadConfig = RewardHeadConfig()


class DistillConfig(AlgorithmConfig):
    """On-policy distillation (Agarwal et al. 2024) from a frozen policy or a served model, token by token."""

    name: Literal["distill"] = Field("distill", description=NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    teacher: str | None = Field(
        None,
        description="Name of the policy that teaches: one of `policies` that is frozen, with the same tokenizer. None: "
        "the job's only frozen policy.",
    )
    teacher_server: TeacherServerConfig | None = Field(
        None, description="A server whose model teaches, in place of a policy of the job. None: there is none."
    )

    @model_validator(mode="after")
    def _one_teacher(self) -> DistillConfig:
        if self.teacher is not None and self.teacher_server is not None:
            raise ValueError("teacher and teacher_server name two teachers; leave one of them out")
        return self

    @property
    def served_teacher(self) -> TeacherServerConfig | None:
        """Return the teacher's server."""
        return self.teacher_server

    def teacher_of(self, frozen: Sequence[str]) -> str | None:
        """Return the teacher policy; None: a server teaches, or there is no frozen policy, which is
        refused elsewhere.
        """
        known = ", ".join(map(repr, frozen)) or "none"
        if self.teacher_server is not None:
            return None
        if self.teacher is None:
            if len(frozen) > 1:
                raise ValueError(f"algorithm.teacher names the frozen policy that teaches; frozen are {known}")
            return frozen[0] if frozen else None
        if self.teacher not in frozen:
            raise ValueError(f"algorithm.teacher is {self.teacher!r}, which is no frozen policy (frozen are {known})")
        return self.teacher
