"""Measure how many seconds it takes to start many boxes with one command each, and to close them.

python bench/sandboxes.py [--boxes 50] [--image NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack

from palestra.sandbox import SandboxSpec, sandbox

AT_ONCE = 4  # starts


async def main(boxes: int, image: str | None) -> None:
    """Print the seconds of starting with one command each, and of closing."""
    spec, gate = SandboxSpec(image=image), asyncio.Semaphore(AT_ONCE)
    async with sandbox(spec) as box:  # the image is there after it
        await box.run(["true"])
    async with AsyncExitStack() as stack:

        async def start() -> None:
            async with gate:
                box = await stack.enter_async_context(sandbox(spec))
            assert (await box.run(["true"])).code == 0

        began = time.perf_counter()
        await asyncio.gather(*(start() for _ in range(boxes)))
        print(f"{boxes} boxes with one command each: {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
    print(f"closed one after another: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--boxes", type=int, default=50)
    arguments.add_argument("--image", help="name of an image; without it, boxes of bubblewrap")
    given = arguments.parse_args()
    asyncio.run(main(given.boxes, given.image))
