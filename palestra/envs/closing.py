"""Closing an environment whose episode is over and has its result, so that an error of it is only logged."""

from __future__ import annotations

import asyncio
import logging

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.errors import PalestraError, place_of

WAIT_SECONDS = 3.0  # for an environment to close; the caller then goes on, and the environment goes on closing
_closing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive


async def close_or_log(
    environment: ConcurrentEnvironment, seconds: float, log: logging.Logger, name: str | None = None
) -> None:
    """Close an environment, and log what it raises, or that it took too long.

    The caller waits for WAIT_SECONDS at most, so that no environment holds up the end of a server. A caller that is
    cancelled stops waiting; the environment still closes.

    Args:
        name: of the environment, for the log; None: of its class.
    """
    closing = asyncio.create_task(_close(environment, seconds, log, name or type(environment).__name__))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.wait((closing,), timeout=WAIT_SECONDS)


async def _close(environment: ConcurrentEnvironment, seconds: float, log: logging.Logger, name: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await environment.close()
    except Exception as error:  # noqa: BLE001 - the user's code failed, after its episode was over
        said = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}{place_of(error)}"
        log.warning("closing a %s failed: %s", name, said)
