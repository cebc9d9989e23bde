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
from palestra.ledger import Tasks
from palestra.schemas.records import Task
from palestra.schemas.wire import TaskBody, task_id_of

Files = dict[Split, tuple[Path, list[Task]]]  # by split: the file, and its tasks
ENVELOPE = 1000  # bytes of a body around a single task, its name included


async def load_tasks(known: Tasks, config: JobConfig, read: Files | None = None) -> None:
    """Store the tasks of files, or those that the environment makes, if the job names any.

    Args:
        known: the tasks of the job's store.
        config: of the job.
        read: what `read_files` found; None: the files are read now.
    """
    if config.kind == "inference" or await known.sealed():
        return
    environment = config.environment
    if config.tasks.train is not None:
        for split, (path, tasks) in (read or read_files(config)).items():
            await known.push(split, tasks, f"file {path.name}")
    elif environment.name is not None:
        generate = catalog_entry(environment.name).generate
        counts: dict[Split, int] = {"validation": environment.validation_tasks, "train": environment.train_tasks}
        for split, count in counts.items():
            made = generate(split, count, config.seed) if count else []
            await known.push(split, [task_of(data) for data in made], environment.name)
    else:
        return
    await known.seal()


def read_files(config: JobConfig) -> Files:
    """Read and check the files of tasks that a job names; none where it serves a model.

    Raises:
        ConfigError: no such file, a line that is no task, two tasks of one name, or no training task at all.
    """
    if config.kind == "inference" or config.tasks.train is None:
        return {}
    validation, train = config.tasks.validation, config.tasks.train
    found: Files = {} if validation is None else {"validation": (validation, read_tasks(validation))}
    found["train"] = (train, read_tasks(train))
    if not found["train"][1]:
        raise ConfigError(f"tasks file {train} is empty: the job has no training tasks")
    return found


def check_sizes(files: Files, max_body_bytes: int) -> None:
    """Check that each task can be pushed to a data plane.

    Raises:
        ConfigError: a task alone is more than a body may have.
    """
    for path, tasks in files.values():
        for task in tasks:
            size = len(json.dumps(task.data, ensure_ascii=False).encode()) + ENVELOPE
            if size > max_body_bytes:
                raise ConfigError(
                    f"tasks file {path}: task {task.task_id!r} has {size:,} bytes, and server.max_body_bytes is "
                    f"{max_body_bytes:,}; raise that, or make it smaller"
                )


def read_tasks(path: Path) -> list[Task]:
    """A JSONL file: an object a line; its key `id`, if it has one, names the task.

    Raises:
        ConfigError: no such file, a line that is no JSON object, or a name that was given to another task; the line
            is named.
    """
    found: dict[str, Task] = {}
    tasks: list[Task] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                task = _task(line, f"{path}:{number}")
                if found.setdefault(task.task_id, task).data != task.data:
                    raise ConfigError(f"{path}:{number}: an earlier task has the id {task.task_id!r} and other data")
                tasks.append(task)
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error
    return tasks


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
