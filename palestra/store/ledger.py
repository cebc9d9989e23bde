"""`Ledger`: what a job has spent and reserved of its budget, which nothing can exceed.

A call reserves its prompt and its longest reply before it is sampled, and gives back what it does not use. A call that
fits only when others have given back waits, in the order of arrival. One that can't fit any more ends the job and waits
for that end, so that no episode is lost by it. The store has what was spent: a killed job goes on with these sums.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from palestra.config.budget import FREE, TokenPrice
from palestra.errors import BudgetSpent

_TOO_MUCH = "the call does not fit into what is left of the job's budget; raise it and go on with --resume"
END_MS = 5000  # kept for the end of a job that has not trained a step yet


class BudgetAmounts(NamedTuple):
    """Tokens, units of money (`palestra.config.budget.UNITS`), and milliseconds."""

    tokens: int = 0
    money: int = 0
    ms: int = 0


NOTHING = BudgetAmounts()


class Limits(NamedTuple):
    """The most that a job may spend, in units of `BudgetAmounts`; None: any amount."""

    tokens: int | None = None
    money: int | None = None
    ms: int | None = None


class Hold(NamedTuple):
    """What one call has reserved."""

    tokens: int
    money: int
    price: TokenPrice


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A call that does not fit at the moment."""

    hold: Hold
    refusable: bool
    aside: bool
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[Hold]


