from __future__ import annotations

import pytest

from palestra.server.workers import FORGOTTEN_SECONDS, MOST_RESTING, WorkerRegistry
from unit.building import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def registry(clock):
    return WorkerRegistry(clock)


def asks(registry, worker: str, request: str, gets: str | None = None) -> None:
    registry.mark_claiming(worker, request)
    registry.mark_answered(worker, request)
    if gets is not None:
        registry.mark_playing(worker, gets, 1)


def test_where_no_worker_ever_claimed_none_has_to_be_notified(registry):
    assert registry.all_notified


def test_a_worker_that_asked_is_waited_for_until_it_is_notified(registry):
    asks(registry, "w", "1")
    assert not registry.all_notified
    registry.mark_notified("w", "2")
    assert registry.all_notified


def test_every_loop_of_a_worker_has_to_be_notified(registry):
    """Two threads under one name: one asks while the other plays."""
    asks(registry, "w", "1", gets="e1")
    asks(registry, "w", "2", gets="e2")
    registry.mark_finished("e1", 1)
    registry.mark_notified("w", "3")
    assert not registry.all_notified
    registry.mark_notified("w", "3")  # the same claim answered twice is one loop
    assert not registry.all_notified
    registry.mark_finished("e2", 1)
    registry.mark_notified("w", "4")
    assert registry.all_notified


def test_one_loop_that_plays_one_episode_after_another_is_one_loop(registry):
    for number in range(5):
        asks(registry, "w", str(number), gets=f"e{number}")
        registry.mark_finished(f"e{number}", 1)
    registry.mark_notified("w", "9")
    assert registry.all_notified


def test_all_workers_have_to_be_notified(registry):
    asks(registry, "a", "1")
    asks(registry, "b", "2")
    registry.mark_notified("a", "3")
    assert not registry.all_notified
    registry.mark_notified("b", "4")
    assert registry.all_notified


def test_a_worker_that_was_not_seen_for_long_is_gone(registry, clock):
    asks(registry, "w", "1")
    clock.advance(FORGOTTEN_SECONDS - 1)
    assert not registry.all_notified
    clock.advance(1)
    assert registry.all_notified


def test_one_that_still_plays_is_not_gone(registry, clock):
    asks(registry, "w", "1", gets="e")
    clock.advance(10 * FORGOTTEN_SECONDS)
    assert not registry.all_notified
    registry.mark_finished("e", 1)
    assert not registry.all_notified
    registry.mark_notified("w", "2")
    assert registry.all_notified


def test_one_whose_lease_ran_out_is_not_waited_for(registry):
    asks(registry, "w", "1", gets="e")
    registry.mark_lease_over("e", 1)
    assert registry.all_notified


def test_what_no_worker_played_ends_without_a_trace(registry):
    registry.mark_finished("e", 1)
    registry.mark_lease_over("e", 1)
    assert registry.all_notified


@pytest.mark.slow
def test_ever_new_names_do_not_fill_the_memory(registry):
    asks(registry, "plays", "0", gets="e")
    for number in range(MOST_RESTING + 10):
        asks(registry, f"w{number}", "1")
    assert len(registry) == MOST_RESTING + 1
    registry.mark_finished("e", 1)
    registry.mark_notified("plays", "1")
    assert not registry.all_notified  # those who asked last are still waited for


def test_who_is_gone_is_forgotten(registry, clock):
    asks(registry, "plays", "0", gets="e")
    for number in range(10):
        asks(registry, f"w{number}", "1")
    clock.advance(FORGOTTEN_SECONDS)
    asks(registry, "new", "1")
    assert len(registry) == 2


def test_who_comes_back_after_a_long_time_is_one_loop_again(registry, clock):
    for number in range(3):
        registry.mark_claiming("w", str(number))
    for number in range(3):
        registry.mark_answered("w", str(number))
    clock.advance(FORGOTTEN_SECONDS)
    asks(registry, "other", "1")
    asks(registry, "w", "4")
    for worker in ("w", "other"):
        registry.mark_notified(worker, "5")
    assert registry.all_notified


def test_a_claim_that_waits_for_long_is_not_forgotten(registry, clock):
    registry.mark_claiming("w", "1")
    clock.advance(FORGOTTEN_SECONDS)
    asks(registry, "other", "1")
    registry.mark_answered("w", "1")
    registry.mark_playing("w", "e", 1)
    registry.mark_notified("other", "2")
    assert not registry.all_notified


def test_a_forgotten_worker_is_not_waited_for_though_requests_of_it_are_still_on_their_way(registry):
    asks(registry, "w", "1", gets="e1")
    registry.mark_claiming("w", "2")
    registry.forget("w")
    assert registry.all_notified
    assert len(registry) == 0
    registry.mark_answered("w", "2")
    registry.mark_finished("e1", 1)
    registry.mark_lease_over("e1", 1)
    assert registry.all_notified
    assert len(registry) == 0
    registry.forget("w")


def test_a_forgotten_worker_of_which_a_late_claim_gets_an_episode_is_known_until_that_is_given_back(registry):
    asks(registry, "w", "1")
    registry.forget("w")
    asks(registry, "w", "2", gets="e1")
    assert not registry.all_notified
    registry.mark_lease_over("e1", 1)
    assert registry.all_notified
