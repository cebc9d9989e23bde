"""Algorithms with a critic: `[algorithm]` of PPO and A2C, with values of states, and of SAC, with values of actions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.config.algorithm_base import CLIP_HIGH, CLIP_LOW, LOSS_AGG_MODE, NAME, AlgorithmConfig, LossAggMode
from palestra.config.networks import CriticConfig, TwinCriticConfig
from palestra.config.section import UNLIMITED, Positive, Section

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
    max_age: int = Field(16, ge=0, description="Episodes of so many steps back are drawn. 0: only the step's own.")


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
