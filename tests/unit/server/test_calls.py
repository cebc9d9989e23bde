"""Several calls of one request: how they are started, and what one that fails means for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from palestra.errors import ContextOverflow
from palestra.server.respond import sample_calls
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest
from unit.building import make_chat

CALLS = [GenerationRequest(policy="policy", prompt=str(number)) for number in range(128)]


class Session:
    """Answers calls; the one with the prompt `bad` fails in its first step."""

    def __init__(self, bad: str | None = None) -> None:
        self.bad = bad
        self.started: list[Any] = []
        self.finished = 0

    async def generate(self, call: GenerationRequest, listener: object) -> tuple[Chat, ...]:
        self.started.append(call.prompt)
        if call.prompt == self.bad:
            raise ContextOverflow(2, 1)
        await asyncio.sleep(0)
        self.finished += 1
        return (make_chat(index=int(str(call.prompt))),)


async def ticks(seen: list[int], session: Session) -> None:
    """Note how many calls were started at each turn of the event loop."""
    while True:
        seen.append(len(session.started))
        await asyncio.sleep(0)


def jumps(seen: Sequence[int]) -> int:
    return max(later - earlier for earlier, later in pairwise(seen))


async def test_others_are_served_between_the_starts_of_two_calls_and_answers_are_in_order():
    session, seen = Session(), [0]
    ticking = asyncio.create_task(ticks(seen, session))
    chats = await sample_calls(session, CALLS, None)  # type: ignore[arg-type]
    ticking.cancel()
    assert [chat.index for chat in chats] == list(range(128))
    assert jumps(seen) <= 2


async def test_after_a_call_has_failed_no_other_is_started():
    session = Session(bad="3")
    with pytest.raises(ContextOverflow):
        await sample_calls(session, CALLS, None)  # type: ignore[arg-type]
    assert session.started[:4] == ["0", "1", "2", "3"]
    assert len(session.started) <= 6
