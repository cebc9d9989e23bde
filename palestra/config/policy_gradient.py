"""`[algorithm]` of the policy gradients: GRPO and its kin, REINFORCE++, RAE, and those with a critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from palestra.config.algorithm_base import CLIP_HIGH, CLIP_LOW, LOSS_AGG_MODE, NAME, AlgorithmConfig, LossAggMode
from palestra.config.networks import CriticConfig, TwinCriticConfig
from palestra.config.section import UNLIMITED, Positive, Section

AdvantageScale = Literal["std", "none", "gdpo"]
Credit = Literal["episode", "step", "agent", "branch", "team-step"]

_CREDIT = (
    "The return with which a call's tokens are credited. `episode`: the sum of all rewards; `agent`: the reward of the "
    "call's agent, or of the nearest parent that has one (`planner` for `planner/search`), compared with those of the "
    "same agent; `branch`: as `agent`, but subagents are compared with all that the same parent started; `step`: the "
    "discounted sum of what that agent earns from the call's own TimeStep on, compared as by `branch`; `team-step`: "
    "the same sum of what all agents earn, as for a planner that answers for its subagents."
)
_ADVANTAGE_SCALE = (
    "`std`: divide by the group's sample deviation, with n - 1 (GRPO); `none`: do not (Dr. GRPO); `gdpo`: divide each "
    "of an episode's `named_rewards` by its own deviation before they are weighed and added up, and the sum by the "
    "batch's deviation (GDPO: Liu et al. 2026), so that a reward with a small range counts, too."
)
_DYNAMIC_SAMPLING = (
    "Groups of a step that may be replaced by groups of tasks to come because their returns are equal, as a multiple "
    "of `rollout.groups_per_step` (DAPO, section 3.2). 0: such groups are part of the step, without a gradient."
)


class PolicyGradientConfig(AlgorithmConfig):
    """Keys of algorithms that credit calls with returns, with an off-policy correction."""

    credit: Credit = Field("episode", description=_CREDIT)
    discount: float = Field(1.0, ge=0, le=1, description="Discount factor of one TimeStep, for `step` and `team-step`.")
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
    """Keys of algorithms with a clipped probability ratio."""

    clip_low: float = Field(0.2, ge=0, le=1, description=CLIP_LOW)
    clip_high: float = Field(0.2, ge=0, le=UNLIMITED, description=CLIP_HIGH)


class GroupConfig(ClippedConfig):
    """Keys of algorithms that compare the episodes of a group."""

    dynamic_sampling: int = Field(0, ge=0, le=16, description=_DYNAMIC_SAMPLING)

    @property
    def smallest_group(self) -> int:
        """Return 2: a single episode cannot be compared."""
        return 2


class ScaledGroupConfig(GroupConfig):
    """Keys of algorithms whose baseline is the group's mean return."""

    advantage_scale: AdvantageScale = Field("std", description=_ADVANTAGE_SCALE)

    @model_validator(mode="after")
    def _named_rewards_are_of_episodes(self) -> ScaledGroupConfig:
        if self.advantage_scale == "gdpo" and self.credit != "episode":
            raise ValueError("advantage_scale = 'gdpo' normalises rewards of episodes, and needs credit = 'episode'")
        return self


class GRPOConfig(ScaledGroupConfig):
    """GRPO (Shao et al. 2024, DeepSeekMath, section 4.1): a group's mean return is its baseline."""

    name: Literal["grpo"] = Field("grpo", description=NAME)


