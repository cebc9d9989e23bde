"""The cluster of the table, with its control store in a PostgreSQL of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("faults.invariants", "faults.backends")  # so that their assertions say what differs

from nodes import cluster  # noqa: E402
from service import Service  # noqa: E402

from faults.database import Postgres, postgres  # noqa: E402
from faults.world import CPUS, GPUS, World  # noqa: E402


@pytest.fixture(scope="session")
def database() -> Iterator[Postgres]:
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def world(tmp_path_factory, database) -> Iterator[World]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.add(cpus=CPUS, gpus=GPUS)
        options = ("--ray-address", nodes.address, "--database", database.url)
        options += ("--pass-env", "PALESTRA_FAULT")  # to inference workers on machines that are armed
        with Service(tmp_path_factory.mktemp("service"), options) as service:
            world = World(nodes, service.start(), database.writer)
            yield world
            world.close()
