"""How a pool of inference workers behaves, and what it asks of those who start its workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from palestra.engine.pool.worker import StartedWorker

START_SECONDS = 900.0  # to load the models, unless the options say otherwise

StartWorker = Callable[[int], Awaitable[StartedWorker]]
"""Starts the worker of a place, and returns when it has the weights of the start. A PalestraError that is no
EngineFailure says that no start can succeed."""
CheckRoom = Callable[[int], Awaitable[None]]
"""Raises a PalestraError if the machine has no room for so many workers beside those that serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """How a pool behaves.

    Attributes:
        replicas: workers at the start.
        most: workers that there may be, because each needs a place of its own; None: any number.
        sync: whether new weights reach the workers one after another, so that the others go on, or all together.
        stuck_seconds: a worker that has work and does none for so long is replaced.
        prefix_tokens: tokens of each policy whose place is remembered, for each worker.
        start_seconds: how long the start of a worker may take.
        kinds: of the workers, by their number, where a request that one kind refuses may be one for another. The number
            of workers stays as it is then. (): all workers are alike.
    """

    replicas: int
    most: int | None = None
    sync: Literal["rolling", "all"] = "rolling"
    stuck_seconds: float = 60.0
    prefix_tokens: int = 32768
    start_seconds: float = START_SECONDS
    kinds: tuple[str, ...] = ()
