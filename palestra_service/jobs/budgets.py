"""The budgets of tenants, handed out to their jobs in parts.

A job is not asked for each call. It has a part of its tenant's budget, in a file of its folder, and spends no more than
that. The scheduler reads from the job's store what it has used, and gives it more in time. When the job has ended, its
store says what it has really used, also after a kill; the rest goes back.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from palestra.config import JobConfig, parse_config
from palestra.config.budget import device_price, token_prices, unpriced_servers
from palestra.disk import write_whole
from palestra.errors import StoreError
from palestra.store.browsing import browse
from palestra.store.ledger import NOTHING, Allowance, BudgetAmounts, Limits
from palestra.store.spending import Used, loading_ms, spent_ms, sums, wanted_by
from palestra_control.jobs import JobRecord
from palestra_service.jobs.launcher import RUN
from palestra_service.placement.tenants import MICRO, Quota
from palestra_service.store import allowances
from palestra_service.store.allowances import Grant, Need, Spent
from palestra_service.store.control_store import ControlStore

ALLOWANCE_FILE = "allowance.json"  # in a job's folder


class TenantBudgets:
    """Gives jobs parts of the budgets of their tenants, and takes back what they have not used."""

    def __init__(self, store: ControlStore, folder_of: Callable[[str], Path]) -> None:
        self._store, self._folder_of = store, folder_of
        self._written: dict[str, str] = {}  # content of each live job's file
        self._ended: set[str] = set()  # jobs that are given nothing more until they start again

    async def obstacles(self, queue: Iterable[JobRecord], quotas: Mapping[str, Quota]) -> dict[str, str]:
        """Return why queued jobs can't start under the budgets of their tenants."""
        found: dict[str, str] = {}
        spent: dict[str, str | None] = {}
        for job in queue:
            quota = quotas.get(job.tenant)
            if quota is None or not quota.has_budget:
                continue
            if job.tenant not in spent:
                given = await self._store.read(partial(allowances.given_to, tenant=job.tenant))
                spent[job.tenant] = _shortage(job.tenant, quota, given)
            if (why := spent[job.tenant] or unpriced(quota, job.config)) is not None:
                found[job.job_id] = why
        return found

    async def begin(self, job: JobRecord, quota: Quota, live: int) -> None:
        """Give a job that starts its first part, or remove what an earlier start has left."""
        path = self._folder_of(job.job_id) / ALLOWANCE_FILE
        self._written.pop(job.job_id, None)
        self._ended.discard(job.job_id)
        if not quota.has_budget:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            return
        need = await asyncio.to_thread(self._need, job) or Need()
        given = await self._grant(job, quota, need, live)
        await self._write(job, given, 0.0)

    async def refresh(self, live: Iterable[JobRecord], quotas: Mapping[str, Quota]) -> None:
        """Give live jobs more that have used most of what they have."""
        by_tenant: defaultdict[str, list[JobRecord]] = defaultdict(list)
        for job in live:
            by_tenant[job.tenant].append(job)
        for tenant, jobs in by_tenant.items():
            quota = quotas.get(tenant, Quota())
            budgeted = [job for job in jobs if (self._folder_of(job.job_id) / ALLOWANCE_FILE).exists()]
            given: dict[str, Grant] = {}
            unspent = Spent()
            for job in budgeted:
                need = await asyncio.to_thread(self._need, job)
                if need is None or job.job_id in self._ended:
                    continue
                given[job.job_id] = grant = await self._grant(job, quota, need, len(jobs))
                rest = (max((has or 0) - used, 0) for has, used in zip(grant, need.used, strict=False))
                unspent = Spent(*map(sum, zip(unspent, rest, strict=True)))
            if not budgeted:
                continue
            whole = await self._store.read(partial(allowances.given_to, tenant=tenant))
            amounts = zip(whole, unspent, quota.budget, strict=True)
            percent = max((100 * (all_ - rest) / limit for all_, rest, limit in amounts if limit), default=0.0)
            for job in budgeted:
                if job.job_id in given and job.job_id not in self._ended:
                    await self._write(job, given[job.job_id], percent)

    async def settle(self, job: JobRecord) -> None:
        """Record what a job has used that runs no more."""
        self._written.pop(job.job_id, None)
        self._ended.add(job.job_id)  # first: the writing thread runs what `refresh` has asked for until now before
        if await self._store.read(lambda c: allowances.given_to_job(c, job.job_id)) is None:
            return
        if (need := await asyncio.to_thread(self._need, job)) is not None:  # else it keeps what it was given
            await self._store.write(lambda c: allowances.settle(c, job.job_id, need.used))

    async def _grant(self, job: JobRecord, quota: Quota, need: Need, live: int) -> Grant:
        return await self._store.write(lambda c: allowances.grant(c, job.tenant, job.job_id, quota, need, live))

    async def _write(self, job: JobRecord, given: Grant, percent: float) -> None:
        text = json.dumps({**given._asdict(), "of": f"tenant {job.tenant}", "percent": round(percent, 1)})
        if self._written.get(job.job_id) != text:
            await self._store.confirmed()
            folder = self._folder_of(job.job_id)
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            await asyncio.to_thread(write_whole, folder / ALLOWANCE_FILE, text.encode())
            self._written[job.job_id] = text

    def _need(self, job: JobRecord) -> Need | None:
        """Return what a job has used and needs; None: its store can't be read, or is being made. Blocks for disk."""
        run = self._folder_of(job.job_id) / RUN
        config, used, ms, wanted = parse_config(job.config), list[Used](), loading_ms(run), NOTHING
        if (run / "run.db").exists():
            try:
                with browse(run / "run.db") as connection:
                    used, ms, wanted = sums(connection), ms + spent_ms(connection), wanted_by(connection)
            except StoreError:
                return None
        prices = token_prices(config)
        money = sum(one.money(prices) for one in used) + ms * device_price(config)
        return Need(_spent(BudgetAmounts(sum(one.tokens for one in used), money, ms)), _spent(wanted))


