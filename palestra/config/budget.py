"""The tables `[prices]` and `[budget]`, and how amounts of money become integers.

Money is counted in integers of 10^-15 of the currency, so that sums are exact in any order. The currency itself is the
user's: whatever the prices are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from palestra.config.section import Positive, Section

if TYPE_CHECKING:
    from palestra.config.job import JobConfig

UNITS = 10**15  # of money in one of the currency
MILLION, HOUR_MS = 10**6, 3_600_000
GIB, MONTH_SECONDS = 2**30, 30 * 24 * 3600
Amount = Annotated[float, Field(ge=0, le=1e9)]


class TokenPrice(NamedTuple):
    """Units of money for a token of a prompt and for one of a reply."""

    prompt: int
    reply: int

    def of(self, prompt_tokens: int, reply_tokens: int) -> int:
        """Return the units of money for some tokens."""
        return self.prompt * prompt_tokens + self.reply * reply_tokens


FREE = TokenPrice(0, 0)


def units_of(amount: float, divisor: int = 1) -> int:
    """Return an amount of the currency in units of money, divided and rounded up: nothing is charged too low."""
    return int((Decimal(repr(amount)) * UNITS / divisor).to_integral_value(ROUND_CEILING))


def shown_money(units: int) -> str:
    """Return units of money as a decimal number with two digits behind the point, or four below one."""
    digits = 4 if 0 < abs(units) < UNITS else 2
    whole, rest = divmod(abs(round(units, digits - 15)), UNITS)
    return f"{'-' * (units < 0)}{whole:,}.{rest:015d}"[: digits - 15]


def exact_money(units: int) -> str:
    """Return units of money as a decimal number without rounding."""
    whole, rest = divmod(abs(units), UNITS)
    return f"{'-' * (units < 0)}{whole}.{rest:015d}"


class PricesConfig(Section):
    """What things cost, all in one currency. Nothing is looked up in a network."""

    device_hour: Amount = Field(
        0.0, description="Price of an hour of one device of the job: a GPU, or the machine if it computes on the CPU."
    )
    storage: Amount = Field(
        0.0, description="Price of a GiB of the run's folder for a month of 30 days. No part of a budget."
    )
    tokens: dict[str, tuple[Amount, Amount]] = Field(
        {},
        description="Prices of a million tokens of prompts and of replies, `[in, out]`, by a policy, a model, or a "
        "server's URL. A model that computes on the job's own devices needs none.",
    )

    def of(self, *names: str | None) -> TokenPrice | None:
        """Return the price of the first name that has one; a URL is also found by its host and port."""
        for key in _keys(names):
            if key in self.tokens:
                prompt, reply = self.tokens[key]
                return TokenPrice(units_of(prompt, MILLION), units_of(reply, MILLION))
        return None


def _keys(names: Iterable[str | None]) -> list[str]:
    """Return the keys under which `prices.tokens` may have something with these names."""
    return [key for name in names if name for key in (name, name.rstrip("/"), urlsplit(name).netloc) if key]


class BudgetConfig(Section):
    """The most that a job may spend, over all its restarts; it ends at a checkpoint before it spends more."""

    money: float | None = Field(None, gt=0, le=1e12, description="In the currency of `[prices]`.")
    hours: float | None = Field(None, gt=0, le=1e6, description="Hours for which the job runs.")
    tokens: Positive | None = Field(
        None, description="Tokens of all prompts and replies: of policies, judges and teachers' servers."
    )

    @model_validator(mode="after")
    def _limits_something(self) -> BudgetConfig:
        if self.money is None and self.hours is None and self.tokens is None:
            raise ValueError("a budget limits `money`, `hours` or `tokens`; give at least one of them")
        return self


def check_budget(config: JobConfig) -> None:
    """Raise ValueError for a budget that can't be kept, or that ends before one step."""
    budget = config.budget
    if budget is None:
        return
    if budget.money is not None:
        if config.prices is None:
            raise ValueError("budget.money needs prices: add the table [prices]")
        if unpriced := next(unpriced_servers(config), None):
            raise ValueError(f"budget.money counts all that is paid, and {unpriced[1]}")
    if budget.tokens is None or config.kind != "training" or config.learns_recorded:
        return
    # A call reserves its prompt and its longest reply, and an episode has a prompt and a reply of a token at least.
    episodes = config.rollout.group_size * config.rollout.groups_per_step
    reply = max(config.policies[name].sampling.max_tokens for name in config.trained_policies)
    if budget.tokens < (least := max(2 * episodes, reply + 1)):
        raise ValueError(
            f"budget.tokens is {budget.tokens:,}, and a step needs at least {least:,}: {episodes:,} episodes, and a "
            f"call of a prompt and up to {reply:,} tokens (sampling.max_tokens)"
        )


