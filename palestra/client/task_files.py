"""Files of tasks: JSONL, one JSON object per line, whose key `id`, if present, names the task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from palestra.errors import ConfigError
from palestra.types.wire import TaskBody, task_id_of

TaskRows = Sequence[Mapping[str, Any]]


def read_task_file(path: Path) -> list[TaskBody]:
    """Read a JSONL file of tasks, each with its name.

    Raises:
        ConfigError: there is no such file, or a line is not a JSON object, or reuses the name of another task; the
            message names the line.
    """
    found: dict[str, TaskBody] = {}
    tasks: list[TaskBody] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                task = _task(line, f"{path}:{number}")
                if found.setdefault(str(task.id), task).data != task.data:
                    raise ConfigError(f"{path}:{number}: an earlier task has the id {task.id!r} and other data")
                tasks.append(task)
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error
    return tasks


def task_rows(tasks: TaskRows | str | Path) -> TaskRows:
    """Return tasks as JSON objects with their names in `id`.

    Args:
        tasks: the objects, which are returned as they are, or the path of a JSONL file.

    Raises:
        ConfigError: see `read_task_file`.
    """
    if isinstance(tasks, str | Path):
        return [{"id": task.id, **task.data} for task in read_task_file(Path(tasks))]
    return tasks


def named_task(data: Mapping[str, Any]) -> TaskBody:
    """Return a task from its data, in which the key `id`, if present, names it; else its name is made from the data.

    Raises:
        ValidationError: the name is not valid.
    """
    rest = dict(data)
    name = rest.pop("id", None)
    body = TaskBody(id=None if name is None else str(name), data=rest)
    return body.model_copy(update={"id": task_id_of(body)})


def _task(line: bytes, place: str) -> TaskBody:
    try:
        data = json.loads(line.decode())
        if not isinstance(data, dict):
            raise TypeError(f"a task is a JSON object, this is a {type(data).__name__}")
        return named_task(data)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not valid JSON: {error.msg}; a file of tasks has one JSON object a line"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    except (UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error
