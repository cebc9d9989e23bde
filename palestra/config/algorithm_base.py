"""Common keys of all algorithms' sections: `AlgorithmConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from palestra.config.networks import KLConfig, TeacherServerConfig
from palestra.config.section import Positive, Section

REWARD_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # a part of the name of a metric
# Much larger than any useful weight, and small enough that the largest rewards times it do not overflow when squared.
MAX_REWARD_WEIGHT = 1e6
LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]

NAME = "The algorithm; each has keys of its own. `palestra algorithms` lists them."
LOSS_AGG_MODE = (
    "How the losses of tokens become one number, by verl's names; a sequence is a rollout, of any number of calls. "
    "`seq-mean-token-mean`: mean over a rollout's tokens, then over rollouts (GRPO); `token-mean`: mean over all "
    "tokens of the batch (DAPO); `seq-mean-token-sum-norm`: sum over tokens divided by (rollouts with trained "
    "tokens) x max_tokens (Dr. GRPO)."
)
CLIP_LOW = "Probability ratios below 1 - clip_low are clipped."
CLIP_HIGH = "Probability ratios above 1 + clip_high are clipped."


class AlgorithmConfig(Section):
    """Keys of every algorithm: which calls are trained, and how the losses of their tokens become updates."""

    chosen_by: ClassVar[str] = "name"
    rewards_tokens: ClassVar[bool] = False  # whether a single token may have a reward, such as a penalty
    trained_networks: ClassVar[int] = 1  # of the policy's size, each with gradient and moments: 2 with a critic
    copied_networks: ClassVar[int] = 0  # of the policy's size, float32, which no optimizer updates
    trains_policy: ClassVar[bool] = True  # False: only a reward model is trained
    learns_pairs: ClassVar[bool] = False  # whether recorded episodes are pairs of a chosen and a rejected one

    name: str = Field(description=NAME)
    loss_agg_mode: LossAggMode = Field("seq-mean-token-mean", description=LOSS_AGG_MODE)
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
    reward_weights: dict[
        Annotated[str, Field(pattern=REWARD_NAME)], Annotated[float, Field(ge=-MAX_REWARD_WEIGHT, le=MAX_REWARD_WEIGHT)]
    ] = Field(
        {},
        description="Weights of an episode's `named_rewards`, by name, each from -1e6 to 1e6; 1 for a name that is not "
        "here.",
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
        """Return the smallest group size: 2 if the algorithm compares episodes with one another."""
        return 1

    @property
    def credits_agents(self) -> bool:
        """Return whether an agent is credited with its own reward instead of the episode's."""
        return getattr(self, "credit", "episode") in ("agent", "branch", "step")

    @property
    def trains_equal_rewards(self) -> bool:
        """Return whether the loss has a gradient for equal rewards: from the entropy bonus, or from its penalty."""
        penalty = self.kl is not None and self.kl.place == "loss" and self.kl.coefficient > 0
        return self.entropy_coefficient > 0 or penalty

    def weighted_sum(self, named_rewards: Mapping[str, float | None]) -> float:
        """Return the weighted sum of the scored named rewards."""
        return weighted_sum(named_rewards, self.reward_weights)

    @property
    def brings_tasks(self) -> bool:
        """Return whether the algorithm provides the training tasks."""
        return False

    @property
    def learns_conversations(self) -> bool:
        """Return whether the training tasks are conversations to learn from."""
        return False

    @property
    def served_teacher(self) -> TeacherServerConfig | None:
        """Return the server of the teacher that gives `teacher_logprobs`; None: not needed."""
        return None

    def teacher_of(self, frozen: Sequence[str]) -> str | None:
        """Return the name of the policy that gives `teacher_logprobs`; None: not needed."""
        return None


def weighted_sum(named_rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the named rewards that are not None (not scored); the weight of a name that `weights`
    lacks is 1.
    """
    scored = {name: value for name, value in sorted(named_rewards.items()) if value is not None}
    return float(sum(weights.get(name, 1.0) * value for name, value in scored.items()))
