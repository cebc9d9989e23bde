"""What a wait promises: nothing that it started is left running, and no error is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from pathlib import Path

import pytest

import palestra
from palestra.errors import StoreError
from palestra.waiting import LoggedOnce, Winner, cancelled, ordinary_errors, race, together


class Body:
    """Something that a reference can be watched of."""


class Runner:
    """Work that takes some turns of the event loop, to be started and to be ended."""

    def __init__(self) -> None:
        self.state = "new"

    async def work(self, turns: int, result: object = None, at_cancel: Exception | None = None) -> object:
        self.state = "running"
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for _ in range(3):  # what it cleans up takes a while, too
                await asyncio.sleep(0)
            self.state = "cancelled"
            if at_cancel is not None:
                raise at_cancel from None
            raise
        self.state = "done"
        if isinstance(result, Exception):
            raise result
        return result


LONG = 10_000


async def test_the_first_that_is_done_wins_and_the_others_have_ended():
    fast, slow, slower = Runner(), Runner(), Runner()
    assert await race(slow.work(LONG), fast.work(2, "fast"), slower.work(LONG)) == Winner(1, "fast")
    assert [slow.state, fast.state, slower.state] == ["cancelled", "done", "cancelled"]


async def test_of_two_that_are_done_at_the_same_time_the_first_argument_wins():
    ready: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for number, future in enumerate(ready):
        future.set_result(f"result {number}")
    assert await race(*ready) == Winner(0, "result 0")
    assert await race(*ready[::-1]) == Winner(0, "result 1")


async def test_the_error_of_the_winner_is_raised_when_the_others_have_ended():
    slow = Runner()
    with pytest.raises(KeyError, match="fast"):
        await race(slow.work(LONG), Runner().work(1, KeyError("fast")))
    assert slow.state == "cancelled"


async def test_the_error_of_a_loser_is_raised_where_the_winner_has_a_result():
    with pytest.raises(ValueError, match="left half"):
        await race(Runner().work(1, "fast"), Runner().work(LONG, at_cancel=ValueError("left half")))
    ready = asyncio.get_running_loop().create_future()
    failed = asyncio.get_running_loop().create_future()
    ready.set_result("ready")
    failed.set_exception(ValueError("at the same time"))
    with pytest.raises(ValueError, match="same time"):
        await race(ready, failed)


async def test_the_error_of_a_loser_is_logged_where_the_winner_failed_too(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="fast"):
        await race(Runner().work(1, KeyError("fast")), Runner().work(LONG, at_cancel=ValueError("left half")))
    assert "left half" in caplog.text


async def test_an_error_of_ours_that_is_not_raised_is_logged_in_one_line(caplog):
    gone = "the store is gone; put it back"
    with caplog.at_level(logging.ERROR), pytest.raises(StoreError):
        await race(Runner().work(1, StoreError("first")), Runner().work(LONG, at_cancel=StoreError(gone)))
    (record,) = caplog.records
    assert gone in record.getMessage()
    assert record.exc_info is None


async def test_an_entrant_in_a_shield_goes_on():
    slow = Runner()
    task = asyncio.ensure_future(slow.work(20, "slow"))
    assert await race(asyncio.shield(task), Runner().work(1, "fast")) == Winner(1, "fast")
    assert slow.state == "running"
    assert await task == "slow"


@pytest.mark.parametrize("wait", [race, together])
async def test_cancelling_the_caller_ends_all_and_logs_what_they_raise(wait, caplog):
    runners = [Runner(), Runner()]
    task = asyncio.ensure_future(wait(runners[0].work(LONG), runners[1].work(LONG, at_cancel=ValueError("left half"))))
    await asyncio.sleep(0.01)
    assert [runner.state for runner in runners] == ["running", "running"]
    task.cancel()
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await task
    assert [runner.state for runner in runners] == ["cancelled", "cancelled"]
    assert "left half" in caplog.text


@pytest.mark.parametrize("again", [1, 2, 3, 4])
async def test_a_caller_that_is_cancelled_while_it_waits_for_losers_still_waits_for_them(again):
    slow = Runner()
    task = asyncio.ensure_future(race(Runner().work(2, "fast"), slow.work(LONG)))
    for _ in range(2 + again):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.state == "cancelled"


async def test_together_returns_results_in_order_and_runs_at_the_same_time():
    runners = [Runner(), Runner()]
    assert await together(runners[0].work(9, "a"), runners[1].work(1, "b")) == ["a", "b"]
    assert await together() == []


async def test_a_single_coroutine_runs_in_the_task_of_the_caller():
    async def current() -> asyncio.Task[object] | None:
        return asyncio.current_task()

    assert await together(current()) == [asyncio.current_task()]


async def test_together_cancels_the_others_when_one_fails(caplog):
    slow = Runner()
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="fast"):
        await together(slow.work(LONG, at_cancel=ValueError("left half")), Runner().work(1, KeyError("fast")))
    assert slow.state == "cancelled"
    assert "left half" in caplog.text


async def test_cancelled_ends_tasks_and_raises_what_they_raised():
    runners = [Runner(), Runner(), Runner()]
    tasks = [asyncio.ensure_future(runner.work(LONG)) for runner in runners[:2]]
    done = asyncio.ensure_future(runners[2].work(0, "done"))
    await asyncio.sleep(0)
    await cancelled(*tasks, done)
    assert [runner.state for runner in runners] == ["cancelled", "cancelled", "done"]
    await cancelled()
    failing = asyncio.ensure_future(Runner().work(LONG, at_cancel=ValueError("left half")))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="left half"):
        await cancelled(failing)


@pytest.mark.parametrize("wait", [race, together])
@pytest.mark.parametrize("at_cancel", [None, ValueError("left half")])
async def test_what_failed_is_forgotten_with_its_error(wait, at_cancel):
    """A circle of error and frames would keep a request of megabytes until the garbage collector runs."""

    async def fail(body: Body) -> None:
        await asyncio.sleep(0)
        raise KeyError("no")

    async def attempt() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(KeyError, match="no"):
            await wait(fail(body), Runner().work(LONG, at_cancel=at_cancel))
        return weakref.ref(body)

    gc.disable()
    try:
        kept = await attempt()
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


def test_no_other_room_waits_for_the_first_of_several_by_hand():
    """Three keep their tasks over many waits, and one leaves behind what can't be cancelled: these are no races."""
    root = Path(palestra.__file__).parents[1]
    found = {
        path.relative_to(root).as_posix()
        for path in root.glob("palestra*/**/*.py")
        if "FIRST_COMPLETED" in path.read_text()
    }
    kept = {"palestra/rollout/collect.py", "palestra/runtime/judging.py", "palestra/runtime/local_job.py"}
    assert found == {"palestra/waiting.py", "palestra_sharded/processes.py", *kept}


