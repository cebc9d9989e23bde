"""A wait that times out or is cancelled leaves nothing behind: not in a list of waiters, nor a callback on a future."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.dashboard.reader import _Kept
from palestra.database import Notifier
from palestra.engine.embedded.engine import CommandQueue
from palestra.engine.pool.state import PoolState
from palestra.engine.pool.worker import InferenceWorker
from palestra.errors import TooManyRequests
from palestra.grammars import pool
from palestra.grammars.pool import Grammars
from palestra.runtime.engine_process import WorkerEngine
from palestra.session.registry import CallRegistry
from palestra.store.claiming import RolloutSyncLock
from palestra_bases.link import Link
from palestra_bases.tinker.service import Futures
from palestra_bases.tinker.tables import PENDING
from palestra_mcp.connection import McpConnection
from palestra_remote import SessionLimits, SessionTable
from palestra_worlds import Gomoku

pytestmark = pytest.mark.ci

WAITS = 1000
Case = tuple[Callable[[], Awaitable[Any]], Callable[[], int]]  # begins a wait; the size of what it may be left in
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def callbacks(future: asyncio.Future[Any]) -> int:
    return len(future._callbacks or ())


async def never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@case
def notifier() -> Case:
    made = Notifier()
    return lambda: made.wait(60, made.count), lambda: len(made._waiting)


@case
def notifier_by_its_own_limit() -> Case:
    made = Notifier()
    return lambda: made.wait(0.01, made.count), lambda: len(made._waiting)


@case
def failures_of_the_embedded_engine() -> Case:
    made = CommandQueue()
    return lambda: asyncio.wrap_future(made.failure()), lambda: len(made._awaiting_failure)


@case
def commands_of_the_embedded_engine() -> Case:
    made = CommandQueue()
    return lambda: asyncio.wrap_future(made.future()), lambda: len(made._unsettled)


@case
def one_compilation() -> Case:
    made, key = Grammars(), b"key"
    compilation = made._compiling[key, False] = pool._Compilation()
    compilation.waiting = 1  # somebody who stays

    def size() -> int:
        return callbacks(compilation.done_here()) + len(compilation.done._done_callbacks) + compilation.waiting

    return lambda: made._done(key, "", compiled=False), size


@case
def results_for_tinker() -> Case:
    async def pending(*_: str) -> Any:
        return SimpleNamespace(state=PENDING)

    made = Futures(SimpleNamespace(request=pending))  # type: ignore[arg-type]
    return lambda: made.result("tenant", "request", 60), lambda: len(made._waiting)


@case
def places_of_an_environment_server() -> Case:
    made = SessionTable(Gomoku, SessionLimits(sessions=1))
    made._taken = 1
    return lambda: made._take_place(60), lambda: len(made._waiting) + made._taken


@case
def sessions_of_an_environment_server() -> Case:
    made = SessionTable(Gomoku, SessionLimits(sessions=1))
    made._taken = 1

    async def wait() -> None:
        with contextlib.suppress(TooManyRequests):
            async with made.session(None, 0.05, never):
                pass

    return wait, lambda: len(made._waiting) + len(made._sessions) + made._taken


@case
def calls_of_a_base_server() -> Case:
    made = Link("ws://127.0.0.1:1", "key", "job")
    made.remote.renew(SimpleNamespace(send=lambda _: None, frames=_no_frames, close=lambda: None))  # type: ignore[arg-type]
    return lambda: made.remote.call("trainer.forward"), lambda: len(made.remote._calls)


@case
def failures_of_a_base_server() -> Case:
    made = Link("ws://127.0.0.1:1", "key", "job")
    return made.failure, lambda: callbacks(made._failure)


@case
def calls_of_an_engine_worker() -> Case:
    made = WorkerEngine(SimpleNamespace(send=lambda _: None, frames=_no_frames, close=lambda: None), never)  # type: ignore[arg-type]
    return made.engine.pause, lambda: len(made._remote._calls) + callbacks(made._lost)


@case
def failures_of_an_engine_worker() -> Case:
    made = WorkerEngine(SimpleNamespace(send=lambda _: None, frames=_no_frames, close=lambda: None), never)  # type: ignore[arg-type]
    return made.failure, lambda: callbacks(made._lost)


@case
def losses_of_an_inference_worker() -> Case:
    made = InferenceWorker(0, 1, 1.0)
    return made.lost, lambda: callbacks(made._lost)


@case
def changes_of_a_pool() -> Case:
    made = PoolState()
    return lambda: made.until(lambda: False), lambda: len(made.changed._waiters)


@case
def updates_during_a_rollout() -> Case:
    made = RolloutSyncLock(lambda: 1, Notifier())

    async def update() -> None:
        async with made.acquire_weight_sync():
            pass

    return update, lambda: len(made.released._waiting) + made._waiting


@case
def answers_about_a_run() -> Case:
    made: _Kept[Any] = _Kept()
    first = asyncio.create_task(made.get("run", never))  # somebody who stays

    def size() -> int:
        assert not first.done()
        return len(made._asking) + sum(callbacks(task) for task in made._asking.values())

    return lambda: made.get("run", never), size


@case
def replies_that_are_being_written() -> Case:
    made = CallRegistry(0, "episode", ())
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    made._recordings["digest"] = written
    request = SimpleNamespace(choices=1, choice_digest=lambda _: "digest")
    return lambda: made.undelivered(request), lambda: len(made._recordings) + callbacks(written)  # type: ignore[arg-type]


@case
def requests_of_an_mcp_client() -> Case:
    async def sent(_: Any) -> None:
        return None

    made = McpConnection(SimpleNamespace(send=sent, where="a server"))  # type: ignore[arg-type]
    return lambda: made.request("tools/call", {}), lambda: len(made._waiting) + len(made._sending)


async def _no_frames() -> Any:
    await never()
    yield None


async def settled() -> None:
    """Let callbacks of callbacks run, also those that another thread has to call."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", CASES)
async def test_a_thousand_waits_that_time_out_leave_nothing(name):
    wait, size = CASES[name]()
    await settled()
    before = size()

    async def one() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await wait()

    await asyncio.gather(*(one() for _ in range(WAITS)))
    await settled()
    assert size() == before


async def test_a_place_that_a_cancelled_client_got_goes_to_the_next():
    table = SessionTable(Gomoku, SessionLimits(sessions=1))
    table._taken = 1
    first, second = (asyncio.create_task(table._take_place(60)) for _ in range(2))
    await settled()
    table._taken = 0
    table._grant()
    first.cancel()
    await second
    assert table._taken == 1
