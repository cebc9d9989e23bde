"""The gate of a server is told of each ended session once, also when the disk fails in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from palestra.errors import StoreError
from palestra_live.gate.ledger import GateLedger
from palestra_live.gating import GateService
from palestra_live.store import LiveStore, NewSession, SessionState
from unit.live.stories import started

pytestmark = pytest.mark.anyio


@pytest.fixture
async def gating(tmp_path):
    store, ledger = LiveStore(tmp_path, 10.0, 100), GateLedger(tmp_path)
    await ledger.add("started 0", started())
    run = SimpleNamespace(policies=SimpleNamespace(trained=["policy"]), folder=SimpleNamespace(path=tmp_path))
    yield GateService(run, store, ledger), store, ledger
    ledger.close()
    store.close()


async def ended(store, name, at, state=SessionState.DONE):
    await store.begin(NewSession(session_id=name, subject=None, cluster=None, train=True), "policy@step-0")
    await store.change(name, state=state.value, ended_at=at, calls=1, score=1.0)


async def test_sessions_are_told_again_after_a_write_that_failed(gating, monkeypatch):
    service, store, ledger = gating
    for n in range(3):
        await ended(store, f"s{n}", float(n + 1))

    async def full(told):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "add_all", full)
        with pytest.raises(StoreError):
            await service._tell_sessions()
    await service._tell_sessions()
    assert await ledger.look(lambda gate: gate.level.size) == 3


async def test_sessions_that_end_at_the_same_time_are_all_told(gating):
    service, store, ledger = gating
    await ended(store, "a", 1.0)
    await ended(store, "b", 1.0, SessionState.ENDED)
    await service._tell_sessions()
    await store.change("b", state=SessionState.DONE.value)
    await ended(store, "c", 2.0)
    for _ in range(2):
        await service._tell_sessions()
    assert await ledger.look(lambda gate: gate.level.size) == 3