class AllowanceFile:
    """What a job may spend by its file; call it again to read it again."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, Allowance(Limits(*NOTHING))

    def __call__(self) -> Allowance:
        """Return the newest allowance, which is never less than one before. Blocks for the disk."""
        found = json.loads(self._path.read_bytes())
        money = None if found["micros"] is None else found["micros"] * MICRO
        limits = (found["tokens"], money, found["ms"])
        most = (None if b is None or a is None else max(a, b) for a, b in zip(self._known.limits, limits, strict=True))
        self._known = Allowance(Limits(*most), found["last"], found["of"], found["percent"])
        return self._known


def unpriced(quota: Quota, config: Mapping[str, Any] | JobConfig) -> str | None:
    """Return why the money of a job can't be counted, although its tenant has a budget of money; None: it can."""
    if quota.money is None:
        return None
    parsed = config if isinstance(config, JobConfig) else parse_config(dict(config))
    if parsed.prices is None:
        return "its tenant has a budget of money, so the job needs prices: add the table [prices]"
    missing = next(unpriced_servers(parsed), None)
    return None if missing is None else f"its tenant has a budget of money, and {missing[1]}"


def _shortage(tenant: str, quota: Quota, given: Spent) -> str | None:
    """Return why no job of a tenant can start, because its budget has nothing left; None: there is some."""
    for name, limit, used in zip(("tokens", "money", "hours"), quota.budget, given, strict=True):
        if limit is not None and used >= limit:
            return (
                f"the budget of tenant {tenant} has no {name} left: {getattr(quota, name):,} are spent or given to "
                "running jobs; an operator can raise it (palestra tenants quota)"
            )
    return None


def _spent(amounts: BudgetAmounts) -> Spent:
    """Return amounts with the money in millionths, rounded up."""
    return Spent(amounts.tokens, -(-amounts.money // MICRO), amounts.ms)
