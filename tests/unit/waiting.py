"""Waits for what happens a moment later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(ready: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
    """Return when `ready` gives something true; it is asked again and again."""
    async with asyncio.timeout(seconds):
        while not await ready():
            await asyncio.sleep(0.005)
