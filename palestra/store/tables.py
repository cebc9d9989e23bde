"""The tables of the run store."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Column, Float, Index, Integer, LargeBinary, String, Table, Text

from palestra.database import Schema

metadata = sa.MetaData()

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

tasks = Table(
    "tasks",
    metadata,
    Column("place", Integer, primary_key=True),  # position in the split, after `SPLIT` times the split's number
    Column("split", String, nullable=False),
    Column("task_id", String, nullable=False),
    Column("data", Text, nullable=False),
    Index("tasks_by_id", "split", "task_id", unique=True),
)

task_chunks = Table(
    "task_chunks",
    metadata,
    Column("split", String, primary_key=True),
    Column("chunk_id", String, primary_key=True),
    Column("digest", String, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("kind", String, primary_key=True),
    Column("group_index", Integer, primary_key=True),
    Column("step", Integer, nullable=False),
    Column("task_id", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("state", String, nullable=False),
    Index("groups_by_step", "kind", "step", "group_index"),
)

episodes = Table(
    "episodes",
    metadata,
    Column("episode_id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("group_index", Integer, nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("task_id", String, nullable=False),
    Column("task_data", Text, nullable=False),
    Column("state", String, nullable=False),
    Column("fence", Integer, nullable=False, default=0),
    Column("attempts", Integer, nullable=False, default=0),
    Column("lease_seconds", Float, nullable=False, default=0.0),
    Column("worker_id", String),
    Column("claim_request_id", String, unique=True),
    Column("rewards", Text),
    Column("step_rewards", Text),
    Column("named_rewards", Text),  # {name: reward or null}; NULL: there are none
    Column("agent_step_rewards", Text),  # [[TimeStep, agent, reward], …]; NULL: not known, or not needed
    Column("step_times", Text),  # [[observed, acted or null], …]; NULL: not known
    Column("players", Text),  # {role: policy or past version} of roles with a pool; NULL: there are none
    Column("metadata", Text, nullable=False, default="{}"),  # the worker's own; never read for training
    Column("facts", Text),  # what training and lists read of how it was played; NULL: nothing is known
    Column("end_digest", String),
    Column("reason", Text),
    Column("claimed_at", Float),
    Column("ended_at", Float),
    Index("episodes_of_group", "kind", "group_index", "sample_index", unique=True),
    Index("episodes_by_state", "state", "kind", "group_index", "sample_index"),
)

chats = Table(
    "chats",
    metadata,
    Column("episode_id", String, primary_key=True),
    Column("fence", Integer, primary_key=True),
    Column("idx", Integer, primary_key=True),
    Column("time_step", Integer, nullable=False),
    Column("agent", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("parent", Integer),
    Column("shared", Integer, nullable=False),  # leading prompt ids taken from the parent, not stored again
    Column("shared_messages", Integer, nullable=False),  # leading messages taken from the parent, not stored again
    Column("messages", Text, nullable=False),  # the other messages, JSON
    Column("tools", Text),  # JSON; NULL: the parent's, or none
    Column("media", Text),  # [[start, tokens, digest], …] in the tail; NULL: none
    Column("reply", Text, nullable=False),
    Column("prompt_tail", LargeBinary, nullable=False),  # the other prompt ids: zlib of int32
    Column("completion", LargeBinary, nullable=False),  # zlib of int32
    Column("logprobs", LargeBinary, nullable=False),  # zlib of float32
    Column("top_logprobs", LargeBinary),  # zlib of int32 ids, then of float32 logprobs; NULL: not requested
    Column("versions", Text, nullable=False),  # [[incarnation, n, count], …]
    Column("finish_reason", String, nullable=False),
    Column("stop", Text),  # the stop string that ended it; NULL: none
    Column("fork", Text),  # [reason, call, message, position]; NULL: none
    Column("temperature", Float, nullable=False),
    Column("max_tokens", Integer, nullable=False),
    Column("sampling", Text),  # other parameters that differ from their defaults, a JSON object; NULL: none
    Column("seed", String, nullable=False),  # up to 64 bits unsigned, which is too large for SQLite's integers
    Column("request_digest", String, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float, nullable=False),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("kind", String, primary_key=True),
    Column("group_index", Integer, primary_key=True),
    Column("members", Text, primary_key=True),  # [[episode, fence], …] of the episodes that were judged together
    Column("rubric", String, primary_key=True),  # digest of what was asked
    Column("judge", String, primary_key=True),  # who was asked
    Column("ordering", Integer, primary_key=True),  # of the members, where a judge is asked in several
    Column("scores", Text, nullable=False),  # {episode: {name: number}}
    Column("reasons", Text, nullable=False),  # {episode: {name: text}}
    Column("calls", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("at", Float, nullable=False),
)

spending = Table(
    "spending",
    metadata,
    Column("episode_id", String, primary_key=True),  # empty: the sum of all, with those of no episode
    Column("kind", String, primary_key=True),  # of the episode, or `judge`, `audit`, `teacher`
    Column("payee", String, primary_key=True),  # the policy, or a server as `palestra.config.budget` names it
    Column("calls", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("reply_tokens", Integer, nullable=False),
    sqlite_with_rowid=False,
)

manifests = Table(
    "manifests",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("episode_ids", Text, nullable=False),
    Column("seed", String, nullable=False),
    Column("config_digest", String, nullable=False),
    Column("versions", Text, nullable=False),  # {policy: [incarnation, n]} of those that are trained
)

trained_tokens = Table(
    "trained_tokens",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("episode_id", String, primary_key=True),
    Column("idx", Integer, primary_key=True),  # of the call
    Column("start", Integer, nullable=False),  # place of the first value, from the beginning of the call's prompt
    Column("logprobs", LargeBinary, nullable=False),  # when trained: zlib of float32, NaN where a token was not
    sqlite_with_rowid=False,
)

metric_rows = Table(
    "metric_rows", metadata, Column("step", Integer, primary_key=True), Column("data", Text, nullable=False)
)

events = Table(
    "events",
    metadata,
    Column("event_id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("kind", String, nullable=False),
    Column("step", Integer),  # that `data` names; NULL: none
    Column("data", Text, nullable=False),
    Index("events_by_kind", "kind"),
    Index("events_by_step", "step", "kind"),
)

SCHEMA = Schema(store="run store", metadata=metadata)
# Joins groups and their episodes.
OF_GROUP = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
# Joins episodes and the calls of their last lease.
OF_LAST_LEASE = (episodes.c.episode_id == chats.c.episode_id) & (episodes.c.fence == chats.c.fence)
