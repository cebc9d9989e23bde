"""The tasks of a job: added in chunks until a client or a file says that there are no more."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import chain, count, repeat
from typing import Any, overload

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from palestra.database import WAKE_SECONDS, Database, Notifier, to_json
from palestra.database.sqlite import pieces, sqlite_connection
from palestra.errors import Conflict
from palestra.store.tables import meta, task_chunks, tasks
from palestra.types.records import Task
from palestra.types.wire import MAX_NAME, name_in, task_digest

SEALED = "tasks_sealed"  # key of the row in `meta` that seals the tasks
READ_ROWS = 500  # tasks that are in memory while all are read
SPLIT = 2**40  # places of a split: a table with one number as its key is written in half the time of one with two
_KNOWN = "SELECT task_id, data FROM tasks WHERE split = ? AND task_id IN (SELECT value FROM json_each(?))"
_PLACES = "SELECT task_id, place FROM tasks WHERE split = ? AND task_id IN (SELECT value FROM json_each(?))"
_READ = "SELECT task_id, data FROM tasks WHERE place >= ? AND place < ? ORDER BY place"
_OF_SPLIT = "SELECT place FROM tasks WHERE split = ? LIMIT 1"
_LAST = "SELECT max(place) FROM tasks WHERE place < ?"
_FORGET = "DELETE FROM tasks WHERE place >= ? AND place < ?"
_VALUES = "(?, ?, ?, ?)"
_INSERT = f"INSERT INTO tasks (place, split, task_id, data) VALUES {_VALUES}"
_ROWS = 50  # of one statement, which takes less time than a statement for each
_INSERT_ROWS = _INSERT + f", {_VALUES}" * (_ROWS - 1)


class StoredTasks(Sequence[Task]):
    """The tasks of a split in the order of their upload, each read from the store on access."""

    def __init__(self, db: Database, split: str, first: int, length: int) -> None:
        self._db, self._split, self._first, self._length = db, split, first, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Task: ...

    @overload
    def __getitem__(self, place: slice) -> list[Task]: ...

    def __getitem__(self, place: int | slice) -> Task | list[Task]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            if step == 1:
                return self._read(start, max(stop - start, 0))
            return [self._read(position, 1)[0] for position in range(self._length)[place]]
        position = range(self._length)[place]
        return self._read(position, 1)[0]

    def __iter__(self) -> Iterator[Task]:
        for start in range(0, self._length, READ_ROWS):
            yield from self._read(start, READ_ROWS)

    def values_of(self, key: str) -> dict[int, Any]:
        """Return the values of a key by task index, parsing only tasks that contain it."""
        own = tasks.c.place.between(self._first, self._first + self._length - 1)
        wanted = select(tasks.c.place, tasks.c.data).where(own, func.instr(tasks.c.data, to_json(key)) > 0)

        def query(connection: Connection) -> dict[int, Any]:
            found = ((row.place - self._first, orjson.loads(row.data)) for row in connection.execute(wanted))
            return {position: data[key] for position, data in found if key in data}

        return self._db.read_here(query)

    def positions_of(self, task_ids: Sequence[str]) -> dict[str, int]:
        """Return the positions of tasks by their ids; unknown ids are left out."""
        names = to_json(list(task_ids))

        def query(connection: Connection) -> dict[str, int]:
            found = sqlite_connection(connection).execute(_PLACES, (self._split, names))
            return {name: place - self._first for name, place in found}

        return self._db.read_here(query)

    def _read(self, start: int, count: int) -> list[Task]:
        values = (self._first + start, self._first + min(start + count, self._length))
        return self._db.read_here(
            lambda connection: [
                Task(task_id=name, data=orjson.loads(data))
                for name, data in sqlite_connection(connection).execute(_READ, values)
            ]
        )


class Tasks:
    """The inputs of a job's episodes, by split. Methods return when their changes are on disk."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._changed = Notifier()  # notified when the tasks are sealed

    async def push(self, split: str, new: Sequence[Task], chunk_id: str) -> int:
        """Add tasks to a split, and return the split's number of tasks; see `push_texts`."""
        return await self.push_texts(
            split, [task.task_id for task in new], [to_json(task.data) for task in new], chunk_id
        )

    async def push_texts(self, split: str, names: Sequence[str], texts: Sequence[str], chunk_id: str) -> int:
        """Add tasks to a split, and return the split's number of tasks.

        Args:
            names: ids of the tasks; those that the split already has are left out.
            texts: their data, as `to_json` writes it.
            chunk_id: repeating a chunk changes nothing.

        Raises:
            Conflict: the chunk or a task id was used for other data, or the tasks are sealed. A repeated id from the
                task's own key `id` is not a conflict: the later task gets another name.
        """

        def push(connection: Connection) -> int:
            digest = _digest(names, texts)
            same = (task_chunks.c.split == split, task_chunks.c.chunk_id == chunk_id)
            known = connection.execute(select(task_chunks.c.digest).where(*same)).scalar()
            first, total = _extent(connection, split)
            if known == digest:
                return total
            if known is not None:
                raise Conflict(f"chunk {chunk_id!r} was pushed before with other tasks")
            if are_sealed(connection):
                raise Conflict(
                    "this job takes no more tasks: a push with final=true ended them, or they came from a file"
                )
            total += _add(connection, split, first + total, names, texts)
            connection.execute(task_chunks.insert(), {"split": split, "chunk_id": chunk_id, "digest": digest})
            return total

        return await self._db.write(push)

    async def require(self, split: str, names: Sequence[str], texts: Sequence[str]) -> None:
        """Check that a split has these tasks. Raises Conflict if it lacks one."""
        if missing := await self._db.read(lambda connection: _absent(connection, split, names, texts)):
            raise Conflict(
                f"the run was started without the {split} task {missing[0][0]!r}, and goes on with the tasks that it "
                "has; give those of its start, or choose another run_dir for a new run"
            )

    async def clear(self) -> None:
        """Forget the tasks of a start that was broken off, unless they are sealed."""

        def clear(connection: Connection) -> None:
            if not are_sealed(connection):
                connection.execute(sa.delete(tasks))
                connection.execute(sa.delete(task_chunks))

        await self._db.write(clear)

    async def seal(self) -> None:
        """Record that no more tasks will come, so that training can start."""

        def set_it(connection: Connection) -> None:
            connection.execute(sa.delete(meta).where(meta.c.key == SEALED))
            connection.execute(meta.insert(), {"key": SEALED, "value": "yes"})

        await self._db.write(set_it)
        self._changed.notify()

    async def sealed(self) -> bool:
        """Return whether the tasks are sealed."""
        return await self._db.read(are_sealed)

    async def wait_sealed(self) -> None:
        """Wait until the tasks are sealed."""
        seen = self._changed.count
        while not await self.sealed():
            await self._changed.wait(WAKE_SECONDS, seen)
            seen = self._changed.count

    async def stored(self, split: str) -> StoredTasks:
        """Return all tasks of a split, read on access, in the order of their upload."""
        return StoredTasks(self._db, split, *await self._db.read(lambda connection: _extent(connection, split)))


