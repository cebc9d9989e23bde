"""Where a job's tasks come from: files, or the generator of its environment. Else clients push them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from palestra.config import JobConfig
from palestra.envs.catalog import catalog_entry
from palestra.envs.splits import Split
from palestra.errors import ConfigError
from palestra.ledger import RunStore
from palestra.schemas.records import Task
from palestra.schemas.wire import TaskBody, task_id_of


async def load_tasks(store: RunStore, config: JobConfig) -> None:
    """Tasks from files, or made by the environment, if the job names any."""
    if await store.tasks_sealed():
        return
    environment = config.environment
    if config.tasks.train is not None:
        for split, path in (("validation", config.tasks.validation), ("train", config.tasks.train)):
            if path is not None:
                await store.push_tasks(split, read_tasks(path), f"file {path.name}")
    elif environment.name is not None:
        generate = catalog_entry(environment.name).generate
        counts: dict[Split, int] = {"validation": environment.validation_tasks, "train": environment.train_tasks}
        for split, count in counts.items():
            made = generate(split, count, config.seed) if count else []
            await store.push_tasks(split, [task_of(data) for data in made], environment.name)
    else:
        return
    await store.seal_tasks()


def read_tasks(path: Path) -> list[Task]:
    """A JSONL file: an object a line; its key `id`, if it has one, names the task.

    Raises:
        ConfigError: no such file, or a line that is no JSON object; the line is named.
    """
    try:
        with path.open("rb") as file:
            return [_task(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error


def task_of(data: dict[str, Any]) -> Task:
    """A task from its data, in which a key `id` names it.

    Raises:
        ValidationError: the name is none.
    """
    data = dict(data)
    name = data.pop("id", None)
    body = TaskBody(id=None if name is None else str(name), data=data)
    return Task(task_id=task_id_of(body), data=data)


def _task(line: bytes, place: str) -> Task:
    try:
        data = json.loads(line.decode())
        if not isinstance(data, dict):
            raise TypeError(f"a task is a JSON object, this is a {type(data).__name__}")
        return task_of(data)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON: {error.msg}") from error
    except ValidationError as error:
        raise ConfigError(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    except (UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error
