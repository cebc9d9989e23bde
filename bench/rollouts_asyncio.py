"""The floor of `rollouts`: the same sleeps as bare asyncio tasks under a semaphore; prints one JSON line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sleeps import Meter, workload_of


async def play(table: Sequence[Sequence[float]], slots: int) -> None:
    """All episodes."""
    gate = asyncio.Semaphore(slots)

    async def episode(steps: Sequence[float]) -> None:
        async with gate:
            for seconds in steps:
                await asyncio.sleep(seconds)

    await asyncio.gather(*map(episode, table))


if __name__ == "__main__":
    work, _ = workload_of(__doc__)
    table = work.sleeps()
    with Meter() as meter:
        asyncio.run(play(table, work.slots))
    meter.tell(work, len(table))
