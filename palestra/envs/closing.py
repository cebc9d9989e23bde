"""Closing an environment whose episode is over and has its result, so that an error of it is only logged."""

from __future__ import annotations

import asyncio
import logging

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.errors import PalestraError, place_of


async def close_or_log(
    environment: ConcurrentEnvironment, seconds: float, log: logging.Logger, name: str | None = None
) -> None:
    """Close an environment, and log what it raises, or that it took too long.

    Args:
        environment: whose last episode is over.
        seconds: limit.
        log: where the error goes.
        name: of the environment, for the log; None: of its class.
    """
    try:
        async with asyncio.timeout(seconds):
            await environment.close()
    except Exception as error:  # noqa: BLE001 - the user's code failed, after its episode was over
        said = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}{place_of(error)}"
        log.warning("closing a %s failed: %s", name or type(environment).__name__, said)
