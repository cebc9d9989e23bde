from __future__ import annotations

import pytest

from palestra.gateway.attendance import FORGOTTEN_SECONDS, MOST_RESTING, Attendance
from unit.building import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def attendance(clock):
    return Attendance(clock)


def asks(attendance, worker: str, request: str, gets: str | None = None) -> None:
    attendance.asks(worker, request)
    attendance.leaves(worker, request)
    if gets is not None:
        attendance.plays(worker, gets, 1)


def test_where_nobody_ever_asked_nobody_has_to_be_told(attendance):
    assert attendance.complete


def test_a_worker_that_asked_is_waited_for_until_it_is_told(attendance):
    asks(attendance, "w", "1")
    assert not attendance.complete
    attendance.told("w", "2")
    assert attendance.complete


def test_every_loop_of_a_worker_has_to_be_told(attendance):
    """Two threads under one name: one asks while the other plays."""
    asks(attendance, "w", "1", gets="e1")
    asks(attendance, "w", "2", gets="e2")
    attendance.hands_in("e1", 1)
    attendance.told("w", "3")
    assert not attendance.complete
    attendance.told("w", "3")  # the same claim answered twice is one loop
    assert not attendance.complete
    attendance.hands_in("e2", 1)
    attendance.told("w", "4")
    assert attendance.complete


def test_one_loop_that_plays_one_episode_after_another_is_one_loop(attendance):
    for number in range(5):
        asks(attendance, "w", str(number), gets=f"e{number}")
        attendance.hands_in(f"e{number}", 1)
    attendance.told("w", "9")
    assert attendance.complete


def test_all_workers_have_to_be_told(attendance):
    asks(attendance, "a", "1")
    asks(attendance, "b", "2")
    attendance.told("a", "3")
    assert not attendance.complete
    attendance.told("b", "4")
    assert attendance.complete


def test_a_worker_that_was_not_seen_for_long_is_gone(attendance, clock):
    asks(attendance, "w", "1")
    clock.advance(FORGOTTEN_SECONDS - 1)
    assert not attendance.complete
    clock.advance(1)
    assert attendance.complete


def test_one_that_still_plays_is_not_gone(attendance, clock):
    asks(attendance, "w", "1", gets="e")
    clock.advance(10 * FORGOTTEN_SECONDS)
    assert not attendance.complete
    attendance.hands_in("e", 1)
    assert not attendance.complete
    attendance.told("w", "2")
    assert attendance.complete


def test_one_whose_lease_ran_out_is_not_waited_for(attendance):
    asks(attendance, "w", "1", gets="e")
    attendance.lease_over("e", 1)
    assert attendance.complete


def test_what_nobody_played_ends_without_a_trace(attendance):
    attendance.hands_in("e", 1)
    attendance.lease_over("e", 1)
    assert attendance.complete


def test_ever_new_names_do_not_fill_the_memory(attendance):
    asks(attendance, "plays", "0", gets="e")
    for number in range(MOST_RESTING + 10):
        asks(attendance, f"w{number}", "1")
    assert len(attendance) == MOST_RESTING + 1
    attendance.hands_in("e", 1)
    attendance.told("plays", "1")
    assert not attendance.complete  # those who asked last are still waited for


def test_who_is_gone_is_forgotten(attendance, clock):
    asks(attendance, "plays", "0", gets="e")
    for number in range(10):
        asks(attendance, f"w{number}", "1")
    clock.advance(FORGOTTEN_SECONDS)
    asks(attendance, "new", "1")
    assert len(attendance) == 2


def test_who_comes_back_after_a_long_time_is_one_loop_again(attendance, clock):
    for number in range(3):
        attendance.asks("w", str(number))
    for number in range(3):
        attendance.leaves("w", str(number))
    clock.advance(FORGOTTEN_SECONDS)
    asks(attendance, "other", "1")
    asks(attendance, "w", "4")
    for worker in ("w", "other"):
        attendance.told(worker, "5")
    assert attendance.complete


def test_a_claim_that_waits_for_long_is_not_forgotten(attendance, clock):
    attendance.asks("w", "1")
    clock.advance(FORGOTTEN_SECONDS)
    asks(attendance, "other", "1")
    attendance.leaves("w", "1")
    attendance.plays("w", "e", 1)
    attendance.told("other", "2")
    assert not attendance.complete
