"""The `[algorithm]` table: each algorithm has keys and defaults of its own, and refuses the keys of others."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from palestra.config.section import Positive, Section

OWN = "package.module:Class"


class AlgorithmConfig(Section):
    """What every algorithm has: which calls are trained, and how the losses of their tokens become updates."""

    chosen_by: ClassVar[str] = "name"
    smallest_group: ClassVar[int] = 1  # episodes that a group needs, because the algorithm compares them

    name: str = Field(description="The algorithm; each has keys of its own. `palestra algorithms` lists them.")
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-mean",
        description="How the losses of tokens become one number, by verl's names; a sequence is a rollout, of any "
        "number of calls. `seq-mean-token-mean`: mean over a rollout's tokens, then over rollouts (GRPO); "
        "`token-mean`: mean over all tokens of the batch (DAPO); `seq-mean-token-sum-norm`: sum over tokens divided by "
        "rollouts x max_tokens (Dr. GRPO).",
    )
    train_on: Literal["all-calls", "final-branch"] = Field(
        "all-calls",
        description="`all-calls`: every call of an episode is trained; `final-branch`: only calls whose tokens are in "
        "the last call of an agent; others, such as attempts that were given up, are left out and counted.",
    )
    epochs: Positive = Field(1, description="Optimizer steps made from one batch.")


class PolicyGradientConfig(AlgorithmConfig):
    """What algorithms have that credit calls with returns, and correct for the policy that has sampled them."""

    credit: Literal["episode", "step", "agent", "branch"] = Field(
        "episode",
        description="The return with which a call's tokens are credited. `episode`: the sum of all rewards; `step`: "
        "the discounted sum of rewards from the call's own TimeStep on; `agent`: the reward of the call's agent, or of "
        "the nearest parent that has one (`planner` for `planner/search`), compared with those of the same agent; "
        "`branch`: as `agent`, but subagents are compared with all that the same parent started.",
    )
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
    """What algorithms have whose loss is PPO's clipped surrogate."""

    clip_low: float = Field(0.2, ge=0, le=1, description="Probability ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Probability ratios above 1 + clip_high are clipped.")


class GRPOConfig(ClippedConfig):
    """GRPO (Shao et al. 2024, DeepSeekMath, section 4.1): a group's mean return is its baseline."""

    smallest_group: ClassVar[int] = 2

    name: Literal["grpo"] = Field("grpo", description=AlgorithmConfig.model_fields["name"].description)
    advantage_scale: Literal["std", "none"] = Field(
        "std", description="`std`: divide by the group's deviation (GRPO); `none`: do not (Dr. GRPO)."
    )


class DrGRPOConfig(ClippedConfig):
    """Dr. GRPO (Liu et al. 2025, section 3.2): GRPO without division by the deviation or by a rollout's length."""

    smallest_group: ClassVar[int] = 2

    name: Literal["dr_grpo"] = Field("dr_grpo", description=AlgorithmConfig.model_fields["name"].description)
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-sum-norm", description=AlgorithmConfig.model_fields["loss_agg_mode"].description
    )


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
        near = difflib.get_close_matches(str(name), ALGORITHM_NAMES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"name is {name!r}, which is no algorithm{hint} (known: {', '.join(ALGORITHM_NAMES)})")
    return value


AnyAlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[DrGRPOConfig, Tag("dr_grpo")]
    | Annotated[OwnAlgorithmConfig, Tag(OWN)],
    Discriminator(_name_of),
    BeforeValidator(_known_name),
]
ALGORITHM_NAMES: Final = tuple(
    get_args(part)[1].tag for part in get_args(get_args(AnyAlgorithmConfig)[0]) if get_args(part)[1].tag != OWN
)
"""The algorithms that Palestra ships, in the order of the documentation."""
