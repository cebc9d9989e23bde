"""A restart goes on with the sessions that no step has used, and reads few of the others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from palestra.session.history import EXACT
from palestra_live.config import LiveConfig
from palestra_live.learning import WINDOW
from palestra_live.privacy import Redaction
from palestra_live.sessions import UNTIL, LiveSessions
from palestra_live.store import LiveStore, NewSession, SessionState

pytestmark = pytest.mark.anyio
CLUSTERS = (None, "a", "b")


@pytest.fixture
async def opened(tmp_path):
    store, facts, groups = LiveStore(tmp_path, 10.0), {}, []

    async def fact(name):
        return facts.get(name)

    async def set_fact(name, value):
        facts[name] = value

    async def after(kind, step):
        return [group for group in groups if group.step > step]

    run = SimpleNamespace(
        store=SimpleNamespace(
            log=SimpleNamespace(fact=fact, set_fact=set_fact), groups=SimpleNamespace(after=after, all=groups)
        )
    )
    plane = SimpleNamespace(sessions=SimpleNamespace(context=SimpleNamespace(sameness=EXACT)))

    async def loaded() -> LiveSessions:
        sessions = LiveSessions(run, plane, store, LiveConfig(), SimpleNamespace(), Redaction([]))
        await sessions.load()
        return sessions

    yield loaded, store, facts, groups
    store.close()


async def learned(sessions: LiveSessions) -> tuple[list[str], list[float | None]]:
    """The sessions that wait, and the baselines."""
    return sorted(sessions._scored.waiting), [await sessions._baseline("new", cluster) for cluster in CLUSTERS]


@pytest.mark.parametrize("seed", range(3))
async def test_what_waits_and_the_baselines_are_those_of_a_start_that_reads_all(opened, monkeypatch, seed):
    loaded, store, facts, groups = opened
    draw, number = random.Random(seed), 0

    async def more(count: int) -> None:
        nonlocal number
        for _ in range(count):
            name, number = f"s{number}", number + 1
            cluster = draw.choice(CLUSTERS)
            await store.begin(NewSession(session_id=name, subject=None, cluster=cluster, train=True), "policy")
            state = draw.choice([SessionState.DONE] * 9 + [SessionState.ENDED])
            score = draw.random() if draw.random() < 0.9 else None
            await store.change(name, state=state.value, ended_at=number * 10.0, score=score)

    await more(250)
    step = 0
    for _ in range(3):
        sessions = await loaded()
        for _ in range(6):
            step += 1
            waiting = list(sessions._scored.waiting)
            for name in waiting[:10] if draw.random() < 0.7 else draw.sample(waiting, min(10, len(waiting))):
                row = sessions._scored.waiting.pop(name)
                sessions._used[name] = row["ended_at"], step
                groups.append(SimpleNamespace(task_id=name, step=step))
            await sessions._note(step)
        await more(10)
        short = await learned(await loaded())
        kept = dict(facts)
        facts.clear()
        assert await learned(await loaded()) == short
        facts.update(kept)


async def test_a_start_after_many_sessions_reads_few_of_them(opened, monkeypatch):
    loaded, store, facts, groups = opened

    for number in range(600):
        await store.begin(NewSession(session_id=f"s{number}", subject=None, cluster=None, train=True), "policy")
        await store.change(f"s{number}", state=SessionState.DONE.value, ended_at=number + 1.0, score=0.5)
        groups.append(SimpleNamespace(task_id=f"s{number}", step=1 + number // 10))
    sessions = await loaded()
    assert not sessions._scored.waiting
    await sessions._note(60)
    read, rows = [], store._rows

    async def counted(wanted):
        found = await rows(wanted)
        read.append(len(found))
        return found

    monkeypatch.setattr(store, "_rows", counted)
    again = await loaded()
    assert sum(read) == WINDOW + 1
    assert await again._baseline("new", None) == 0.5
    assert sum(read) == 2 * (WINDOW + 1), "those of its cluster are read when they are needed"
    assert facts[UNTIL].endswith(", 59]")
