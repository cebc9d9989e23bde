"""One event loop for the trainers of a module, whose sockets belong to it."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture(scope="module")
def loop():
    """The loop on which a module's trainers live, and on which `ranks.on_the_loop` runs its tests."""
    with asyncio.Runner() as runner:
        yield runner
