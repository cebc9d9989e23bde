"""The verdicts of a job's judge, and the episodes that wait for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, select
from sqlalchemy.dialects.sqlite import insert

from palestra.database import Database, to_json
from palestra.database.sqlite import Prepared
from palestra.errors import JudgeFailed
from palestra.store.codec import episode_of
from palestra.store.tables import OF_GROUP, episodes, groups, verdicts
from palestra.types.clock import Clock
from palestra.types.records import AUDIT, EpisodeKind, EpisodeRecord, Verdict, VerdictKey
from palestra.types.states import EpisodeState

UNJUDGED, COMPLETED = EpisodeState.UNJUDGED.value, EpisodeState.COMPLETED.value
_KNOWN = Prepared(
    select(verdicts).where(*(column == sa.bindparam(column.name) for column in verdicts.primary_key.columns))
)
_RECORD = Prepared(
    insert(verdicts)
    .values({column.name: sa.bindparam(column.name) for column in verdicts.columns})
    .on_conflict_do_nothing()
)
_VALIDATED = (
    select(episodes)
    .join(groups, OF_GROUP)
    .where(groups.c.kind == "validation", groups.c.step == sa.bindparam("step"))
    .where(groups.c.task_id == sa.bindparam("task"), episodes.c.state == COMPLETED)
)
_UNPLAYED = (EpisodeState.REGISTERED.value, EpisodeState.CLAIMED.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingGroup:
    """A group with episodes that have to be judged.

    Attributes:
        waiting: episodes without a verdict, by sample index.
        judged: episodes of the group that have one already, since some were repeated.
        since: when the first of `waiting` ended, Unix seconds.
    """

    kind: EpisodeKind
    group_index: int
    step: int
    waiting: tuple[EpisodeRecord, ...]
    judged: tuple[EpisodeRecord, ...]
    unplayed: int
    since: float


class Verdicts:
    """Keeps each verdict once, so that a resumed job asks for none again. Its methods may run on any event loop."""

    def __init__(self, db: Database, clock: Clock, audit: bool = False) -> None:
        """Keep the verdicts of the job's judge, or with `audit` those of its audit, which are no rewards."""
        self._db, self._clock, self._audit = db, clock, audit
        is_audit = verdicts.c.judge.startswith(AUDIT)
        self._own = is_audit if audit else ~is_audit
        self.recorded = 0  # since the start

    def _columns(self, key: VerdictKey) -> dict[str, Any]:
        return {
            "kind": key.kind,
            "group_index": key.group_index,
            "members": to_json([list(member) for member in key.members]),
            "rubric": key.rubric,
            "judge": AUDIT + key.judge if self._audit else key.judge,
            "ordering": key.ordering,
        }

    async def known(self, key: VerdictKey) -> Verdict | None:
        """Return a verdict that was given before."""
        values = self._columns(key)

        def query(connection: Connection) -> Verdict | None:
            row = _KNOWN.row(connection, values)
            return None if row is None else _verdict(row)

        return await self._db.read(query)

    async def record(self, key: VerdictKey, verdict: Verdict) -> None:
        """Keep a verdict; returns when it is on disk. The first one of a key stays."""
        row = self._columns(key) | {
            "scores": to_json(verdict.scores),
            "reasons": to_json(verdict.reasons),
            "calls": verdict.calls,
            "tokens": verdict.tokens,
            "seconds": verdict.seconds,
            "at": self._clock.now(),
        }
        await self._db.write(lambda connection: _RECORD.change(connection, row), "verdict_commit")
        self.recorded += 1

    async def cost_of_step(self, kind: EpisodeKind, step: int) -> dict[str, float]:
        """Return what the verdicts of a step have cost: `verdicts`, `calls`, `tokens`, `seconds`."""
        same = (groups.c.kind == verdicts.c.kind) & (groups.c.group_index == verdicts.c.group_index)
        sums = [func.coalesce(func.sum(verdicts.c[name]), 0).label(name) for name in ("calls", "tokens", "seconds")]
        wanted = select(func.count().label("verdicts"), *sums).select_from(verdicts).join(groups, same)
        wanted = wanted.where(groups.c.kind == kind, groups.c.step == step, self._own)

        def query(connection: Connection) -> dict[str, float]:
            return {name: float(value) for name, value in connection.execute(wanted).one()._mapping.items()}

        return await self._db.read(query)

    async def waiting(self) -> list[WaitingGroup]:
        """Return the groups that have episodes without a verdict, in canonical order."""
        return await self._db.read(_waiting)

    async def first_validated(self, task_id: str, step: int) -> EpisodeRecord | None:
        """Return the episode of a task in the first validation of the run; None: it is that of this step.

        Raises:
            JudgeFailed: that episode was not completed, so that there is nothing to compare with.
        """
        first = select(groups.c.step).where(groups.c.kind == "validation").order_by(groups.c.group_index).limit(1)

        def query(connection: Connection) -> EpisodeRecord | None:
            if (beginning := connection.execute(first).scalar_one()) == step:
                return None
            found = connection.execute(_VALIDATED, {"step": beginning, "task": task_id}).first()
            if found is None:
                raise JudgeFailed(f"the task has no reply of version {beginning}, with which later ones are compared")
            return episode_of(found)

        return await self._db.read(query)


