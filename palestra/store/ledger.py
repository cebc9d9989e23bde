"""`Ledger`: what a job has spent and reserved of its budget, which nothing can exceed.

A call reserves its prompt and its longest reply before it is sampled, and gives back what it does not use. A call that
fits only when others have given back waits, in the order of arrival. One that can't fit any more ends the job and waits
for that end, so that no episode is lost by it. A serving job refuses it, and ends if it served one as large before. The
store has what was spent: a killed job goes on with these sums.
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
AHEAD_MS = 5_000  # of time are recorded before they are used, so that a killed job has not run for longer
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


class Allowance(NamedTuple):
    """What a job may spend of a budget that it shares with other jobs.

    Attributes:
        limits: what it was given so far, in all; it is given more as it spends.
        last: whether it is given no more.
        of: whose budget it is; empty: there is none.
        percent: of the shared budget that all jobs have spent.
    """

    limits: Limits = Limits()
    last: bool = False
    of: str = ""
    percent: float = 0.0


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
        allowance: of a budget that is shared with other jobs; see `allow`.
        over: whether the job ends, because something does not fit any more.
        shared_over: whether that is because of the allowance.
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
    allowance: Allowance = field(default=Allowance(), init=False)
    over: bool = field(default=False, init=False)
    shared_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._lock, self._began = threading.Lock(), self.monotonic() if self.began is None else self.began
        self._tokens, self._money = self.spent.tokens, self.spent.money  # of calls
        self._held_tokens = self._held_money = 0
        self._waiting: deque[_Waiting] = deque()
        self._step: BudgetAmounts | None = None  # spent when the present step began, with the money of calls alone
        self._largest = NOTHING  # step so far
        self._largest_call = NOTHING  # that was granted so far

    @property
    def total(self) -> BudgetAmounts:
        """Return what has been spent, for calls and time."""
        ms = self._ms()
        return BudgetAmounts(self._tokens, self._money + ms * self.device_ms, ms)

    @property
    def share(self) -> float:
        """Return the share that is spent of the limit that is nearest."""
        return max((used / limit for used, limit in zip(self.total, self.limits, strict=True) if limit), default=0.0)

    @property
    def wanted(self) -> BudgetAmounts:
        """Return what an allowance needs for the calls in flight, the first that waits, and the end of the job."""
        with self._lock:
            waiting = self._waiting[0].hold if self._waiting else Hold(0, 0, FREE)
            ms = self._ms() + 2 * self.end_ms + AHEAD_MS
            money = self._money + self._held_money + waiting.money + ms * self.device_ms
            return BudgetAmounts(self._tokens + self._held_tokens + waiting.tokens, money, ms)

    def allow(self, allowance: Allowance) -> None:
        """Replace the allowance, and grant the calls for which it has room."""
        with self._lock:
            self.allowance = allowance
        self._look()

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
            return not self.over and self._has_room(self._largest, held=False, ever=True)

    def keep_for_end(self, seconds: float) -> None:
        """Keep time for the end of the job: the most `seconds` that a step took to train and save, and half as much."""
        self.end_ms = max(self.end_ms, math.ceil(seconds * 1500))

    def left_ms(self) -> float:
        """Return for how many milliseconds the job can go on until it must have ended, if all reserved is used."""
        with self._lock:
            return min(self._left_ms(self.limits), self._left_ms(self.allowance.limits))

    def end(self) -> None:
        """Let no call fit any more."""
        with self._lock:
            shared = self._left_ms(self.limits) > self.end_ms and self._is_within(self.limits, self._largest)
            began = self._set_over(shared)
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

    def _left_ms(self, limits: Limits) -> float:
        ms = self._ms()
        left = math.inf if limits.ms is None else float(limits.ms - ms)
        if limits.money is not None and self.device_ms:
            left = min(left, (limits.money - self._money - self._held_money) // self.device_ms - ms)
        return left

    def _set_over(self, shared: bool) -> bool:
        """Let no call fit any more, and return whether that is new. `shared`: because of the allowance."""
        if self.over:
            return False
        self.over, self.shared_over = True, shared and bool(self.allowance.of)
        return True

    def _has_room(self, more: BudgetAmounts, held: bool, ever: bool = False) -> bool:
        """Return whether something fits beside what is spent (or `held`); `ever`: or with all that the job gets."""
        if held:
            more = BudgetAmounts(more.tokens + self._held_tokens, more.money + self._held_money, more.ms)
        if not ever or self.allowance.last:
            return self._is_within(self.limits, more) and self._is_within(self.allowance.limits, more)
        return self._is_within(self.limits, more)

    def _is_within(self, limits: Limits, more: BudgetAmounts) -> bool:
        ms = self._ms() + more.ms
        after = (self._tokens + more.tokens, self._money + more.money + ms * self.device_ms, ms)
        return all(limit is None or used <= limit for used, limit in zip(after, limits, strict=True))

    def _needs(self, hold: Hold) -> BudgetAmounts:
        return BudgetAmounts(hold.tokens, hold.money, self.end_ms)

    def _fits(self, hold: Hold) -> bool:
        return not self.over and self._has_room(self._needs(hold), held=True)

    def _can_fit(self, hold: Hold) -> bool:
        """Return whether a call will fit when others have given back what they do not use."""
        return not self.over and self._has_room(self._needs(hold), held=False, ever=True)

    def _is_extra(self, waiting: _Waiting) -> bool:
        """Return whether a call is refused without an end of the job: a smaller one may fit still."""
        hold, largest = waiting.hold, self._largest_call
        if not self.refuses or (hold.tokens <= largest.tokens and hold.money <= largest.money):
            return waiting.aside
        smallest = BudgetAmounts(2, hold.price.of(1, 1), self.end_ms)  # of a prompt and a reply of a token each
        return self._has_room(smallest, held=False, ever=True)

    def _reserve(self, hold: Hold) -> None:
        self._held_tokens += hold.tokens
        self._held_money += hold.money
        self._largest_call = BudgetAmounts(*map(max, self._largest_call, (hold.tokens, hold.money, 0)))

    def _look(self) -> None:
        """Grant what fits now to the calls that wait, and end the job if the first of them can't fit any more."""
        began = False
        with self._lock:
            while self._waiting:
                waiting = self._waiting[0]
                if self._fits(waiting.hold):
                    self._reserve(waiting.hold)
                    self._tell(waiting, self._grant)
                elif self._is_extra(waiting) and not self._can_fit(waiting.hold):
                    self._tell(waiting, _refuse)
                else:
                    break
                self._waiting.popleft()
            if self._waiting and not self._can_fit(hold := self._waiting[0].hold):
                began = self._set_over(shared=self._is_within(self.limits, self._needs(hold)))
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
