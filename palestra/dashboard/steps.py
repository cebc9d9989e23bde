"""A step with its groups, a group with its episodes side by side, the slowest calls, and searches for episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, select

from palestra.config import JobConfig
from palestra.dashboard.answers import (
    EpisodesAnswer,
    EventsAnswer,
    GroupAnswer,
    GroupLine,
    GroupMember,
    SlowCall,
    SlowCallsAnswer,
    StepAnswer,
)
from palestra.dashboard.credit import Credit, batch_group, credits_of_group, readable_manifest
from palestra.dashboard.fate import Fate, episode_fates, whole_fate
from palestra.dashboard.runs import DAMAGED, Run
from palestra.errors import InvalidRequest, NotFound
from palestra.store.browsing import (
    EpisodeView,
    episode_events,
    last_of_states,
    read_episode,
    trained_steps,
)
from palestra.store.counting import KINDS
from palestra.store.run_log import event_of, object_of, readable_row
from palestra.store.search import EpisodeFilter, Place, readable_summaries, search_episodes
from palestra.store.tables import chats, episodes, events, groups
from palestra.types.calls import Chat
from palestra.types.records import RunEvent, Trajectory
from palestra.types.states import EpisodeState
from palestra.types.summaries import EpisodeSummary

ROW_DAMAGED = "the metrics of step {} can't be read, because their record is damaged"
STEP_DAMAGED = "the step of the group can't be read, because its record is damaged"
MOST_TEXT = 20_000  # characters of a message, or bytes of a task or of metadata; more would stop a browser
EXCERPT = 400  # characters of a task or a message beside others
REPLY = 1200  # characters of a reply beside others
LEFT_OUT = (
    "episode_untrainable",
    "episode_stale",
    "group_dropped",
    "group_skipped",
    "warning",
)  # kinds of events of a step


def find_episodes(run: Run, wanted: EpisodeFilter, before: str | None, limit: int) -> EpisodesAnswer:
    """Return a page of matching episodes, newest first."""
    place = None
    if before is not None:
        parts = before.split("-")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
            raise InvalidRequest(f"before is {before!r}; it is `following` of the page before", "before")
        place = Place(int(parts[0]), int(parts[1]))
    with run.open() as connection:
        page = search_episodes(connection, wanted, place, limit)
        steps = trained_steps(connection, page.episodes)
    return EpisodesAnswer(
        run=run.name,
        episodes=page.episodes,
        trained_in=steps,
        following=None if page.following is None else f"{page.following[0]}-{page.following[1]}",
        looked_at=page.looked_at,
    )


def read_events_before(run: Run, before: int | None, limit: int, kind: str | None = None) -> EventsAnswer:
    """Return a page of a run's events, newest first. `kind`: of these alone; None: all."""
    wanted = select(events).order_by(events.c.event_id.desc()).limit(limit)
    if kind is not None:
        wanted = wanted.where(events.c.kind == kind)
    if before is not None:
        wanted = wanted.where(events.c.event_id < before)
    with run.open() as connection:
        found = [event_of(row) for row in connection.execute(wanted)]
    return EventsAnswer(run=run.name, events=found, before=found[-1].event_id if len(found) == limit else None)


def ends_of_events(run: Run) -> tuple[float | None, int]:
    """Return the time of a run's first event, and the number of the newest; None and 0 without events."""
    by_number = select(events.c.event_id, events.c.at)
    with run.open() as connection:
        first = connection.execute(by_number.order_by(events.c.event_id).limit(1)).first()
        newest = connection.execute(by_number.order_by(events.c.event_id.desc()).limit(1)).first()
    return None if first is None else first.at, 0 if newest is None else newest.event_id


