"""The tasks of a job: added in chunks until a client or a file says that there are no more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from palestra.database import WAKE_SECONDS, Database, Notifier, to_json
from palestra.database.sqlite import MOST_VALUES
from palestra.errors import Conflict
from palestra.store.tables import meta, task_chunks, tasks
from palestra.types.records import Task
from palestra.types.wire import MAX_NAME, digest_of, name_in

SEALED = "tasks_sealed"  # key of the row in `meta` that seals the tasks


class Tasks:
    """Keeps the inputs of a job's episodes, by split. A method that changes something returns when it is on disk."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._changed = Notifier()  # notified when the tasks are sealed

    async def push(self, split: str, new: Sequence[Task], chunk_id: str) -> int:
        """Add tasks to a split, and return how many tasks the split has then.

        Args:
            split: `train` or `validation`.
            new: the tasks. Those that the split has already are left out.
            chunk_id: names this chunk; the same chunk a second time changes nothing.

        Raises:
            Conflict: the chunk or a task id was used before for other data, or the tasks are sealed. A name that is
                the task's own key `id` is not a conflict: the later task gets a name of its own.
        """

        def push(connection: Connection) -> int:
            digest = hashlib.sha256(to_json([[task.task_id, task.data] for task in new]).encode()).hexdigest()
            same = (task_chunks.c.split == split, task_chunks.c.chunk_id == chunk_id)
            known = connection.execute(select(task_chunks.c.digest).where(*same)).scalar()
            total = int(connection.execute(select(func.count()).where(tasks.c.split == split)).scalar_one())
            if known == digest:
                return total
            if known is not None:
                raise Conflict(f"chunk {chunk_id!r} was pushed before with other tasks")
            if _sealed(connection):
                raise Conflict(
                    "this job takes no more tasks: a push with final=true ended them, or they came from a file"
                )
            rows = _new_rows(connection, split, new, total)
            if rows:
                connection.execute(tasks.insert(), rows)
            connection.execute(task_chunks.insert(), {"split": split, "chunk_id": chunk_id, "digest": digest})
            return total + len(rows)

        return await self._db.write(push)

    async def seal(self) -> None:
        """Record that no more tasks will come, so that training can start."""

        def set_it(connection: Connection) -> None:
            connection.execute(sa.delete(meta).where(meta.c.key == SEALED))
            connection.execute(meta.insert(), {"key": SEALED, "value": "yes"})

        await self._db.write(set_it)
        self._changed.notify()

    async def sealed(self) -> bool:
        """Return whether the tasks are sealed, so that no more will come."""
        return await self._db.read(_sealed)

    async def wait_sealed(self) -> None:
        """Wait until the tasks are sealed, so that a job knows all of its inputs."""
        seen = self._changed.count
        while not await self.sealed():
            await self._changed.wait(WAKE_SECONDS, seen)
            seen = self._changed.count

    async def of_split(self, split: str) -> list[Task]:
        """Return all tasks of a split, in the order in which they were pushed."""

        def query(connection: Connection) -> list[Task]:
            rows = connection.execute(select(tasks).where(tasks.c.split == split).order_by(tasks.c.position))
            return [Task(task_id=row.task_id, data=orjson.loads(row.data)) for row in rows]

        return await self._db.read(query)


def _sealed(connection: Connection) -> bool:
    """Return whether the row that seals the tasks is there."""
    return connection.execute(select(meta.c.value).where(meta.c.key == SEALED)).first() is not None


def _new_rows(connection: Connection, split: str, new: Sequence[Task], total: int) -> list[dict[str, Any]]:
    """Return the rows of `tasks` to insert: those of `new` that the split does not have yet."""
    known = {
        row.task_id: row.data
        for start in range(0, len(new), MOST_VALUES)
        for row in connection.execute(
            select(tasks.c.task_id, tasks.c.data).where(
                tasks.c.split == split, tasks.c.task_id.in_([t.task_id for t in new[start : start + MOST_VALUES]])
            )
        )
    }
    rows: list[dict[str, Any]] = []
    for task in new:
        data = to_json(task.data)
        if task.task_id in known:
            if known[task.task_id] == data:
                continue
            task = _renamed(task)
            name = select(tasks.c.task_id).where(tasks.c.split == split, tasks.c.task_id == task.task_id)
            if task.task_id in known or connection.execute(name).first():
                continue
        known[task.task_id] = data
        rows.append({"split": split, "position": total + len(rows), "task_id": task.task_id, "data": data})
    return rows


def _renamed(task: Task) -> Task:
    """Return a task under a name made from its key `id` and its data, for data sets whose `id` is not unique."""
    if task.task_id != name_in(task.data):
        raise Conflict(f"task {task.task_id!r} was given before with other data")
    digest = digest_of(task.data)
    return Task(task_id=f"{task.task_id[: MAX_NAME - len(digest) - 1]}-{digest}", data=task.data)
