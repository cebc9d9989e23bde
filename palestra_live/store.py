"""RUN/live.db: the sessions of an application and their feedback, on disk before they are acknowledged."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Float, Index, Integer, String, Table, Text, select

from palestra.database import Backend, Database, Schema, to_json
from palestra.database.sqlite import OpenFile, make_private, open_engine, transaction
from palestra.disk import writing
from palestra.errors import Conflict, Expired, Forbidden, NotFound, TooManyRequests
from palestra.store.run_store import store_error
from palestra_live.feedback import JUDGED, Feedback, Lessons, session_lessons, session_score

FILE = "live.db"
FEEDBACK_PER_HOUR = 60  # of one subject, or one session without a subject: a person gives less, a script more
metadata = sa.MetaData()


class SessionState(StrEnum):
    """Where a session is: OPEN until silence, ENDED until no more feedback is taken, SETTLED until its episode is
    over, DONE.
    """

    OPEN = "open"
    ENDED = "ended"
    SETTLED = "settled"
    DONE = "done"


sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("subject", String),  # whose data it is; NULL: not named
    Column("cluster", String),  # the kind of use whose sessions are compared; NULL: not named
    Column("train", Integer, nullable=False),  # whether the subject consents
    Column("policy", String, nullable=False),  # what serves it until its end
    Column("state", String, nullable=False),
    Column("episode_id", String),  # NULL: none of its calls is recorded
    Column("fence", Integer),
    Column("created_at", Float, nullable=False),
    Column("last_at", Float, nullable=False),  # of a call, or of the beginning
    Column("ended_at", Float),
    Column("score", Float),  # of its feedback; NULL: not settled, or without
    Column("calls", Integer, nullable=False, default=0),
    Column("unrecorded", Integer, nullable=False, default=0),  # of the calls
    Column("errors", Integer, nullable=False, default=0),  # of the calls
    Column("seconds", Float, nullable=False, default=0.0),  # of all calls
    Index("sessions_by_state", "state", "last_at"),
    Index("sessions_by_subject", "subject"),
    Index("sessions_by_end", "ended_at", "session_id"),
)

feedback = Table(
    "feedback",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),  # order of arrival
    Column("feedback_id", String, nullable=False, unique=True),  # the client's
    Column("session_id", String, nullable=False),
    Column("subject", String, nullable=False),  # whose cap it counts for
    Column("kind", String, nullable=False),
    Column("call", Integer),  # NULL: of the whole session
    Column("value", Text, nullable=False),  # JSON
    Column("at", Float, nullable=False),
    Index("feedback_of_session", "session_id", "number"),
    Index("feedback_by_subject", "subject", "at"),
)

forgotten = Table(
    "forgotten",
    metadata,
    Column("subject_digest", String, primary_key=True),  # SHA-256, so that the name itself is gone
    Column("version", String, primary_key=True),
    Column("at", Float, nullable=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSession:
    """A session that begins, and needs a version."""

    session_id: str
    subject: str | None
    cluster: str | None
    train: bool


def open_live_db(path: Path, tables: sa.MetaData) -> Database:
    """Open or create a SQLite file of a live run. A commit is on disk when it is acknowledged, and deleted content is
    overwritten.
    """
    with writing(path):
        make_private(path)
    engine = open_engine(path, "FULL")

    @sa.event.listens_for(engine, "connect")
    def _overwrite(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA secure_delete=ON")

    backend = Backend(
        engine=engine,
        read_engine=open_engine(path, "FULL", read_only=True),
        readers=1,
        explain=partial(store_error, path),
        watch=lambda: OpenFile(path).problem,
        transaction=transaction,
    )
    return Database(backend, Schema(store="store of live sessions", metadata=tables))


class LiveStore:
    """The sessions and the feedback of one live run."""

    def __init__(self, folder: Path, wait_seconds: float, now: Callable[[], float] = time.time) -> None:
        self.db = open_live_db(folder / FILE, metadata)
        self._wait, self._now = wait_seconds, now

    def close(self) -> None:
        """Finish what was submitted, and close the file."""
        self.db.close()

    async def begin(self, new: NewSession, policy: str) -> Mapping[str, Any]:
        """Store a session that begins, and return its row; a known session is returned as it is."""

        def write(connection: Connection) -> Mapping[str, Any]:
            known = _row(connection, new.session_id)
            if known is not None:
                return known
            now = self._now()
            values = {"policy": policy, "state": SessionState.OPEN.value, "created_at": now, "last_at": now}
            connection.execute(sessions.insert(), asdict(new) | values)
            return _row(connection, new.session_id) or {}

        return await self.db.write(write)

    async def find(self, session_id: str) -> Mapping[str, Any] | None:
        """Return the row of a session; None: there is none."""
        return await self.db.read(lambda connection: _row(connection, session_id))

    async def change(self, session_id: str, **values: Any) -> None:
        """Change columns of a session."""
        changed = sa.update(sessions).where(sessions.c.session_id == session_id).values(**values)

        def write(connection: Connection) -> None:
            connection.execute(changed)

        await self.db.write(write)

    async def count_call(self, session_id: str, *, seconds: float, failed: bool, recorded: bool) -> None:
        """Count an answered call of a session."""
        values = {
            "calls": sessions.c.calls + 1,
            "unrecorded": sessions.c.unrecorded + (not recorded),
            "errors": sessions.c.errors + failed,
            "seconds": sessions.c.seconds + seconds,
        }
        await self.change(session_id, last_at=self._now(), **values)

    async def in_state(self, state: SessionState) -> list[Mapping[str, Any]]:
        """Return the sessions in a state, those first whose last call is longest ago."""
        return await self._rows(select(sessions).where(sessions.c.state == state.value).order_by(sessions.c.last_at))

    async def settle(self, session_id: str) -> float | None:
        """Take no more feedback for an ended session, and return its score; None: it has none."""

        def write(connection: Connection) -> float | None:
            row = _row(connection, session_id)
            if row is None or row["state"] != SessionState.ENDED:
                return None if row is None else row["score"]
            score = session_score(_feedback(connection, session_id))
            values = {"state": SessionState.SETTLED.value, "score": score}
            connection.execute(sa.update(sessions).where(sessions.c.session_id == session_id).values(**values))
            return score

        return await self.db.write(write)

    async def is_silent(self, session_id: str) -> bool:
        """Return whether nobody has given feedback for a session."""
        return not await self.db.read(lambda connection: _feedback(connection, session_id))

    async def add_verdict(self, session_id: str, score: float) -> None:
        """Store the score that a judge gives a settled session without feedback."""

        def write(connection: Connection) -> None:
            values = {"feedback_id": secrets.token_hex(32), "session_id": session_id, "subject": JUDGED}
            value = {"kind": JUDGED, "value": to_json(score), "at": self._now()}
            changed = sa.update(sessions).where(sessions.c.session_id == session_id).values(score=score)
            if connection.execute(changed).rowcount:  # it was not forgotten
                connection.execute(feedback.insert(), values | value)

        await self.db.write(write, "feedback_commit")

    async def lessons(self, session_id: str) -> Lessons:
        """Return the edits and comparisons of a session."""
        return await self.db.read(lambda connection: session_lessons(_feedback(connection, session_id)))

    async def to_learn_since(self, moment: float) -> list[Mapping[str, Any]]:
        """Return the done sessions with a score, an edit or a comparison that ended at or after a time (Unix seconds),
        in order of their ends.
        """
        lessons = select(feedback.c.number).where(
            feedback.c.session_id == sessions.c.session_id, feedback.c.kind.in_(("edit", "comparison"))
        )
        others = [state.value for state in SessionState if state is not SessionState.DONE]
        done = (sessions.c.state.not_in(others), sessions.c.ended_at >= moment)  # so that the index by end is used
        wanted = select(sessions).where(*done, sa.or_(sessions.c.score.is_not(None), lessons.exists()))
        return await self._rows(wanted.order_by(sessions.c.ended_at))

    async def newest_scored(self, most: int, before: float, *cluster: str | None) -> list[Mapping[str, Any]]:
        """Return the sessions with a score that ended before a time, the newest first; of one `cluster` if given."""
        mine = [sessions.c.cluster.is_not_distinct_from(name) for name in cluster]
        wanted = select(sessions).where(sessions.c.ended_at < before, sessions.c.score.is_not(None), *mine)
        return await self._rows(wanted.order_by(sessions.c.ended_at.desc()).limit(most))

    async def _rows(self, wanted: sa.Select[Any]) -> list[Mapping[str, Any]]:
        return await self.db.read(lambda connection: [dict(row._mapping) for row in connection.execute(wanted)])

    async def add_feedback(self, given: Feedback) -> bool:
        """Store feedback; return False if it was stored before, with the same content.

        Raises:
            NotFound, Forbidden, Expired, Conflict, TooManyRequests: it is refused; the message says why.
        """

        def write(connection: Connection) -> bool:
            where = feedback.c.feedback_id == given.id
            value, now = to_json(given.value), self._now()
            known = connection.execute(select(feedback).where(where)).first()
            if known is not None:
                if (known.session_id, known.kind, known.call, known.value) == (
                    given.session,
                    given.kind,
                    given.call,
                    value,
                ):
                    return False
                raise Conflict(f"feedback {given.id!r} was given before with another content; use a new id")
            row = _row(connection, given.session)
            if row is None:
                raise NotFound(f"there is no session {given.session!r}; open one with POST /live/sessions")
            if given.subject is not None and given.subject != row["subject"]:
                raise Forbidden(f"session {given.session!r} is another subject's; name its own, or leave `subject` out")
            if not row["train"]:
                raise Forbidden(
                    f"session {given.session!r} has no consent; open sessions with `train` to learn from them"
                )
            over = row["ended_at"] is not None and now > row["ended_at"] + self._wait
            if over or row["state"] in (SessionState.SETTLED, SessionState.DONE):
                raise Expired(f"session {given.session!r} is over for more than {self._wait:g} s (live.wait_seconds)")
            payer = row["subject"] or f"session {given.session}"
            recent = select(sa.func.count()).where(feedback.c.subject == payer, feedback.c.at > now - 3600)
            if connection.execute(recent).scalar_one() >= FEEDBACK_PER_HOUR:
                raise TooManyRequests(
                    f"{payer!r} has given feedback {FEEDBACK_PER_HOUR} times in an hour, which is the limit; send no "
                    "more before an hour has passed"
                )
            values = {"feedback_id": given.id, "session_id": given.session, "subject": payer, "kind": given.kind}
            connection.execute(feedback.insert(), values | {"call": given.call, "value": value, "at": now})
            return True

        return await self.db.write(write, "feedback_commit")

    async def outcomes(self, after: float, most: int) -> list[Mapping[str, Any]]:
        """Return settled sessions that ended after a time (Unix seconds), in order of their ends: the first `most`, and
        those that ended together with the last one. A score is here that of users; a judge's decides nothing.
        """
        settled = sessions.c.state.in_((SessionState.SETTLED.value, SessionState.DONE.value))
        mine = select(sessions).where(sessions.c.ended_at > after, settled)
        last = mine.with_only_columns(sessions.c.ended_at).order_by(sessions.c.ended_at).offset(most - 1).limit(1)
        ordered = mine.order_by(sessions.c.ended_at, sessions.c.session_id)

        def read(connection: Connection) -> list[Mapping[str, Any]]:
            until = connection.execute(last).scalar()
            wanted = ordered if until is None else ordered.where(sessions.c.ended_at <= until)
            judged = feedback.c.session_id.in_(select(wanted.subquery().c.session_id)), feedback.c.kind == JUDGED
            others = set(connection.execute(select(feedback.c.session_id).where(*judged)).scalars())
            rows = [dict(row._mapping) for row in connection.execute(wanted)]
            return [row | {"score": None} if row["session_id"] in others else row for row in rows]

        return await self.db.read(read)

    async def unsettled_since(self) -> float:
        """Return when the first session ended of which feedback is still taken, in Unix seconds; infinity: there is
        none.
        """
        first = select(sa.func.min(sessions.c.ended_at)).where(sessions.c.state == SessionState.ENDED.value)
        found = await self.db.read(lambda connection: connection.execute(first).scalar())
        return math.inf if found is None else float(found)

    async def consenting(self, policy: str, after: float) -> list[Mapping[str, Any]]:
        """Return the recorded sessions that a policy has served and that ended after a time, in order of their ends;
        all are done.
        """
        mine = (sessions.c.state == SessionState.DONE.value, sessions.c.train == 1, sessions.c.policy == policy)
        recorded = sessions.c.episode_id.is_not(None)
        wanted = select(sessions).where(*mine, recorded, sessions.c.ended_at > after)
        return await self._rows(wanted.order_by(sessions.c.ended_at))


def _row(connection: Connection, session_id: str) -> Mapping[str, Any] | None:
    found = connection.execute(select(sessions).where(sessions.c.session_id == session_id)).first()
    return None if found is None else dict(found._mapping)


def _feedback(connection: Connection, session_id: str) -> list[Any]:
    wanted = select(feedback).where(feedback.c.session_id == session_id).order_by(feedback.c.number)
    return list(connection.execute(wanted))
