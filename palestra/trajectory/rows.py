"""Calls to rows: a call that goes on where another ended extends its row; every sampled token stands once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.schemas.records import Chat, Floats, Ids, Mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRow:
    """One prompt + completion that the engine saw, from its first token to its last."""

    policy: str
    agent: str
    ids: Ids  # [N]
    sampled: Mask  # [N], True where the token was sampled by a call of this row
    logprobs: Floats  # [N], NaN where not sampled
    versions: NDArray[np.int32]  # [N, 2] (incarnation, n); -1 where not sampled
    temperature: float


def rows_of(chats: Sequence[Chat]) -> list[TokenRow]:
    """All calls of one episode as rows, in the order in which the rows began.

    Only ids decide: a call extends a row if its prompt starts with exactly the ids with which the row ends. Where a
    call goes on from the middle of a row, or from one that was extended already, a new row begins, and what the
    older row had sampled is context there, not trained again.
    """
    rows: list[list[Chat]] = []
    ending_with: dict[int, list[Chat]] = {}  # index of a row's last call -> that row
    for chat in sorted(chats, key=lambda c: c.index):
        row = ending_with.pop(chat.parent, None) if chat.parent is not None else None
        if row is None or not _continues(row[-1], chat):
            if row is not None:
                ending_with[row[-1].index] = row
            row = []
            rows.append(row)
        row.append(chat)
        ending_with[chat.index] = row
    return [_row(calls) for calls in rows]


def _continues(last: Chat, chat: Chat) -> bool:
    same_kind = (last.policy, last.agent, last.sampling.temperature) == (
        chat.policy,
        chat.agent,
        chat.sampling.temperature,
    )
    return same_kind and chat.shared == len(last.prompt_ids) + len(last.completion_ids)


def _row(calls: Sequence[Chat]) -> TokenRow:
    """Calls of which each starts with all that came before it."""
    length = len(calls[-1].prompt_ids) + len(calls[-1].completion_ids)
    sampled = np.zeros(length, np.bool_)
    logprobs = np.full(length, np.nan, np.float32)
    versions = np.full((length, 2), -1, np.int32)
    for chat in calls:
        start = len(chat.prompt_ids)
        stop = start + len(chat.completion_ids)
        sampled[start:stop] = True
        logprobs[start:stop] = chat.logprobs
        versions[start:stop] = np.repeat(
            np.array([span.version for span in chat.versions], np.int32),
            [span.tokens for span in chat.versions],
            axis=0,
        )
    return TokenRow(
        policy=calls[-1].policy,
        agent=calls[-1].agent,
        ids=np.concatenate((calls[-1].prompt_ids, calls[-1].completion_ids)).astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        versions=versions,
        temperature=calls[-1].sampling.temperature,
    )
