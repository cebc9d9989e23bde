"""What jobs may spend of the budgets of their tenants, as operations on a connection; see `jobs` about repetitions.

The sum of a tenant's rows never exceeds its budget by a grant: a live job's row is what it was given, an ended job's is
what it has used.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from palestra_service.placement.tenants import Quota
from palestra_service.store.tables import allowances

PARTS = 64  # of a budget: a job is given at least one of them at a time
SHARES = 8  # of what is left: a job is given one of them, divided by the number of live jobs
LEAST_MS = 60_000  # of time that is given at once
_COLUMNS = (allowances.c.tokens, allowances.c.micros, allowances.c.ms)


class Spent(NamedTuple):
    """Tokens, millionths of the currency, and milliseconds of jobs."""

    tokens: int = 0
    micros: int = 0
    ms: int = 0


class Need(NamedTuple):
    """What a job has used, and what it needs in all to go on."""

    used: Spent = Spent()
    wanted: Spent = Spent()


class Grant(NamedTuple):
    """What a job may spend in all: None of an amount that its tenant's budget does not limit.

    Attributes:
        last: whether the budget has nothing left to give for something that the job needs.
    """

    tokens: int | None
    micros: int | None
    ms: int | None
    last: bool


def given_to(connection: Connection, tenant: str) -> Spent:
    """Return the sum of what the jobs of a tenant were given, and of what ended ones have used."""
    sums = (func.coalesce(func.sum(column), 0) for column in _COLUMNS)
    row = connection.execute(select(*sums).where(allowances.c.tenant == tenant)).one()
    return Spent(*map(int, row))


def given_to_job(connection: Connection, job_id: str) -> Spent | None:
    """Return what a job was given; None: it was never started under a budget."""
    row = connection.execute(select(*_COLUMNS).where(allowances.c.job_id == job_id)).first()
    return None if row is None else Spent(*row)


def grant(connection: Connection, tenant: str, job_id: str, quota: Quota, need: Need, live: int) -> Grant:
    """Give a job more of its tenant's budget if it has used half of what it was given, and return what it has in all.

    `live`: number of the tenant's live jobs, among which what is left is shared.
    """
    before = given_to_job(connection, job_id) or Spent()
    others = [all_ - own for all_, own in zip(given_to(connection, tenant), before, strict=True)]
    after, last = [], False
    for limit, rest, has, used, wanted, least in zip(
        quota.budget, others, before, need.used, need.wanted, (1, 1, LEAST_MS), strict=True
    ):
        has = max(has, used)
        if limit is not None:
            left = max(limit - rest - has, 0)
            part = max(limit // PARTS, left // (SHARES * max(live, 1)), least, wanted - has)
            if has - used <= part // 2 or wanted > has:
                has += min(part, left)
            last |= left == 0 or wanted > has
        after.append(has)
    connection.execute(allowances.delete().where(allowances.c.job_id == job_id))
    row = dict(zip(Spent._fields, after, strict=True))
    connection.execute(allowances.insert(), {"job_id": job_id, "tenant": tenant, **row})
    tokens, micros, ms = (None if limit is None else has for has, limit in zip(after, quota.budget, strict=True))
    return Grant(tokens, micros, ms, last)


def settle(connection: Connection, job_id: str, used: Spent) -> None:
    """Take back what a job that runs no more was given and has not used; no effect on one without an allowance."""
    connection.execute(allowances.update().where(allowances.c.job_id == job_id).values(used._asdict()))
