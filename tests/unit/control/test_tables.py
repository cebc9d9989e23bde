from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from palestra.errors import StoreError
from palestra.types.states import BaseState, JobState
from palestra_control.jobs import BaseKind, BaseRecord, Bundle, Resources
from palestra_service.placement.tenants import Quota
from palestra_service.store import accounts, bases, decisions, tables
from palestra_service.store.backends import open_backend
from palestra_service.store.control_store import ControlStore
from unit.building import open_store
from unit.control.building import change_numbers, running, submit


def look(url, work):
    opened = open_backend(url)
    try:
        with opened.engine.begin() as connection:
            return work(connection)
    finally:
        opened.close()


def version(url):
    return look(
        url, lambda c: c.execute(sa.text("SELECT value FROM meta WHERE key = 'control_schema_version'")).scalar_one()
    )


async def test_what_was_stored_is_there_after_opening_again(url, clock):
    with ControlStore(url, clock) as store:
        job = await submit(store)
    with ControlStore(url, clock) as store:
        assert await store.job("a", job.job_id) == job
        later = await submit(store)
        assert [j.job_id for j in (await store.jobs("a")).jobs] == [later.job_id, job.job_id]
        assert await change_numbers(store) == [1, 2]


def test_both_databases_have_all_tables_columns_and_indexes(url):
    ControlStore(url).close()

    def read(connection):
        inspector = sa.inspect(connection)
        return {
            name: (
                {column["name"] for column in inspector.get_columns(name)},
                {index["name"] for index in inspector.get_indexes(name) if not index["unique"]},
            )
            for name in inspector.get_table_names()
        }

    assert look(url, read) == {
        name: ({column.name for column in table.columns}, {index.name for index in table.indexes})
        for name, table in tables.metadata.tables.items()
    }


def test_a_store_of_another_version_is_refused_and_left_alone(url):
    ControlStore(url).close()
    look(url, lambda c: c.execute(sa.text("UPDATE meta SET value = '99' WHERE key = 'control_schema_version'")))
    with pytest.raises(StoreError):
        ControlStore(url)
    assert version(url) == "99"


def test_the_tables_of_another_program_are_refused(url):
    look(url, lambda c: c.execute(sa.text("CREATE TABLE jobs (id INTEGER)")))
    with pytest.raises(StoreError, match="another program"):
        ControlStore(url)


def test_a_run_store_is_not_a_control_store(tmp_path):
    open_store(tmp_path).close()
    with pytest.raises(StoreError, match="another program"):
        ControlStore(f"sqlite:///{tmp_path / 'run.db'}")


async def test_records_with_every_field_are_read_as_they_were_written(url, clock):
    bundles = (Bundle(role="engine", count=2, gpus=1.0, gpu_kind="H100", labels={"zone": "a"}),)
    base = BaseRecord(
        base_id="base-1",
        kind=BaseKind("tiny-random", True),
        state=BaseState.LOADING,
        reason="it starts",
        node="n1",
        resources=Resources(cpus=2.0, gpus=0.5, memory_gib=3.0),
        address=None,
        created_at=1.0,
        changed_at=2.0,
        starts=1,
    )
    with ControlStore(url, clock) as store:
        await store.write(lambda c: accounts.add_tenant(c, "blue", 0.0))
        assert await store.read(decisions.quotas_of_all) == {"blue": None}
        await store.write(lambda c: decisions.change_quota(c, "blue", {"gpus": 1.5}))
        await store.write(lambda c: bases.put(c, base))
        job = await submit(store, resources=Resources(bundles=bundles, placement="SPREAD"), from_step=3)
        fields = {"node": "n1", "bundle_nodes": ("n2", "n3")}
        await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "it starts", **fields)
    serving = replace(base, state=BaseState.SERVING, address="ws://127.0.0.1:1", reason="it listens", starts=2)
    with ControlStore(url, clock) as store:
        again = await store.job("a", job.job_id)
        assert (again.resources, again.bundle_nodes) == (job.resources, ("n2", "n3"))
        assert again.from_step == 3
        assert await store.read(decisions.quotas_of_all) == {"blue": Quota(gpus=1.5)}
        assert await store.read(bases.all_bases) == [base]
        await store.write(lambda c: bases.put(c, serving))
    with ControlStore(url, clock) as store:
        assert await store.read(bases.all_bases) == [serving]
        await store.write(lambda c: bases.remove(c, "base-1"))
        assert await store.read(bases.all_bases) == []


async def test_a_job_that_is_queued_again_keeps_the_time_that_it_ran(url, clock):
    with ControlStore(url, clock) as store:
        job = await running(store)
        clock.advance(60)
        lost = await store.change_state(job.job_id, JobState.RUNNING, JobState.QUEUED, "its machine is gone")
        assert lost.ran_seconds == 60.0
        limited = await submit(store, time_limit_seconds=5400.0)
        assert limited.time_left(clock.now()) == 5400.0
