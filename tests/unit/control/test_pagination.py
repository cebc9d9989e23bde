from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.types.states import JobState
from palestra_service.store.control_store import ControlStore
from unit.building import FakeClock
from unit.control.building import submit

USERS = ("ann", "bob")


async def read_while_others_write(url, before, limit, between, user):
    """Returns what pages showed, and what there was at the start, newest first."""
    clock = FakeClock()
    with ControlStore(url, clock) as store:
        jobs = []
        for tenant, owner in before:
            clock.wall += (-1) ** len(jobs) * 50
            jobs.append(await submit(store, tenant, owner))
        expected = [j.job_id for j in reversed(jobs) if j.tenant == "a" and user in (None, j.user)]
        shown, cursor = [], None
        writes = iter(between)
        while True:
            page = await store.jobs("a", user=user, cursor=cursor, limit=limit)
            assert len(page.jobs) <= limit
            shown += [job.job_id for job in page.jobs]
            if page.cursor is None:
                return shown, expected
            cursor = page.cursor
            for tenant in next(writes, ()):
                await submit(store, tenant, "ann")
                await store.request_cancel(None, jobs[0].job_id, "")  # what changes keeps its place


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    before=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(USERS)), min_size=1, max_size=12),
    limit=st.integers(1, 5),
    between=st.lists(st.lists(st.sampled_from("ab"), max_size=3), max_size=6),
    user=st.sampled_from([None, *USERS]),
)
def test_pages_show_everything_once_whatever_is_added_meanwhile(before, limit, between, user):
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'control.db'}"
        shown, expected = asyncio.run(read_while_others_write(url, before, limit, between, user))
    assert shown == expected


async def test_pages_in_both_databases(url):
    shown, expected = await read_while_others_write(url, [("a", "ann")] * 7 + [("b", "bob")] * 3, 2, ["ab"] * 5, None)
    assert shown == expected
    assert len(shown) == 7


async def test_a_list_filtered_by_state_goes_on_after_a_job_that_has_left_it(store):
    jobs = [await submit(store) for _ in range(5)]
    page = await store.jobs("a", states=[JobState.QUEUED], limit=2)
    await store.request_cancel("a", page.jobs[-1].job_id, "")
    rest = await store.jobs("a", states=[JobState.QUEUED], cursor=page.cursor)
    assert [job.job_id for job in rest.jobs] == [job.job_id for job in jobs[2::-1]]
