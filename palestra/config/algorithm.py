"""The `[algorithm]` table: each algorithm has keys and defaults of its own, and refuses the keys of others."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from palestra.config.networks import CriticConfig, KLConfig, TeacherServerConfig, TwinCriticConfig
from palestra.config.section import Positive, Section

OWN = "package.module:Class"


LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]
AdvantageScale = Literal["std", "none", "gdpo"]
Credit = Literal["episode", "step", "agent", "branch"]

# Meanings of keys that several sections have, some with defaults of their own.
_NAME = "The algorithm; each has keys of its own. `palestra algorithms` lists them."
_LOSS_AGG_MODE = (
    "How the losses of tokens become one number, by verl's names; a sequence is a rollout, of any number of calls. "
    "`seq-mean-token-mean`: mean over a rollout's tokens, then over rollouts (GRPO); `token-mean`: mean over all "
    "tokens of the batch (DAPO); `seq-mean-token-sum-norm`: sum over tokens divided by (rollouts with trained "
    "tokens) x max_tokens (Dr. GRPO)."
)
_CREDIT = (
    "The return with which a call's tokens are credited. `episode`: the sum of all rewards; `step`: the discounted sum "
    "of rewards from the call's own TimeStep on; `agent`: the reward of the call's agent, or of the nearest parent "
    "that has one (`planner` for `planner/search`), compared with those of the same agent; `branch`: as `agent`, but "
    "subagents are compared with all that the same parent started."
)
_ADVANTAGE_SCALE = (
    "`std`: divide by the group's deviation (GRPO); `none`: do not (Dr. GRPO); `gdpo`: divide each of an episode's "
    "`named_rewards` by its own deviation before they are weighed and added up, and the sum by the batch's deviation "
    "(GDPO: Liu et al. 2026), so that a reward with a small range counts, too."
)
_DYNAMIC_SAMPLING = (
    "Groups of a step that may be replaced by groups of tasks to come because their returns are equal, as a multiple "
    "of `rollout.groups_per_step` (DAPO, section 3.2). 0: such groups are part of the step, without a gradient."
)
_CLIP_LOW = "Probability ratios below 1 - clip_low are clipped."
_CLIP_HIGH = "Probability ratios above 1 + clip_high are clipped."
_TOKEN_CREDIT = (
    "Where rewards are earned. `step`: each TimeStep's at the agent's last %s before it (the "
    "episode's reward at the last TimeStep, if TimeSteps have none); `episode`: the sum of all rewards at the "
    "agent's last %s; `agent`: there the reward of the agent, or of the nearest parent that has one."
)
_ONE_UPDATE = "One: nothing keeps a second update near the policy that has sampled."
_DRAWS = "One: `replay.draws` says how many updates a step makes."
_GAE_LAMBDA = "Lambda of GAE (Schulman et al. 2016), of one action: 0 trusts the critic, 1 the rewards."


class AlgorithmConfig(Section):
    """What every algorithm has: which calls are trained, and how the losses of their tokens become updates."""

    chosen_by: ClassVar[str] = "name"
    rewards_tokens: ClassVar[bool] = False  # whether a single token may have a reward, such as a penalty
    trained_networks: ClassVar[int] = 1  # of the policy's size, each with gradient and moments: 2 with a critic
    copied_networks: ClassVar[int] = 0  # of the policy's size, float32, which follow others

    name: str = Field(description=_NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-mean", description=_LOSS_AGG_MODE)
    train_on: Literal["all-calls", "final-branch"] = Field(
        "all-calls",
        description="`all-calls`: every call of an episode is trained; `final-branch`: only calls whose tokens are in "
        "the last call of an agent; others, such as attempts that were given up, are left out and counted.",
    )
    epochs: Positive = Field(1, description="Passes over one batch; each makes `minibatches` optimizer steps.")
    minibatches: Positive = Field(
        1,
        description="Parts of whole groups into which a batch is cut, at most `rollout.groups_per_step`. Each part is "
        "weighed as a batch of its own and makes an optimizer step; with several, each epoch draws other parts.",
    )
    reward_weights: dict[str, float] = Field(
        {}, description="Weights of an episode's `named_rewards`, by name; 1 for a name that is not here."
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="Factor of the entropy at each token, which is taken from its loss. 0: measured only."
    )
    kl: KLConfig | None = Field(
        None, description="Divergence from a reference policy. None: there is no reference, and nothing to measure."
    )

    @model_validator(mode="after")
    def _penalty_has_a_place(self) -> Self:
        if self.kl is not None and self.kl.place == "reward" and not self.rewards_tokens:
            raise ValueError(
                f"{self.name!r} has no rewards of single tokens, so kl.place = 'reward' is for algorithms with a "
                "critic; take kl.place = 'loss'"
            )
        return self

    @property
    def smallest_group(self) -> int:
        """Return how many episodes a group needs: 2 where the algorithm compares them with one another."""
        return 1

    @property
    def credits_agents(self) -> bool:
        """Return whether an agent answers for its own reward, and not for all of the episode."""
        return getattr(self, "credit", "episode") in ("agent", "branch")

    def weighted_sum(self, named_rewards: Mapping[str, float | None]) -> float:
        """Return the sum of the named rewards that were scored, each times its weight.

        Args:
            named_rewards: by name; None: not scored.
        """
        scored = {name: value for name, value in sorted(named_rewards.items()) if value is not None}
        return float(sum(self.reward_weights.get(name, 1.0) * value for name, value in scored.items()))

    @property
    def brings_tasks(self) -> bool:
        """Return whether the training tasks come with the algorithm, so that a job needs no others."""
        return False

    @property
    def served_teacher(self) -> TeacherServerConfig | None:
        """Return the server whose model's `teacher_logprobs` the algorithm needs; None: it needs none."""
        return None

    def teacher_of(self, frozen: Sequence[str]) -> str | None:
        """Return the name of the policy whose `teacher_logprobs` the algorithm needs; None: it needs none.

        Args:
            frozen: names of the job's frozen policies.
        """
        return None


