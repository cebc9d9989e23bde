"""What to play: tasks, the environment, the episodes of a step and of evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from palestra.config.parts import SeatsConfig
from palestra.config.roles import AgentName
from palestra.config.section import Identifier, Positive, Seconds, Section
from palestra.extensions import extensions

SERVERS = "palestra.environment_servers"

MAX_LEASE_SECONDS = 3600.0  # that a claim may ask for: a worker that is gone holds its episode no longer


class TaskFilesConfig(Section):
    """Files of tasks."""

    train: Path | None = Field(None, description="JSONL file of tasks: one JSON object per line; its `id` names it.")
    validation: Path | None = Field(None, description="JSONL file of held-out tasks, never trained on.")


class TasksConfig(TaskFilesConfig):
    """Files of tasks. Without a file, an environment generates tasks, or clients push them with `POST /tasks`."""

    weigh: Literal["groups", "tokens"] = Field(
        "groups", description="What the weights of `[[environments]]` share out: groups, or sampled tokens of groups."
    )


class PlayedEnvironment(Section):
    """An environment that ships with Palestra, or one on a server; the job's process plays its episodes."""

    name: str | None = Field(
        None,
        description="Name of an environment that ships with Palestra, such as `arithmetic`, `gomoku-duel` or "
        "`kuhn-poker`; `palestra environments` lists all. None: remote workers play, or the environment given to "
        "`palestra.train`.",
    )
    path: Path | None = Field(
        None, description="Folder of tasks, for an environment that reads them, such as `harbor`; part of its name."
    )
    settings: dict[str, bool | int | float | str] = Field({}, description="Settings of the environment.")
    agent: str | None = Field(
        None,
        description="Agent that acts in the environment, by name: `tools` (with `agent_settings.tools`, names of "
        "installed tools separated by commas, and `max_calls`), or one of an installed package. None: each observation "
        "is answered with one reply of the policy.",
    )
    agent_settings: dict[str, bool | int | float | str] = Field({}, description="Settings of the agent.")
    url: str | None = Field(
        None,
        description="URL of an environment server (`palestra env serve`), such as `http://10.0.0.7:7500`, in place of "
        "`name`. Its tasks come from files, or clients push them.",
    )
    protocol: str = Field(
        "palestra",
        description="What the server at `url` speaks: `palestra` (`palestra env serve`), `openenv` (a server of "
        "OpenEnv), or `nemo-gym` (a resources server of NeMo Gym). With the last two, `settings` may set their limits "
        "(docs/how-to/partners.md), and the key is optional.",
    )
    key_variable: str = Field(
        "PALESTRA_ENVIRONMENT_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the key of the environment server. The key itself is never in a "
        "configuration.",
    )
    train_tasks: Positive = Field(512, description="Tasks to generate, if no file names any.")
    validation_tasks: int = Field(64, ge=0, description="Held-out tasks to generate, if no file names any.")
    system: str | None = Field(None, description="System message. None: the environment's own, if it has one.")

    @field_validator("protocol")
    @classmethod
    def _protocol_is_known(cls, protocol: str) -> str:
        if protocol != "palestra" and protocol not in (known := extensions(SERVERS)):
            raise ValueError(f"{protocol!r} is no protocol; there are {', '.join(known)}")
        return protocol

    @model_validator(mode="after")
    def _one_environment(self) -> PlayedEnvironment:
        if self.url is not None and (self.name is not None or (self.settings and self.protocol == "palestra")):
            raise ValueError(
                "environment.url names a server that has its own environment and settings; leave `name` and "
                "`settings` out"
            )
        return self

    @model_validator(mode="after")
    def _path_has_a_name(self) -> PlayedEnvironment:
        if self.path is not None and self.name is None:
            raise ValueError("environment.path is a folder of tasks for an environment; give environment.name")
        return self

    @property
    def full_name(self) -> str | None:
        """Return the name in the catalogue, `NAME` or `NAME/PATH`; None: no environment is named."""
        return self.name if self.path is None else f"{self.name}/{self.path}"

    @model_validator(mode="after")
    def _settings_have_an_agent(self) -> PlayedEnvironment:
        if self.agent_settings and self.agent is None:
            raise ValueError("environment.agent_settings are settings of an agent; give environment.agent")
        return self


