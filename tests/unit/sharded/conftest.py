"""What modules of tests share: an event loop for their trainers, whose sockets belong to it, and pictures on disk."""

from __future__ import annotations

import asyncio

import pytest

from palestra.pictures.blobs import Blobs


@pytest.fixture(scope="module")
def loop():
    """The loop on which a module's trainers live, and on which `ranks.on_the_loop` runs its tests."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Pictures on disk, as a run has them."""
    return Blobs(tmp_path_factory.mktemp("pictures"))
