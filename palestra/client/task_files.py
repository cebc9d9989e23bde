"""Tasks as they come: files of JSONL, one JSON object per line, and iterables, which are spooled to such a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from palestra.client.plain_values import is_json, plain_task, rows_of_frame
from palestra.errors import ConfigError, InvalidRequest, StoreError
from palestra.types.wire import TaskBody

DEEP = 200  # brackets: a line that has more may be nested deeper than can be stored
MEMORY = 2**23  # bytes of spooled tasks that stay in memory
_LONG = b"0" * 19  # as digits, perhaps an integer over 64 bits, which orjson reads as a float
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
TaskRows = Iterable[Mapping[str, Any]]
TaskCheck = Callable[[Mapping[str, Any], str], object]
"""Raises an error for a task that can't be played; gets the task, and the place that the error names."""


def read_task_file(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of tasks, each with all of its keys."""
    return list(TaskFile(path))


class TaskFile:
    """The tasks of a JSONL file, read again for each iteration, so that few are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (task for _, task, _ in self._numbered())

    def count(self, check: TaskCheck | None = None) -> int:
        """Check all lines, and return the number of tasks."""
        count = 0
        for number, task, _ in self._numbered():
            count += 1
            if check is not None:
                check(task, f"{self.path}:{number}")
        return count

    def chunks(self, most: int, most_bytes: int) -> Iterator[list[dict[str, Any]]]:
        """Yield lists of at most `most` tasks, whose lines have at most `most_bytes`, except for a
        single larger task.
        """
        tasks, size = list[dict[str, Any]](), 0
        for _, task, length in self._numbered():
            tasks.append(task)
            size += length
            if len(tasks) == most or size >= most_bytes:
                yield tasks
                tasks, size = [], 0
        if tasks:
            yield tasks

    def close(self) -> None:
        """Remove what was made to read the tasks."""

    @contextmanager
    def _lines(self) -> Iterator[Iterable[bytes]]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise ConfigError(f"tasks file {self.path}: {error.strerror}") from error

    def _numbered(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yield the number and the task of each line, and its bytes."""
        with self._lines() as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    task = _plain_task(line)
                    yield number, _task(line, f"{self.path}:{number}") if task is None else task, len(line)


class SpooledTasks(TaskFile):
    """Tasks of an iterable, which is read once, in a temporary file that no folder shows.

    A killed process leaves nothing of it.
    """

    def __init__(
        self, rows: Iterable[Any], name: str, folder: Path | None = None, check: TaskCheck | None = None
    ) -> None:
        """Read and check all tasks. `folder`: on the disk to use; None: the system's temporary folder. Raises
        InvalidRequest if a task is not a JSON object. Raises StoreError if the disk is full.
        """
        super().__init__(Path(name))
        self._file = tempfile.SpooledTemporaryFile(MEMORY, dir=None if folder is None else str(folder))  # noqa: SIM115 - `close` closes it
        self._length = 0
        try:
            for number, row in enumerate(rows):
                task, line = _spooled(row, number, name)
                if check is not None:
                    check(task, f"`{name}`, task {number}")
                self._write(line)
                self._length += 1
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            raise StoreError(
                f"`{self.path}`: task {self._length} can't be written to disk: {error.strerror}"
            ) from error

    @contextmanager
    def _lines(self) -> Iterator[Iterable[bytes]]:
        self._file.seek(0)
        yield self._file


def task_source(tasks: TaskRows | str | Path, name: str) -> TaskFile:
    """Return tasks that can be read several times, from objects, a DataFrame, or the path of a JSONL file."""
    if isinstance(tasks, str | Path):
        return TaskFile(Path(tasks))
    return SpooledTasks(rows_of_frame(tasks), name)


def _spooled(row: Any, number: int, name: str) -> tuple[Mapping[str, Any], bytes]:
    """Return a task as a JSON object, and as a line of a file."""
    with suppress(TypeError, RecursionError):  # an integer of more than 64 bits, half of a character, …
        if type(row) is dict and is_json(row):
            line = orjson.dumps(row)
            if line.count(b"[") + line.count(b"{") <= DEEP:
                return row, line + b"\n"
    try:
        data = TaskBody(data=plain_task(row, number, name)).data
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"`{name}`, task {number}: {said}", name) from error
    return data, orjson.dumps(data) + b"\n"


def _plain_task(line: bytes) -> dict[str, Any] | None:
    """Return the task of a line if it certainly is one, in a tenth of the time of `_task`; None: not certain."""
    if line.count(b"[") + line.count(b"{") > DEEP or _LONG in line.translate(_DIGITS):
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
