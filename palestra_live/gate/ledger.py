"""RUN/gate.db: the gate's observations and decisions, on disk before anything follows from them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import Column, Connection, Float, Integer, String, Table, Text, select
from sqlalchemy.dialects.sqlite import insert

from palestra.database.sqlite import open_engine
from palestra.errors import ConfigError, NotFound, StoreError
from palestra_live.gate.machine import Gate
from palestra_live.gate.records import GateDecision, Observation, Started
from palestra_live.gate.routing import Routing, routing_of
from palestra_live.store import open_live_db

T = TypeVar("T")
FILE = "gate.db"
metadata = sa.MetaData()

observations = Table(
    "observations",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("key", String, nullable=False, unique=True),  # an observation that is told twice counts once
    Column("at", Float, nullable=False),
    Column("data", Text, nullable=False),
)

decisions = Table(
    "decisions",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("observation", Integer, nullable=False),  # after which it was made
    Column("at", Float, nullable=False),
    Column("data", Text, nullable=False),
)

former = Table(
    "former_decisions",  # that another version of Palestra made, and this one does not
    metadata,
    Column("number", Integer, nullable=False),
    Column("observation", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("data", Text, nullable=False),
)

routes = Table(
    "routes",
    metadata,
    Column("session", String, primary_key=True),  # a keyed hash of its id
    Column("user", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("canary", Integer, nullable=False),  # the version that might have been drawn
    Column("share", Float, nullable=False),
    Column("at", Float, nullable=False),
)

_ANY = msgspec.json.Decoder(Observation)


class Decided(NamedTuple):
    """A decision as it is stored. `at`: Unix seconds."""

    number: int
    at: float
    decision: GateDecision


class GateLedger:
    """The gate of one run. Several processes may have the same file open: each takes the others' observations in.

    Attributes:
        routing: what new sessions are served by; None: before the first observation.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Open or create the file in the folder of a run; `refresh` replays it.

        Raises:
            StoreError: it cannot be opened.
        """
        self._db, self._now = open_live_db(folder / FILE, metadata), now
        self._gate, self._seen, self._is_whole = Gate(), 0, True  # of the writing thread
        self.routing: Routing | None = None

    def close(self) -> None:
        """Finish what was submitted, and close the file."""
        self._db.close()

    async def add(self, key: str, observation: Observation) -> list[GateDecision]:
        """Store one observation with the decisions that follow from it; returns when both are on disk.

        An observation with a known key changes nothing.

        Raises:
            ConfigError: it is an order that cannot be followed; nothing is stored.
        """
        return await self.add_all([(key, observation)])

    async def add_all(self, told: Sequence[tuple[str, Observation]]) -> list[GateDecision]:
        """Store observations in one transaction, in their order; see `add`."""

        def write(connection: Connection) -> tuple[list[GateDecision], Routing | None]:
            gate = self._current(connection)
            self._is_whole = False  # until nothing has failed
            found: list[GateDecision] = []
            for key, observation in told:
                if connection.execute(select(observations.c.key).where(observations.c.key == key)).first():
                    continue
                made = gate.see(observation)  # first: what raises must not have written
                values = {"key": key, "at": self._now(), "data": msgspec.json.encode(observation).decode()}
                new = observations.insert().values(values).returning(observations.c.number)
                number = self._seen = connection.execute(new).scalar_one()
                for one in made:
                    row = {"observation": number, "at": self._now(), "data": msgspec.json.encode(one).decode()}
                    connection.execute(decisions.insert(), row)
                found += made
            self._is_whole = True
            return found, routing_of(gate)

        try:
            found, self.routing = await self._db.write(write, "gate_commit")
        except BaseException:
            self._is_whole = False  # the transaction may be undone: the next one replays the file
            raise
        return found

    async def refresh(self) -> None:
        """Take in what other processes have stored."""
        newest = select(sa.func.max(observations.c.number))
        if await self._db.read(lambda connection: connection.execute(newest).scalar()) != self._seen:
            await self.add_all([])

    async def restate(self) -> bool:
        """Make the decisions again if the stored ones do not follow, and return whether that was so.

        Another version of Palestra may have decided by other formulas. Its decisions are kept in `former_decisions`.
        """

        def write(connection: Connection) -> bool:
            _, again = _decided_again(connection)
            if _problem(connection, again) is None:
                return False
            self._is_whole = False  # until the next one replays the file
            connection.execute(former.insert().from_select(list(former.c.keys()), select(decisions)))
            connection.execute(decisions.delete())
            told = connection.execute(select(observations.c.number, observations.c.at))
            at = {row.number: row.at for row in told}
            for number, (of, one) in enumerate(again, 1):
                row = {"observation": of, "at": at[of], "data": msgspec.json.encode(one).decode()}
                connection.execute(decisions.insert(), row | {"number": number})
            return True

        return await self._db.write(write)

    async def look(self, read: Callable[[Gate], T]) -> T:
        """Return what a function reads in the gate, which it must not change."""

        def write(connection: Connection) -> tuple[T, Routing | None]:
            gate = self._current(connection)  # which takes in what other processes have stored
            return read(gate), routing_of(gate)

        found, self.routing = await self._db.write(write)
        return found

    async def told(self, beginning: str = "") -> set[str]:
        """Return the keys of all observations, or of those that begin in this way."""
        key = observations.c.key
        wanted = select(key).where(key >= beginning, key < f"{beginning}\U0010ffff")
        return await self._db.read(lambda connection: set(connection.execute(wanted).scalars()))

    async def decided(self, after: int) -> list[Decided]:
        """Return the decisions with a number above `after`, of all processes."""
        return await self._db.read(lambda connection: _stored(connection, after))

    async def log_route(self, session: str, user: str, version: int, routing: Routing) -> None:
        """Store what was drawn for a session that begins during a canary."""
        row = {"session": session, "user": user, "version": version, "canary": routing.canary, "share": routing.share}
        new = insert(routes).values(**row, at=self._now()).on_conflict_do_nothing()
        await self._db.write(lambda connection: connection.execute(new).close())

    def _current(self, connection: Connection) -> Gate:
        """Return the gate after all observations of the file. It runs in the writing thread."""
        if not self._is_whole:
            self._gate, self._seen, self._is_whole = Gate(), 0, True
        for number, observation in _observations(connection, self._seen):
            _repeated(self._gate, observation)
            self._seen = number
        return self._gate


def _observations(connection: Connection, after: int) -> Iterator[tuple[int, Observation]]:
    wanted = select(observations.c.number, observations.c.data).where(observations.c.number > after)
    for number, data in connection.execute(wanted.order_by(observations.c.number)).all():
        yield number, _ANY.decode(data)


def _stored(connection: Connection, after: int = 0) -> list[Decided]:
    rows = connection.execute(select(decisions).where(decisions.c.number > after).order_by(decisions.c.number))
    return [Decided(row.number, row.at, msgspec.json.decode(row.data, type=GateDecision)) for row in rows]


def replay(folder: Path) -> tuple[Gate, list[Decided]]:
    """Return the gate of a run and its decisions, each of which was made again from the observations.

    It only reads, and may be called while the run goes on.

    Raises:
        NotFound: the run has no gate.
        StoreError: a stored decision does not follow from the observations.
    """
    path = folder / FILE
    if not path.is_file():
        raise NotFound(f"{folder} has no {FILE}: it is no live run with a gate ([live.gate])")
    engine = open_engine(path, "FULL", read_only=True)
    try:
        with engine.begin() as connection:
            gate, again = _decided_again(connection)
            problem, stored = _problem(connection, again), _stored(connection)
    finally:
        engine.dispose()
    if problem is not None:
        raise StoreError(
            f"{path}: a decision {problem}; the file was changed, or is of another version of Palestra. "
            "`palestra run … --resume` decides again"
        )
    return gate, stored


def _decided_again(connection: Connection) -> tuple[Gate, list[tuple[int, GateDecision]]]:
    """Return the gate after all observations, and what each decides."""
    gate, again = Gate(), list[tuple[int, GateDecision]]()
    for number, observation in _observations(connection, 0):
        again += [(number, one) for one in _repeated(gate, observation)]
    return gate, again


def _repeated(gate: Gate, observation: Observation) -> list[GateDecision]:
    """Let a gate see a stored observation, and return what it decides."""
    try:
        return gate.see(observation)
    except ConfigError:  # an order that was followed, and can't be since another version of Palestra decides
        return []


def _problem(connection: Connection, again: Sequence[tuple[int, GateDecision]]) -> str | None:
    """Return what is wrong with the stored decisions; None: they are the same."""
    kept = select(decisions.c.observation).order_by(decisions.c.number)
    numbers = connection.execute(kept).scalars().all()
    for one, of, made in zip_longest(_stored(connection), numbers, again):
        if one is None or made != (of, one.decision):
            return "is missing" if one is None else f"{one.number} does not follow from the observations"
    return None


def new_started(version: int, bounds: dict[str, object]) -> Started:
    """Return the first observation of a run, with a new key."""
    return Started(version=version, key=secrets.token_hex(32), bounds=bounds)
