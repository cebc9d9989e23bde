"""The budget of a running job: opened from the store, watched while the job runs, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from palestra.config import JobConfig
from palestra.config.budget import HOUR_MS, device_price, shown_money, token_prices, units_of
from palestra.disk import write_whole
from palestra.learner.open_run import AddEvent
from palestra.store import RunStore
from palestra.store.ledger import AHEAD_MS, NOTHING, Allowance, BudgetAmounts, Ledger, Limits
from palestra.store.spending import LOADING_FILE, Metering, loading_ms
from palestra.threads import in_thread
from palestra.types.progress import duration
from palestra.waiting import cancelled

WATCH_SECONDS = 0.5
CLOSING_MS = 2000  # left for closing when the work is cancelled
SHARES = (50, 80, 100)  # percent of the budget that are warned of


@contextlib.asynccontextmanager
async def recorded_loading(folder: Path, began: float) -> AsyncIterator[float]:
    """Record the time of a start in the run's folder while the block loads its model. Yields from when on the time of
    the job counts, with that of killed starts: `open_metering` records it. `began`: monotonic seconds.
    """
    counts_from = began - await in_thread(lambda: loading_ms(folder)) / 1000

    async def record() -> None:
        while True:
            text = str(math.ceil((time.monotonic() - counts_from) * 1000))
            await in_thread(partial(write_whole, folder / LOADING_FILE, text.encode()))
            await asyncio.sleep(WATCH_SECONDS)

    recording = asyncio.create_task(record())
    try:
        yield counts_from
    finally:
        await cancelled(recording)


async def open_metering(
    config: JobConfig, store: RunStore, began: float, allowed: Callable[[], Allowance] | None
) -> Metering | None:
    """Return what counts the calls and the time of a job; None: it has neither prices nor a budget, and never had.

    `began`: from when on its time counts, monotonic seconds. `allowed`: see `JobTerms`.
    """
    budgeted = config.prices is not None or config.budget is not None or allowed is not None
    if not budgeted and not await store.spending.has_begun():
        return None
    prices = token_prices(config)
    used, ms = await store.spending.begin(config)
    ledger = Ledger(
        limits=limits_of(config),
        monotonic=store.clock.monotonic,
        began=began,
        spent=BudgetAmounts(sum(one.tokens for one in used), sum(one.money(prices) for one in used), ms),
        prices=prices,
        device_ms=device_price(config),
        refuses=config.kind == "inference",
    )
    await store.spending.set_ms(ledger.total.ms)
    await in_thread(lambda: (config.folder / LOADING_FILE).unlink(missing_ok=True))
    if allowed is not None:
        ledger.allow(allowed())
    return Metering(ledger, store.spending, judging_policies(config), allowed)


def judging_policies(config: JobConfig) -> dict[str, str]:
    """Return the kind of the calls, `judge` or `audit`, to each policy of a job that judges."""
    judges = {"audit": None if config.audit is None else config.audit.judge, "judge": config.judge}
    found = {judge.asked_policy: kind for kind, judge in judges.items() if judge is not None}
    return {policy: kind for policy, kind in found.items() if policy is not None}


def limits_of(config: JobConfig) -> Limits:
    """Return the limits of a job's budget."""
    if (budget := config.budget) is None:
        return Limits()
    return Limits(
        tokens=budget.tokens,
        money=None if budget.money is None else units_of(budget.money),
        ms=None if budget.hours is None else int(budget.hours * HOUR_MS),
    )


def shown_amounts(amounts: BudgetAmounts, limits: Limits) -> str:
    """Describe what is spent of each limit: `1,234 of 2,000 tokens, 0.50 of 1.00 (money)`."""
    parts = []
    if limits.money is not None:
        parts.append(f"{shown_money(amounts.money)} of {shown_money(limits.money)} (money)")
    if limits.ms is not None:
        parts.append(f"{duration(amounts.ms / 1000)} of {duration(limits.ms / 1000)}")
    if limits.tokens is not None:
        parts.append(f"{amounts.tokens:,} of {limits.tokens:,} tokens")
    return ", ".join(parts)


