from __future__ import annotations

import asyncio

from palestra.database import Notifier


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(notifier: Notifier, seconds: float = 60.0) -> asyncio.Task[None]:
    return asyncio.ensure_future(notifier.wait(seconds, notifier.count))


async def test_a_notification_wakes_all_that_wait():
    notifier = Notifier()
    tasks = [waiting(notifier) for _ in range(3)]
    await settle()
    notifier.notify()
    await asyncio.wait_for(asyncio.gather(*tasks), 1)


async def test_a_notification_for_one_wakes_the_first_only():
    notifier = Notifier()
    tasks = [waiting(notifier) for _ in range(3)]
    await settle()
    notifier.notify(2)
    await settle()
    assert [t.done() for t in tasks] == [True, True, False]
    notifier.notify(1)
    await asyncio.wait_for(tasks[2], 1)


async def test_a_notification_between_looking_and_waiting_is_not_missed():
    notifier = Notifier()
    seen = notifier.count
    notifier.notify(0)
    await asyncio.wait_for(notifier.wait(60, seen), 1)


async def test_waiting_ends_when_its_time_is_over():
    notifier = Notifier()
    await asyncio.wait_for(notifier.wait(0.01, notifier.count), 1)
    task = waiting(notifier)
    await settle()
    notifier.notify(1)  # not used up by the one that has given up
    await asyncio.wait_for(task, 1)


async def test_the_wake_up_of_one_who_was_cancelled_goes_to_the_next():
    notifier = Notifier()
    tasks = [waiting(notifier) for _ in range(2)]
    await settle()
    notifier.notify(1)
    tasks[0].cancel()
    await asyncio.wait_for(tasks[1], 1)
    assert tasks[0].cancelled()


async def test_one_who_was_cancelled_before_the_notification_takes_nothing():
    notifier = Notifier()
    tasks = [waiting(notifier) for _ in range(2)]
    await settle()
    tasks[0].cancel()
    await settle()
    notifier.notify(1)
    await asyncio.wait_for(tasks[1], 1)
