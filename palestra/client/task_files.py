"""Files of tasks: JSONL, one JSON object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from palestra.client.plain_values import rows_of_frame
from palestra.errors import ConfigError
from palestra.types.wire import TaskBody

TaskRows = Sequence[Mapping[str, Any]]
DEEP = 200  # brackets: a line that has more may be nested deeper than can be stored
_LONG = re.compile(rb"\d{19}")  # perhaps an integer over 64 bits, which orjson reads as a float


def _sized(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the tasks of a JSONL file one by one, each with the bytes of its line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    task = _plain_task(line)
                    yield _task(line, f"{path}:{number}") if task is None else task, len(line)
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error


def read_task_file(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of tasks, each with all of its keys."""
    return [task for task, _ in _sized(path)]


def task_rows(tasks: TaskRows | str | Path) -> TaskRows:
    """Return tasks as JSON objects, from objects, a DataFrame, or the path of a JSONL file."""
    return read_task_file(Path(tasks)) if isinstance(tasks, str | Path) else rows_of_frame(tasks)


class TaskFile:
    """The tasks of a JSONL file, read again for each iteration."""

    def __init__(self, path: Path) -> None:
        """Create without reading."""
        self.path = path

    def count(self) -> int:
        """Check all lines, and return the number of tasks."""
        return sum(1 for _ in _sized(self.path))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (task for task, _ in _sized(self.path))

    def chunks(self, most: int, most_bytes: int) -> Iterator[list[dict[str, Any]]]:
        """Yield lists of at most `most` tasks, whose lines have at most `most_bytes`, except for a
        single larger task.
        """
        tasks, size = list[dict[str, Any]](), 0
        for task, length in _sized(self.path):
            tasks.append(task)
            size += length
            if len(tasks) == most or size >= most_bytes:
                yield tasks
                tasks, size = [], 0
        if tasks:
            yield tasks


def task_source(tasks: Iterable[Mapping[str, Any]] | str | Path) -> Iterable[Mapping[str, Any]]:
    """Return tasks that can be iterated several times, like `task_rows`; a file's tasks are not kept in memory."""
    if isinstance(tasks, str | Path):
        return TaskFile(Path(tasks))
    return list(tasks) if isinstance(tasks, Iterator) else rows_of_frame(tasks)


def _plain_task(line: bytes) -> dict[str, Any] | None:
    """Return the task of a line if it certainly is one, in a tenth of the time of `_task`; None: not certain."""
    if line.count(b"[") + line.count(b"{") > DEEP or _LONG.search(line):
        return None
    try:
        data = orjson.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


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