def read_step(run: Run, step: int) -> StepAnswer:
    """Return a step: its metrics, its groups, and left-out episodes; step 0 is the evaluation before the first."""
    steps = run.config.steps
    with run.open() as connection:
        rows, damaged = readable_row(connection, step)
        row = rows[0] if rows else {}
        manifest = readable_manifest(connection, step)
        found = _groups(connection, "train", step)
        if not row and manifest is None and not found and not 0 <= step <= steps:
            raise NotFound(f"the run {run.name} has no step {step}")
        left_out = select(events).where(events.c.step == step, events.c.kind.in_(LEFT_OUT)).order_by(events.c.event_id)
        return StepAnswer(
            run=run.name,
            step=step,
            steps=steps,
            row=row,
            versions={} if manifest is None else {name: str(version) for name, version in manifest.versions.items()},
            batch=[] if manifest is None else list(manifest.episode_ids),
            groups=found,
            validation=_groups(connection, "validation", step),
            events=[
                *map(_row_damaged, damaged),
                *map(event_of, connection.execute(left_out)),
            ],
        )


def _groups(connection: Connection, kind: str, step: int) -> list[GroupLine]:
    """Return the groups of a step with their episodes, by three queries."""
    records = connection.execute(
        select(groups).where(groups.c.kind == kind, groups.c.step == step).order_by(groups.c.group_index)
    ).all()
    if not records:
        return []
    members: dict[int, list[Any]] = {record.group_index: [] for record in records}
    wanted = select(episodes).where(
        episodes.c.kind == kind, episodes.c.group_index.between(records[0].group_index, records[-1].group_index)
    )
    for row in connection.execute(wanted.order_by(episodes.c.group_index, episodes.c.sample_index)):
        if row.group_index in members:
            members[row.group_index].append(row)
    found = readable_summaries(connection, [row for rows in members.values() for row in rows])
    lines = {line.episode_id: line for line in found}
    return [
        GroupLine(
            kind=record.kind,
            group_index=record.group_index,
            task_id=record.task_id,
            task=_excerpt(members[record.group_index][0].task_data) if members[record.group_index] else "",
            state=record.state,
            episodes=[lines[row.episode_id] for row in members[record.group_index]],
        )
        for record in records
    ]


def read_group(run: Run, kind: str, group_index: int) -> GroupAnswer:
    """Return the episodes of one task."""
    config = run.config
    with run.open() as connection:
        record = connection.execute(
            select(groups).where(groups.c.kind == kind, groups.c.group_index == group_index)
        ).first()
        of_group = select(episodes).where(episodes.c.kind == kind, episodes.c.group_index == group_index)
        rows = connection.execute(of_group.order_by(episodes.c.sample_index)).all()
        if not rows:
            raise NotFound(f"the run {run.name} has no group {group_index} of kind {kind}")
        step = None if record is None or not isinstance(record.step, int) else record.step
        manifest = None if step is None or kind != "train" else readable_manifest(connection, step)
        group = batch_group(connection, manifest, group_index)
        credits = credits_of_group(connection, config, manifest, group)
        lines = readable_summaries(connection, rows)
        task, task_cut = fitting(object_of(rows[0].task_data), MOST_TEXT)
        return GroupAnswer(
            run=run.name,
            kind=kind,
            group_index=group_index,
            step=step or 0,
            task_id=rows[0].task_id,
            task=task,
            task_cut=task_cut,
            state="" if record is None else record.state,
            members=[_member(connection, config, line, group, credits) for line in lines],
            notes=[
                *([STEP_DAMAGED] if record is not None and step is None else []),
                *dict.fromkeys(note for credit in credits.values() for note in credit.notes),
            ],
        )


def _row_damaged(step: int) -> RunEvent:
    """Return the warning that the row of a step cannot be read."""
    return RunEvent(event_id=0, at=0.0, kind="warning", data={"step": step, "text": ROW_DAMAGED.format(step)})


def _member(
    connection: Connection,
    config: JobConfig,
    line: EpisodeSummary,
    group: Sequence[Trajectory] | None,
    credits: Mapping[str, Credit],
) -> GroupMember:
    try:
        if line.damaged is not None:
            return GroupMember(line=line, trained=False, why=f"its record can't be read: {line.damaged}")
        known = next((one for one in group or () if one.episode.episode_id == line.episode_id), None)
        view = read_episode(connection, line.episode_id, known)
        fate = whole_fate(episode_fates(view, config, group, episode_events(connection, view)))
        return _member_of(line, view, fate, credits)
    except DAMAGED as error:
        why = f"{type(error).__name__}: {error}"[:200]
        damaged = line.model_copy(update={"damaged": why})
        return GroupMember(line=damaged, trained=False, why=f"its calls can't be read: {why}")


