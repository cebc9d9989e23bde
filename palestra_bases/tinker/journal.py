"""The journal of a Tinker server: requests and their results, each change in one transaction.

A request is on disk before its client gets an id for it, and its result before it counts as executed. A retry gets the
id of the first request.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, select

from palestra.database import Database
from palestra.errors import Expired, InvalidRequest, NotFound, TooManyRequests
from palestra.types.clock import Clock
from palestra_bases.tinker import tables
from palestra_bases.tinker.records import Category, FutureRequest, TinkerLimits
from palestra_bases.tinker.tables import DONE, FAILED, FORGOTTEN, PENDING

Operation = Callable[[Connection], None]
CLONE = 1_000_000_000  # how many numbers of requests each client of a sampler has
MOST_COMPLETIONS = 1000  # in one answer


class Completion(NamedTuple):
    """A sampling request with a result.

    Attributes:
        place: among those of its sampler, from 1 on.
        size: bytes of the result; None: it was dropped.
    """

    place: int
    request_id: str
    state: str
    size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request that is to be recorded.

    Attributes:
        seq_id: number among the requests of the target.
        sequences: how many are to be sampled.
        identity: what is the same in a request that is sent again; None: its body.
    """

    tenant: str
    kind: str
    target: str
    seq_id: int
    body: bytes
    sequences: int = 0
    identity: bytes | None = None

    @property
    def digest(self) -> str:
        """Return what tells the request from others under its number."""
        return hashlib.sha256(f"{self.tenant}\0{self.kind}\0".encode() + (self.identity or self.body)).hexdigest()


