"""Files of tasks: JSONL, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from palestra.client.plain_values import rows_of_frame
from palestra.errors import ConfigError
from palestra.types.wire import TaskBody

TaskRows = Sequence[Mapping[str, Any]]


def read_task_file(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of tasks, each with all of its keys.

    Raises:
        ConfigError: there is no such file, or a line is not a JSON object; the message names the line.
    """
    try:
        with path.open("rb") as file:
            return [_task(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error


def task_rows(tasks: TaskRows | str | Path) -> TaskRows:
    """Return tasks as JSON objects.

    Args:
        tasks: the objects, which are returned as they are, a DataFrame, or the path of a JSONL file.

    Raises:
        ConfigError: see `read_task_file`.
    """
    return read_task_file(Path(tasks)) if isinstance(tasks, str | Path) else rows_of_frame(tasks)


def _task(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8-sig"))
        if not isinstance(data, dict):
            raise TypeError(f"a task is a JSON object, this is a {type(data).__name__}")
        return TaskBody(data=data).data
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not valid JSON: {error.msg}; a file of tasks has one JSON object a line"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    except (UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error
