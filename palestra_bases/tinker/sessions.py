"""The sessions of a Tinker server, and the models that are trained in them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, select

from palestra.database import Database
from palestra.errors import NotFound, TooManyRequests
from palestra.types.clock import Clock
from palestra_bases.tinker import tables
from palestra_bases.tinker.journal import Operation
from palestra_bases.tinker.records import ModelRecord, TinkerLimits


class TinkerSessions:
    """Sessions and models of all tenants. A method that changes something returns when the change is on disk."""

    def __init__(self, db: Database, clock: Clock) -> None:
        """Use a database from `tables.open_journal`."""
        self.db, self.clock = db, clock

    async def add_session(self, tenant: str, data: Mapping[str, Any], limits: TinkerLimits) -> str:
        """Record a session, and return its id. Raises TooManyRequests if the tenant has too many live ones."""
        session_id, now = f"session-{secrets.token_hex(12)}", self.clock.now()
        values = {"session_id": session_id, "tenant": tenant, "created_at": now, "seen_at": now, "data": data}
        table = tables.sessions
        alive = (table.c.finished_at.is_(None), table.c.seen_at > now - limits.session_seconds)
        query = select(sa.func.count()).where(table.c.tenant == tenant, *alive)

        def insert(connection: Connection) -> None:
            if connection.execute(query).scalar_one() >= limits.sessions:
                raise TooManyRequests(
                    f"this key has {limits.sessions} sessions, which is the most; closing one frees it"
                )
            connection.execute(table.insert(), values)

        await self.db.write(insert)
        return session_id

    async def session(self, tenant: str, session_id: str) -> sa.Row[Any]:
        """Return the row of a session."""
        table = tables.sessions
        query = select(table).where(table.c.session_id == session_id, table.c.tenant == tenant)
        found = await self.db.read(lambda c: c.execute(query).first())
        if found is None:
            raise NotFound(f"there is no session {session_id!r} of this key")
        return found

    async def touch_session(self, session_id: str, finished: bool = False) -> None:
        """Record a heartbeat of a session, or its end."""
        now = self.clock.now()
        values = {"seen_at": now} | ({"finished_at": now} if finished else {})
        here = sa.update(tables.sessions).where(tables.sessions.c.session_id == session_id)
        await self.db.write(lambda c: tables.execute(c, here.values(values)))

    async def restarted(self) -> None:
        """Do not count the server's downtime against unfinished sessions."""
        here = sa.update(tables.sessions).where(tables.sessions.c.finished_at.is_(None))
        await self.db.write(lambda c: tables.execute(c, here.values(seen_at=self.clock.now())))

    # Models.

    def insert_model(self, record: ModelRecord, most: int, session_seconds: float) -> Operation:
        """Return an operation that adds a model. Raises TooManyRequests: the tenant has `most` in live sessions."""
        models, sessions = tables.models, tables.sessions

        def insert(connection: Connection) -> None:
            alive = sa.and_(sessions.c.finished_at.is_(None), sessions.c.seen_at > self.clock.now() - session_seconds)
            query = (
                select(sa.func.count())
                .select_from(models.join(sessions, models.c.session_id == sessions.c.session_id))
                .where(models.c.tenant == record.tenant, alive)
            )
            if connection.execute(query).scalar_one() >= most:
                raise TooManyRequests(
                    f"this key has {most} models already, which is the most; closing a ServiceClient, or "
                    f"{session_seconds:g} s without its heartbeats, frees those of its session"
                )
            connection.execute(models.insert(), tables.row_of(record))

        return insert

    def insert_copy(self, record: ModelRecord) -> Operation:
        """Return an operation that adds an untrained model, and an ended session for it unless it is known."""
        table, now = tables.sessions, self.clock.now()
        session = {"session_id": record.session_id, "tenant": record.tenant, "created_at": now, "seen_at": now}

        def insert(connection: Connection) -> None:
            if connection.execute(select(table).where(table.c.session_id == record.session_id)).first() is None:
                connection.execute(table.insert(), session | {"finished_at": now, "data": {}})
            connection.execute(tables.models.insert(), tables.row_of(record))

        return insert

    def delete_model(self, model_id: str) -> Operation:
        """Return an operation that removes a model that could not be created, and fails its requests."""
        models, requests = tables.models, tables.requests
        why = orjson.dumps({"error": f"{model_id} could not be created", "category": "user"})

        def delete(connection: Connection) -> None:
            connection.execute(sa.delete(models).where(models.c.model_id == model_id))
            here = sa.update(requests).where(requests.c.target == model_id, requests.c.state == tables.PENDING)
            connection.execute(here.values(state=tables.FAILED, result=why, body=None, ended_at=self.clock.now()))

        return delete

    async def model(self, tenant: str, model_id: str) -> ModelRecord:
        """Return a model."""
        query = select(tables.models).where(tables.models.c.model_id == model_id, tables.models.c.tenant == tenant)
        row = await self.db.read(lambda c: c.execute(query).first())
        if row is None:
            raise NotFound(f"there is no model {model_id!r} of this key")
        return tables.stored_record(ModelRecord, row)

    async def models(self, tenant: str, session_id: str | None = None) -> list[ModelRecord]:
        """Return the models of a tenant, or of one of its sessions, newest first."""
        table = tables.models
        query = select(table).where(table.c.tenant == tenant).order_by(table.c.created_at.desc(), table.c.model_id)
        if session_id is not None:
            query = query.where(table.c.session_id == session_id)
        return await self.db.read(lambda c: [tables.stored_record(ModelRecord, row) for row in c.execute(query)])

    async def sessions(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's sessions, newest first."""
        table = tables.sessions
        query = select(table.c.session_id).where(table.c.tenant == tenant).order_by(table.c.created_at.desc())
        return await self.db.read(lambda c: list(c.execute(query).scalars()))

    async def dead(self, seconds: float) -> list[tuple[str, str]]:
        """Return the tenants and ids of sessions with samplers that have ended, or had no heartbeat for so long."""
        sessions, samplers = tables.sessions, tables.samplers
        over = sa.or_(sessions.c.finished_at.is_not(None), sessions.c.seen_at < self.clock.now() - seconds)
        query = (
            select(sessions.c.tenant, sessions.c.session_id)
            .join(samplers, samplers.c.session_id == sessions.c.session_id)
            .where(over)
            .distinct()
        )
        return await self.db.read(lambda c: [(row.tenant, row.session_id) for row in c.execute(query)])

    async def unused(self, kept_seconds: float) -> list[tuple[str, str]]:
        """Return the tenants and ids of long unused models without checkpoints, whose sessions ended as long ago.

        A model with a saved checkpoint is listed as long as the checkpoint exists. `kept_seconds`: how long a model is
        kept after its last use.
        """
        models = tables.models
        query = select(models.c.tenant, models.c.model_id).where(*self._unused(kept_seconds))
        return await self.db.read(lambda c: [(row.tenant, row.model_id) for row in c.execute(query)])

    async def forget(self, kept_seconds: float) -> None:
        """Delete `unused` models with their requests, and empty sessions that ended as long ago.

        Ids are never reused: requests to a deleted model are never executed. `kept_seconds`: how long a model is kept
        after its last use, and a session after its end.
        """
        models, sessions, requests, samplers = tables.models, tables.sessions, tables.requests, tables.samplers

        def delete(connection: Connection) -> None:
            gone = select(models.c.model_id).where(*self._unused(kept_seconds))
            connection.execute(sa.delete(requests).where(requests.c.target.in_(gone)))
            connection.execute(sa.delete(models).where(models.c.model_id.in_(gone)))
            empty = [~sa.exists().where(other.c.session_id == sessions.c.session_id) for other in (models, samplers)]
            connection.execute(sa.delete(sessions).where(self._over_for(kept_seconds), *empty))

        await self.db.write(delete)

    def _over_for(self, seconds: float) -> sa.ColumnElement[bool]:
        """Return whether a session has been over, or without a heartbeat, for so long."""
        sessions = tables.sessions
        return sa.func.coalesce(sessions.c.finished_at, sessions.c.seen_at) < self.clock.now() - seconds

    def _unused(self, kept_seconds: float) -> list[sa.ColumnElement[bool]]:
        models, sessions, requests = tables.models, tables.sessions, tables.requests
        over = select(sessions.c.session_id).where(self._over_for(kept_seconds))
        waits = sa.and_(requests.c.target == models.c.model_id, requests.c.state == tables.PENDING)
        return [
            models.c.used_at < self.clock.now() - kept_seconds,
            models.c.session_id.in_(over),
            ~sa.exists().where(tables.checkpoints.c.model_id == models.c.model_id),
            ~sa.exists().where(waits),
        ]
