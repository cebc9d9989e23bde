"""The arguments of `train` and `evaluate`, checked and brought into one form before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from palestra.agents import Agent, named_agents
from palestra.client.harness import HarnessProgram, harness_rollout
from palestra.client.plain_values import rows_of_frame
from palestra.client.task_files import TaskCheck, TaskFile
from palestra.client.worker import Rollout
from palestra.config import HarnessConfig, JobConfig, JudgeConfig
from palestra.envs import ConcurrentEnvironment, Environment, TaskEnvironment
from palestra.envs.catalog import adapted
from palestra.envs.environment import task_prompt
from palestra.envs.rewards import FACTS, needed_columns, reward_function
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.learner.samplers import SamplerMaker
from palestra.rollout import RolloutSpec
from palestra.runtime.starting_points import with_checkpoints, with_models

TaskData = Mapping[str, Any]
TaskRows = Iterable[TaskData] | str | Path
Tasks = TaskRows | Callable[[], TaskRows]
EnvironmentMaker = Callable[[], Environment | ConcurrentEnvironment]
RewardFunction = Callable[..., Any] | Mapping[str, Callable[..., Any]] | JudgeConfig


def resolve_config(
    config: JobConfig | None, model: str | Mapping[str, str] | None, environment: EnvironmentMaker | str | None
) -> JobConfig:
    """Return the job's configuration, with the user's arguments applied.

    Args:
        model: replaces the model of the only policy that is not frozen; or models by policy name, see `with_models`;
            None: unchanged.
        environment: a name sets `environment.name`; anything else has no effect.
    """
    if config is not None and not isinstance(config, JobConfig):
        raise ConfigError(f"the configuration is a {type(config).__name__}; write palestra.JobConfig(steps=30, …)")
    config = config or JobConfig()
    if model is not None:
        if not isinstance(model, str | Mapping):
            raise ConfigError(
                f"`model` has the type {type(model).__name__}; give the name of a model, or the folder that it is in"
            )
        config = with_models(config, model)
    config = with_checkpoints(config)
    if isinstance(environment, str):
        if config.environment.name not in (None, environment):
            raise ConfigError(
                f"`environment` is {environment!r}, and environment.name is {config.environment.name!r}; leave one out"
            )
        config = config.model_copy(
            update={"environment": config.environment.model_copy(update={"name": environment})},
        )
    return config


def with_harness(config: JobConfig, harness: object) -> JobConfig:
    """Return the job with the harness that is given by name, or as a program."""
    if harness is None:
        return config
    if not isinstance(harness, str | HarnessProgram):
        raise ConfigError(
            f"`harness` has the type {type(harness).__name__}; give a name (palestra harness list), or a "
            "palestra_harness.Harness"
        )
    name = harness if isinstance(harness, str) else harness.name
    settings = config.harness or HarnessConfig(name=name)
    if settings.name != name:
        raise ConfigError(f"`harness` is {name!r}, and harness.name is {settings.name!r}; leave one out")
    return config.model_copy(update={"harness": settings})


def with_harness_of_run(config: JobConfig, reward: object, *others: object) -> JobConfig:
    """Return a run's settings for an evaluation: its harness plays if the caller only gives a `reward`.

    No score function of the run is imported: its folder may be another user's. `others`: a rollout or an environment
    that the caller gives, or None.
    """
    scored = reward is not None and all(other is None for other in others)
    harness = None if config.harness is None or not scored else config.harness.model_copy(update={"score": None})
    return config.model_copy(update={"harness": harness})


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """How a user says what to play: one of the first four, or the configuration does.

    Attributes:
        rollout: a function `(task, endpoint)`, or a `RolloutSpec`.
        environment: an environment's class, a factory, or a name.
        reward: scores the answer to a task's `prompt`; several functions by name give several rewards. Or a judge. In a
            job with a harness: scores what the program left.
        harness: plays in place of the installed program of `config.harness`.
        sampler: makes what chooses the training tasks, whichever of these is given; None: as configured.
    """

    rollout: Rollout | RolloutSpec | None = None
    environment: EnvironmentMaker | str | None = None
    reward: RewardFunction | None = None
    harness: HarnessProgram | None = None
    sampler: SamplerMaker | None = None


async def _none_is_played(task: TaskData, endpoint: Any) -> float:
    """Raise ConfigError: the job trains recorded episodes, and was given something to validate on."""
    raise ConfigError(
        "nothing says how validation episodes are played: give `rollout`, `environment` or `reward`, or no "
        "`validation_tasks`"
    )


def resolve_rollout(config: JobConfig, play: Play) -> Rollout | RolloutSpec | None:
    """Return the user's rollout function, or agents in an environment; None: `config.environment` names it."""
    rollout, environment, reward = play.rollout, play.environment, play.reward
    named, served = config.environment.name, config.environment.url
    mixed = any(each.name is not None or each.url is not None for each in config.environments)
    _check_rollout(rollout)
    given = {
        "rollout": rollout is not None,
        "environment": environment is not None and not isinstance(environment, str),
        "reward": reward is not None and config.harness is None,
        "harness": config.harness is not None,
        f"environment.name = {named!r}": named is not None,
        f"environment.url = {served!r}": served is not None,
        "[[environments]]": mixed,
    }
    found = [name for name, is_given in given.items() if is_given]
    if not found and config.learns_recorded:
        return _none_is_played
    if not found:
        raise ConfigError(
            "nothing says what is played: give `rollout`, a function (task, endpoint) -> reward; or `environment`; or "
            "`harness`; or `reward`, a function (task, answer) -> reward that scores one answer to each task's `prompt`"
        )
    if len(found) > 1:
        raise ConfigError(f"what is played is said more than once, by {' and '.join(found)}; leave one of them out")
    if config.harness is not None:
        if isinstance(reward, JudgeConfig | Mapping):
            raise ConfigError(
                "a harness needs one function (task, result) as `reward`; a judge may be added as [judge]"
            )
        return harness_rollout(config.harness, reward, play.harness)
    chosen = config.environment
    if rollout is not None:
        if chosen.agent is not None:
            raise ConfigError(
                f"`rollout` says who acts, and environment.agent is {chosen.agent!r}; leave one of them out"
            )
        return rollout
    agents = named_agents(chosen.agent, chosen.agent_settings)
    if reward is not None:
        return _answers(reward, agents, chosen.system)
    if environment is None or isinstance(environment, str):
        return None
    maker: object = adapted(environment)
    if not callable(maker):
        name = type(maker).__name__
        raise ConfigError(
            f"`environment` is one {name}, and each episode needs its own; give the class {name}, or "
            f"`lambda: {name}(…)`"
        )
    return RolloutSpec(environment=maker, agents=agents, system=chosen.system)