def _member_of(line: EpisodeSummary, view: EpisodeView, fate: Fate, credits: Mapping[str, Credit]) -> GroupMember:
    chats = view.trajectory.chats
    values = [v for credit in credits.values() for v in credit.advantages.get(line.episode_id, {}).values()]
    flat = np.concatenate(values) if values else np.empty(0, np.float32)
    known = flat[~np.isnan(flat)]
    weights = {w for credit in credits.values() if (w := credit.weights.get(line.episode_id)) is not None}
    advantage = (float(known.min()), float(known.max())) if len(known) else None
    if advantage is None and not fate.trained and any(credit.weights for credit in credits.values()):
        advantage = (0.0, 0.0)
    return GroupMember(
        line=line,
        trained=fate.trained,
        why=fate.why,
        advantage=advantage,
        weight=weights.pop() if len(weights) == 1 else None,
        mean_logprob=mean_logprob(chats),
        prompt=_end(chats[0].messages[-1].text if chats and chats[0].messages else "", EXCERPT),
        reply=_said(chats[-1])[:REPLY] if chats else "",
        seconds=max(chat.finished_at for chat in chats) - min(chat.started_at for chat in chats) if chats else None,
    )


def mean_logprob(chats: Iterable[Chat]) -> float | None:
    """Return the mean logprob of all tokens sampled by calls; None without tokens."""
    values = [chat.logprobs for chat in chats if len(chat.logprobs)]
    return float(np.concatenate(values).mean()) if values else None


def _said(chat: Chat) -> str:
    """Return a reply as one text: reasoning, content and tool calls."""
    reply = chat.reply
    parts = [reply.reasoning_content or "", reply.text]
    parts += [f"→ {call.function.name}({call.function.arguments})" for call in reply.tool_calls]
    return "\n".join(part for part in parts if part)


def _end(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[1 - length :]


def _excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def fitting(data: Mapping[str, Any], most: int) -> tuple[dict[str, Any], int]:
    """Return the values that fit into `most` bytes of JSON, and the bytes of the others."""
    kept, left = dict[str, Any](), most
    sizes = {name: len(orjson.dumps({name: value}, option=orjson.OPT_NON_STR_KEYS)) for name, value in data.items()}
    for name, value in data.items():
        if sizes[name] <= left:
            kept[name], left = value, left - sizes[name]
    return kept, sum(size for name, size in sizes.items() if name not in kept)


SLOWEST, LOOKED_AT = 5, 200  # calls, and the newest episodes whose calls are looked at


def read_slow_calls(run: Run) -> SlowCallsAnswer:
    """Return the slowest calls of the newest episodes of a run, slowest first, without damaged ones."""
    states = [state for state in EpisodeState if state is not EpisodeState.REGISTERED]
    columns = (episodes.c.episode_id, episodes.c.claimed_at)
    seconds = (chats.c.finished_at - chats.c.started_at).label("seconds")
    found = select(chats.c.episode_id, chats.c.idx, chats.c.agent, chats.c.finished_at, seconds)
    with run.open() as connection:
        newest = last_of_states(connection, KINDS, states, LOOKED_AT, *columns)
        names = [row.episode_id for row in nlargest(LOOKED_AT, newest, key=lambda row: row.claimed_at or 0.0)]
        slowest = found.where(chats.c.episode_id.in_(names)).order_by(seconds.desc()).limit(SLOWEST)
        calls = [one for row in connection.execute(slowest) if (one := _readable(row)) is not None]
    return SlowCallsAnswer(run=run.name, calls=calls)


def _readable(row: Any) -> SlowCall | None:
    """Return a call; None: its record is damaged."""
    try:
        return SlowCall(
            episode_id=row.episode_id, call=row.idx, agent=row.agent, seconds=row.seconds, ended=row.finished_at
        )
    except ValueError:
        return None
