"""Sampling of all calls of one request concurrently: a request may ask for several prompts, or several choices."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from palestra.gateway.dialects.base import GenerationResult
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, Listener, ReplyPiece, Session


async def generate(session: Session, calls: Sequence[GenerationRequest]) -> GenerationResult:
    """Sample all choices of all calls, and collect the most probable tokens where a call asks for them.

    Args:
        session: the session that makes and records the calls.
        calls: the calls of one request.

    Raises:
        PalestraError: see `Session.generate`.
    """
    top = _TopLogprobs() if any(call.top_logprobs for call in calls) else None
    chats = await sample_calls(session, calls, top)
    return GenerationResult(chats=chats, top=[()] * len(chats) if top is None else top.of(len(chats)))


async def sample_calls(
    session: Session, calls: Sequence[GenerationRequest], listener: Listener | None
) -> tuple[Chat, ...]:
    """Sample all choices of all calls concurrently. If one call fails, the others are cancelled.

    The event loop serves other requests between the starts of two calls, and no call is started after one has failed.

    Args:
        session: the session that makes and records the calls.
        calls: the calls of one request.
        listener: is notified of all choices; the choices of the second call are numbered after those of the first.

    Returns:
        The choices, in the order of their calls.

    Raises:
        PalestraError: the error of the call that failed first; see `Session.generate`.
    """
    if len(calls) == 1:
        return await session.generate(calls[0], listener)
    tasks: list[asyncio.Task[tuple[Chat, ...]]] = []
    first, failure = 0, None
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                numbered = None if listener is None else _Numbered(listener, first)
                tasks.append(group.create_task(session.generate(call, numbered)))
                first += call.choices
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]
    try:
        if failure is not None:
            raise failure
        return tuple(chat for task in tasks for chat in task.result())
    finally:
        # The error refers to this frame: if the frame referred to the error, only the garbage collector freed both.
        del failure, tasks


class _Numbered:
    """A listener for one call of a request, which shifts the numbers of the call's choices."""

    def __init__(self, listener: Listener, first: int) -> None:
        """Wrap `listener`; `first` is the number of the call's first choice in the request."""
        self._listener, self._first = listener, first

    def started(self, choice: int, start: CallStart) -> None:
        self._listener.started(self._first + choice, start)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        self._listener.sampled(self._first + choice, piece)

    def finished(self, choice: int, chat: Chat) -> None:
        self._listener.finished(self._first + choice, chat)


class _TopLogprobs:
    """A listener that keeps the most probable tokens at each place, which are not part of the records."""

    def __init__(self) -> None:
        self._top: defaultdict[int, list[Sequence[tuple[int, float]]]] = defaultdict(list)

    def of(self, choices: int) -> list[list[Sequence[tuple[int, float]]]]:
        """Return for each of the choices its most probable tokens, place by place."""
        return [self._top[number] for number in range(choices)]

    def started(self, choice: int, start: CallStart) -> None:
        pass

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        self._top[choice] += piece.top

    def finished(self, choice: int, chat: Chat) -> None:
        pass
