"""Convert records to rows and back: token arrays as compressed binary, JSON for the rest."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import TypeAdapter

from palestra.database import to_json
from palestra.errors import InvalidRequest
from palestra.types.calls import (
    AgentStepReward,
    Chat,
    Fork,
    ForkReason,
    MediaSpan,
    PolicyVersion,
    SamplingParams,
    StepTimes,
    TopTokens,
    VersionSpan,
)
from palestra.types.messages import ChatMessage
from palestra.types.records import EpisodeEnd, EpisodeRecord, Task
from palestra.types.states import EpisodeState

SHORT = 4096  # bytes: 1,024 tokens
# Sampling parameters without a column of their own, and their defaults.
_OTHERS = {field.name: field.default for field in fields(SamplingParams) if field.default is not MISSING}
_others, _DEFAULTS = attrgetter(*_OTHERS), tuple(_OTHERS.values())
_BLOCK = struct.Struct("<3sHH")
_MESSAGES = TypeAdapter(tuple[ChatMessage, ...])
_encode = msgspec.json.Encoder().encode  # messages are without fields that have their defaults


def pack_array(array: NDArray[Any], kind: str) -> bytes:
    """Return an array as a zlib stream of little-endian numbers, uncompressed up to `SHORT` bytes. `array`: [n] token
    ids or logprobs. `kind`: `i4` for int32, `f4` for float32.
    """
    data = np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()
    if len(data) > SHORT:
        return zlib.compress(data, level=1)
    # One uncompressed block (RFC 1950 and 1951): `unpack` needs no second format, and the checksum detects a damaged
    # file. zlib.compress would take longer than all the rest of recording a call (0.1 ms for 300 tokens, for half of
    # the bytes). It also releases the interpreter's lock, and getting the lock back costs even more under load.
    return _BLOCK.pack(b"\x78\x01\x01", len(data), len(data) ^ 0xFFFF) + data + zlib.adler32(data).to_bytes(4, "big")


def unpack(blob: bytes, kind: str) -> NDArray[Any]:
    """Return the array [n] given to `pack_array`, bit for bit. Raises zlib.error if the stream is damaged."""
    return np.frombuffer(zlib.decompress(blob), dtype=f"<{kind}")


def rewards_to_json(rewards: Mapping[str, float | None] | Sequence[float]) -> str:
    """Return the rewards of an episode as JSON for a text column."""
    for place, value in rewards.items() if isinstance(rewards, Mapping) else enumerate(rewards):
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"the reward {place!r} is {value}; a reward is a finite number")
    return to_json(dict(rewards) if isinstance(rewards, Mapping) else list(rewards))


def end_columns(end: EpisodeEnd) -> dict[str, str | None]:
    """Return the columns of `episodes` for the result of an episode."""
    steps, named, earned, times = end.step_rewards, end.named_rewards, end.agent_step_rewards, end.step_times
    return {
        "rewards": rewards_to_json(end.rewards),
        "step_rewards": None if steps is None else rewards_to_json(steps),
        "named_rewards": None if named is None else rewards_to_json(named),
        "agent_step_rewards": None if earned is None else to_json([list(one) for one in earned]),
        "step_times": None if times is None else to_json([list(one) for one in times]),
        "metadata": to_json(dict(end.metadata)),
        "facts": to_json(dict(end.facts)) if end.facts else None,
    }


def episode_of(row: Any) -> EpisodeRecord:
    """Return the episode of a row of `episodes`."""
    facts = {} if row.facts is None else orjson.loads(row.facts)
    return EpisodeRecord(
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
        step_times=None if row.step_times is None else tuple(StepTimes(*t) for t in orjson.loads(row.step_times)),
        metadata=facts | orjson.loads(row.metadata),
        facts=facts,
        worker_id=row.worker_id,
        lease_seconds=row.lease_seconds,
        named_rewards=None if row.named_rewards is None else orjson.loads(row.named_rewards),
        agent_step_rewards=None
        if row.agent_step_rewards is None
        else tuple(AgentStepReward(*one) for one in orjson.loads(row.agent_step_rewards)),
        players={} if row.players is None else orjson.loads(row.players),
    )


def chat_row(chat: Chat) -> dict[str, Any]:
    """Return the row of `chats` for a call, without the parts shared with its parent."""
    tools = () if chat.parent is None else chat.parent.tools
    versions: list[tuple[int, ...]] = []
    for version, tokens in chat.versions:
        versions.append((*version, tokens))
    return {
        "episode_id": chat.episode_id,
        "fence": chat.fence,
        "idx": chat.index,
        "time_step": chat.time_step,
        "agent": chat.agent,
        "policy": chat.policy,
        "parent": None if chat.parent is None else chat.parent.index,
        "shared": chat.shared,
        "shared_messages": chat.shared_messages,
        "messages": _encode(chat.new_messages).decode(),
        "tools": None if chat.tools == tools else to_json(chat.tools),
        "media": to_json([list(span) for span in chat.media]) if chat.media else None,
        "reply": _encode(chat.reply).decode(),
        "prompt_tail": pack_array(chat.prompt_tail, "i4"),
        "completion": pack_array(chat.completion_ids, "i4"),
        "logprobs": pack_array(chat.logprobs, "f4"),
        "top_logprobs": None if chat.top is None else _packed_top(chat.top),
        "versions": _encode(versions).decode(),
        "finish_reason": chat.finish_reason,
        "fork": None if chat.fork is None else _fork_text(chat.fork),
        "stop": chat.stop,
        "temperature": chat.sampling.temperature,
        "max_tokens": chat.sampling.max_tokens,
        "sampling": None if _others(chat.sampling) == _DEFAULTS else _more_text(chat.sampling),
        "seed": str(chat.sampling.seed),
        "request_digest": chat.request_digest,
        "started_at": chat.started_at,
        "finished_at": chat.finished_at,
    }


def chat_of(row: Any, earlier: dict[int, Chat]) -> Chat:
    """Return the call of a row of `chats`, linked to its parent. `earlier`: the earlier calls of the same lease by
    index, including the parent.
    """
    parent = None if row.parent is None else earlier[row.parent]
    inherited = () if parent is None else parent.tools
    completion = unpack(row.completion, "i4")
    return Chat(
        episode_id=row.episode_id,
        fence=row.fence,
        index=row.idx,
        time_step=row.time_step,
        agent=_text(row.agent),
        policy=_text(row.policy),
        parent=parent,
        shared=row.shared,
        shared_messages=row.shared_messages,
        new_messages=_MESSAGES.validate_json(row.messages),
        prompt_tail=unpack(row.prompt_tail, "i4"),
        media=tuple(MediaSpan(*span) for span in orjson.loads(row.media)) if row.media else (),
        tools=inherited if row.tools is None else tuple(orjson.loads(row.tools)),
        reply=ChatMessage.model_validate_json(row.reply),
        completion_ids=completion,
        logprobs=unpack(row.logprobs, "f4"),
        top=None if row.top_logprobs is None else _top_of(row.top_logprobs, len(completion)),
        versions=tuple(VersionSpan(PolicyVersion(i, n), count) for i, n, count in orjson.loads(row.versions)),
        finish_reason=row.finish_reason,
        fork=None if row.fork is None else fork_of(row.fork),
        stop=row.stop,
        sampling=SamplingParams(
            temperature=row.temperature, max_tokens=row.max_tokens, seed=int(row.seed), **_more(row.sampling)
        ),
        request_digest=row.request_digest,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def _text(value: Any) -> str:
    """Return a text of a row; SQLite may have anything in a column of texts."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _packed_top(top: TopTokens) -> bytes:
    return pack_array(np.concatenate([top.ids, top.logprobs.view(np.int32)]), "i4")


def _top_of(blob: bytes, tokens: int) -> TopTokens:
    ids, logprobs = unpack(blob, "i4").reshape(2, tokens, -1)
    return TopTokens(ids, logprobs.view(np.float32))


def _more_text(sampling: SamplingParams) -> str:
    """Return the non-default parameters without their own columns as JSON."""
    values = zip(_OTHERS, _others(sampling), strict=True)
    return to_json({name: value for name, value in values if value != _OTHERS[name]})


def _more(text: str | None) -> dict[str, Any]:
    """Return the parameters of a `_more_text` text, with lists as tuples, as in `SamplingParams`."""
    more: dict[str, Any] = {} if text is None else orjson.loads(text)
    return more | {
        name: tuple(tuple(v) if isinstance(v, list) else v for v in value)
        for name, value in more.items()
        if isinstance(value, list)
    }


def _fork_text(fork: Fork) -> str:
    """Return a fork as a JSON list, for the column `chats.fork`."""
    return to_json([fork.reason, fork.call, fork.message, fork.position])


def fork_of(text: str) -> Fork:
    """Return the fork of the column `chats.fork`."""
    reason, call, message, position = orjson.loads(text)
    return Fork(reason=ForkReason(reason), call=call, message=message, position=position)