class DrGRPOConfig(GroupConfig):
    """Dr. GRPO (Liu et al. 2025, section 3.2): GRPO without division by the deviation or by a rollout's length."""

    name: Literal["dr_grpo"] = Field("dr_grpo", description=NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-sum-norm", description=LOSS_AGG_MODE)


class DAPOConfig(ScaledGroupConfig):
    """DAPO (Yu et al. 2025): GRPO with a higher upper bound, equal token weights, and a length penalty."""

    name: Literal["dapo"] = Field("dapo", description=NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    dynamic_sampling: int = Field(3, ge=0, le=16, description=_DYNAMIC_SAMPLING)
    clip_high: float = Field(0.28, ge=0, le=UNLIMITED, description=CLIP_HIGH)
    overlong_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Last share of a call's max_tokens in which a reply loses reward: nothing at the beginning of the "
        "share, growing in a line to 1 at max_tokens (soft overlong punishment, equation 13). A "
        "return loses by the longest reply that it credits. 0: none does.",
    )


class GSPOConfig(ScaledGroupConfig):
    """GSPO (Zheng et al. 2025): GRPO with the probability ratio of the whole sequence for each of its tokens."""

    name: Literal["gspo"] = Field("gspo", description=NAME)
    clip_low: float = Field(3e-4, ge=0, le=1, description=CLIP_LOW)
    clip_high: float = Field(4e-4, ge=0, le=UNLIMITED, description=CLIP_HIGH)


class CISPOConfig(ScaledGroupConfig):
    """CISPO (MiniMax 2025, MiniMax-M1): bounded ratios weight the gradient, and no token is dropped."""

    name: Literal["cispo"] = Field("cispo", description=NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    clip_low: float = Field(1.0, ge=0, le=1, description=CLIP_LOW)
    clip_high: float = Field(4.0, ge=0, le=UNLIMITED, description=CLIP_HIGH)


class RLOOConfig(GroupConfig):
    """RLOO (Ahmadian et al. 2024): an episode's baseline is the mean return of the other episodes of its group."""

    name: Literal["rloo"] = Field("rloo", description=NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-sum-norm", description=LOSS_AGG_MODE)


class ReinforcePPConfig(ClippedConfig):
    """REINFORCE++ (Hu et al. 2025): advantages are normalised over the whole batch."""

    name: Literal["reinforce_pp"] = Field("reinforce_pp", description=NAME)
    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    baseline: Literal["none", "group"] = Field(
        "none",
        description="What returns are compared with before they are normalised. `none`: nothing, so that groups may "
        "have one episode; `group`: the mean of the group (REINFORCE++-baseline).",
    )

    @property
    def smallest_group(self) -> int:
        """Return 2 if returns are compared within a group, else 1."""
        return 2 if self.baseline == "group" else 1


class RAEConfig(ClippedConfig):
    """RAE (Liu et al. 2025, SPIRAL): each role's baseline is a moving mean of its returns."""

    name: Literal["rae"] = Field("rae", description=NAME)
    credit: Credit = Field("agent", description=_CREDIT)


TokenCredit = Literal["step", "team-step", "episode", "agent"]

_TOKEN_CREDIT = (
    "Where rewards are earned. `step`: what the agent, or the nearest parent that has a reward, earns in a TimeStep, "
    "at the agent's last %s before it (all in the last TimeStep, if TimeSteps have no rewards); `team-step`: there "
    "what all agents earn, as for a planner that answers for its subagents; `episode`: the sum of all rewards at the "
    "agent's last %s; `agent`: there the reward of that agent or parent."
)
_ONE_UPDATE = "One: nothing keeps a second update near the policy that has sampled."
_DRAWS = "One: `replay.draws` says how many updates a step makes."
_GAE_LAMBDA = "Lambda of GAE (Schulman et al. 2016), of one action: 0 trusts the critic, 1 the rewards."


class ActorCriticConfig(AlgorithmConfig):
    """Base of algorithms with a critic: how rewards become advantages, by the critic's values and GAE."""

    rewards_tokens: ClassVar[bool] = True
    trained_networks: ClassVar[int] = 2

    loss_agg_mode: LossAggMode = Field("token-mean", description=LOSS_AGG_MODE)
    credit: TokenCredit = Field("step", description=_TOKEN_CREDIT % ("token", "token"))
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

    name: Literal["ppo"] = Field("ppo", description=NAME)
    clip_low: float = Field(0.2, ge=0, le=1, description=CLIP_LOW)
    clip_high: float = Field(0.2, ge=0, le=UNLIMITED, description=CLIP_HIGH)


class A2CConfig(ActorCriticConfig):
    """A2C (Mnih et al. 2016): a critic's advantages and the plain policy gradient, one update a batch."""

    name: Literal["a2c"] = Field("a2c", description=NAME)
    epochs: Literal[1] = Field(1, description=_ONE_UPDATE)
    minibatches: Literal[1] = Field(1, description=_ONE_UPDATE)
    gae_lambda: float = Field(1.0, ge=0, le=1, description=_GAE_LAMBDA)


class ReplayConfig(Section):
    """Which episodes a step draws, from itself and from earlier steps in the run store."""

    draws: Positive = Field(8, description="Batches drawn in a step; each makes one update of critic and policy.")
    episodes: Positive = Field(32, description="Episodes of a batch, drawn without replacement.")


class SACConfig(AlgorithmConfig):
    """SAC (Haarnoja et al. 2018; Christodoulou 2019), for replies restricted to finitely many `choices`."""

    trained_networks: ClassVar[int] = 2
    copied_networks: ClassVar[int] = 1

    name: Literal["sac"] = Field("sac", description=NAME)
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean"] = Field(
        "token-mean",
        description="How decisions share the loss, here in place of tokens. `token-mean`: each has the same weight; "
        "`seq-mean-token-mean`: each rollout has the same weight, which its decisions share.",
    )
    epochs: Literal[1] = Field(1, description=_DRAWS)
    minibatches: Literal[1] = Field(1, description=_DRAWS)
    entropy_coefficient: float = Field(0.0, ge=0, le=0, description="0: `temperature` is the weight of the entropy.")
    kl: None = Field(None, description="None: a penalty of divergence would be in the reward of every choice.")
    credit: TokenCredit = Field("step", description=_TOKEN_CREDIT % ("decision", "decision"))
    discount: float = Field(1.0, ge=0, le=1, description="Discount factor of one TimeStep (gamma).")
    temperature: float = Field(
        0.01, gt=0, description="Weight of the entropy in the reward (alpha), in the first batch."
    )
    target_entropy: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Entropy that the temperature is tuned to, as a share of the largest possible one, log(choices). "
        "0: the temperature is fixed.",
    )
    critic: TwinCriticConfig = TwinCriticConfig()
    replay: ReplayConfig = ReplayConfig()