class PolicyGradientConfig(AlgorithmConfig):
    """What algorithms have that credit calls with returns, and correct for the policy that has sampled them."""

    credit: Credit = Field("episode", description=_CREDIT)
    discount: float = Field(1.0, ge=0, le=1, description="Discount factor of one TimeStep, for `credit = step`.")
    importance_sampling: Literal["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = Field(
        "none",
        description="Correction for tokens that were sampled with other probabilities than those of the policy before "
        "the step (older weights, or an engine that rounds differently). `none`: the clipped ratio is to the sampling "
        "probability. Otherwise the ratio is to the policy before the step, and each token's loss is multiplied by "
        "w = policy before the step / sampled, of the token or of the call's whole reply (sequence); `truncate`: at "
        "most `importance_limit` (truncated importance sampling, TIS: Yao et al. 2025); `mask`: w itself between "
        "1 / `importance_limit` and `importance_limit`, and 0 outside (masked importance sampling, MIS).",
    )
    importance_limit: float = Field(2.0, gt=1, description="Bound of the weights of `importance_sampling`.")


class ClippedConfig(PolicyGradientConfig):
    """What algorithms have whose loss bounds probability ratios."""

    clip_low: float = Field(0.2, ge=0, le=1, description=_CLIP_LOW)
    clip_high: float = Field(0.2, ge=0, description=_CLIP_HIGH)


class GroupConfig(ClippedConfig):
    """What algorithms have that compare the episodes of a group with one another."""

    dynamic_sampling: int = Field(0, ge=0, le=16, description=_DYNAMIC_SAMPLING)

    @property
    def smallest_group(self) -> int:
        """Return 2: a group of one has nothing to be compared with."""
        return 2


