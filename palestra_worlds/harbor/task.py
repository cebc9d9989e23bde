"""`HarborTask`: a folder of Harbor's format, read with bounds; nothing in it is run."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError
from palestra_worlds.harbor.format import RECIPE, BoxTable, TaskTable, parse_table

MAX_TEXT = 2**20  # bytes of task.toml, and of instruction.md
MAX_BYTES, MAX_FILES = 64 * 2**20, 5_000  # of the files of tests/, and again of solution/
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task of Harbor's format.

    Attributes:
        name: the name of its folder.
        folder: where it is.
        instruction: what the agent is asked, without marks against contamination at its beginning.
        table: task.toml.
    """

    name: str
    folder: Path
    instruction: str
    table: TaskTable

    def tests(self) -> dict[str, bytes]:
        """Return the files of tests/ by relative path. Raises ConfigError: one can't be taken."""
        return read_files(self.folder / "tests", f"task {self.name!r}: tests")

    @property
    def has_solution(self) -> bool:
        """Return whether the task has a solution/solve.sh."""
        return (self.folder / "solution" / "solve.sh").is_file()

    def solution(self) -> dict[str, bytes]:
        """Return the files of solution/ by relative path. Raises ConfigError: one can't be taken."""
        return read_files(self.folder / "solution", f"task {self.name!r}: solution")

    @property
    def agent_box(self) -> tuple[BoxTable, Path | None]:
        """Return the agent's box, and the folder that its image is built from; None: it has an image by name."""
        box = self.table.environment
        return box, None if box.docker_image else self.folder / "environment"

    @property
    def verifier_box(self) -> tuple[BoxTable, Path | None, bool] | None:
        """Return the verifier's own box, the folder that its image is built from, and whether the image has the tests.
        None: it runs in the agent's box.
        """
        verifier = self.table.verifier
        if not verifier.is_separate:
            return None
        box, tests = verifier.environment or self.table.environment, self.folder / "tests"
        if verifier.environment is not None and verifier.environment.docker_image:
            return box, None, True
        if (tests / "Dockerfile").is_file():
            return box, tests, True
        agents, build = self.agent_box
        return box.model_copy(update={"docker_image": agents.docker_image}), build, False


def read_task(folder: Path) -> HarborTask:
    """Read a task, except for the files of tests/ and solution/, which are read when they are needed.

    Raises:
        ConfigError: a file is missing, or wrong, or asks for a part of the format that is not played here.
    """
    name = folder.name
    if not name.isprintable() or len(name) > 128:
        raise ConfigError(f"the folder {name[:128]!r} is no task's: a name is printable, of at most 128 characters")
    try:
        data = tomllib.loads(_text(folder / "task.toml", name))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"task {name!r}: task.toml is no TOML: {str(error)[:200]}") from None
    table = parse_table(name, data, folder)
    instruction = _without_canary(_text(folder / "instruction.md", name)).strip()
    if not instruction:
        raise ConfigError(f"task {name!r}: instruction.md is empty")
    task = HarborTask(name=name, folder=folder, instruction=instruction, table=table)
    build = task.agent_box[1]
    for linked in ("environment", "tests", "solution"):
        if (folder / linked).is_symlink():
            raise ConfigError(f"task {name!r}: {linked} is a link; copy what it leads to")
    if build is not None and not (build / "Dockerfile").is_file():
        raise ConfigError(f"task {name!r} has neither environment/Dockerfile nor environment.docker_image")
    verifier = task.verifier_box
    if (verifier is None or not verifier[2]) and not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"task {name!r} has no tests/test.sh, which writes its reward")
    return task


