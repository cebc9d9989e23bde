"""Search the episodes of a run store, newest first, in pages, within a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, func, or_, select, tuple_

from palestra.database.sqlite import MOST_VALUES
from palestra.store.browsing import calls_of, summary
from palestra.store.run_store import UNREADABLE
from palestra.store.tables import OF_LAST_LEASE, chats, episodes, groups
from palestra.types.records import EpisodeKind
from palestra.types.states import EpisodeState
from palestra.types.summaries import EpisodeSummary

SEARCH_SECONDS = 0.4  # a page that is not full by then is given as it is, with the place to go on from


class Place(NamedTuple):
    """The position of an episode in the canonical order of its kind."""

    group_index: int
    sample_index: int


Count = Annotated[int | None, Field(ge=0, le=2**53)]
Bound = Annotated[float | None, Field(allow_inf_nan=False)]
Words = Annotated[str | None, AfterValidator(lambda words: words or None)]  # an empty field of a form is none


class EpisodeFilter(BaseModel):
    """The conditions of a search; None allows any value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: EpisodeKind = "train"
    state: EpisodeState | None = None
    step: Count = None  # that trains them or, for validation, before which they are scored
    group: Count = None
    least_reward: Bound = None  # excludes episodes without a reward, as does `most_reward`
    most_reward: Bound = None
    least_tokens: Count = None  # sampled by their calls, as is `most_tokens`
    most_tokens: Count = None
    termination: Words = Field(None, max_length=200)
    text: Words = Field(None, max_length=500)  # in task, messages, replies or metadata; ASCII case is ignored
    tool: Words = Field(None, max_length=200)
    forked: bool | None = None  # whether a call lost exact tokens of an earlier one

    def accepts(self, found: EpisodeSummary) -> bool:
        """Return whether an episode meets the conditions on its summary, without texts."""
        reward = found.reward
        return (
            _between(reward, self.least_reward, self.most_reward)
            and _between(found.tokens, self.least_tokens, self.most_tokens)
            and self.termination in (None, found.termination)
            and self.forked in (None, bool(found.forks))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePage:
    """A page of search results.

    Attributes:
        episodes: matches, newest first; damaged episodes always match.
        following: start of the next page; None: the last page.
        looked_at: number of episodes examined for this page.
    """

    episodes: list[EpisodeSummary]
    following: Place | None
    looked_at: int


def search_episodes(
    connection: Connection,
    wanted: EpisodeFilter,
    before: Place | None = None,
    limit: int = 50,
    clock: Callable[[], float] = time.monotonic,
) -> EpisodePage:
    """Return the next page of matching episodes, newest first. `before`: `following` of the previous page; None: the
    first page.
    """
    until, found, looked_at = clock() + SEARCH_SECONDS, list[EpisodeSummary](), 0
    size = max(limit, 50)
    while True:
        rows = connection.execute(_statement(wanted, before).limit(size)).all()
        accepted = _accepted(connection, rows, wanted)
        for row in rows:
            looked_at, before = looked_at + 1, Place(row.group_index, row.sample_index)
            if (one := accepted.get(row.episode_id)) is None:
                continue
            found.append(one)
            if len(found) == limit:
                return EpisodePage(episodes=found, following=before, looked_at=looked_at)
        if len(rows) < size:
            return EpisodePage(episodes=found, following=None, looked_at=looked_at)
        if clock() > until:
            return EpisodePage(episodes=found, following=before, looked_at=looked_at)
        size = min(size * 2, MOST_VALUES)


def readable_summaries(connection: Connection, rows: Sequence[Any]) -> list[EpisodeSummary]:
    """Return the summaries of rows of `episodes`, in order; of damaged rows only id and place, and `damaged`."""
    calls = calls_of(connection, [row.episode_id for row in rows])
    return [_readable(row, calls.get(row.episode_id, [])) for row in rows]


def _readable(row: Any, calls: Sequence[Any]) -> EpisodeSummary:
    try:
        return summary(row, calls)
    except (*UNREADABLE, TypeError, LookupError, AttributeError, OverflowError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return EpisodeSummary(
            episode_id=row.episode_id, group_index=row.group_index, sample_index=row.sample_index, damaged=why
        )


def _statement(wanted: EpisodeFilter, before: Place | None) -> Any:
    """Return the statement for the conditions on columns, newest first."""
    columns = episodes.c
    statement = select(episodes).where(columns.kind == wanted.kind)
    if before is not None:
        statement = statement.where(tuple_(columns.group_index, columns.sample_index) < tuple_(*before))
    if wanted.state is not None:
        statement = statement.where(columns.state == wanted.state)
    if wanted.group is not None:
        statement = statement.where(columns.group_index == wanted.group)
    if wanted.step is not None:
        of_step = select(groups.c.group_index).where(groups.c.kind == wanted.kind, groups.c.step == wanted.step)
        statement = statement.where(columns.group_index.in_(of_step))
    return statement.order_by(columns.group_index.desc(), columns.sample_index.desc())


def _accepted(connection: Connection, rows: Sequence[Any], wanted: EpisodeFilter) -> dict[str, EpisodeSummary]:
    """Return the matching rows, by id."""
    if wanted.text is not None or wanted.tool is not None:
        rows = _with_texts(connection, rows, wanted)
    found = readable_summaries(connection, rows)
    return {one.episode_id: one for one in found if one.damaged is not None or wanted.accepts(one)}


def _with_texts(connection: Connection, rows: Sequence[Any], wanted: EpisodeFilter) -> Sequence[Any]:
    """Return the rows that have the wanted text and tool."""
    names = [row.episode_id for row in rows]
    if wanted.tool is not None:
        named = f'"name":{orjson.dumps(wanted.tool).decode()}'
        called = _episodes_where(connection, names, _contains(chats.c.reply, named))
        rows = [row for row in rows if row.episode_id in called]
    if wanted.text is not None:
        inside = orjson.dumps(wanted.text).decode()[1:-1]  # as it stands in JSON
        either = or_(_contains(chats.c.reply, inside), _contains(chats.c.messages, inside))
        said = _episodes_where(connection, names, either)
        lower = inside.lower()
        rows = [row for row in rows if row.episode_id in said or _in_row(row, lower)]
    return rows


def _in_row(row: Any, text: str) -> bool:
    columns = (row.episode_id, row.task_id, row.task_data, row.metadata, row.facts, row.reason)
    return any(text in str(column).lower() for column in columns if column is not None)


def _episodes_where(connection: Connection, names: Sequence[str], condition: Any) -> set[str]:
    """Return the episodes with a call of their last lease that meets the condition."""
    found: set[str] = set()
    for start in range(0, len(names), MOST_VALUES):
        found |= set(
            connection.execute(
                select(chats.c.episode_id)
                .distinct()
                .join(episodes, OF_LAST_LEASE)
                .where(chats.c.episode_id.in_(names[start : start + MOST_VALUES]), condition)
            ).scalars()
        )
    return found


def _contains(column: Any, text: str) -> Any:
    """Return the condition that a column contains a text; upper and lower case of ASCII are the same."""
    # LIKE would take a second for each megabyte of "aaa…" in which "aaa…b" is searched, and can't be interrupted.
    lower = text.encode().lower().decode()  # of ASCII alone, as SQLite's lower()
    return func.instr(func.lower(column), lower) > 0


def _between(value: float | None, least: float | None, most: float | None) -> bool:
    if least is None and most is None:
        return True
    return value is not None and (least is None or value >= least) and (most is None or value <= most)