def _extent(connection: Connection, split: str) -> tuple[int, int]:
    """Return the first place of a split, and how many tasks it has; their places have no gap."""
    driver = sqlite_connection(connection)
    if (own := driver.execute(_OF_SPLIT, (split,)).fetchone()) is None:
        (last,) = driver.execute(_LAST, (2**63 - 1,)).fetchone()
        return 0 if last is None else (last // SPLIT + 1) * SPLIT, 0
    first = own[0] // SPLIT * SPLIT
    (last,) = driver.execute(_LAST, (first + SPLIT,)).fetchone()
    return first, last - first + 1


def _add(connection: Connection, split: str, place: int, names: Sequence[str], texts: Sequence[str]) -> int:
    """Add tasks from a place on, and return their number, which is smaller if the split has some of them."""
    try:
        _insert(connection, split, place, names, texts)
    except sqlite3.IntegrityError:  # a known id
        sqlite_connection(connection).execute(_FORGET, (place, (place // SPLIT + 1) * SPLIT))
        added = _absent(connection, split, names, texts)
        _insert(connection, split, place, [name for name, _ in added], [text for _, text in added])
        return len(added)
    return len(names)


def _insert(connection: Connection, split: str, place: int, names: Sequence[str], texts: Sequence[str]) -> None:
    values = list(chain.from_iterable(zip(count(place), repeat(split), names, texts, strict=False)))
    whole, driver = len(names) // _ROWS * _ROWS * 4, sqlite_connection(connection)
    driver.executemany(_INSERT_ROWS, pieces(values[:whole], 4 * _ROWS))
    driver.executemany(_INSERT, pieces(values[whole:], 4))


def are_sealed(connection: Connection) -> bool:
    """Return whether a run has all of its tasks."""
    return connection.execute(select(meta.c.value).where(meta.c.key == SEALED)).first() is not None


def _digest(names: Sequence[str], texts: Sequence[str]) -> str:
    """Return the SHA-256 of the ids as a JSON list, and a line for the data of each task, in hex."""
    return hashlib.sha256("\n".join([to_json(names), *texts]).encode()).hexdigest()


def _absent(connection: Connection, split: str, names: Sequence[str], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and texts of those tasks that the split does not have."""
    wanted = (split, to_json(names))
    known: dict[str, str] = dict(sqlite_connection(connection).execute(_KNOWN, wanted).fetchall())
    given = zip(names, texts, strict=True)
    found: list[tuple[str, str]] = []
    for name, text in given:
        if name not in known:
            known[name] = text
            found.append((name, text))
        elif known[name] != text:
            other = _renamed(split, name, text)
            row = select(tasks.c.task_id).where(tasks.c.split == split, tasks.c.task_id == other)
            if other not in known and not connection.execute(row).first():
                known[other] = text
                found.append((other, text))
    return found


def _renamed(split: str, name: str, text: str) -> str:
    """Return a name made from a task's key `id` and its data, for data sets whose `id` is not unique."""
    data = orjson.loads(text)
    own, (_, slash, environment) = name_in(data), split.partition("/")
    if own is None or name != f"{environment}{slash}{own}":
        raise Conflict(f"task {name!r} was given before with other data")
    digest = task_digest(data)
    return f"{name[: MAX_NAME - len(digest) - 1]}-{digest}"
