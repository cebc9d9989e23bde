from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import time
import weakref

import pytest

from palestra.threads import FREED_AT_ONCE, SHORT_TURN_SECONDS, WorkPool, freed, in_thread, short_turns


async def test_a_result_and_an_error_come_to_whoever_waits():
    assert await in_thread(lambda: threading.current_thread().name, "mine") == "mine"
    with pytest.raises(KeyError, match="x"):
        await in_thread(lambda: {}["x"])


@pytest.mark.parametrize("error", [StopIteration(1), SystemExit(3), KeyboardInterrupt()])
async def test_what_a_future_cant_hold_or_would_end_the_program_is_an_error_of_the_work(error):
    def work() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await in_thread(work)


async def test_the_context_of_the_caller_is_there():
    name = contextvars.ContextVar("name", default="nobody")
    name.set("somebody")
    assert await in_thread(name.get) == "somebody"


async def test_work_that_nobody_waits_for_is_finished_and_its_thread_ends():
    go, finished = threading.Event(), threading.Event()
    task = asyncio.ensure_future(in_thread(lambda: (go.wait(5), finished.set()), "left-alone"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(finished.wait, 5)
    while any(thread.name == "left-alone" for thread in threading.enumerate()):
        await asyncio.sleep(0.001)


async def test_any_number_of_works_that_hang_hold_up_no_other():
    hang = threading.Event()
    hanging = [asyncio.ensure_future(in_thread(lambda: hang.wait(10))) for _ in range(50)]
    started = time.monotonic()
    assert await in_thread(lambda: "done") == "done"
    assert time.monotonic() - started < 5
    hang.set()
    assert await asyncio.gather(*hanging) == [True] * 50


async def test_what_failed_in_a_thread_is_forgotten_with_its_error():
    """A circle of error and frames would keep a request of megabytes until the garbage collector runs."""

    class Body:
        pass

    def fail(body: Body) -> None:
        raise ValueError("no")

    async def attempt() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(ValueError, match="no"):
            await pool.run(fail, body)
        return weakref.ref(body)

    pool = WorkPool(1)
    gc.disable()
    try:
        kept = await attempt()
        await pool.run(int)  # the thread has let go of the work before
        assert kept() is None
    finally:
        gc.enable()
        pool.close()


async def test_what_is_freed_is_freed_in_another_thread_from_its_end():
    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            gone.append((self.number, threading.get_ident()))

    gone: list[tuple[int, int]] = []
    many = 3 * FREED_AT_ONCE + 1
    items, others = [Item(number) for number in range(many)], [Item(many)]
    await freed(items, others)
    assert items == others == []
    assert {number for number, _ in gone} == set(range(many + 1))
    assert {number for number, _ in gone[:FREED_AT_ONCE]} == set(range(many - FREED_AT_ONCE, many))
    assert threading.get_ident() not in {thread for _, thread in gone}


def test_turns_are_short_until_the_last_block_is_over():
    usual = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SHORT_TURN_SECONDS)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual
    with pytest.raises(KeyError), short_turns():
        raise KeyError
    assert sys.getswitchinterval() == usual