class EnvironmentConfig(PlayedEnvironment):
    """The environment of a job; with `[[environments]]`, the limits of all of them."""

    max_concurrency: Positive | None = Field(
        None, description="Episodes that are played at the same time. None: as many as a step has, at most 256."
    )
    runners: Positive | None = Field(
        None,
        description="Processes of the job that play `name`, one core each: for environments that compute. In a "
        "service each counts as one core of the job. None: the job's own process plays.",
    )

    @model_validator(mode="after")
    def _runners_have_a_name(self) -> EnvironmentConfig:
        if self.runners is not None and self.name is None:
            raise ValueError("environment.runners play an environment that ships; give environment.name")
        return self


class MixedEnvironment(PlayedEnvironment):
    """One of several environments of a job, or one of several files of tasks."""

    id: Identifier = Field(description="Name of the environment in metrics, and of its tasks: `ID/TASK`.")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Share of the groups of all steps, relative to the other weights."
    )
    tasks: TaskFilesConfig = TaskFilesConfig()

    @model_validator(mode="after")
    def _has_tasks(self) -> MixedEnvironment:
        if self.name is None and self.tasks.train is None:
            raise ValueError(f"environment {self.id!r} has no tasks: name a file in its tasks.train")
        return self


class CurriculumConfig(Section):
    """Draws training tasks that are solved sometimes, in place of a plain order; see docs/how-to/curricula.md."""

    target: float = Field(
        0.5, gt=0, lt=1, description="Share of solved episodes of the tasks that are drawn, which teach most."
    )
    min_reward: float = Field(
        0.5, allow_inf_nan=False, description="Least reward of an episode that has solved its task."
    )


def check_environments(environments: Sequence[MixedEnvironment], alone: EnvironmentConfig, tasks: TasksConfig) -> None:
    """Raise ValueError for environments of one name, or that are named in two ways, and for keys without effect."""
    twice = [name for name, count in Counter(each.id for each in environments).items() if count > 1]
    if twice:
        raise ValueError(f"two of environments have the id {twice[0]!r}; give each its own")
    if not environments:
        if tasks.weigh == "tokens":
            raise ValueError("tasks.weigh is of the weights of [[environments]], and the job has none; leave it out")
        return
    played = [each for each in environments if each.name is not None or each.url is not None]
    if played and len(played) < len(environments):
        raise ValueError("either all of environments have `name` or `url`, or none has: then workers play their tasks")
    of_all = () if played else ("system", "agent", "agent_settings")  # of what is given to `palestra.train`
    named = [f"environment.{key}" for key in _keys_set(alone) if key not in of_all]
    named += [f"tasks.{key}" for key in TaskFilesConfig.model_fields if getattr(tasks, key) is not None]
    if named:
        raise ValueError(f"{named[0]} is set, and the job has [[environments]], which have their own; leave it out")
    for each in () if played else environments:
        if keys := _keys_set(each):
            raise ValueError(
                f"environment {each.id!r} has `{keys[0]}`, and neither `name` nor `url`; give one, or leave it out"
            )


def check_no_environment(
    environments: Sequence[MixedEnvironment], alone: EnvironmentConfig, seats: SeatsConfig
) -> None:
    """Raise ValueError for keys of environments in a job whose episodes a harness plays."""
    named = ["environments"] if environments else []
    named += [f"environment.{key}" for key in _keys_set(alone)]
    named += [] if alone.runners is None else ["environment.runners"]
    named += ["seats.roles"] if seats.roles else []
    if named:
        raise ValueError(f"{named[0]} is set, and [harness] says what is played; leave one of the two out")


def _keys_set(environment: PlayedEnvironment) -> list[str]:
    """Return the keys that say what is played and have another value than their default."""
    fields = PlayedEnvironment.model_fields
    return [key for key, field in fields.items() if getattr(environment, key) != field.default]


