from __future__ import annotations

import pytest

from palestra.errors import Conflict
from palestra.types.calls import PolicyVersion
from palestra.types.records import BatchManifest
from unit.building import FakeClock, open_store


def manifest(step: int = 1, **changes) -> BatchManifest:
    values = {
        "step": step,
        "versions": {"policy": PolicyVersion(1, 4)},
        "episode_ids": ("train-000000-00", "train-000000-03"),
        "seed": 2**63 - 1,
        "config_digest": "d",
    }
    return BatchManifest(**(values | changes))


async def test_a_manifest_comes_back_as_it_was_fixed(store):
    assert await store.log.manifest(1) is None
    await store.log.commit_manifest(manifest())
    assert await store.log.manifest(1) == manifest()
    assert await store.log.manifest(2) is None


async def test_a_manifest_is_fixed_once(store):
    await store.log.commit_manifest(manifest())
    await store.log.commit_manifest(manifest())
    for change in (
        {"episode_ids": ("train-000000-03", "train-000000-00")},
        {"episode_ids": ()},
        {"seed": 1},
        {"config_digest": "e"},
        {"versions": {"policy": PolicyVersion(1, 5)}},
        {"versions": {"other": PolicyVersion(1, 4)}},
    ):
        with pytest.raises(Conflict, match="step 1"):
            await store.log.commit_manifest(manifest(**change))
    assert await store.log.manifest(1) == manifest()


# Metrics, events, facts


async def test_a_row_of_metrics_replaces_that_of_an_undone_step(store):
    await store.log.put_metrics(2, {"step": 2.0, "x": 1.0})
    await store.log.put_metrics(1, {"step": 1.0})
    await store.log.put_metrics(2, {"step": 2.0, "x": 0.1})
    assert await store.log.metrics() == [{"step": 1.0}, {"step": 2.0, "x": 0.1}]


async def test_an_unfinished_row_is_none_of_the_rows_until_it_is_finished(store):
    await store.log.put_metrics(1, {"step": 1.0, "wall_seconds": 1.0})
    await store.log.put_unfinished_metrics({"step": 2.0, "x": 0.1})
    assert [row["step"] for row in await store.log.metrics()] == [1.0]
    assert await store.log.restore_metrics(1) is None
    assert await store.log.restore_metrics(2) == {"step": 2.0, "x": 0.1}
    await store.log.put_metrics(2, {"step": 2.0, "x": 0.1, "wall_seconds": 2.0})
    assert await store.log.restore_metrics(2) is None
    assert [row["step"] for row in await store.log.metrics()] == [1.0, 2.0]


async def test_rows_of_steps_that_will_be_trained_again_are_dropped(store):
    for step in (0, 1, 2, 3):
        await store.log.put_metrics(step, {"step": step, "wall_seconds": 1.0})
    assert await store.log.restore_metrics(1) is None
    assert [row["step"] for row in await store.log.metrics()] == [0, 1]


async def test_events_are_replayed_from_any_of_them(store, clock):
    made = []
    for number in range(5):
        clock.advance(1)
        made.append(await store.log.add_event("k", {"number": number}))
    assert await store.log.events(0) == made
    assert await store.log.events(made[2].event_id) == made[3:]
    assert await store.log.events(0, limit=2) == made[:2]
    assert [e.at for e in made] == [clock.wall - 4 + n for n in range(5)]


async def test_facts_may_be_changed(store):
    assert await store.log.fact("k") is None
    for value in ("1", "2"):
        await store.log.set_fact("k", value)
        assert await store.log.fact("k") == value


async def test_all_of_it_is_there_after_a_restart(tmp_path):
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.commit_manifest(manifest())
        event = await store.log.add_event("k", {})
        await store.log.set_fact("k", "v")
    with open_store(tmp_path, FakeClock()) as store:
        assert await store.log.manifest(1) == manifest()
        assert await store.log.events(0) == [event]
        assert (await store.log.add_event("k", {})).event_id > event.event_id
        assert await store.log.fact("k") == "v"