def verdicts_of(connection: Connection, episode: EpisodeRecord) -> list[Verdict]:
    """Return the verdicts on the last attempt of an episode, in their order; the audit's names begin with `audit/`."""
    wanted = select(verdicts).where(
        verdicts.c.kind == episode.kind,
        verdicts.c.group_index == episode.group_index,
        verdicts.c.members.contains(to_json([episode.episode_id, episode.fence])),
    )
    found = connection.execute(wanted.order_by(verdicts.c.at, verdicts.c.ordering))
    return [_verdict(row, "audit/" if row.judge.startswith(AUDIT) else "") for row in found]


def audit_scores(connection: Connection, step: int) -> dict[str, float]:
    """Return the mean of what the audit has scored of the training episodes of a step, by episode."""
    same = (groups.c.kind == verdicts.c.kind) & (groups.c.group_index == verdicts.c.group_index)
    wanted = select(verdicts.c.scores).join(groups, same).where(groups.c.kind == "train", groups.c.step == step)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for scores in connection.execute(wanted.where(verdicts.c.judge.startswith(AUDIT))).scalars():
        for episode, named in orjson.loads(scores).items():
            found[episode] += named.values()
    return {episode: sum(values) / len(values) for episode, values in found.items() if values}


def _verdict(row: Any, prefix: str = "") -> Verdict:
    """Return the verdict of a row, with a prefix before the names of its scores."""
    scores, reasons = (
        {
            episode: {prefix + name: value for name, value in named.items()}
            for episode, named in orjson.loads(of).items()
        }
        for of in (row.scores, row.reasons)
    )
    return Verdict(
        scores=scores,
        reasons=reasons,
        calls=row.calls,
        tokens=row.tokens,
        seconds=row.seconds,
    )


def _waiting(connection: Connection) -> list[WaitingGroup]:
    open_groups = select(episodes.c.kind, episodes.c.group_index).where(episodes.c.state == UNJUDGED).distinct()
    rows = connection.execute(
        select(episodes, groups.c.step)
        .join(groups, OF_GROUP)
        .where(sa.tuple_(episodes.c.kind, episodes.c.group_index).in_(open_groups))
        .order_by(episodes.c.kind.desc(), episodes.c.group_index, episodes.c.sample_index)
    )
    found: Mapping[tuple[EpisodeKind, int, int], list[Any]] = defaultdict(list)
    for row in rows:
        found[row.kind, row.group_index, row.step].append(row)
    return [_group(*place, members) for place, members in found.items()]


def _group(kind: EpisodeKind, group_index: int, step: int, rows: Sequence[Any]) -> WaitingGroup:
    return WaitingGroup(
        kind=kind,
        group_index=group_index,
        step=step,
        waiting=tuple(episode_of(row) for row in rows if row.state == UNJUDGED),
        judged=tuple(episode_of(row) for row in rows if row.state == COMPLETED),
        unplayed=sum(row.state in _UNPLAYED for row in rows),
        since=min(row.ended_at for row in rows if row.state == UNJUDGED),
    )