def resolved(values: Mapping[str, str], allowed: Collection[str], where: str) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced by variables of this machine.

    Args:
        values: a table `env`.
        allowed: names of this machine's variables that may be given away; others count as not set.
        where: the table, for messages.

    Raises:
        ConfigError: a variable is not allowed, or not set, and has no default.
    """
    found = {}
    for key, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
            raise ConfigError(f"{where}: {key[:80]!r} can't be a variable of a program")
        if (asked := _VARIABLE.fullmatch(value)) is None:
            found[key] = value
            continue
        name, default = asked.groups()
        given = os.environ.get(name) if name in allowed else None
        if given is None and default is None:
            why = "it is not set here" if name in allowed else "name it in settings.variables to give it away"
            raise ConfigError(f"{where}: {key} asks for the variable {name[:80]!r} of this machine; {why}")
        found[key] = default if given is None else given
    return found


def read_files(folder: Path, where: str) -> dict[str, bytes]:
    """Return the files of a folder by relative path.

    Raises:
        ConfigError: there is a link, or something else that is no file, or the files are too many or too large.
    """
    found: dict[str, bytes] = {}
    left = MAX_BYTES
    for path in _walk(folder, where):
        name = path.relative_to(folder).as_posix()
        if len(found) >= MAX_FILES:
            raise ConfigError(f"{where}/ has more than {MAX_FILES:,} files; {RECIPE}")
        data = _read(path, left, f"{where}/{name}", f"{where}/ has more than {MAX_BYTES >> 20} MiB; {RECIPE}")
        found[name] = data
        left -= len(data)
    return found


def _walk(folder: Path, where: str) -> Iterator[Path]:
    """Yield what is below a folder and no folder itself, in order."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{where}: {error.strerror}: {error.filename}") from None

    for at, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        linked = [name for name in folders if os.path.islink(os.path.join(at, name))]
        yield from (Path(at) / name for name in sorted([*files, *linked]))


def _text(path: Path, name: str) -> str:
    data = _read(path, MAX_TEXT, f"task {name!r}: {path.name}", f"task {name!r}: {path.name} is longer than 1 MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"task {name!r}: {path.name} is no UTF-8: byte {error.start}") from None


def _read(path: Path, most: int, where: str, too_long: str) -> bytes:
    """Return the bytes of a file; links are not followed, and a pipe is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        kind = "is a link; copy what it leads to" if path.is_symlink() else f"can't be read: {error.strerror}"
        raise ConfigError(f"{where} {kind}") from None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{where} is no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(too_long)
    return data


def _without_canary(text: str) -> str:
    """Return an instruction without the marks at its beginning by which benchmarks are found in training data."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines)


def task_folders(folder: Path) -> list[Path]:
    """Return the folders of tasks: those in a folder, or the folder itself if it is one task.

    Raises:
        ConfigError: there is no task.
    """
    if (folder / "task.toml").exists():
        return [folder.absolute()]
    try:
        found = sorted(path for path in folder.absolute().iterdir() if (path / "task.toml").exists())
    except OSError as error:
        raise ConfigError(f"the folder of tasks {str(folder)!r} can't be read: {error.strerror}") from None
    if not found:
        raise ConfigError(f"no folder in {str(folder)!r} has a task.toml")
    return found


def find_task(folder: Path, name: object) -> HarborTask:
    """Return the task of this name in a folder of tasks. Clients may push tasks, so a name leads nowhere else.

    Raises:
        ConfigError: there is no such task, or it can't be played.
    """
    if isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name):
        alone = folder.absolute()
        found = alone if alone.name == name and (alone / "task.toml").exists() else alone / name
        if (found / "task.toml").exists():
            return read_task(found)
    raise ConfigError(f"there is no task {str(name)[:100]!r} in {folder}")


def read_tasks(folder: Path) -> dict[str, HarborTask]:
    """Return all tasks of a folder by name.

    Raises:
        ConfigError: there is none, or some can't be played; the message names them and says why.
    """
    found: dict[str, HarborTask] = {}
    wrong: list[str] = []
    for each in task_folders(folder):
        try:
            found[each.name] = read_task(each)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        total = len(wrong) + len(found)
        more = f" (and {len(wrong) - 1} more of {total} tasks that can't be played)" if len(wrong) > 1 else ""
        raise ConfigError(f"{wrong[0]}{more}")
    return found


def task_data(task: HarborTask) -> dict[str, Any]:
    """Return a task as a job knows it."""
    return {"id": task.name, "prompt": task.instruction}
