from __future__ import annotations

import math

import pytest

from palestra.errors import TooManyRequests
from palestra.http import connections as module
from palestra.http.connections import ConnectionLimits, Connections
from unit.building import FakeClock


class FakeConnection:
    def __init__(self, connections: Connections, known: bool = False, flushed: bool = True) -> None:
        self.known, self.flushed, self.until, self.over = known, flushed, math.inf, False
        self._connections = connections
        connections.open = {*connections.open, self}

    def close(self) -> None:
        self.over = True
        self._connections.open = {*self._connections.open} - {self}

    expire = close


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def full(**settings) -> tuple[Connections, list[FakeConnection]]:
    """Connections of which there is one too many, the newest, and three wait."""
    connections = Connections(ConnectionLimits(connections=4))
    waiting = [FakeConnection(connections, **settings) for _ in range(3)]
    for one in waiting:
        connections.wait(one, 60)
    for _ in range(2):
        FakeConnection(connections)
    return connections, waiting


def test_the_stranger_that_waited_longest_makes_room():
    connections, waiting = full()
    waiting[0].known = True
    connections.wait(waiting[0], 60)
    connections.wait(waiting[1], 60)
    assert connections.free_capacity()
    assert [one.over for one in waiting] == [False, False, True]


def test_an_answer_that_a_known_client_has_not_taken_yet_is_not_cut_off():
    connections, waiting = full(known=True, flushed=False)
    assert not connections.free_capacity()
    waiting[1].flushed = True
    assert connections.free_capacity()
    assert [one.over for one in waiting] == [False, True, False]


def test_an_answer_that_a_stranger_leaves_behind_makes_room():
    connections, waiting = full(flushed=False)
    assert connections.free_capacity()
    assert [one.over for one in waiting] == [True, False, False]


async def test_connections_end_when_their_time_is_over_and_those_in_use_never(clock):
    connections, waiting = full()
    connections.wait(waiting[0], 100)
    connections.forget(waiting[1])
    clock.advance(99)
    await connections.sweep()
    assert [one.over for one in waiting] == [False, False, True]
    clock.advance(1)
    await connections.sweep()
    assert [one.over for one in waiting] == [True, False, True]


def test_places_are_kept_for_requests_that_do_not_wait():
    connections = Connections(ConnectionLimits(connections=160))
    several = [FakeConnection(connections) for _ in range(150)]
    connections.check_capacity()
    several.append(FakeConnection(connections))
    with pytest.raises(TooManyRequests):
        connections.check_capacity()
    connections.wait(several[0], 60)
    connections.check_capacity()


async def test_refusals_are_said_once_a_minute_with_advice_that_fits(clock, caplog, monkeypatch):
    connections = Connections()
    for _ in range(100):
        connections.counts["waits_refused"] += 1
        await connections.sweep()
        clock.advance(0.1)
    assert "--concurrency" in caplog.text
    assert "ulimit" not in caplog.text
    assert len(caplog.records) == 1
    monkeypatch.setattr(module, "raise_descriptor_limit", lambda: 100)
    connections = Connections()
    connections.fit_descriptors()
    connections.counts["refused"] += 1
    await connections.sweep()
    assert "ulimit -n" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("room", [300, 10_000])
def test_the_limit_leaves_descriptors_to_the_job(room, monkeypatch):
    monkeypatch.setattr(module, "raise_descriptor_limit", lambda: room)
    connections = Connections(ConnectionLimits(header_seconds=3))
    connections.fit_descriptors()
    assert connections.limits.connections <= min(room - 64, 8192)
    assert connections.limits.header_seconds == 3
