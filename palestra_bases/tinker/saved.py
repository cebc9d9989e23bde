"""The saved data of a Tinker server: checkpoints by their paths, and samplers of them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection, select

from palestra.database import Database
from palestra.errors import NotFound, TooManyRequests
from palestra.types.clock import Clock
from palestra_bases.tinker import tables
from palestra_bases.tinker.journal import Operation
from palestra_bases.tinker.records import Checkpoint, Sampler, TinkerLimits
from palestra_bases.tinker.tables import stored_record


class Saved:
    """Checkpoints and samplers of all tenants. A method that changes something returns when it is on disk."""

    def __init__(self, db: Database, clock: Clock) -> None:
        """Use a database from `tables.open_journal`."""
        self.db, self.clock = db, clock

    def insert_checkpoint(self, saved: Checkpoint) -> Operation:
        """Return an operation that adds a checkpoint, replacing one with the same path."""

        def insert(connection: Connection) -> None:
            connection.execute(sa.delete(tables.checkpoints).where(tables.checkpoints.c.path == saved.path))
            connection.execute(tables.checkpoints.insert(), tables.row_of(saved))

        return insert

    async def checkpoint(self, tenant: str, path: str) -> Checkpoint | None:
        """Return a checkpoint that a tenant may use, even if expired, or None."""
        table = tables.checkpoints
        may = sa.or_(table.c.tenant.in_((tenant, "")), table.c.public)
        query = select(table).where(table.c.path == path, may)
        row = await self.db.read(lambda c: c.execute(query).first())
        return None if row is None else stored_record(Checkpoint, row)

    async def checkpoints(self, tenant: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return the unexpired checkpoints of a tenant, or of one of its models, newest first."""
        table, now = tables.checkpoints, self.clock.now()
        query = select(table).where(
            table.c.tenant == tenant, sa.or_(table.c.expires_at.is_(None), table.c.expires_at > now)
        )
        if model_id is not None:
            query = query.where(table.c.model_id == model_id)
        query = query.order_by(table.c.created_at.desc(), table.c.path)
        return await self.db.read(lambda c: [stored_record(Checkpoint, row) for row in c.execute(query)])

    async def check_checkpoints(self, tenant: str, limits: TinkerLimits) -> None:
        """Raise TooManyRequests if a tenant may have no more checkpoints."""
        if len(await self.checkpoints(tenant)) >= limits.checkpoints:
            raise TooManyRequests(
                f"this key has {limits.checkpoints} checkpoints, which is the most; deleting one frees its place"
            )

    async def expired(self) -> list[Checkpoint]:
        """Return the expired checkpoints of all tenants."""
        query = select(tables.checkpoints).where(tables.checkpoints.c.expires_at <= self.clock.now())
        return await self.db.read(lambda c: [stored_record(Checkpoint, row) for row in c.execute(query)])

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
        await self.db.write(lambda c: tables.execute(c, here.values(public=public)))

    async def write(self, operation: Operation) -> None:
        """Execute an operation from another method."""
        await self.db.write(operation)

    # Samplers.

    def insert_sampler(self, sampler: Sampler) -> Operation:
        """Return an operation that adds a sampler, replacing one with the same id."""
        row = tables.row_of(sampler) | {"created_at": self.clock.now()}

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
        return stored_record(Sampler, row)

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
        return await self.db.read(lambda c: [stored_record(Sampler, row) for row in c.execute(query)])

    async def known_sampler(self, session_id: str, name: str, limits: TinkerLimits) -> Sampler | None:
        """Return a session's sampler by id, or None. Raises TooManyRequests if the session may have no more then."""
        table = tables.samplers
        row = await self.db.read(lambda c: c.execute(select(table).where(table.c.sampler_id == name)).first())
        if row is not None:
            return stored_record(Sampler, row)
        count = select(sa.func.count()).where(table.c.session_id == session_id)
        if await self.db.read(lambda c: c.execute(count).scalar_one()) >= limits.samplers:
            raise TooManyRequests(
                f"the session has {limits.samplers} samplers, which is the most; another ServiceClient has others"
            )
        return None

    async def remove_sampler(self, sampler_id: str) -> None:
        """Remove a sampler's record; the caller removes its files."""
        here = sa.delete(tables.samplers).where(tables.samplers.c.sampler_id == sampler_id)
        await self.db.write(lambda c: tables.execute(c, here))
