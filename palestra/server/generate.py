"""Model calls over HTTP: one handler for all dialects, whole or streamed, in an episode or of a served model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from palestra.errors import Forbidden, UnsupportedField
from palestra.http.app import GuardedApp
from palestra.http.bodies import LONG_BODY
from palestra.http.guard import Endpoint, JsonAnswer
from palestra.server.auth import CALLER, Caller, PlaygroundKey
from palestra.server.dialects.base import Dialect, DialectRequest, TokenCounter
from palestra.server.dialects.fields import AGENT_HEADER, agent_of, caller_name, may_show_pictures
from palestra.server.dialects.others import NO_OTHERS
from palestra.server.dialects.sent_pictures import pictures_in
from palestra.server.respond import OVERRULED, StreamedAnswer, sample_calls
from palestra.server.state import DataPlane
from palestra.session import EpisodeKey, PolicyRuntime, SeatKey
from palestra.session.policies import NO_PLAYERS
from palestra.session.sampling import overruled
from palestra.types.calls import Chat, TokenSequence

# Answers with more tokens (counting `top_logprobs`) are written as JSON in a thread, not on the event loop.
MANY_TOKENS = 4096
_TOP_LOGPROBS = attrgetter("top_logprobs")
Parse = Callable[[bytes, Mapping[str, str]], DialectRequest[Any]]


def model_paths(dialects: Sequence[Dialect[Any]]) -> list[str]:
    """Return the paths of the dialects' routes."""
    return [form.path for dialect in dialects for form in (dialect, dialect.counter) if form is not None]


def add_dialect_routes(app: GuardedApp, plane: DataPlane, dialects: Sequence[Dialect[Any]]) -> None:
    """Add the routes of the dialects: one for replies each, and one for counting tokens where the format has it."""

    def add(form: Dialect[Any] | TokenCounter[Any], endpoint: Endpoint) -> None:
        shown: dict[str, Any] = {"tags": ["model"], "description": form.description, "response_model": None}
        app.add_direct(form.path, endpoint, form.body, cancels=True, **shown)

    for dialect in dialects:
        add(dialect, GenerateHandler(plane, dialect).generate)
        if dialect.counter is not None:
            add(dialect.counter, partial(count_tokens, plane, dialect.counter))


class GenerateHandler:
    """Answers the model calls of one dialect."""

    def __init__(self, plane: DataPlane, dialect: Dialect[Any]) -> None:
        self._plane, self._sessions, self._dialect = plane, plane.sessions, dialect

    async def generate(self, request: Request) -> JsonAnswer | Response:
        """Sample the requested replies.

        The answer is sent when they are on disk; a thread writes a long one. Or it is streamed from the first text on.
        If the client disconnects, only replies that were complete before are recorded.
        """
        caller: Caller = request.scope[CALLER]
        asked, runtime = await _read(self._plane, caller, request, self._dialect.parse)
        if asked.stream:
            writer = self._dialect.sse(asked, runtime, self._plane.store.clock.now())
            return StreamedAnswer(self._sessions, caller, asked.calls, writer, self._dialect.error_body)
        session, calls = await self._sessions.enter(caller), asked.calls
        try:
            chats = await (session.generate(calls[0]) if len(calls) == 1 else sample_calls(session, calls))
            tokens, note = 0, overruled(calls[0], chats[0].sampling)
            if asked.scores is not None:
                asked.scores = await _scored(chats, runtime)
                tokens = sum(map(len, asked.scores))
            for chat in chats:
                tokens += len(chat.completion_ids)
            if tokens * (1 + max(map(_TOP_LOGPROBS, calls))) > MANY_TOKENS:
                body = await self._plane.pool.run(lambda: orjson.dumps(self._dialect.render(asked, chats, runtime)))
            else:
                body = orjson.dumps(self._dialect.render(asked, chats, runtime))
            headers = () if note is None else ((OVERRULED.encode(), note.encode()),)
            return JsonAnswer(body, headers, partial(session.delivered, *chats))
        finally:
            self._sessions.leave(session)


async def _scored(chats: Sequence[Chat], runtime: PolicyRuntime) -> list[list[float]]:
    """Return the log-probabilities of the prompts' tokens; choices of one prompt have the same."""
    known: dict[bytes, list[float]] = {}
    for chat in chats:
        ids = chat.prompt_ids
        if ids.tobytes() not in known:
            known[ids.tobytes()] = await runtime.engine.score(runtime.name, TokenSequence(ids, ()))
    return [known[chat.prompt_ids.tobytes()] for chat in chats]


async def count_tokens(plane: DataPlane, counter: TokenCounter[Any], request: Request) -> Response:
    """Count the tokens of a request's prompt, without sampling or recording."""
    caller: Caller = request.scope[CALLER]
    asked, _ = await _read(plane, caller, request, counter.parse)
    session = await plane.sessions.enter(caller)
    try:
        return JSONResponse(counter.render(await session.count_tokens(asked.calls[0])))
    finally:
        plane.sessions.leave(session)


async def _read(
    plane: DataPlane, caller: Caller, request: Request, parse: Parse
) -> tuple[DialectRequest[Any], PolicyRuntime]:
    """Return the parsed request and the runtime of the policy that answers it."""
    body = await request.body()
    if len(body) < LONG_BODY:
        asked = parse(body, request.headers)
    else:
        asked = await plane.pool.run(parse, body, request.headers)
    pictures = pictures_in(asked.calls[0].messages) if may_show_pictures(body) else ()
    policies, players = plane.sessions.context.policies, NO_PLAYERS
    if isinstance(caller, PlaygroundKey):  # it names the policy and has no role
        runtime = policies.runtime(asked.calls[0].policy)
    else:
        call = asked.calls[0]
        model, agent = call.policy, call.agent
        if policies.roles.pools and isinstance(caller, EpisodeKey | SeatKey):
            players = await plane.sessions.players(caller.episode_id, caller.fence)
        if isinstance(caller, SeatKey):
            # Whatever name a framework sends, a seat is played by its own policy, and never asks that of an opponent.
            model, agent = policies.roles.default, _agent_of(caller.role, request)
        server = plane.config.server
        agent = caller_name(agent, call, request.headers, server.agent_headers, server.auxiliary_prompts)
        runtime = policies.asked(model, agent, players)
        if agent != call.agent or runtime.name != call.policy:
            asked.set_caller(agent, runtime.name)
    if asked.others is not NO_OTHERS:
        plane.take_others(asked.others)
    if asked.must_reason and not runtime.renderer.reasons:
        raise UnsupportedField("thinking.type: this model does not reason; leave thinking out", "thinking")
    if pictures:
        await plane.pictures.settle(asked, pictures, runtime, plane.picture_charge(caller))
    return asked, runtime


def _agent_of(seat: str, request: Request) -> str:
    """Return the agent of a call with a player slot's key: the slot's, unless a header names its subagent."""
    if AGENT_HEADER not in request.headers:
        return seat
    agent = agent_of(request.headers)
    if agent != seat and not agent.startswith(f"{seat}/"):
        raise Forbidden(f"this key plays the seat {seat!r}; {AGENT_HEADER} may name it or a subagent below it")
    return agent
