"""Runs that nothing disturbed, for all others to be compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from outcome import assert_complete
from servers import SCRIPTED, TINY, Job, run_through


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("undisturbed"), SCRIPTED) as job:
        run_through(job, [])
        assert_complete(job)
        yield job


@pytest.fixture(scope="session")
def undisturbed_tiny(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("undisturbed-tiny"), TINY) as job:
        run_through(job, [])
        assert_complete(job)
        yield job