class RolloutConfig(Section):
    """Episodes: the sizes of groups, leases of workers, staleness, and how calls are recorded."""

    group_size: Positive = Field(
        8,
        description="Episodes of one task, which are compared with one another. A group of several of which fewer than "
        "two are completed is dropped and replaced.",
    )
    group_key: str = Field(
        "group_id",
        description="Key of a task whose value it shares with the tasks of its group: their episodes are compared with "
        "one another. A group plays its tasks in turn; more than `group_size` tasks make several groups. Empty: each "
        "task is a group.",
    )
    groups_per_step: Positive = Field(8, description="Tasks in one training step; each makes a group of episodes.")
    max_attempts: Positive = Field(3, description="Attempts at an episode before it is discarded.")
    lease_seconds: Seconds = Field(
        120.0,
        le=MAX_LEASE_SECONDS,
        description="A claimed episode is given to another worker after so long without a model call or a heartbeat "
        "of it. A claim may ask for another time, as `allow_discard_timeout`, up to an hour.",
    )
    timeout_seconds: Seconds = Field(3600.0, description="Longest duration of one attempt at an episode.")
    max_staleness: int = Field(
        0,
        ge=0,
        le=16,
        description="Most steps by which a token may be older than the policy that is trained. 0: episodes are played "
        "and trained in turn; above 0: the episodes of so many later steps are played while a step is trained.",
    )

    max_open_buckets: Positive | None = Field(
        None, description="Groups that are played at the same time. None: all that are due."
    )
    max_claimed: Positive | None = Field(
        None, description="Episodes that may be claimed at the same time, by all workers. None: any number."
    )
    step_order: Literal["observed", "acted"] = Field(
        "observed",
        description="Order of the TimeSteps of an episode in which several agents act at the same time, for credit by "
        "step: by the time of their observations, or of their actions. Both times are recorded.",
    )
    weight_sync: Literal["any_time", "between_replies", "between_episodes"] = Field(
        "any_time",
        description="When episodes get new weights. `any_time`: as soon as there are new ones, also within a reply "
        "(each token records its version; SGLang completes replies first); `between_replies`: when the running replies "
        "are complete, except that a reply whose worker has died is sampled again under the newest weights, and may "
        "keep tokens that were passed on before; `between_episodes`: when no episode is being played, and no worker "
        "gets one until then. A base server updates at any time.",
    )

    changed_history: Literal["fork", "keep", "refuse"] = Field(
        "fork",
        description="How to treat a reply that the agent sends back without its reasoning, or with other white space "
        "around its text or its reasoning, as after `.strip()`. `fork`: the model sees what was sent, so the tokens "
        "fork; `keep`: the exact tokens stay. Other changes fork. `refuse`: as `fork`, and each call that continues an "
        "earlier one and can't reuse its exact tokens is refused with 409.",
    )

    untrained_agents: tuple[AgentName, ...] = Field(
        ("*/auxiliary",),
        description="Patterns of names of agents whose calls are recorded and not trained, such as `agent/*` for all "
        "subagents. `*/auxiliary`: titles and the like, for which a coding agent asks beside its task.",
    )

    @property
    def least_completed(self) -> int:
        """Return the completed episodes that a group needs to be trained: two are the fewest that can be compared."""
        return min(2, self.group_size)


class EvaluationConfig(Section):
    """Validation on held-out tasks: greedy, through the same claims as training, while weights do not change."""

    every_steps: int = Field(
        5, ge=0, description="Evaluate every so many steps, before the first and after the last. 0: never."
    )
    every_tokens: Positive | None = Field(
        None,
        description="Evaluate after each step that passes a multiple of so many sampled tokens, before the first step "
        "and after the last; `every_steps` is not used then. None: by steps.",
    )

    @property
    def is_on(self) -> bool:
        """Return whether there are evaluations, if there are tasks for them."""
        return self.every_steps > 0 or self.every_tokens is not None