class PaidServer(NamedTuple):
    """A server that a job asks for tokens.

    Attributes:
        key: of its address in the configuration.
        payee: the policy, or one of `JUDGE`, `AUDIT` and `TEACHER`.
        names: under which `prices.tokens` may have it.
    """

    key: str
    payee: str
    names: tuple[str | None, ...]


# Payees that are no policies, whose names have no space.
JUDGE, AUDIT, TEACHER = "the judge", "the audit's judge", "the teacher"


def servers_of(config: JobConfig) -> Iterator[PaidServer]:
    """Yield the servers that a job asks for tokens."""
    address = next(iter(config.engine.urls), None) or config.base
    if address is not None and config.engine.has_model:
        for name, policy in config.policies.items():
            yield PaidServer(f"policies.{name}", name, (name, policy.model, address))
    audited = None if config.audit is None else config.audit.judge
    for key, payee, judge in (("judge", JUDGE, config.judge), ("audit.judge", AUDIT, audited)):
        if judge is not None and judge.url is not None:
            yield PaidServer(key, payee, (judge.url, judge.served_model))
    for name in config.trained_policies if config.kind == "training" else ():
        if (teacher := config.algorithm_of(name).served_teacher) is not None:
            yield PaidServer(f"{config.algorithm_key(name)}.teacher_server", TEACHER, (teacher.url, teacher.model))


def unpriced_servers(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the key of each server whose tokens have no price, with a sentence; nothing if there are no prices."""
    if config.prices is None:
        return
    for key, _, names in servers_of(config):
        if config.prices.of(*names) is None:
            named = " or ".join(repr(name) for name in names if name is not None)
            yield key, f"the server of {key} has no price; add {named} to prices.tokens ([0, 0] if it is free)"


def token_prices(config: JobConfig) -> Mapping[str, TokenPrice]:
    """Return the prices of tokens by payee; those without one cost the time of devices alone."""
    if config.prices is None:
        return {}
    priced = {payee: config.prices.of(*names) for payee, names in _named(config).items()}
    return {payee: price for payee, price in priced.items() if price is not None}


def unused_prices(config: JobConfig) -> list[str]:
    """Return the names in `prices.tokens` that nothing of the job has."""
    known = {key for names in _named(config).values() for key in _keys(names)}
    return [] if config.prices is None else [name for name in config.prices.tokens if name not in known]


def _named(config: JobConfig) -> dict[str, tuple[str | None, ...]]:
    """Return by payee the names under which its price may stand."""
    named: dict[str, tuple[str | None, ...]] = {name: (name, one.model) for name, one in config.policies.items()}
    return named | {server.payee: server.names for server in servers_of(config)}


def device_price(config: JobConfig) -> int:
    """Return the units of money for a millisecond of all devices of a job."""
    return 0 if config.prices is None else units_of(config.prices.device_hour, HOUR_MS) * device_count(config)


def storage_money(config: JobConfig, size: int, seconds: float) -> int:
    """Return the units of money for keeping some bytes."""
    if config.prices is None:
        return 0
    return units_of(config.prices.storage) * size * math.ceil(seconds) // (GIB * MONTH_SECONDS)


def device_count(config: JobConfig) -> int:
    """Return how many devices a job occupies: those of its trainer, and those of workers that it starts."""
    if not config.engine.has_model or config.base is not None:
        return 1
    own = config.trainer.devices if config.kind == "training" else 0
    return max(own + (config.engine.started_count if config.engine.pooled else 0), 1)
