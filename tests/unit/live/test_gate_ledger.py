"""RUN/gate.db: observations counted once, decisions made again from them, several processes on one file."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import msgspec
import pytest

from palestra.errors import ConfigError, NotFound, StoreError
from palestra_live.gate.command import obey, status
from palestra_live.gate.ledger import GateLedger, replay
from palestra_live.gate.records import Ordered, SessionEnded
from palestra_live.gate.records import VersionStage as Stage
from unit.live.stories import passing, started

pytestmark = pytest.mark.anyio


def _canary(canary: float = 0.5):
    return [(f"begin {number}", one) for number, one in enumerate((started(canary=canary), *passing(1)))]


def _sessions(first: int, last: int):
    return [
        (f"session {n}-{version}", SessionEnded(version=version, user=f"{n}-{version}", score=float(version)))
        for n in range(first, last)
        for version in (1, 0)
    ]


async def test_what_is_told_twice_counts_once_and_survives_a_restart(tmp_path):
    ledger = GateLedger(tmp_path)
    await ledger.add_all(_canary())
    for _ in range(3):
        await ledger.add_all(_sessions(0, 10))
    assert await ledger.look(lambda gate: gate.trial.canary["score"].differences.size) == 10
    ledger.close()
    again = GateLedger(tmp_path)
    assert await again.look(lambda gate: gate.live) == 0
    await again.refresh()  # there is nothing new
    assert (again.routing.live, again.routing.canary) == (0, 1)
    decided = await again.add_all(_sessions(5, 40))
    again.close()
    assert [one.after for one in decided] == [Stage.RETIRED, Stage.LIVE]
    gate, stored = replay(tmp_path)
    assert (gate.live, [one.decision for one in stored][-2:]) == (1, decided)


async def test_two_processes_see_each_others_switch(tmp_path):
    one, two = GateLedger(tmp_path), GateLedger(tmp_path)
    try:
        await one.add_all(_canary())
        await two.refresh()
        assert two.routing == one.routing
        await two.add_all(_sessions(0, 40))
        await one.refresh()
        assert one.routing.live == two.routing.live == 1
        await one.add_all(_sessions(0, 40))
    finally:
        one.close()
        two.close()
    assert replay(tmp_path)[0].live == 1


async def test_an_order_that_is_refused_is_not_stored(tmp_path):
    ledger = GateLedger(tmp_path)
    await ledger.add_all(_canary())
    with pytest.raises(ConfigError, match="not passed"):
        await ledger.add("order", Ordered(order="promote", version=1, by="ada", reason="now"))
    assert "order" not in await ledger.told()
    await ledger.add_all(_sessions(0, 40))
    assert await ledger.told("session 3-") == {"session 3-0", "session 3-1"}
    assert await ledger.told() == {key for key, _ in (*_canary(), *_sessions(0, 40))}
    ledger.close()
    assert replay(tmp_path)[0].live == 1


def _promoted(folder):
    async def tell():
        ledger = GateLedger(folder)
        await ledger.add_all(_canary() + _sessions(0, 40))
        ledger.close()

    asyncio.run(tell())


def test_a_decision_that_does_not_follow_is_found(tmp_path):
    _promoted(tmp_path)
    with closing(sqlite3.connect(tmp_path / "gate.db")) as connection, connection:
        connection.execute("UPDATE decisions SET data = replace(data, 'took its place', 'was paid for')")
    with pytest.raises(StoreError, match=r"follow.*observations"):
        replay(tmp_path)
    with closing(sqlite3.connect(tmp_path / "gate.db")) as connection, connection:
        connection.execute("DELETE FROM decisions WHERE number > 2")
    with pytest.raises(StoreError, match=r"decision.*missing"):
        replay(tmp_path)


async def test_decisions_of_another_version_of_palestra_are_made_again_and_kept(tmp_path):
    ledger = GateLedger(tmp_path)
    await ledger.add_all(_canary() + _sessions(0, 40))
    assert not await ledger.restate()
    ledger.close()
    before = replay(tmp_path)[1]
    with closing(sqlite3.connect(tmp_path / "gate.db")) as connection, connection:
        connection.execute("UPDATE decisions SET data = replace(data, 'took its place', 'was better')")
        connection.execute("DELETE FROM decisions WHERE number = 2")
        order = msgspec.json.encode(Ordered(order="promote", version=7, by="ada", reason="it had passed")).decode()
        connection.execute("INSERT INTO observations (key, at, data) VALUES ('order', 0, ?)", (order,))
    again = GateLedger(tmp_path)
    assert await again.restate()
    assert not await again.restate()
    assert await again.look(lambda gate: gate.live) == 1
    again.close()
    assert [one.decision for one in replay(tmp_path)[1]] == [one.decision for one in before]
    with closing(sqlite3.connect(tmp_path / "gate.db")) as connection:
        kept = connection.execute("SELECT data FROM former_decisions").fetchall()
    assert len(kept) == len(before) - 1
    assert sum("was better" in data for (data,) in kept) == 1


def test_orders_need_a_reason_and_are_shown_with_it(tmp_path, capsys):
    with pytest.raises(NotFound, match="live run"):
        obey(tmp_path, "hold", None, "we look first")
    _promoted(tmp_path)
    with pytest.raises(ConfigError, match="say why"):
        obey(tmp_path, "back", None, " ")
    for which, order in ((None, "promote"), ("1", "back"), ("newest", "promote"), ("9" * 5000, "promote")):
        with pytest.raises(ConfigError, match=r"number.*version"):
            obey(tmp_path, order, which, "because")
    obey(tmp_path, "back", None, "rude\nreplies ü")
    assert "gone back: sent back by" in capsys.readouterr().out
    lines = status(*replay(tmp_path))
    assert lines[:2] == ["version 0: live", "version 1: gone back"]
    assert any("rude replies ü" in line for line in lines)
