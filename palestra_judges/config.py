"""The tables of the judges: who is asked, about what, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from palestra.client.exchange import checked_url, key_in
from palestra.config import REWARD_NAME, JudgeAccess, JudgeConfig
from palestra.config.algorithm_base import MAX_REWARD_WEIGHT
from palestra.config.section import Identifier, Positive, Seconds, Section
from palestra.errors import ConfigError
from palestra_judges.bounds import AGREEMENT

if TYPE_CHECKING:
    from palestra.envs.judge import Judge
    from palestra_judges.model import JudgeModel

Weight = Annotated[float, Field(ge=-MAX_REWARD_WEIGHT, le=MAX_REWARD_WEIGHT)]
Text = Annotated[str, Field(min_length=1, max_length=20_000)]


class ModelJudge(JudgeConfig):
    """What judges have in common that ask a language model."""

    not_judged: ClassVar[frozenset[str]] = JudgeConfig.not_judged | {
        "max_concurrency",
        "timeout_seconds",
        "checked",
    }

    policy: Identifier | None = Field(None, description="A frozen policy of the job that judges, in place of `url`.")
    model: str | None = Field(
        None, min_length=1, description="Name of the model on the server. None: the only one that it lists."
    )
    instructions: str = Field(
        "", max_length=20_000, description="What the judge has to know of the task, for all criteria."
    )
    sees: Literal["answer", "conversation", "pictures"] = Field(
        "answer",
        description="What of an episode is judged. `answer`: the last question and the last reply; `conversation`: all "
        "messages, with calls of tools and their results, and what the environment showed at the end; `pictures`: the "
        "same with all pictures, by a model that sees.",
    )
    task_keys: list[str] = Field([], description="Keys of the task that the judge sees too, such as a right answer.")
    max_tokens: Positive = Field(1024, le=1_000_000, description="Limit of the judge's reply in tokens.")
    max_concurrency: Positive = Field(8, le=1024, description="Questions that are asked at the same time.")
    timeout_seconds: Seconds = Field(120.0, le=86_400, description="Limit of one request.")
    checked: Path | None = Field(
        None,
        description="What `palestra judge check` has written of this judge: a job warns at its start of a judge "
        "that is below the bounds, or is another one.",
    )

    @model_validator(mode="after")
    def _asks_one(self) -> ModelJudge:
        if (self.policy is None) == (self.url is None):
            raise ValueError("the judge is a frozen policy of the job (`policy`) or a server (`url`): give one of them")
        if self.url is not None:
            try:
                checked_url(self.url, "http://127.0.0.1:8000")
            except ConfigError as error:
                raise ValueError(f"url: {error}") from None
        return self

    @property
    def asked_policy(self) -> str | None:
        """Return the policy of the job that judges; see `JudgeConfig`."""
        return self.policy

    @property
    def served_model(self) -> str | None:
        """Return the name of the model on the server; see `JudgeConfig`."""
        return self.model

    def model_of(self, access: JudgeAccess) -> JudgeModel:
        """Return the model that is asked."""
        from palestra_judges.model import JudgeModel

        if self.policy is not None:
            if self.policy not in access.frozen:
                known = ", ".join(map(repr, access.frozen)) or "none"
                raise ConfigError(
                    f"judge.policy is {self.policy!r}, and is no frozen policy of the job (it has {known})"
                )
            # Its own calls are counted.
            return JudgeModel(self, access.url, access.key, self.policy, pictures=access.pictures)
        key = key_in(self.key_variable, "judge.key_variable")
        url = checked_url(self.url or "", "http://127.0.0.1:8000")
        return JudgeModel(self, url, lambda: key, self.model, access.meter, access.pictures)


class Criterion(Section):
    """One criterion of a rubric, which is a named reward: the place of the choice, from 0 for the worst to 1."""

    name: Annotated[str, Field(pattern=REWARD_NAME)] = Field(description="Name of the reward.")
    text: Text = Field(description="The question that the judge answers by one of the choices.")
    weight: Weight = Field(
        1.0, description="Weight of the reward, unless `algorithm.reward_weights` has it. 0: measured only."
    )
    choices: list[Text] = Field(
        ["no", "yes"], min_length=2, max_length=100, description="The choices, from worst to best."
    )

    @model_validator(mode="after")
    def _choices_differ(self) -> Criterion:
        if len({choice.strip().casefold() for choice in self.choices}) < len(self.choices):
            raise ValueError(f"the choices of {self.name!r} are not all different")
        return self


class Rubric(ModelJudge):
    """A judge that answers questions about each episode."""

    kind: Literal["rubric"] = Field("rubric", description="The kind of judge.")
    criteria: list[Criterion] = Field(min_length=1, max_length=32, description="The criteria, asked together.")

    @model_validator(mode="after")
    def _names_differ(self) -> Rubric:
        names = [criterion.name for criterion in self.criteria]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two criteria have the name {twice[0]!r}")
        return self

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the names of the criteria, with their weights."""
        return {criterion.name: criterion.weight for criterion in self.criteria}

    def make(self, access: JudgeAccess) -> Judge:
        """Return the judge; see `JudgeConfig.make`."""
        from palestra_judges.rubric import RubricJudge

        return RubricJudge(self, self.model_of(access))