async def awaits_what_it_cancelled() -> float:
    child = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    child.cancel()
    await child
    return 1.0


async def ends_the_program() -> float:
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("code", "words"), [(awaits_what_it_cancelled, r"nobody.*cancelled"), (ends_the_program, r"SystemExit\(2\)")]
)
async def test_code_of_a_user_that_would_end_its_task_or_the_process_raises_an_ordinary_error(code, words):
    with pytest.raises(RuntimeError, match=words), ordinary_errors():
        await code()


async def test_a_task_that_is_cancelled_in_code_of_a_user_stays_cancelled():
    async def work() -> None:
        with ordinary_errors():
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await work()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_other_errors_of_a_users_code_pass_unchanged(kind):
    with pytest.raises(kind), ordinary_errors():
        raise kind


def test_an_error_that_stays_is_logged_once_and_again_after_a_good_round(caplog):
    trouble = LoggedOnce(logging.getLogger("palestra.test"), "it can't go on now")
    for error in ("full", "full", "locked", None, "locked"):
        with trouble.attempt():
            if error is not None:
                raise StoreError(error)
    assert [f"it can't go on now: {error}" for error in ("full", "locked", "locked")] == caplog.messages
    with pytest.raises(KeyError), trouble.attempt():
        raise KeyError("a defect")
