"""Tasks as they come: files of JSONL, one JSON object per line, and iterables, which are spooled to such a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from palestra.client.plain_values import is_json, plain_task, rows_of_frame
from palestra.errors import ConfigError, InvalidRequest, StoreError
from palestra.types.wire import TaskBody, name_in, task_digest

if TYPE_CHECKING:
    from palestra.config import JobConfig

DEEP = 200  # brackets: a line that has more may be nested deeper than can be stored
MEMORY = 2**23  # bytes of spooled tasks that stay in memory
BLOCK = 2**20  # bytes of lines after which the tasks read so far are passed on
_LONG = b"0" * 19  # as digits, perhaps an integer over 64 bits, which orjson reads as a float
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_ENVELOPE = 1000  # bytes of a request body around a single task, including its name
TaskRows = Iterable[Mapping[str, Any]]
TaskCheck = Callable[[Mapping[str, Any]], object]
"""Raises ConfigError for a task that can't be played; who calls it adds where the task is."""


def read_task_file(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of tasks, each with all of its keys."""
    return list(TaskFile(path))


class TaskFile:
    """The tasks of a JSONL file, read again for each iteration, so that few are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(self.blocks())

    def count(self, check: TaskCheck | None = None) -> int:
        """Check all lines, and return the number of tasks."""
        count = 0
        for numbers, tasks in self._numbered():
            count += len(tasks)
            if check is not None:
                for number, task in zip(numbers, tasks, strict=True):
                    check_task(check, task, f"{self.path}:", number)
        return count

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the tasks in lists, each of the lines up to one with which they have `BLOCK` bytes."""
        return (tasks for _, tasks in self._numbered())

    def close(self) -> None:
        """Remove what was made to read the tasks."""

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise ConfigError(f"tasks file {self.path}: {error.strerror}") from error

    def _numbered(self) -> Iterator[tuple[Sequence[int], list[dict[str, Any]]]]:
        """Yield the tasks of each block of lines, and the numbers of their lines."""
        first = 1
        with self._open() as file:
            while lines := file.readlines(BLOCK):
                numbers: Sequence[int] = range(first, first + len(lines))
                first += len(lines)
                if any(map(bytes.isspace, lines)):
                    numbers = [number for number, line in zip(numbers, lines, strict=True) if not line.isspace()]
                    lines = [line for line in lines if not line.isspace()]
                tasks = _plain_tasks(lines)
                if tasks is None:
                    placed = zip(lines, numbers, strict=True)
                    tasks = [(_plain_tasks([line]) or [_task(line, f"{self.path}:{n}")])[0] for line, n in placed]
                yield numbers, tasks


TaskFiles = dict[str, TaskFile]  # by split in the store


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
        lines, size = list[bytes](), 0
        try:
            for number, row in enumerate(rows):
                task, line = _spooled(row, number, name)
                if check is not None:
                    check_task(check, task, f"`{name}`, task ", number)
                lines.append(line)
                size += len(line)
                if size >= BLOCK:
                    self._write(lines)
                    lines, size = [], 0
            self._write(lines)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _write(self, lines: Sequence[bytes]) -> None:
        try:
            self._file.write(b"".join(lines))
        except OSError as error:
            raise StoreError(
                f"`{self.path}`: the tasks after the first {self._length} can't be written to disk: {error.strerror}"
            ) from error
        self._length += len(lines)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        self._file.seek(0)
        yield self._file


def check_task(check: TaskCheck, task: Mapping[str, Any], place: str, number: int) -> None:
    """Check a task. Raises ConfigError with where it is: `place`, such as `tasks.jsonl:`, and its number."""
    try:
        check(task)
    except ConfigError as error:
        raise ConfigError(f"{place}{number}: {error}") from None


def task_source(tasks: TaskRows | str | Path, name: str) -> TaskFile:
    """Return tasks that can be read several times, from objects, a DataFrame, or the path of a JSONL file."""
    if isinstance(tasks, str | Path):
        return TaskFile(Path(tasks))
    return SpooledTasks(rows_of_frame(tasks), name)


def split_in(environment: str, split: str) -> str:
    """Return the split in the store of one environment's tasks; "": the only environment of a job."""
    return f"{split}/{environment}" if environment else split


def read_task_files(config: JobConfig, check: TaskCheck | None = None) -> TaskFiles:
    """Read and check the task files of a job; a serving job has none."""
    if config.kind == "inference":
        return {}
    found: TaskFiles = {}
    for name, job in config.each_environment.items():
        if (train := job.tasks.train) is None:
            continue
        if job.tasks.validation is not None:
            found[split_in(name, "validation")] = TaskFile(job.tasks.validation)
        found[split_in(name, "train")] = TaskFile(train)
    for split, file in found.items():
        trains = split.startswith("train")
        if not file.count(None if trains and config.learns_recorded else check) and trains:
            whose = f"environment {split.partition('/')[2]!r}" if "/" in split else "the job"
            raise ConfigError(f"tasks file {file.path} is empty: {whose} has no training tasks")
    return found


def check_sizes(files: TaskFiles, max_body_bytes: int) -> None:
    """Check that each task can be pushed to a data plane. `max_body_bytes`: its limit of a request body."""
    for file in files.values():
        for data in file:
            size = len(json.dumps(data, ensure_ascii=False).encode()) + _ENVELOPE
            if size > max_body_bytes:
                raise ConfigError(
                    f"tasks file {file.path}: task {task_name(data)!r} has {size:,} bytes, and "
                    f"server.max_body_bytes is {max_body_bytes:,}; raise that, or make it smaller"
                )


def task_name(data: dict[str, Any]) -> str:
    """Return the name that a task is stored under: its `id`, or a digest of it."""
    return name_in(data) or f"t{task_digest(data)}"


def _spooled(row: Any, number: int, name: str) -> tuple[Mapping[str, Any], bytes]:
    """Return a task as a JSON object, and as a line of a file."""
    try:
        if type(row) is dict and is_json(row):
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            if len(line) <= DEEP or line.count(b"[") + line.count(b"{") <= DEEP:
                return row, line
    except (TypeError, RecursionError):  # an integer of more than 64 bits, half of a character, …
        pass
    try:
        data = TaskBody(data=plain_task(row, number, name)).data
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"`{name}`, task {number}: {said}", name) from error
    return data, orjson.dumps(data) + b"\n"


def _plain_tasks(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """Return the tasks of lines if each certainly is one, in a tenth of the time of `_task`; None: not certain."""
    whole = b"".join(lines)
    # Each object has a bracket, so that one has at most DEEP.
    if whole.count(b"[") + whole.count(b"{") >= DEEP + len(lines) or _LONG in whole.translate(_DIGITS):
        return None
    try:
        found = list(map(orjson.loads, lines))
    except ValueError:
        return None
    return found if set(map(type, found)) == {dict} else None


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
