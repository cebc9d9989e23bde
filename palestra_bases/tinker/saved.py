"""The saved data of a Tinker server: checkpoints by their paths, copies of them, and samplers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, select

from palestra.config import AdapterConfig
from palestra.database import Database, to_json
from palestra.disk import make_folders, sync, sync_tree
from palestra.errors import InvalidRequest, NotFound, TooManyRequests
from palestra.threads import in_thread
from palestra.types.clock import Clock
from palestra_bases.tinker import tables
from palestra_bases.tinker.journal import Operation
from palestra_bases.tinker.records import COPIED, SCHEME, Checkpoint, ModelRecord, Sampler, TinkerLimits
from palestra_bases.tinker.sessions import TinkerSessions
from palestra_bases.tinker.training import check_ttl, usable
from palestra_bases.tinker.wire import CopyWeights

_CHECKPOINT_FIELDS = ("path", "tenant", "model_id", "name", "base", "step", "bytes", "created_at", "expires_at")


class Saved:
    """Checkpoints and samplers of all tenants. A method that changes something returns when it is on disk."""

    def __init__(self, db: Database, clock: Clock) -> None:
        """Use a database from `tables.open_journal`."""
        self.db, self.clock = db, clock

    def insert_checkpoint(self, saved: Checkpoint) -> Operation:
        """Return an operation that adds a checkpoint, replacing one with the same path."""
        row = {name: getattr(saved, name) for name in _CHECKPOINT_FIELDS} | {
            "folder": str(saved.folder),
            "adapter": saved.adapter.model_dump_json(),
            "data": to_json(dict(saved.data)),
            "user_metadata": None if saved.user_metadata is None else to_json(dict(saved.user_metadata)),
            "public": int(saved.public),
        }

        def insert(connection: Connection) -> None:
            connection.execute(sa.delete(tables.checkpoints).where(tables.checkpoints.c.path == saved.path))
            connection.execute(tables.checkpoints.insert(), row)

        return insert

    async def checkpoint(self, tenant: str, path: str) -> Checkpoint | None:
        """Return a checkpoint that a tenant may use, even if expired, or None."""
        table = tables.checkpoints
        may = sa.or_(table.c.tenant.in_((tenant, "")), table.c.public == 1)
        query = select(table).where(table.c.path == path, may)
        row = await self.db.read(lambda c: c.execute(query).first())
        return None if row is None else _checkpoint(row)

    async def checkpoints(self, tenant: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return the unexpired checkpoints of a tenant, or of one of its models, newest first."""
        table, now = tables.checkpoints, self.clock.now()
        query = select(table).where(
            table.c.tenant == tenant, sa.or_(table.c.expires_at.is_(None), table.c.expires_at > now)
        )
        if model_id is not None:
            query = query.where(table.c.model_id == model_id)
        query = query.order_by(table.c.created_at.desc(), table.c.path)
        return await self.db.read(lambda c: [_checkpoint(row) for row in c.execute(query)])

    async def expired(self) -> list[Checkpoint]:
        """Return the expired checkpoints of all tenants."""
        query = select(tables.checkpoints).where(tables.checkpoints.c.expires_at <= self.clock.now())
        return await self.db.read(lambda c: [_checkpoint(row) for row in c.execute(query)])

    async def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint's record; the caller removes its files."""
        await self.db.write(
            lambda c: tables.execute(c, sa.delete(tables.checkpoints).where(tables.checkpoints.c.path == path))
        )

    async def forget_brought(self) -> None:
        """Remove the records of public operator checkpoints, which the operator lists again at each start."""
        await self.db.write(
            lambda c: tables.execute(c, sa.delete(tables.checkpoints).where(tables.checkpoints.c.tenant == ""))
        )

    async def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Set when a checkpoint expires; None: never."""
        here = sa.update(tables.checkpoints).where(tables.checkpoints.c.path == path)
        await self.db.write(lambda c: tables.execute(c, here.values(expires_at=expires_at)))

    async def set_public(self, path: str, public: bool) -> None:
        """Set whether all tenants may use a checkpoint."""
        here = sa.update(tables.checkpoints).where(tables.checkpoints.c.path == path)
        await self.db.write(lambda c: tables.execute(c, here.values(public=int(public))))

    async def write(self, operation: Operation) -> None:
        """Execute an operation from another method."""
        await self.db.write(operation)

    # Samplers.

    def insert_sampler(self, sampler: Sampler) -> Operation:
        """Return an operation that adds a sampler, replacing one with the same id."""
        row = {
            "sampler_id": sampler.sampler_id,
            "tenant": sampler.tenant,
            "session_id": sampler.session_id,
            "base": sampler.base,
            "model_path": sampler.model_path,
            "folder": None if sampler.folder is None else str(sampler.folder),
            "is_private": int(sampler.is_private),
            "created_at": self.clock.now(),
        }

        def insert(connection: Connection) -> None:
            connection.execute(sa.delete(tables.samplers).where(tables.samplers.c.sampler_id == sampler.sampler_id))
            connection.execute(tables.samplers.insert(), row)

        return insert

    async def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Return a sampler."""
        table = tables.samplers
        query = select(table).where(table.c.sampler_id == sampler_id, table.c.tenant == tenant)
        row = await self.db.read(lambda c: c.execute(query).first())
        if row is None:
            raise NotFound(f"there is no sampling session {sampler_id!r} of this key")
        return _sampler(row)

    async def join_sampler(self, tenant: str, sampler_id: str) -> int:
        """Return a new client number of a sampler, from 1 on."""
        await self.sampler(tenant, sampler_id)
        table = tables.samplers
        here = sa.update(table).where(table.c.sampler_id == sampler_id)
        joined = here.values(clones=table.c.clones + 1).returning(table.c.clones)
        return int(await self.db.write(lambda c: c.execute(joined).scalar_one()))

    async def samplers(self, session_id: str) -> list[Sampler]:
        """Return the samplers of a session."""
        query = select(tables.samplers).where(tables.samplers.c.session_id == session_id)
        return await self.db.read(lambda c: [_sampler(row) for row in c.execute(query)])

    async def known_sampler(self, session_id: str, name: str) -> tuple[Sampler | None, int]:
        """Return a session's sampler by id, or None, and the number of its samplers."""
        table = tables.samplers
        query = select(table).where(table.c.sampler_id == name)
        count = select(sa.func.count()).where(table.c.session_id == session_id)

        def find(connection: Connection) -> tuple[Sampler | None, int]:
            row = connection.execute(query).first()
            return None if row is None else _sampler(row), connection.execute(count).scalar_one()

        return await self.db.read(find)

    async def remove_sampler(self, sampler_id: str) -> None:
        """Remove a sampler's record; the caller removes its files."""
        here = sa.delete(tables.samplers).where(tables.samplers.c.sampler_id == sampler_id)
        await self.db.write(lambda c: tables.execute(c, here))


