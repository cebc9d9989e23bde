from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.http.connections import ConnectionLimits, Connections
from unit.building import FakeClock


class FakeConnection:
    def __init__(self, connections: Connections) -> None:
        self.flushed, self.known, self.over = True, False, False
        self._connections = connections

    def close_idle(self) -> None:
        self.over = True

    def expire(self) -> None:
        self.over = True


@given(moves=st.lists(st.tuples(st.sampled_from(["open", "ask", "answer", "lose", "wait"]), st.integers(0, 30))))
def test_there_are_never_more_than_there_may_be_and_none_in_use_is_closed(moves):
    clock = FakeClock()
    connections = Connections(ConnectionLimits(connections=5), clock)
    alive: list[FakeConnection] = []
    busy: set[FakeConnection] = set()
    for move, which in moves:
        one = alive[which % len(alive)] if alive else None
        if move == "open":
            if connections.make_room():
                alive.append(FakeConnection(connections))
                connections.opened(alive[-1])
            else:
                assert len(busy) == 5
        elif move == "wait":
            clock.advance(which)
            connections.sweep()
        elif one is None:
            continue
        elif move == "ask" and one not in busy:
            connections.began(one)
            connections.answering(one)
            busy.add(one)
        elif move == "answer" and one in busy:
            one.known = one.known or bool(which % 2)
            connections.answered(one, known=one.known, complete=which % 3 > 0)
            busy.discard(one)
        elif move == "lose":
            connections.closed(one)
            busy.discard(one)
            alive.remove(one)
        assert not any(one.over for one in busy)
        alive = [one for one in alive if not one.over]
        assert len(connections) == len(alive) <= 5
    clock.advance(1000)
    connections.sweep()
    assert len(connections) == len(busy)


def test_what_a_client_has_not_taken_yet_is_not_cut_off():
    connections = Connections(ConnectionLimits(connections=2), FakeClock())
    slow, idle = FakeConnection(connections), FakeConnection(connections)
    slow.flushed = False
    for one in (slow, idle):
        connections.opened(one)
    assert connections.make_room()
    assert (slow.over, idle.over) == (False, True)


def test_a_client_that_takes_no_answer_makes_room_if_it_has_no_key_and_is_closed_in_any_case():
    clock = FakeClock()
    connections = Connections(ConnectionLimits(connections=2), clock)
    worker, stranger = FakeConnection(connections), FakeConnection(connections)
    worker.known = True
    for one in (worker, stranger):
        connections.opened(one)
        connections.answering(one)
        one.flushed = False
        connections.stalled(one)
    assert connections.make_room()
    assert (worker.over, stranger.over) == (False, True)
    other = FakeConnection(connections)
    connections.opened(other)
    connections.answering(other)
    assert not connections.make_room()
    connections.resumed(worker)
    clock.advance(100)
    connections.sweep()
    assert not worker.over
    connections.stalled(worker)
    clock.advance(59)
    connections.sweep()
    assert not worker.over
    clock.advance(1)
    connections.sweep()
    assert worker.over
    assert connections.counts["answer_not_taken"] == 1
    assert len(connections) == 1


def test_an_answer_that_is_left_behind_makes_room_where_nothing_else_can():
    connections = Connections(ConnectionLimits(connections=1), FakeClock())
    slow = FakeConnection(connections)
    connections.opened(slow)
    slow.flushed = False
    assert connections.make_room()
    assert slow.over


def test_what_happens_often_is_said_once_a_minute(caplog):
    clock = FakeClock()
    connections = Connections(ConnectionLimits(connections=1), clock)
    for _ in range(100):
        assert connections.make_room()
        connections.opened(FakeConnection(connections))
        connections.sweep()
        clock.advance(0.1)
    assert len(caplog.records) == 1
    clock.advance(60)
    connections.sweep()
    assert len(caplog.records) == 2
    assert "98 idle ones were closed" in caplog.text


@pytest.mark.parametrize("room", [300, 10_000])
def test_the_limit_leaves_descriptors_to_the_job(room, monkeypatch):
    monkeypatch.setattr("palestra.http.connections.raise_descriptor_limit", lambda: room)
    connections = Connections(ConnectionLimits(header_seconds=3))
    connections.fit_descriptors()
    assert connections.limits.connections <= min(room - 64, 8192)
    assert connections.limits.header_seconds == 3
