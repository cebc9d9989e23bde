from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from palestra.control.placement.tenants import Quota
from palestra.control.store import accounts, bases, decisions, tables
from palestra.control.store.backends import open_backend
from palestra.control.store.control_store import ControlStore
from palestra.control.store.tables import SCHEMA
from palestra.errors import StoreError
from palestra.types.bases import BaseKind, BaseRecord
from palestra.types.jobs import Bundle, Resources
from palestra.types.states import BaseState, JobState
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
    return look(url, lambda c: c.execute(sa.text("SELECT value FROM meta")).scalar_one())


# By version: the columns that the next one adds.
ADDED = {
    1: ("jobs.from_job", "jobs.from_step"),
    2: ("tenants.quota",),
    3: ("jobs.private", "tenants.private_jobs"),
    4: ("jobs.time_limit_seconds", "jobs.ran_seconds"),
    5: ("jobs.adapters", "jobs.base_id", "bases"),  # a whole table
    6: ("jobs.more_resources", "jobs.bundle_nodes"),
}


def go_back(url, to: int) -> None:
    """Make a store of this version into one of version `to`."""
    for added in (ADDED[number] for number in range(to, SCHEMA.version)):
        for table, _, column in (name.partition(".") for name in added):
            drop = f"ALTER TABLE {table} DROP COLUMN {column}" if column else f"DROP TABLE {table}"
            look(url, lambda c, drop=drop: c.execute(sa.text(drop)))
    look(url, lambda c: c.execute(sa.text(f"UPDATE meta SET value = '{to}'")))


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


def test_a_store_of_a_newer_palestra_is_refused_and_left_alone(url):
    ControlStore(url).close()
    look(url, lambda c: c.execute(sa.text("UPDATE meta SET value = '99'")))
    with pytest.raises(StoreError, match=r"version 99.*upgrade"):
        ControlStore(url)
    assert version(url) == "99"


def test_an_older_store_goes_through_every_migration_after_its_own(url, monkeypatch):
    ControlStore(url).close()
    more = (
        ("ALTER TABLE users ADD COLUMN two TEXT",),
        ("ALTER TABLE users ADD COLUMN three TEXT", "DELETE FROM users"),
    )
    monkeypatch.setattr(tables, "SCHEMA", replace(SCHEMA, migrations=(*SCHEMA.migrations, *more)))
    ControlStore(url).close()
    assert version(url) == str(SCHEMA.version + 2)
    ControlStore(url).close()  # not a second time


async def test_jobs_of_the_first_version_are_read_on(url, clock):
    with ControlStore(url, clock) as store:
        job = await submit(store)
    go_back(url, 1)
    with ControlStore(url, clock) as store:
        assert await store.job("a", job.job_id) == job
        later = await submit(store, from_job=job.job_id, from_step=3)
        assert (later.from_job, later.from_step) == (job.job_id, 3)


async def test_tenants_of_the_second_version_have_no_quota_and_can_be_given_one(url, clock):
    with ControlStore(url, clock) as store:
        await store.write(lambda c: accounts.add_tenant(c, "blue", 0.0))
    go_back(url, 2)
    with ControlStore(url, clock) as store:
        assert await store.read(decisions.quotas_of_all) == {"blue": None}
        await store.write(lambda c: decisions.change_quota(c, "blue", {"gpus": 1.5}))
    with ControlStore(url, clock) as store:
        assert await store.read(decisions.quotas_of_all) == {"blue": Quota(gpus=1.5)}


async def test_jobs_of_the_third_version_are_not_private_and_later_ones_may_be(url, clock):
    with ControlStore(url, clock) as store:
        await store.write(lambda c: accounts.add_tenant(c, "a", 0.0))
        job = await submit(store)
    go_back(url, 3)
    with ControlStore(url, clock) as store:
        assert await store.job("a", job.job_id) == job
        assert not job.private
        assert (await submit(store, private=True)).private
        assert not await store.read(lambda c: decisions.are_private(c, "a"))


async def test_jobs_of_the_fourth_version_have_no_time_limit_and_later_ones_may_have_one(url, clock):
    with ControlStore(url, clock) as store:
        job = await running(store)
    go_back(url, 4)
    clock.advance(60)
    with ControlStore(url, clock) as store:
        found = await store.job("a", job.job_id)
        assert found == job
        assert (found.time_limit_seconds, found.ran_seconds) == (None, 0.0)
        lost = await store.change_state(job.job_id, JobState.RUNNING, JobState.QUEUED, "its machine is gone")
        assert lost.ran_seconds == 60.0
        assert (await submit(store, time_limit_seconds=5400.0)).time_left(clock.now()) == 5400.0
    assert version(url) == str(SCHEMA.version)


def test_a_migration_that_fails_leaves_the_store_as_it_was(url, monkeypatch):
    ControlStore(url).close()
    failing = ("ALTER TABLE users ADD COLUMN two TEXT", "NONSENSE")
    monkeypatch.setattr(tables, "SCHEMA", replace(SCHEMA, migrations=(*SCHEMA.migrations, failing)))
    with pytest.raises((StoreError, sa.exc.ProgrammingError)):
        ControlStore(url)
    monkeypatch.undo()
    assert version(url) == str(SCHEMA.version)
    assert "two" not in look(url, lambda c: [column["name"] for column in sa.inspect(c).get_columns("users")])
    ControlStore(url).close()


def test_the_tables_of_another_program_are_refused(url):
    look(url, lambda c: c.execute(sa.text("CREATE TABLE jobs (id INTEGER)")))
    with pytest.raises(StoreError, match="another program"):
        ControlStore(url)


def test_a_run_store_is_not_a_control_store(tmp_path):
    open_store(tmp_path).close()
    with pytest.raises(StoreError, match="another program"):
        ControlStore(f"sqlite:///{tmp_path / 'run.db'}")


async def test_jobs_of_the_sixth_version_are_one_process_and_later_ones_may_have_bundles(url, clock):
    with ControlStore(url, clock) as store:
        job = await submit(store)
    go_back(url, 6)
    bundles = (Bundle(role="engine", count=2, gpus=1.0, gpu_kind="H100", labels={"zone": "a"}),)
    with ControlStore(url, clock) as store:
        assert await store.job("a", job.job_id) == job
        assert (job.bundle_nodes, job.resources.bundles) == ((), ())
        over_nodes = await submit(store, resources=Resources(bundles=bundles, placement="SPREAD"))
        fields = {"node": "n1", "bundle_nodes": ("n2", "n3")}
        await store.change_state(over_nodes.job_id, JobState.QUEUED, JobState.STARTING, "it starts", **fields)
    with ControlStore(url, clock) as store:
        again = await store.job("a", over_nodes.job_id)
    assert (again.resources, again.bundle_nodes) == (over_nodes.resources, ("n2", "n3"))
    assert again.resources == Resources(bundles=bundles, placement="SPREAD")


async def test_a_store_of_the_fifth_version_gets_the_table_of_base_servers(url, clock):
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
        job = await submit(store)
    go_back(url, 5)
    with ControlStore(url, clock) as store:
        assert await store.job("a", job.job_id) == job
        assert await store.read(bases.all_bases) == []
        await store.write(lambda c: bases.put(c, base))
        serving = replace(base, state=BaseState.SERVING, address="ws://127.0.0.1:1", reason="it listens", starts=2)
        await store.write(lambda c: bases.put(c, serving))
    with ControlStore(url, clock) as store:
        assert await store.read(bases.all_bases) == [serving]
        await store.write(lambda c: bases.remove(c, "base-1"))
        assert await store.read(bases.all_bases) == []
