"""The gate of a server is told of each ended session once, also when the disk fails in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from palestra.errors import StoreError
from palestra_live import gating as module
from palestra_live.gate.ledger import GateLedger
from palestra_live.gating import REFUSAL, TOLD, GateService
from palestra_live.store import LiveStore, NewSession, SessionState
from unit.live.stories import started

pytestmark = pytest.mark.anyio


@pytest.fixture
async def gating(tmp_path):
    store, ledger = LiveStore(tmp_path, 10.0), GateLedger(tmp_path)
    await ledger.add("started 0", started())
    facts: dict[str, str] = {}

    async def fact(name):
        return facts.get(name)

    async def set_fact(name, value):
        facts[name] = value

    log = SimpleNamespace(fact=fact, set_fact=set_fact, facts=facts)
    run = SimpleNamespace(
        policies=SimpleNamespace(trained=["policy"]),
        folder=SimpleNamespace(path=tmp_path),
        store=SimpleNamespace(log=log),
    )
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


@pytest.mark.parametrize("most", [1, 2, 500])
async def test_only_sessions_that_are_new_are_read_again(gating, monkeypatch, most):
    service, store, ledger = gating
    monkeypatch.setattr(module, "AT_ONCE", most)
    read, outcomes = [], store.outcomes

    async def counted(after, wanted):
        found = await outcomes(after, wanted)
        read.extend(one["session_id"] for one in found)
        return found

    monkeypatch.setattr(store, "outcomes", counted)
    for n in range(6):
        await ended(store, f"s{n}", float(n // 2 + 1), SessionState.ENDED if n == 3 else SessionState.DONE)
    await service._tell_sessions()
    assert sorted(read) == ["s0", "s1", "s2", "s4", "s5"]
    read.clear()
    await store.change("s3", state=SessionState.DONE.value)
    await service._tell_sessions()
    assert sorted(read) == ["s2", "s3", "s4", "s5"], "what ended before the one that was not settled is not read"
    read.clear()
    await ended(store, "new", 9.0)
    await service._tell_sessions()
    assert read == ["new"]
    assert float(service._run.store.log.facts[TOLD]) == 9.0
    read.clear()
    again = GateService(service._run, store, ledger)
    await ended(store, "newer", 10.0)
    await again._recall()
    await again._tell_sessions()
    assert read == ["newer"], "a server that starts again reads what came since"
    assert await ledger.look(lambda gate: gate.level.size) == 8


@pytest.mark.parametrize(
    ("reply", "refuses"),
    [
        ("Sorry, please ask billing!", False),
        ("I'm sorry to hear that! Your parcel is on its way.", False),
        ("I can't find your order. What is its number?", False),
        ("I can help you with that.", False),
        ("You can't share an account, but you can invite others.", False),
        ("I can't help with that.", True),
        ("I’m sorry, but I can’t assist with that request.", True),
        ("As an AI language model, I cannot provide medical advice.", True),
        ("I am unable to do that.", True),
        ("Unfortunately, we're not able to discuss this.", True),
        ("I must decline to answer.", True),
        ("I cannot really help you.", True),
        ("x " * 200 + "I can't help with that.", False),
    ],
)
def test_a_refusal_to_help_is_one_and_an_apology_is_none(reply, refuses):
    assert bool(REFUSAL.search(reply, 0, module.BEGINNING)) is refuses
