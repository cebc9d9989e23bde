"""Closes an environment whose episode already has its result, so that errors are only logged."""

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
    """Close an environment, and log its errors or a timeout.

    The caller waits for WAIT_SECONDS at most, so that no environment delays the end of a server. If the caller is
    cancelled, the environment still closes.

    Args:
        name: for the log; None: the environment's class.
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