@dataclass(kw_only=True)
class Ledger:
    """The sums of a job. Its methods may be called in any thread.

    Attributes:
        spent: by earlier processes of the run; money for calls alone.
        prices: of the tokens of each payee; others cost the time of devices alone.
        device_ms: units of money for a millisecond of all devices of the job.
        monotonic: a clock, seconds.
        began: when the time of this process began; None: now.
        refuses: whether a call that can't fit any more is refused; else it waits for the end of the job.
        on_over: called once, in any thread, when a call can't fit any more.
        end_ms: time that is kept for the end of the job: to train a step that has begun, and to save.
    """

    limits: Limits
    monotonic: Callable[[], float]
    began: float | None = None
    spent: BudgetAmounts = NOTHING
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)
    device_ms: int = 0
    refuses: bool = False
    on_over: Callable[[], object] = lambda: None
    end_ms: int = END_MS
    over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._lock, self._began = threading.Lock(), self.monotonic() if self.began is None else self.began
        self._tokens, self._money = self.spent.tokens, self.spent.money  # of calls
        self._held_tokens = self._held_money = 0
        self._waiting: deque[_Waiting] = deque()
        self._step: BudgetAmounts | None = None  # spent when the present step began, with the money of calls alone
        self._largest = NOTHING  # step so far

    @property
    def total(self) -> BudgetAmounts:
        """Return what has been spent, for calls and time."""
        ms = self._ms()
        return BudgetAmounts(self._tokens, self._money + ms * self.device_ms, ms)

    @property
    def share(self) -> float:
        """Return the share that is spent of the limit that is nearest."""
        return max((used / limit for used, limit in zip(self.total, self.limits, strict=True) if limit), default=0.0)

    async def hold(
        self, payee: str, prompt_tokens: int, reply_tokens: int, refusable: bool = False, aside: bool = False
    ) -> Hold:
        """Return when the tokens of a call are reserved.

        Args:
            refusable: as if `refuses`, for this call.
            aside: it is no part of the job's work, so that it is refused and does not end the job.

        Raises:
            BudgetSpent: they do not fit into the budget any more, and such calls are refused.
        """
        price = self.prices.get(payee, FREE)
        hold = Hold(prompt_tokens + reply_tokens, price.of(prompt_tokens, reply_tokens), price)
        with self._lock:
            if not self._waiting and self._fits(hold):
                self._reserve(hold)
                return hold
            loop = asyncio.get_running_loop()
            waiting = _Waiting(hold, refusable or aside or self.refuses, aside, loop, loop.create_future())
            self._waiting.append(waiting)
        self._look()
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            with self._lock, contextlib.suppress(ValueError):  # it was granted meanwhile
                self._waiting.remove(waiting)
            self._look()
            if waiting.granted.done() and not waiting.granted.cancelled() and waiting.granted.exception() is None:
                self.settle(hold, 0, 0)
            raise

    def settle(self, hold: Hold, prompt_tokens: int, reply_tokens: int) -> None:
        """Count what a call has used, and give back the rest of what it has reserved."""
        with self._lock:
            self._held_tokens -= hold.tokens
            self._held_money -= hold.money
            self._tokens += prompt_tokens + reply_tokens
            self._money += hold.price.of(prompt_tokens, reply_tokens)
        if self._waiting:
            self._look()

    def begin_step(self) -> bool:
        """Return whether a step like the largest one so far fits into the budget. The step before is over."""
        with self._lock:
            now = BudgetAmounts(self._tokens, self._money, self._ms())
            if self._step is not None:
                step = (new - old for new, old in zip(now, self._step, strict=True))
                self._largest = BudgetAmounts(*map(max, step, self._largest))
            self._step = now
            # Calls in flight are part of the step, and give back most of what they have reserved.
            return not self.over and self._has_room(self._largest, held=False)

    def keep_for_end(self, seconds: float) -> None:
        """Keep time for the end of the job: the most `seconds` that a step took to train and save, and half as much."""
        self.end_ms = max(self.end_ms, math.ceil(seconds * 1500))

    def left_ms(self) -> float:
        """Return for how many milliseconds the job can go on until it must have ended, if all reserved is used."""
        with self._lock:
            ms = self._ms()
            left = math.inf if self.limits.ms is None else float(self.limits.ms - ms)
            if self.limits.money is not None and self.device_ms:
                money = self.limits.money - self._money - self._held_money
                left = min(left, money // self.device_ms - ms)
            return left

    def end(self) -> None:
        """Let no call fit any more."""
        with self._lock:
            began, self.over = not self.over, True
        self._look()
        if began:
            self.on_over()

    def close(self) -> None:
        """Refuse the calls that wait, as the job is over, so that workers learn of it."""
        with self._lock:
            if not self.over:
                return
            self.refuses, waiting = True, list(self._waiting)
            self._waiting.clear()
        for one in waiting:
            self._tell(one, _refuse)

    def _ms(self) -> int:
        return self.spent.ms + math.ceil((self.monotonic() - self._began) * 1000)

    def _has_room(self, more: BudgetAmounts, held: bool) -> bool:
        """Return whether something fits in addition to what is spent, and reserved if `held`."""
        tokens, money, ms = self._tokens + more.tokens, self._money + more.money, self._ms() + more.ms
        if held:
            tokens, money = tokens + self._held_tokens, money + self._held_money
        after = (tokens, money + ms * self.device_ms, ms)
        return all(limit is None or used <= limit for used, limit in zip(after, self.limits, strict=True))

    def _fits(self, hold: Hold, held: bool = True) -> bool:
        return not self.over and self._has_room(BudgetAmounts(hold.tokens, hold.money, self.end_ms), held)

    def _reserve(self, hold: Hold) -> None:
        self._held_tokens += hold.tokens
        self._held_money += hold.money

    def _look(self) -> None:
        """Grant what fits now to the calls that wait, and end the job if the first of them can't fit any more."""
        began = False
        with self._lock:
            while self._waiting:
                waiting = self._waiting[0]
                if self._fits(waiting.hold):
                    self._reserve(waiting.hold)
                    self._tell(waiting, self._grant)
                elif waiting.aside and not self._fits(waiting.hold, held=False):
                    self._tell(waiting, _refuse)
                else:
                    break
                self._waiting.popleft()
            if self._waiting and not self._fits(self._waiting[0].hold, held=False):
                began, self.over = not self.over, True
            if self.over:
                for waiting in [waiting for waiting in self._waiting if waiting.refusable]:
                    self._waiting.remove(waiting)
                    self._tell(waiting, _refuse)
        if began:
            self.on_over()

    def _tell(self, waiting: _Waiting, how: Callable[[_Waiting], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its job is over
            waiting.loop.call_soon_threadsafe(how, waiting)

    def _grant(self, waiting: _Waiting) -> None:
        if waiting.granted.done():  # its caller was cancelled
            self.settle(waiting.hold, 0, 0)
        else:
            waiting.granted.set_result(waiting.hold)


def _refuse(waiting: _Waiting) -> None:
    if not waiting.granted.done():
        waiting.granted.set_exception(BudgetSpent(_TOO_MUCH))