class BudgetWatch:
    """Records the time of a job, warns when shares of its budget are spent, and ends it before more is."""

    def __init__(
        self, metering: Metering, add_event: AddEvent, stop: Callable[[], None], step: Callable[[], int]
    ) -> None:
        """Prepare to watch.

        Args:
            stop: ends the job at a checkpoint, as soon as a step that is being trained is over.
            step: returns the number of finished steps.
        """
        self._metering = metering
        self._ledger, self._spending, self._event = metering.ledger, metering.spending, add_event
        self._stop, self._step = stop, step
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ledger.on_over = lambda: loop.call_soon_threadsafe(self._end)
        self._told = min(100 * self._ledger.share, 99.9)  # percent that earlier processes have warned of
        self._shared_told = self._ledger.allowance.percent
        self._recorded = 0
        self._wanted = NOTHING

    async def run(self) -> None:
        """Watch until the time is used up; what is left of the work is to be cancelled then."""
        if self._ledger.over:  # by a call before the job was watched
            self._end()
        while self._ledger.left_ms() > CLOSING_MS:
            await self._record_ahead()
            if self._metering.allowed is not None:
                await self._share(self._metering.allowed)
            await self._warn()
            if self._ledger.left_ms() <= self._ledger.end_ms:
                self._ledger.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._news.wait()
            self._news.clear()
        self._ledger.end()  # it was used up at once: by a resumed job, or while nothing could run
        await self._warn()

    async def close(self) -> None:
        """Record how long the job has run, and refuse the calls that its budget has no room for; it is over."""
        await self._warn()
        self._ledger.close()
        await self._spending.set_ms(self._ledger.total.ms)

    async def _record_ahead(self) -> None:
        """Record more time than the job has run for, unless that was recorded before."""
        if (ms := self._ledger.total.ms) + AHEAD_MS / 2 > self._recorded:
            self._recorded = ms + max(int(min(AHEAD_MS, self._ledger.left_ms())), 0)
            await self._spending.set_ms(self._recorded)

    async def _share(self, allowed: Callable[[], Allowance]) -> None:
        """Read what the job may spend of a shared budget, and record what it wants if that is more."""
        self._ledger.allow(await in_thread(allowed))
        wanted = self._ledger.wanted
        given = self._ledger.allowance.limits
        lacks = any(limit is not None and want > limit for want, limit in zip(wanted, given, strict=True))
        if lacks and any(map(operator.gt, wanted, self._wanted)):
            self._wanted = wanted
            await self._spending.set_wanted(wanted)

    def _end(self) -> None:
        self._news.set()
        self._stop()

    async def _warn(self) -> None:
        """Add an event for each share that was reached since the last one."""
        now = 100.0 if self._ledger.over else min(100 * self._ledger.share, 99.9)
        for share in SHARES:
            if self._told < share <= now:
                self._told = share
                data = {"code": f"budget_{share}", "share": share, "step": self._step(), "text": self._text(share)}
                await asyncio.shield(self._event("warning", data))  # the work may end meanwhile
        shared = self._ledger.allowance
        for share in SHARES:
            if self._shared_told < share <= shared.percent:
                self._shared_told = share
                text = f"{share} % of the budget of {shared.of} is spent, by all of its jobs"
                data = {"code": f"shared_budget_{share}", "share": share, "step": self._step(), "text": text}
                await asyncio.shield(self._event("warning", data))
        if self._ledger.over:
            self._metering.told.set()

    def _text(self, share: int) -> str:
        if self._ledger.shared_over:
            return (
                f"the budget of {self._ledger.allowance.of} has nothing left for this job; "
                f"it ends after step {self._step()}"
            )
        spent = shown_amounts(self._ledger.total, self._ledger.limits)
        if share < 100:
            return f"{share} % of the budget is spent: {spent}"
        return (
            f"the budget is spent: {spent}, and what comes next does not fit; the job ends after step {self._step()}. "
            "Raise the budget, and go on with --resume"
        )
