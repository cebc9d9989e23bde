"""What the calls of a run have used: sums by episode and payee, kept with each call, so that no call is read again."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, bindparam, select
from sqlalchemy.dialects.sqlite import insert

from palestra.config import JobConfig
from palestra.config.budget import AUDIT, FREE, JUDGE, TokenPrice
from palestra.database import Database, to_json
from palestra.database.sqlite import Prepared
from palestra.store.calls import insert_call
from palestra.store.codec import unpack
from palestra.store.ledger import NOTHING, Allowance, BudgetAmounts, Hold, Ledger
from palestra.store.run_log import read_fact, set_fact
from palestra.store.tables import chats, episodes, spending, verdicts
from palestra.types.calls import Chat
from palestra.types.records import AUDIT as OF_AUDIT

log = logging.getLogger("palestra")
WANTED_FACT = "budget_wanted"  # what a job needs of a shared budget in all: tokens, money, milliseconds
MS_FACT = "spent_ms"  # how long the run's processes have run, milliseconds
LOADING_FILE = "loading_ms"  # in a run's folder while a job loads its model
PIECE = 500  # calls that are read at a time

_new = insert(spending).values({column.name: bindparam(column.name) for column in spending.c})
_SUMS = ("calls", "prompt_tokens", "reply_tokens")
_ADD = Prepared(
    _new.on_conflict_do_update(
        index_elements=[spending.c.episode_id, spending.c.kind, spending.c.payee],
        set_={name: spending.c[name] + _new.excluded[name] for name in _SUMS},
    )
)


class Used(NamedTuple):
    """The use of tokens by the calls to one payee, of one episode or of several.

    Attributes:
        episode_id: empty: none, or the sum of all.
        kind: that of the episode, or `judge`, `audit`, `teacher`; ad-hoc are also calls outside any episode.
        payee: the policy, or a server as `palestra.config.budget` names it.
    """

    episode_id: str
    kind: str
    payee: str
    calls: int
    prompt_tokens: int
    reply_tokens: int

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and replies."""
        return self.prompt_tokens + self.reply_tokens

    def money(self, prices: Mapping[str, TokenPrice]) -> int:
        """Return the units of money for the tokens, by the prices of payees; others cost none."""
        return prices.get(self.payee, FREE).of(self.prompt_tokens, self.reply_tokens)


def used_by(chat: Chat, kind: str, episode_id: str) -> Used:
    """Return what one call has used."""
    return Used(episode_id, kind, _policy(chat.policy), 1, chat.prompt_tokens, len(chat.completion_ids))


class Spending:
    """Keeps the sums. Its methods may be called on any event loop."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, used: Used) -> Future[None]:
        """Add calls that are recorded nowhere else; the future resolves when that is on disk."""
        return self._db.submit(partial(_add, used))

    def append(self, chat: Chat, kind: str) -> Future[None]:
        """Record a call of an episode together with its use; see `Calls.append`."""

        def both(connection: Connection) -> None:
            insert_call(chat, connection)
            _add(used_by(chat, kind, chat.episode_id), connection)

        return self._db.submit(both, "chat_commit")

    async def begin(self, config: JobConfig) -> tuple[list[Used], int]:
        """Return the sums by kind and payee, and the milliseconds of earlier processes, at the start of a run.

        A run that was begun without sums gets them from its calls, once.
        """

        def read(connection: Connection) -> tuple[list[Used], int]:
            if connection.execute(select(spending.c.calls).limit(1)).first() is None:
                for used in usage_of_calls(connection, config):
                    _add(used, connection)
            return sums(connection), spent_ms(connection)

        return await self._db.write(read)

    async def has_begun(self) -> bool:
        """Return whether the run has sums, which are kept from then on."""
        return await self._db.read(lambda connection: bool(sums(connection)))

    async def set_ms(self, ms: int) -> None:
        """Record how long the run's processes have run, or will have until this is called again."""
        await self._db.write(lambda connection: set_fact(connection, MS_FACT, str(ms)))

    async def set_wanted(self, wanted: BudgetAmounts) -> None:
        """Record what the job needs of a budget that it shares with other jobs."""
        text = to_json([str(amount) for amount in wanted])  # money is larger than an integer of JSON may be
        await self._db.write(lambda connection: set_fact(connection, WANTED_FACT, text))


@dataclass(frozen=True, slots=True)
class ServerMeter:
    """Charges the calls to a server to a job; see `palestra.config.judge.Meter`."""

    ledger: Ledger
    spending: Spending
    kind: str
    payee: str

    async def reserve(self, prompt_tokens: int, reply_tokens: int) -> Hold:
        """Return what reserves the tokens of a call, once they fit into the budget."""
        # A step waits for its audit and its teacher, so that it would not end if they waited for the end of the job.
        refusable = self.kind != "judge"
        return await self.ledger.hold(self.payee, prompt_tokens, reply_tokens, refusable)

    async def pay(self, reserved: Hold, prompt_tokens: int, reply_tokens: int) -> None:
        """Record what a call has used, in place of what it has reserved."""
        try:
            await self.spending.add(Used("", self.kind, self.payee, 1, prompt_tokens, reply_tokens))
        finally:
            self.ledger.settle(reserved, prompt_tokens, reply_tokens)


