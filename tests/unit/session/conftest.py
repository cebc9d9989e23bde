"""A store, a fake engine, and sessions of claimed episodes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from palestra.config import PolicyConfig
from palestra.engine.fake import FakeEngine, digits_script
from palestra.grammars.pool import Grammars
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import EpisodeSession, PolicyRuntime, SessionContext
from palestra.types.messages import GenerationRequest, text_message
from palestra.types.states import TurnState
from unit.building import TASK, FakeClock, one_policy, open_store

STOP = 258


class Bench:
    """One store with one policy. `script` says what the engine replies; by default digits drawn from the seed."""

    def __init__(self, folder, clock: FakeClock, **policy) -> None:
        self.clock = clock
        self.folder = folder
        self.store = open_store(folder, clock)
        self.engine = FakeEngine(lambda ids, sampling: self.script(ids, sampling))
        self.script = digits_script(12, STOP)
        self.policy = PolicyConfig.model_validate({"max_context": 4096, "sampling": {"max_tokens": 50}} | policy)
        self.grammars = Grammars()
        self.context = self.new_context()

    def new_context(self) -> SessionContext:
        tokenizer = ByteTokenizer()
        renderer = ChatMLRenderer(tokenizer)
        runtime = PolicyRuntime(
            name="policy",
            config=self.policy,
            renderer=renderer,
            engine=self.engine,
            grammars=self.grammars,
        )
        return SessionContext(store=self.store, policies=one_policy(runtime), seed=11)

    async def session(self, kind: str = "train", request: str = "r") -> EpisodeSession:
        """A session of a newly claimed episode."""
        if kind == "adhoc":
            name = await self.store.episodes.register_adhoc(TASK, request)
            claim = await self.store.episodes.claim("w", request, None, name)
        else:
            await self.store.groups.register(kind, 0, 1, TASK, 8)
            claim = await self.store.episodes.claim("w", request, None)
        session = EpisodeSession(self.context, claim, ())
        self.store.episodes.on_lease_over.append(
            lambda e, f: session.terminate(LookupError("over")) if e == claim.episode_id else None
        )
        return session

    async def reopened(self, session: EpisodeSession) -> EpisodeSession:
        """The same lease after the server was started anew."""
        recorded = await self.recorded(session)
        return EpisodeSession(self.new_context(), session.episode, recorded)

    async def recorded(self, session: EpisodeSession):
        return (await self.store.calls.of_lease(session.episode.episode_id, session.episode.fence))[1]


def call(*texts: str, **kw) -> GenerationRequest:
    """User and assistant take turns; the first is the user."""
    roles = ("user", "assistant")
    messages = tuple(text_message(roles[i % 2], text) for i, text in enumerate(texts))
    return GenerationRequest(**({"policy": "policy", "messages": messages, "digest": "|".join(texts)} | kw))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def bench(tmp_path, clock):
    made = Bench(tmp_path, clock)
    yield made
    made.grammars.close()
    made.store.close()


def says(text: str, stop: bool = True):
    return lambda prompt, sampling: [*text.encode(), *([STOP] if stop else [])]


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def busy_writer(store):
    """The store writes nothing until the block ends; then it has written all that was handed to it."""
    reached, go = threading.Event(), threading.Event()

    def busy(connection) -> None:
        reached.set()
        assert go.wait(60)

    blocking = asyncio.ensure_future(store.db.write(busy))
    assert await asyncio.to_thread(reached.wait, 60)
    try:
        yield
    finally:
        go.set()
        await blocking


def state_of(session) -> TurnState:
    """TERMINATED after the end, else that of the call that is furthest; INTERACTING between calls."""
    states = {one.state for one in session._turns._open}
    between = TurnState.INTERACTING if session._turns._acting else TurnState.PENDING
    found = next((state for state in (TurnState.GENERATING, TurnState.PENDING) if state in states), between)
    return TurnState.TERMINATED if session._turns._over else found


async def in_flight(session, *calls):
    """Calls that wait for the paused engine."""
    tasks = [asyncio.ensure_future(session.generate_one(c)) for c in calls]
    await until(lambda: sum(t.state is TurnState.GENERATING for t in session._turns._open) == len(calls))
    return tasks