class ScaledGroupConfig(GroupConfig):
    """What algorithms have whose baseline is the group's mean return."""

    advantage_scale: AdvantageScale = Field("std", description=_ADVANTAGE_SCALE)

    @model_validator(mode="after")
    def _named_rewards_are_of_episodes(self) -> ScaledGroupConfig:
        if self.advantage_scale == "gdpo" and self.credit != "episode":
            raise ValueError("advantage_scale = 'gdpo' normalises rewards of episodes, and needs credit = 'episode'")
        return self


class GRPOConfig(ScaledGroupConfig):
    """GRPO (Shao et al. 2024, DeepSeekMath, section 4.1): a group's mean return is its baseline."""

    name: Literal["grpo"] = Field("grpo", description=_NAME)


class DrGRPOConfig(GroupConfig):
    """Dr. GRPO (Liu et al. 2025, section 3.2): GRPO without division by the deviation or by a rollout's length."""

    name: Literal["dr_grpo"] = Field("dr_grpo", description=_NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-sum-norm", description=_LOSS_AGG_MODE)


class DAPOConfig(ScaledGroupConfig):
    """DAPO (Yu et al. 2025): GRPO that clips higher, weighs tokens equally, and makes long replies cost reward."""

    name: Literal["dapo"] = Field("dapo", description=_NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
    dynamic_sampling: int = Field(3, ge=0, le=16, description=_DYNAMIC_SAMPLING)
    clip_high: float = Field(0.28, ge=0, description=_CLIP_HIGH)
    overlong_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Last share of a call's max_tokens in which a reply loses reward: nothing at the beginning of the "
        "share, growing in a line to `overlong_penalty` at max_tokens (soft overlong punishment, equation 13). A "
        "return loses by the longest reply that it credits. 0: none does.",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="Reward that a reply of max_tokens loses.")


class GSPOConfig(ScaledGroupConfig):
    """GSPO (Zheng et al. 2025): GRPO whose probability ratio is that of the whole sequence, for each of its tokens."""

    name: Literal["gspo"] = Field("gspo", description=_NAME)
    clip_low: float = Field(3e-4, ge=0, le=1, description=_CLIP_LOW)
    clip_high: float = Field(4e-4, ge=0, description=_CLIP_HIGH)
    form: Literal["sequence", "token"] = Field(
        "sequence",
        description="`sequence`: all tokens of an episode have one advantage, the mean over its trained tokens "
        "(equation 5); `token`: each has its own call's (GSPO-token, equation 13). Without credit within an episode "
        "both are the same.",
    )


class CISPOConfig(ScaledGroupConfig):
    """CISPO (MiniMax 2025, MiniMax-M1): ratios are bounded as weights of the gradient, and no token is left out."""

    name: Literal["cispo"] = Field("cispo", description=_NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
    clip_low: float = Field(1.0, ge=0, le=1, description=_CLIP_LOW)
    clip_high: float = Field(4.0, ge=0, description=_CLIP_HIGH)


class RLOOConfig(GroupConfig):
    """RLOO (Ahmadian et al. 2024): an episode's baseline is the mean return of the other episodes of its group."""

    name: Literal["rloo"] = Field("rloo", description=_NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-sum-norm", description=_LOSS_AGG_MODE)


class ReinforcePPConfig(ClippedConfig):
    """REINFORCE++ (Hu et al. 2025): advantages are normalised over the whole batch."""

    name: Literal["reinforce_pp"] = Field("reinforce_pp", description=_NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
    baseline: Literal["none", "group"] = Field(
        "none",
        description="What returns are compared with before they are normalised. `none`: nothing, so that groups may "
        "have one episode; `group`: the mean of the group (REINFORCE++-baseline).",
    )

    @property
    def smallest_group(self) -> int:
        """Return 2 where returns are compared within a group, else 1."""
        return 2 if self.baseline == "group" else 1


class RAEConfig(ClippedConfig):
    """RAE (Liu et al. 2025, SPIRAL): each role's baseline is a moving mean of its returns."""

    name: Literal["rae"] = Field("rae", description=_NAME)
    credit: Credit = Field("agent", description=_CREDIT)
    decay: float = Field(0.95, ge=0, lt=1, description="Share of the baseline that stays at each return of its role.")


class ActorCriticConfig(AlgorithmConfig):
    """What algorithms with a critic have: how rewards become advantages, by the critic's values and GAE."""

    rewards_tokens: ClassVar[bool] = True
    trained_networks: ClassVar[int] = 2

    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
    credit: Literal["step", "episode", "agent"] = Field("step", description=_TOKEN_CREDIT % ("token", "token"))
    discount: float = Field(1.0, ge=0, le=1, description="Discount factor of one TimeStep (gamma).")
    gae_lambda: float = Field(0.95, ge=0, le=1, description=_GAE_LAMBDA)
    gae_level: Literal["token", "turn"] = Field(
        "token",
        description="What an action is. `token`: each sampled token; `turn`: all that an agent samples in one "
        "TimeStep, whose tokens then have one advantage.",
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std",
        description="`std`: advantages of a batch's tokens are centred and divided by their deviation; `none`: they "
        "are as GAE estimates them.",
    )
    critic: CriticConfig = CriticConfig()


class PPOConfig(ActorCriticConfig):
    """PPO (Schulman et al. 2017): a critic's advantages and the clipped surrogate loss."""

    name: Literal["ppo"] = Field("ppo", description=_NAME)
    clip_low: float = Field(0.2, ge=0, le=1, description=_CLIP_LOW)
    clip_high: float = Field(0.2, ge=0, description=_CLIP_HIGH)


class A2CConfig(ActorCriticConfig):
    """A2C (Mnih et al. 2016): a critic's advantages and the plain policy gradient, one update a batch."""

    name: Literal["a2c"] = Field("a2c", description=_NAME)
    epochs: Literal[1] = Field(1, description=_ONE_UPDATE)
    minibatches: Literal[1] = Field(1, description=_ONE_UPDATE)
    gae_lambda: float = Field(1.0, ge=0, le=1, description=_GAE_LAMBDA)


class ReplayConfig(Section):
    """Which episodes a step draws, of its own and of earlier steps, all of which are in the run store."""

    draws: Positive = Field(8, description="Batches drawn in a step; each makes one update of critic and policy.")
    episodes: Positive = Field(32, description="Episodes of a batch, drawn without replacement.")
    max_age: int = Field(16, ge=0, description="Episodes of so many steps back are drawn. 0: only the step's own.")
    max_episodes: Positive = Field(4096, description="Only so many of the newest episodes are drawn from.")


class SACConfig(AlgorithmConfig):
    """SAC (Haarnoja et al. 2018; Christodoulou 2019) where replies are held to finitely many `choices`."""

    trained_networks: ClassVar[int] = 2
    copied_networks: ClassVar[int] = 1

    name: Literal["sac"] = Field("sac", description=_NAME)
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean"] = Field(
        "token-mean",
        description="How decisions share the loss, here in place of tokens. `token-mean`: each has the same weight; "
        "`seq-mean-token-mean`: each rollout has the same weight, which its decisions share.",
    )
    epochs: Literal[1] = Field(1, description=_DRAWS)
    minibatches: Literal[1] = Field(1, description=_DRAWS)
    entropy_coefficient: float = Field(0.0, ge=0, le=0, description="0: `temperature` is the weight of the entropy.")
    kl: None = Field(None, description="None: a penalty of divergence would be in the reward of every choice.")
    credit: Literal["step", "episode", "agent"] = Field("step", description=_TOKEN_CREDIT % ("decision", "decision"))
    discount: float = Field(1.0, ge=0, le=1, description="Discount factor of one TimeStep (gamma).")
    temperature: float = Field(
        0.05, gt=0, description="Weight of the entropy in the reward (alpha), in the first batch."
    )
    temperature_rate: float = Field(
        0.02, ge=0, description="Rate at which the logarithm of the temperature follows the entropy. 0: it is fixed."
    )
    target_entropy: float = Field(
        0.3, ge=0, le=1, description="Entropy that is aimed at, as a share of the largest possible one, log(choices)."
    )
    critic: TwinCriticConfig = TwinCriticConfig()
    replay: ReplayConfig = ReplayConfig()


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning: recorded episodes are trained, and none is played for training."""

    name: Literal["sft"] = Field("sft", description=_NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
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

    @property
    def brings_tasks(self) -> bool:
        """Return whether the training tasks are the episodes of a run."""
        return self.from_run is not None

    @model_validator(mode="after")
    def _reward_of_a_run(self) -> SFTConfig:
        if self.min_reward is not None and self.from_run is None:
            raise ValueError("min_reward chooses among the episodes of `from_run`, and that is not given")
        return self


class DistillConfig(AlgorithmConfig):
    """On-policy distillation (Agarwal et al. 2024): a frozen policy or a served model teaches, token by token."""

    name: Literal["distill"] = Field("distill", description=_NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=_LOSS_AGG_MODE)
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
        """Return the server that teaches."""
        return self.teacher_server

    def teacher_of(self, frozen: Sequence[str]) -> str | None:
        """Return the policy that teaches; None: a server does, or there is no frozen policy, and no job starts so.

        Args:
            frozen: names of the job's frozen policies.

        Raises:
            ValueError: the named policy is not one of them, or there are several and none is named.
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


class OwnAlgorithmConfig(ClippedConfig):
    """A class of your own, where you call `palestra.train` yourself: a server imports no code of its users."""

    form_of_name: ClassVar[str] = OWN

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}:[A-Za-z_][A-Za-z0-9_]{0,63}$",
        description="`package.module:Class`, a subclass of `palestra.Algorithm`.",
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std", description="`std`: divide by the group's deviation (GRPO); `none`: do not (Dr. GRPO)."
    )
    settings: dict[str, bool | int | float | str] = Field(
        {}, description="Settings of your own, which your class reads from `self.config.settings`."
    )


def _name_of(value: Any) -> Any:
    """Return the tag of an algorithm, given as a table or as a section; a table without a name is `grpo`."""
    name = value.get("name", "grpo") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name


def _known_name(value: Any) -> Any:
    """Refuse an unknown algorithm with the nearest one, because the error of pydantic's union would not name the key.

    Raises:
        ValueError: the table names no algorithm, or is no table.
    """
    name = _name_of(value)
    if not isinstance(value, dict | Section):
        raise ValueError(f"it is a table, such as {{name = 'grpo'}}, and not {value!r}")
    if name not in (*ALGORITHM_NAMES, OWN):
        # Of equally near ones the first: the list begins with those that are used most.
        likeness = {known: difflib.SequenceMatcher(None, str(name), known).ratio() for known in ALGORITHM_NAMES}
        near = max(ALGORITHM_NAMES, key=lambda known: likeness[known])
        hint = f"; did you mean {near!r}?" if likeness[near] >= 0.5 else ""
        raise ValueError(f"name is {name!r}, which is no algorithm{hint} (known: {', '.join(ALGORITHM_NAMES)})")
    return value


AnyAlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[DrGRPOConfig, Tag("dr_grpo")]
    | Annotated[DAPOConfig, Tag("dapo")]
    | Annotated[GSPOConfig, Tag("gspo")]
    | Annotated[CISPOConfig, Tag("cispo")]
    | Annotated[RLOOConfig, Tag("rloo")]
    | Annotated[ReinforcePPConfig, Tag("reinforce_pp")]
    | Annotated[RAEConfig, Tag("rae")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[A2CConfig, Tag("a2c")]
    | Annotated[SACConfig, Tag("sac")]
    | Annotated[SFTConfig, Tag("sft")]
    | Annotated[DistillConfig, Tag("distill")]
    | Annotated[OwnAlgorithmConfig, Tag(OWN)],
    Discriminator(_name_of),
    BeforeValidator(_known_name),
]
ALGORITHM_NAMES: Final = tuple(
    get_args(part)[1].tag for part in get_args(get_args(AnyAlgorithmConfig)[0]) if get_args(part)[1].tag != OWN
)
"""The algorithms that Palestra ships, in the order of the documentation."""
