"""Rows to records: token arrays as compressed binary, JSON for the rest."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat, Episode, PolicyVersion, Sampling, Task, VersionSpan
from palestra.schemas.states import EpisodeState


def pack(array: NDArray[Any], kind: str) -> bytes:
    """Little-endian int32 (`i4`) or float32 (`f4`), compressed."""
    return zlib.compress(np.ascontiguousarray(array, dtype=f"<{kind}").tobytes(), level=1)


def unpack(blob: bytes, kind: str) -> NDArray[Any]:
    """The array that `pack` was given, bit by bit."""
    return np.frombuffer(zlib.decompress(blob), dtype=f"<{kind}")


def to_json(value: Any) -> str:
    """Compact JSON. NaN and infinities are refused where the value comes in, not here."""
    return orjson.dumps(value).decode()


def episode_of(row: Any) -> Episode:
    """A row of `episodes`."""
    return Episode(
        episode_id=row.episode_id,
        kind=row.kind,
        group_index=row.group_index,
        sample_index=row.sample_index,
        task=Task(task_id=row.task_id, data=orjson.loads(row.task_data)),
        state=EpisodeState(row.state),
        fence=row.fence,
        attempts=row.attempts,
        rewards=None if row.rewards is None else orjson.loads(row.rewards),
        step_rewards=None if row.step_rewards is None else tuple(orjson.loads(row.step_rewards)),
        metadata=orjson.loads(row.metadata),
        worker_id=row.worker_id,
        lease_seconds=row.lease_seconds,
    )


def chat_row(chat: Chat) -> dict[str, Any]:
    """A row of `chats`: only what the parent does not have already."""
    own = chat.messages[chat.shared_messages :]
    return {
        "episode_id": chat.episode_id,
        "fence": chat.fence,
        "idx": chat.index,
        "time_step": chat.time_step,
        "agent": chat.agent,
        "policy": chat.policy,
        "parent": chat.parent,
        "shared": chat.shared,
        "shared_messages": chat.shared_messages,
        "messages": "[" + ",".join(m.model_dump_json(exclude_none=True) for m in own) + "]",
        "reply": chat.reply.model_dump_json(exclude_none=True),
        "prompt_tail": pack(chat.prompt_ids[chat.shared :], "i4"),
        "completion": pack(chat.completion_ids, "i4"),
        "logprobs": pack(chat.logprobs, "f4"),
        "versions": json.dumps([[*span.version, span.tokens] for span in chat.versions]),
        "finish_reason": chat.finish_reason,
        "temperature": chat.sampling.temperature,
        "max_tokens": chat.sampling.max_tokens,
        "seed": str(chat.sampling.seed),
        "request_digest": chat.request_digest,
        "started_at": chat.started_at,
        "finished_at": chat.finished_at,
    }


def chat_of(row: Any, earlier: dict[int, Chat]) -> Chat:
    """A row of `chats`, put together again with its parent, which must be in `earlier` (by index)."""
    messages = tuple(ChatMessage.model_validate(m) for m in orjson.loads(row.messages))
    prompt_ids = unpack(row.prompt_tail, "i4")
    if row.parent is not None:
        parent = earlier[row.parent]
        history = np.concatenate((parent.prompt_ids, parent.completion_ids))
        prompt_ids = np.concatenate((history[: row.shared], prompt_ids))
        messages = ((*parent.messages, parent.reply)[: row.shared_messages]) + messages
    return Chat(
        episode_id=row.episode_id,
        fence=row.fence,
        index=row.idx,
        time_step=row.time_step,
        agent=row.agent,
        policy=row.policy,
        messages=messages,
        reply=ChatMessage.model_validate_json(row.reply),
        prompt_ids=prompt_ids,
        completion_ids=unpack(row.completion, "i4"),
        logprobs=unpack(row.logprobs, "f4"),
        versions=tuple(VersionSpan(PolicyVersion(i, n), count) for i, n, count in orjson.loads(row.versions)),
        finish_reason=row.finish_reason,
        parent=row.parent,
        shared=row.shared,
        shared_messages=row.shared_messages,
        sampling=Sampling(temperature=row.temperature, max_tokens=row.max_tokens, seed=int(row.seed)),
        request_digest=row.request_digest,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