@dataclass(frozen=True, slots=True)
class Metering:
    """Counts the calls of a job's sessions, within its budget.

    Attributes:
        judges: the kind, `judge` or `audit`, of the calls to each policy of the job that judges.
        allowed: see `JobTerms`.
        told: set when the job's events say that its budget is spent.
        ending: set when the work waits for that, and then says that it is over.
    """

    ledger: Ledger
    spending: Spending
    judges: Mapping[str, str] = field(default_factory=dict)
    allowed: Callable[[], Allowance] | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def told_if_over(self) -> None:
        """Wait until the job's events say that its budget is spent, if it is."""
        if self.ledger.over:
            self.ending.set()
            await self.told.wait()

    async def hold(self, chat: Chat, kind: str) -> Hold:
        """Return what reserves the tokens of a call that is not sampled yet; see `Ledger.hold`."""
        policy = _policy(chat.policy)
        aside = kind == "adhoc" and policy not in self.judges and not self.ledger.refuses
        return await self.ledger.hold(policy, chat.prompt_tokens, chat.sampling.max_tokens, aside=aside)

    def settle(self, hold: Hold, chat: Chat) -> None:
        """Count what was sampled of a call."""
        self.ledger.settle(hold, chat.prompt_tokens, len(chat.completion_ids))

    def lost(self, chat: Chat, kind: str) -> None:
        """Record the use of a call that was sampled, at least in part, and is not recorded itself."""
        adding = self.spending.add(used_by(chat, kind, chat.episode_id if chat.fence else ""))
        adding.add_done_callback(_log_unrecorded)

    def record(self, chat: Chat, kind: str) -> Future[None]:
        """Record a call of an episode with its use (see `Calls.append`), or the use alone of one outside episodes."""
        if chat.fence:
            return self.spending.append(chat, kind)
        return self.spending.add(used_by(chat, self.judges.get(_policy(chat.policy), "adhoc"), ""))

    def server(self, kind: str, payee: str) -> ServerMeter:
        """Return what the calls to a server are charged to."""
        return ServerMeter(self.ledger, self.spending, kind, payee)


def _log_unrecorded(adding: Future[None]) -> None:
    if not adding.cancelled() and (error := adding.exception()) is not None:
        log.error("what a lost call has cost could not be recorded: %s", error)


def _policy(name: str) -> str:
    """Return the policy of a name that may be that of a past version or a checkpoint, as in `policy@20`."""
    return name.partition("@")[0]


def _add(used: Used, connection: Connection) -> None:
    values = used._asdict()
    _ADD.change(connection, values)
    if used.episode_id:
        _ADD.change(connection, values | {"episode_id": ""})


def sums(connection: Connection, episode_id: str = "") -> list[Used]:
    """Return the sums of a run, or of an episode, by kind and payee. Works in any process."""
    wanted = select(spending).where(spending.c.episode_id == episode_id)
    return [Used(*row) for row in connection.execute(wanted)]


def sums_by_episode(connection: Connection) -> list[Used]:
    """Return the sums of each episode of a run by kind and payee."""
    wanted = select(spending).where(spending.c.episode_id > "")
    return [Used(*row) for row in connection.execute(wanted)]


def spent_ms(connection: Connection) -> int:
    """Return how long the run's processes have run, milliseconds; 0: that was not recorded."""
    return int(read_fact(connection, MS_FACT) or 0)


def wanted_by(connection: Connection) -> BudgetAmounts:
    """Return what a job has recorded last that it needs of a shared budget, in all."""
    found = read_fact(connection, WANTED_FACT)
    return NOTHING if found is None else BudgetAmounts(*map(int, orjson.loads(found)))


def loading_ms(folder: Path) -> int:
    """Return for how many milliseconds starts of a run have loaded that were killed before its store was open."""
    try:
        return int((folder / LOADING_FILE).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def usage_of_calls(connection: Connection, config: JobConfig) -> Iterator[Used]:
    """Yield what each call of a run without sums has used, and each verdict of its judges. It reads all calls."""
    columns = (chats.c.episode_id, episodes.c.kind, chats.c.policy, chats.c.shared, chats.c.prompt_tail)
    wanted = select(*columns, chats.c.versions).join(episodes, episodes.c.episode_id == chats.c.episode_id)
    if config.learns_recorded:  # nothing was sampled for training
        wanted = wanted.where(episodes.c.kind != "train")
    for row in connection.execute(wanted.execution_options(yield_per=PIECE)):
        prompt = row.shared + len(unpack(row.prompt_tail, "i4"))
        reply = sum(tokens for *_, tokens in orjson.loads(row.versions))
        yield Used(row.episode_id, row.kind, _policy(row.policy), 1, prompt, reply)
    audit = None if config.audit is None else config.audit.judge
    of = {"judge": (config.judge, JUDGE), "audit": (audit, AUDIT)}
    policies = {kind: None if judge is None else judge.asked_policy for kind, (judge, _) in of.items()}
    for verdict in connection.execute(select(verdicts.c.judge, verdicts.c.calls, verdicts.c.tokens)):
        kind = "audit" if verdict.judge.startswith(OF_AUDIT) else "judge"
        # How many of the tokens are of prompts is not recorded.
        yield Used("", kind, policies[kind] or of[kind][1], verdict.calls, verdict.tokens, 0)
