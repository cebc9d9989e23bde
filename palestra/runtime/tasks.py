"""What a job plays: its environment, and its tasks, from files, from the environment, or pushed by clients."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

from palestra.agents import named_agents
from palestra.client.task_files import TaskFile, read_task_files, split_in, task_name
from palestra.config import JobConfig
from palestra.config.rollout import SERVERS, EnvironmentConfig
from palestra.database import to_json
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.envs.catalog import catalog_entry, catalog_maker
from palestra.envs.tasks import Split
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension
from palestra.rollout import RolloutSpec
from palestra.store import Tasks
from palestra.types.records import Task
from palestra.types.wire import MAX_NAME, TaskBody, task_digest, task_id_of


def named_environment(config: JobConfig) -> Callable[[], Environment | ConcurrentEnvironment] | None:
    """Return a factory of the environment that the job names; None: external workers play."""
    chosen = config.environment
    if chosen.url is not None and chosen.protocol != "palestra":
        return _partner(chosen, chosen.url)
    if chosen.url is not None:
        key = os.environ.get(chosen.key_variable)
        if not key:
            raise ConfigError(
                f"environment.key_variable is {chosen.key_variable!r}, and that variable is not set here; it has to "
                f"hold the key of {chosen.url}"
            )
        make: Callable[..., Callable[[], ConcurrentEnvironment]] = load_extension(_server(chosen.protocol))
        return make(chosen.url, key, system=chosen.system)
    if chosen.protocol != "palestra":
        raise ConfigError(f"environment.protocol is {chosen.protocol!r}, which is of a server; give environment.url")
    if chosen.full_name is None:
        return None
    return catalog_maker(chosen.full_name, chosen.settings, chosen.system)


def played_of(config: JobConfig) -> RolloutSpec | None:
    """Return the environment and the agent that the job names; None: external workers play. Raises ConfigError if a
    name or a setting is wrong, or there is an agent without an environment.
    """
    chosen = config.environment
    make, agents = named_environment(config), named_agents(chosen.agent, chosen.agent_settings)
    if make is not None:
        return RolloutSpec(environment=make, agents=agents, system=chosen.system)
    if agents is not None:
        raise ConfigError(
            f"environment.agent is {chosen.agent!r}, and no environment is named in which it could act; give "
            "environment.name or environment.url"
        )
    return None


def _partner(chosen: EnvironmentConfig, url: str) -> Callable[[], Environment | ConcurrentEnvironment]:
    """Return a factory of an environment on another project's server."""
    make = load_extension(_server(chosen.protocol))
    known = [name for name in inspect.signature(make).parameters if name not in ("url", "key", "system", "clock")]
    if unknown := [name for name in chosen.settings if name not in known]:
        raise ConfigError(f"environment.settings has no {unknown[0]!r}; {chosen.protocol} has {', '.join(known)}")
    given: dict[str, Any] = {
        "key": os.environ.get(chosen.key_variable) or None,
        "system": chosen.system,
        **chosen.settings,
    }
    make(url, **given)  # a wrong setting is refused now
    return partial(make, url, **given)


def _server(protocol: str) -> EntryPoint:
    """Return the entry point of environments whose servers speak a protocol."""
    if (point := extensions(SERVERS).get(protocol)) is None:
        raise ConfigError(f"environment.url: no package that plays environments over {protocol!r} is installed")
    return point


async def load_tasks(known: Tasks, config: JobConfig, read: Mapping[str, TaskFile] | None = None) -> None:
    """Store the tasks of a script or of files, and those that the environment generates, if the job names any.

    A run that has all of its tasks plays them; those of a script must be among them.

    Args:
        read: the tasks of a script, by split, or the result of `read_task_files`; empty: the files are read now.

    Raises:
        Conflict: the run has other tasks.
    """
    if config.kind == "inference":
        return
    if await known.sealed():
        for split, file in (read or {}).items():
            for tasks in file.blocks():
                await known.require(split, *_texts(tasks, split.partition("/")[2]))
        return
    files = read or read_task_files(config)
    made = {
        name: job
        for name, job in config.each_environment.items()
        if job.environment.name is not None and job.tasks.train is None
    }
    if not made and not files:
        return  # clients push them
    await known.clear()  # a start that was broken off may have had others
    for split, file in files.items():
        name = split.partition("/")[2]
        for number, tasks in enumerate(file.blocks()):
            await known.push_texts(split, *_texts(tasks, name), f"file {file.path.name}, part {number + 1}")
        file.close()
    for name, job in made.items():
        await _generate(known, name, job, files)
    await known.seal()


async def _generate(known: Tasks, name: str, job: JobConfig, files: Mapping[str, TaskFile]) -> None:
    """Store the tasks that the environment `name` generates, without splits that are given."""
    environment = job.environment
    assert environment.full_name is not None
    generate = catalog_entry(environment.full_name).generate
    counts: dict[Split, int] = {"validation": environment.validation_tasks, "train": environment.train_tasks}
    for split, count in counts.items():
        if split_in(name, split) not in files:
            made = generate(split, count, job.seed) if count else []
            new = [_of_environment(name, task_of(data)) for data in made]
            await known.push(split_in(name, split), new, environment.full_name)


def _of_environment(name: str, task: Task) -> Task:
    """Return a task of an environment, named `ENVIRONMENT/TASK`; "": the job's only environment, whose names stay."""
    return replace(task, task_id=_in_environment(name, task.task_id, task.data))


def _in_environment(name: str, task_id: str, data: dict[str, Any]) -> str:
    """Return the name of a task of an environment; see `_of_environment`."""
    full = f"{name}/{task_id}" if name else task_id
    return full if len(full) <= MAX_NAME else f"{name}/t{task_digest(data)}"


def _texts(rows: Sequence[dict[str, Any]], environment: str) -> tuple[list[str], list[str]]:
    """Return the names and texts of an environment's tasks, which were checked when they were read."""
    names = [task_name(data) for data in rows]
    if environment:
        names = [_in_environment(environment, name, data) for name, data in zip(names, rows, strict=True)]
    return names, [to_json(data) for data in rows]


def task_of(data: dict[str, Any]) -> Task:
    """Return a task from its data, named by `id` or a new name."""
    return Task(task_id=task_id_of(TaskBody(data=data)), data=data)