class Relative(ModelJudge):
    """A judge that ranks the episodes of a group, in several orders."""

    kind: Literal["relative"] = Field("relative", description="The kind of judge.")
    name: Annotated[str, Field(pattern=REWARD_NAME, max_length=64 - len(AGREEMENT))] = Field(
        "rank", description="Name of the reward: 1 for the best of a group, 0 for the worst, 0.5 on average."
    )
    weight: Weight = Field(1.0, description="Weight of the reward, unless `algorithm.reward_weights` has it.")
    orders: Literal[1, 2, 4, 6, 8] = Field(
        2,
        description="Orders in which a group is shown: each drawn one and its mirror image, of which the ranks are "
        "averaged. Where they agree no more than by chance, the group teaches nothing. 1: a single one, which keeps "
        "the judge's preference for a position; in validation both are asked.",
    )

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the name of the reward, with its weight; how far the orders of a group agree is measured only."""
        return {self.name: self.weight, self.name + AGREEMENT: 0.0}

    @property
    def compares(self) -> str:
        """Return the name of the reward; see `JudgeConfig`."""
        return self.name

    def make(self, access: JudgeAccess) -> Judge:
        """Return the judge; see `JudgeConfig.make`."""
        from palestra_judges.relative import RelativeJudge

        return RelativeJudge(self, self.model_of(access))


class RewardModel(JudgeConfig):
    """A judge that is a reward model, such as `algorithm.name = "reward_model"` trains; no words are asked."""

    bounded: ClassVar[bool] = False

    kind: Literal["reward_model"] = Field("reward_model", description="The kind of judge.")
    path: Path = Field(
        description="Folder with the model, as `palestra export` writes it: one of transformers for the classification "
        "of sequences, with one class. It reads the last conversation up to the end of the reply."
    )
    name: Annotated[str, Field(pattern=REWARD_NAME)] = Field("preference", description="Name of the reward.")
    weight: Weight = Field(1.0, description="Weight of the reward, unless `algorithm.reward_weights` has it.")

    @model_validator(mode="after")
    def _asks_no_server(self) -> RewardModel:
        for key in ("url", "key_variable", "wait_seconds"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} has no effect on a reward model, which the job's process runs")
        return self

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the name of the reward, with its weight."""
        return {self.name: self.weight}

    def make(self, access: JudgeAccess) -> Judge:
        """Return the judge; see `JudgeConfig.make`."""
        from palestra_judges.reward_model import RewardModelJudge

        return RewardModelJudge(self)