def _checkpoint(row: Any) -> Checkpoint:
    values = {name: getattr(row, name) for name in _CHECKPOINT_FIELDS}
    return Checkpoint(
        **values,
        folder=Path(row.folder),
        adapter=AdapterConfig.model_validate_json(row.adapter),
        data=orjson.loads(row.data),
        user_metadata=None if row.user_metadata is None else orjson.loads(row.user_metadata),
        public=bool(row.public),
    )


def _sampler(row: Any) -> Sampler:
    return Sampler(
        sampler_id=row.sampler_id,
        tenant=row.tenant,
        session_id=row.session_id,
        base=row.base,
        model_path=row.model_path,
        folder=None if row.folder is None else Path(row.folder),
        is_private=bool(row.is_private),
    )


class Copies:
    """Copies checkpoints. A copy keeps its kind, belongs to a model that is never trained, and outlives its source."""

    def __init__(self, sessions: TinkerSessions, saved: Saved, limits: TinkerLimits, folder: Path) -> None:
        self._sessions, self._saved, self._limits, self._folder = sessions, saved, limits, folder
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> str:
        """Copy a checkpoint, and return the path of the copy; a retry returns the first path.

        Args:
            idempotency_key: the same in each attempt of one request; None: the request names a model of a session.

        Raises:
            NotFound: the tenant may not use such a checkpoint or session.
            InvalidRequest: the TTL is too short or too long, or the session has another model of this number.
            TooManyRequests: the tenant has too many checkpoints.
        """
        check_ttl(asked.ttl_seconds)
        async with self._one_at_a_time:  # a request and the same one sent again would write the same files
            return await self._copy(tenant, asked, idempotency_key)

    async def _copy(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> str:
        source = await usable(self._saved, tenant, asked.source_path)
        session_id, number = await self._place(tenant, asked, idempotency_key)
        model_id = f"{session_id}:train:{number}"
        path = f"{SCHEME}{model_id}/{source.name}"
        if (known := await self._saved.checkpoint(tenant, path)) is not None and known.data.get(COPIED):
            return path
        if any(model.model_id == model_id for model in await self._sessions.models(tenant, session_id)):
            raise InvalidRequest(f"the session has a model with the number {number}", "model_seq_id")
        if len(await self._saved.checkpoints(tenant)) >= self._limits.checkpoints:
            most = self._limits.checkpoints
            raise TooManyRequests(f"this key has {most} checkpoints, which is the most; deleting one frees its place")
        now = self._saved.clock.now()
        copied = replace(
            source,
            path=path,
            tenant=tenant,
            model_id=model_id,
            folder=await in_thread(lambda: self._copied(source, model_id)),
            data={**source.data, COPIED: asked.source_path},
            created_at=now,
            expires_at=None if asked.ttl_seconds is None else now + asked.ttl_seconds,
            public=False,
        )
        record = ModelRecord(
            model_id=model_id,
            tenant=tenant,
            session_id=session_id,
            base=source.base,
            adapter=source.adapter,
            seed=0,
            data=copied.data,
            created_at=now,
            used_at=now,
        )
        model, checkpoint = self._sessions.insert_copy(record), self._saved.insert_checkpoint(copied)

        def insert(connection: Connection) -> None:
            model(connection)
            checkpoint(connection)

        await self._saved.write(insert)
        return path

    async def _place(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> tuple[str, int]:
        """Return the session of the copy and its number there; without a session the copy gets one of its own."""
        if asked.session_id is not None and asked.model_seq_id is not None:
            await self._sessions.session(tenant, asked.session_id)
            return asked.session_id, asked.model_seq_id
        if not idempotency_key:
            raise InvalidRequest("copy_weights has session_id and model_seq_id, or the header X-Idempotency-Key")
        digest = hashlib.sha256(f"{tenant}\0{idempotency_key}\0{asked.source_path}".encode()).hexdigest()
        return f"session-{digest[:24]}", 0

    def _copied(self, source: Checkpoint, model_id: str) -> Path:
        """Link a checkpoint's files into a folder of the copy, and return the folder.

        Checkpoint files are never rewritten, so that both may share them. Files of the operator's adapters may be, and
        are copied.
        """
        kind, name = source.name.split("/", 1)
        target = self._folder / kind / f"copy-{model_id.replace(':', '-')}-{name}"
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that was cut off
        inside = target / source.folder.name if source.kind == "training" else target
        make_folders(target.parent)
        shutil.copytree(source.folder, inside, copy_function=_link if source.tenant else shutil.copy2)
        sync_tree(target)
        sync(target.parent)
        return inside


def _link(source: str, target: str) -> None:
    """Link a file under another name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