def _answers(reward: RewardFunction, agents: Mapping[str, Agent] | None, system: str | None) -> RolloutSpec:
    """Return one answer to each task's `prompt`, which is scored."""
    if isinstance(reward, JudgeConfig):
        return RolloutSpec(
            environment=lambda: TaskEnvironment(_not_scored), agents=agents, system=system, only_judged=True
        )
    functions = reward.values() if isinstance(reward, Mapping) else (reward,)
    if not all(map(callable, functions)):
        raise ConfigError(
            f"`reward` has the type {type(reward).__name__}; give a function (task, answer) -> number, or a "
            "dict of such functions by name"
        )
    try:
        reward_function(reward)
    except InvalidEnvironment as error:
        raise ConfigError(f"`reward`: {error}") from None
    return RolloutSpec(environment=lambda: TaskEnvironment(reward), agents=agents, system=system)


def _not_scored(task: TaskData, answer: str) -> float:
    """Return the reward of an answer that the job's judge scores."""
    return 0.0


def check_sampler_argument(config: JobConfig, sampler: object) -> None:
    """Raise ConfigError for a `sampler` that can't be made, or that would not choose the tasks."""
    if sampler is None:
        return
    if not callable(sampler):
        raise ConfigError(
            f"`sampler` has the type {type(sampler).__name__}; give a class derived from palestra.TaskSampler"
        )
    if config.curriculum is not None:
        raise ConfigError("`sampler` chooses the tasks, and the job has a [curriculum]; leave one of them out")
    if config.brings_tasks:
        raise ConfigError("`sampler` chooses among tasks, and this algorithm takes the episodes of a run instead")