class Journal:
    """The requests of all tenants. A method that changes something returns when the change is on disk."""

    def __init__(self, db: Database, clock: Clock) -> None:
        """Use a database from `tables.open_journal`."""
        self.db, self.clock = db, clock

    async def accept(
        self, request: NewRequest, limits: TinkerLimits, extra: Operation | None = None
    ) -> tuple[str, bool]:
        """Record a request, unless it was recorded before; return its id, and whether it is new.

        Args:
            limits: how many requests of a tenant may have no result, and how long they may be together.

        Raises:
            InvalidRequest: another request of the target had this number.
            NotFound: the model is gone.
            Expired: a model has executed the request, and nothing of it is known any more.
            TooManyRequests: too many requests of the tenant wait.
        """
        tenant, kind, target, seq_id = request.tenant, request.kind, request.target, request.seq_id
        digest, body, sequences = request.digest, request.body, request.sequences
        models, table = tables.models, tables.requests

        def insert(connection: Connection) -> tuple[str, bool]:
            columns = select(table.c.request_id, table.c.digest)
            known = connection.execute(columns.where(table.c.target == target, table.c.seq_id == seq_id)).first()
            if known is not None:
                if known.digest != digest:
                    raise InvalidRequest(f"{target} had another request with the number {seq_id}", "seq_id")
                return str(known.request_id), False
            executed = connection.execute(select(models.c.executed).where(models.c.model_id == target)).scalar()
            if executed is None and extra is None and not sequences:  # it was forgotten a moment ago
                raise NotFound(f"there is no model {target!r} of this key")
            if executed is not None and executed >= seq_id:
                raise Expired(f"the request {seq_id} to {target} was executed, and its result is not kept any more")
            size, samples = (
                sa.func.coalesce(sa.func.sum(column), 0) for column in (sa.func.length(table.c.body), table.c.sequences)
            )
            pending = select(sa.func.count(), size, samples).where(table.c.tenant == tenant, table.c.state == PENDING)
            number, length, sampled = connection.execute(pending).one()
            if sequences and sampled and sampled + sequences > limits.waiting_samples:
                raise TooManyRequests(
                    f"{sampled} sequences of this key are to be sampled, and at most {limits.waiting_samples} may; "
                    "wait for results before asking for more, or cancel some"
                )
            if number >= limits.waiting or length + len(body) > limits.waiting_bytes:
                raise TooManyRequests(
                    f"{number} requests of this key wait, with {length} bytes, and at most {limits.waiting} "
                    f"with {limits.waiting_bytes} bytes may; wait for their results"
                )
            request_id = f"{kind}-{secrets.token_hex(12)}"
            values = {"request_id": request_id, "tenant": tenant, "kind": kind, "target": target, "seq_id": seq_id}
            values["sequences"] = sequences
            if extra is not None:
                extra(connection)
            connection.execute(
                table.insert(),
                values | {"digest": digest, "body": body, "state": PENDING, "created_at": self.clock.now()},
            )
            return request_id, True

        return await self.db.write(insert, "tinker_accept")

    async def next_request(self, model_id: str) -> FutureRequest | None:
        """Return a model's next request; None: it has not arrived."""
        models, table = tables.models, tables.requests

        def find(connection: Connection) -> FutureRequest | None:
            executed = select(models.c.executed).where(models.c.model_id == model_id).scalar_subquery()
            row = connection.execute(
                select(table).where(
                    table.c.target == model_id, table.c.seq_id == executed + 1, table.c.state == PENDING
                )
            ).first()
            return None if row is None else tables.stored_record(FutureRequest, row)

        return await self.db.read(find)

    async def finish(
        self, request: FutureRequest, result: bytes, keep_body: bool = False, extra: Operation | None = None
    ) -> None:
        """Record a request's result. `keep_body`: the request changed a model, and restoring that may repeat it."""
        await self._end(request, DONE, result, keep_body, extra)

    async def fail(
        self, request: FutureRequest, message: str, category: Category, extra: Operation | None = None
    ) -> None:
        """Record that a request has failed."""
        await self._end(request, FAILED, orjson.dumps({"error": message, "category": category}), False, extra)

    async def _end(
        self, request: FutureRequest, state: str, result: bytes, keep_body: bool, extra: Operation | None
    ) -> None:
        models, table = tables.models, tables.requests

        def end(connection: Connection) -> None:
            if extra is not None:
                extra(connection)
            values = {"state": state, "result": result, "ended_at": self.clock.now()}
            if not keep_body:
                values["body"] = None
            if request.kind == "sample":
                newest = sa.func.coalesce(sa.func.max(table.c.completed), 0)
                values["completed"] = (
                    1 + connection.execute(select(newest).where(table.c.target == request.target)).scalar_one()
                )
            this = sa.update(table).where(table.c.request_id == request.request_id)
            if request.kind == "sample":  # the first end counts: a write whose caller was cancelled is done, too
                this = this.where(table.c.state == tables.PENDING)
            connection.execute(this.values(values))
            if request.kind != "sample":
                here = sa.update(models).where(models.c.model_id == request.target)
                connection.execute(here.values(executed=request.seq_id, used_at=self.clock.now()))

        await self.db.write(end, "tinker_result")

    async def request(self, tenant: str, request_id: str) -> FutureRequest:
        """Return a request with its result, if there is one, without its body."""
        table = tables.requests
        columns = [column for column in table.c if column.name != "body"]

        def find(connection: Connection) -> FutureRequest | None:
            row = connection.execute(
                select(*columns).where(table.c.request_id == request_id, table.c.tenant == tenant)
            ).first()
            return None if row is None else tables.stored_record(FutureRequest, row)

        found = await self.db.read(find)
        if found is None:
            raise NotFound(f"there is no request {request_id!r} of this key")
        return found

    async def completions(self, sampler_id: str, clone: int, after: int) -> list[Completion]:
        """Return finished requests of a sampler's client by their results; its numbers begin at `clone * CLONE`."""
        table, first = tables.requests, clone * CLONE
        columns = (table.c.completed, table.c.request_id, table.c.state, sa.func.length(table.c.result))
        query = (
            select(*columns)
            .where(table.c.target == sampler_id, table.c.completed > after)
            .where(table.c.seq_id >= first, table.c.seq_id < first + CLONE)
            .order_by(table.c.completed)
            .limit(MOST_COMPLETIONS)
        )
        return await self.db.read(lambda c: [Completion(*row) for row in c.execute(query)])

    async def pending(self) -> list[FutureRequest]:
        """Return all requests without a result, without their bodies."""
        table = tables.requests
        columns = [column for column in table.c if column.name not in ("body", "result")]
        query = select(*columns).where(table.c.state == PENDING).order_by(table.c.created_at)
        return await self.db.read(lambda c: [tables.stored_record(FutureRequest, row) for row in c.execute(query)])

    async def history(self, model_id: str, after: int, until: int) -> list[tuple[int, str]]:
        """Return the requests that have changed a model after its checkpoint, as (seq_id, request_id), in order."""
        table = tables.requests
        query = select(table.c.seq_id, table.c.request_id).where(
            table.c.target == model_id, table.c.seq_id > after, table.c.seq_id <= until, table.c.body.is_not(None)
        )
        return await self.db.read(
            lambda c: [(r.seq_id, r.request_id) for r in c.execute(query.order_by(table.c.seq_id))]
        )

    async def with_body(self, request_id: str) -> FutureRequest:
        """Return a request with its body."""
        query = select(tables.requests).where(tables.requests.c.request_id == request_id)
        return await self.db.read(lambda c: tables.stored_record(FutureRequest, c.execute(query).one()))

    async def drop_bodies(self, model_id: str, until: int) -> None:
        """Drop the bodies of a model's requests up to a number, because a checkpoint includes them."""
        models, table = tables.models, tables.requests

        def drop(connection: Connection) -> None:
            here = sa.update(table).where(table.c.target == model_id, table.c.seq_id <= until, table.c.state != PENDING)
            connection.execute(here.values(body=None))
            connection.execute(sa.update(models).where(models.c.model_id == model_id).values(dropped=until))

        await self.db.write(drop)

    async def forget_results(self, limits: TinkerLimits) -> None:
        """Drop old results, and each tenant's excess results; later also the requests.

        Numbers of executed requests of models are remembered forever. Requests needed to restore a model are kept.
        """
        table, now = tables.requests, self.clock.now()
        ended, forgotten = table.c.state.in_((DONE, FAILED)), table.c.state == FORGOTTEN
        over = sa.and_(forgotten, table.c.body.is_(None))

        def too_many(connection: Connection, these: Any, most: int) -> Iterator[Any]:
            """Yield for each tenant a query of the oldest of some requests beyond a number."""
            for (tenant,) in connection.execute(select(table.c.tenant).where(these).distinct()).all():
                own = select(table.c.request_id).where(these, table.c.tenant == tenant)
                yield own.order_by(table.c.ended_at.desc(), table.c.request_id).offset(most).limit(-1)

        def forget(connection: Connection) -> None:
            update = sa.update(table).values(state=FORGOTTEN, result=None)
            connection.execute(update.where(ended, table.c.ended_at < now - limits.future_seconds))
            for old in too_many(connection, ended, limits.futures):
                connection.execute(update.where(table.c.request_id.in_(old)))
            connection.execute(sa.delete(table).where(over, table.c.ended_at < now - limits.forgotten_seconds))
            for old in too_many(connection, over, limits.forgotten):
                connection.execute(sa.delete(table).where(table.c.request_id.in_(old)))

        await self.db.write(forget)