def with_judge(config: JobConfig, reward: RewardFunction | None) -> JobConfig:
    """Return the job with the judge that is given as its reward, if it is one."""
    if not isinstance(reward, JudgeConfig):
        return config
    if config.judge not in (None, reward):
        raise ConfigError("`reward` is a judge, and the configuration has another one in `judge`; leave one out")
    if type(reward) not in JudgeConfig.alternatives():
        name = type(reward).__name__
        raise ConfigError(
            f"the judge {name} is not installed: its package names it by an entry point of palestra.judges"
        )
    if config.trains_several:
        raise ConfigError("a judge scores whole episodes, and several policies are trained; train one policy a job")
    return config.model_copy(update={"judge": reward})


def _check_rollout(rollout: object) -> None:
    if rollout is None or isinstance(rollout, RolloutSpec):
        return
    made = rollout if isinstance(rollout, type) else type(rollout)
    if issubclass(made, Environment | ConcurrentEnvironment):
        raise ConfigError(
            f"{made.__name__} is an environment, not a rollout function; give environment={made.__name__}"
        )
    if not callable(rollout):
        raise ConfigError(f"`rollout` has the type {made.__name__}; give a function (task, endpoint) -> reward")
    _check_two(rollout)


def _check_two(rollout: Callable[..., Any]) -> None:
    """Refuse a rollout function that cannot be called with a task and an endpoint."""
    try:
        signature = inspect.signature(rollout)
    except ValueError:  # a function in C that does not say what it takes
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(rollout, "__name__", type(rollout).__name__)
        raise ConfigError(
            f"`rollout`: {name}{signature} can't be called as {name}(task, endpoint): {error}; a function "
            "(task, answer) that scores one answer is the argument `reward`"
        ) from None


def task_check(config: JobConfig, reward: RewardFunction | None) -> TaskCheck | None:
    """Return a function that raises ConfigError for a task that can't be asked or scored; None: any task can."""
    if config.harness is not None:
        return _check_text
    return None if reward is None else prompt_check(reward)


def _check_text(task: TaskData) -> None:
    """Raise ConfigError for a task that no harness can be given."""
    if not isinstance(prompt := task.get("prompt"), str) or not prompt:
        raise ConfigError("the task has no `prompt`, which is the text that a harness gets")


def prompt_check(reward: RewardFunction) -> TaskCheck:
    """Return a function that raises ConfigError for a task that the reward function can't ask or score."""
    functions = reward.values() if isinstance(reward, Mapping) else () if isinstance(reward, JudgeConfig) else (reward,)
    needed = {column for function in functions for column in needed_columns(function)}

    def check(task: TaskData) -> None:
        try:
            task_prompt(task)
        except InvalidEnvironment as error:
            raise ConfigError(str(error)) from None
        if not needed <= task.keys():
            absent = map(repr, sorted(needed - task.keys()))
            raise ConfigError(
                f"the task has no {' and no '.join(absent)}, which the reward function needs; a function may take "
                f"columns, completions, prompts and {', '.join(FACTS)}"
            )

    return check


def is_function(tasks: Tasks) -> TypeGuard[Callable[[], TaskRows]]:
    """Return whether tasks are a function that returns them."""
    return callable(tasks) and not isinstance(tasks, Iterable)


def resolve_tasks(name: str, tasks: Tasks) -> Iterable[Any]:
    """Return tasks, of which few are in memory while they are read.

    Args:
        tasks: a sequence or an iterator of JSON objects, a data set of `datasets`, a DataFrame of pandas or polars, the
            path of a JSONL file, or a function that returns one of these.
    """
    if isinstance(tasks, str | Path):
        return TaskFile(Path(tasks))
    if is_function(tasks):
        return resolve_tasks(name, tasks())
    tasks = rows_of_frame(tasks)
    if isinstance(tasks, Mapping):
        # `datasets.load_dataset` without `split` is a mapping of splits.
        raise ConfigError(
            f"`{name}` is one {type(tasks).__name__}, not several tasks; write [{{…}}], or choose a split of a data set"
        )
    if not isinstance(tasks, Iterable):
        raise ConfigError(
            f"`{name}` has the type {type(tasks).__name__}; give a list of JSON objects, or a JSONL file's path"
        )
    return tasks
