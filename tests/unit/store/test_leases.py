from __future__ import annotations

import pytest

from palestra.errors import EpisodeLeaseExpired, PayloadTooLarge
from palestra.store.leases import LeaseBook
from unit.building import FakeClock

YEAR = 365 * 86400.0


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def book(clock):
    return LeaseBook(clock, timeout_seconds=100.0)


def test_a_lease_runs_out_after_its_period_and_not_before(book, clock):
    book.grant("e", 1, 10.0)
    clock.ticks += 9.999
    assert book.expired() == []
    clock.ticks += 0.001
    assert book.expired() == [("e", 1)]


def test_each_lease_has_its_own_period(book, clock):
    book.grant("short", 1, 5.0)
    book.grant("long", 4, 20.0)
    clock.ticks += 5
    assert book.expired() == [("short", 1)]
    clock.ticks += 15
    assert book.expired() == [("short", 1), ("long", 4)]


def test_a_call_renews_the_period(book, clock):
    book.grant("e", 1, 10.0)
    clock.ticks += 9
    assert book.renew("e", 1)
    clock.ticks += 9
    assert book.expired() == []
    clock.ticks += 1
    assert book.expired() == [("e", 1)]


def test_a_former_holder_renews_nothing(book, clock):
    book.grant("e", 1, 10.0)
    book.grant("e", 2, 10.0)
    clock.ticks += 9
    assert not book.renew("e", 1)
    assert not book.renew("other", 1)
    clock.ticks += 1
    assert book.expired() == [("e", 2)]


def test_a_claim_that_is_answered_again_starts_the_period_anew_but_not_the_deadline(book, clock):
    book.grant("e", 1, 60.0)
    clock.ticks += 59
    book.grant("e", 1, 60.0)
    clock.ticks += 40
    assert book.expired() == []
    clock.ticks += 1
    assert book.expired() == [("e", 1)]


def test_while_a_call_is_in_flight_the_lease_does_not_run_out(book, clock):
    book.grant("e", 1, 10.0)
    with book.hold("e", 1):
        clock.ticks += 50
        assert book.expired() == []
    clock.ticks += 9
    assert book.expired() == []
    clock.ticks += 1
    assert book.expired() == [("e", 1)]


def test_the_last_of_several_calls_in_flight_counts(book, clock):
    book.grant("e", 1, 10.0)
    with book.hold("e", 1):
        with book.hold("e", 1):
            clock.ticks += 20
        clock.ticks += 20
        assert book.expired() == []


def test_a_call_that_fails_lets_go_of_the_lease(book, clock):
    book.grant("e", 1, 10.0)
    with pytest.raises(RuntimeError), book.hold("e", 1):
        raise RuntimeError
    clock.ticks += 10
    assert book.expired() == [("e", 1)]


def test_nothing_moves_the_end_of_an_attempt(book, clock):
    book.grant("e", 1, 10.0)
    with book.hold("e", 1):
        for _ in range(99):
            clock.ticks += 1
            book.renew("e", 1)
        assert book.expired() == []
        clock.ticks += 1
        assert book.expired() == [("e", 1)]


def test_holding_what_one_does_not_have_does_nothing(book, clock):
    book.grant("e", 2, 10.0)
    with book.hold("e", 1), book.hold("other", 1):
        clock.ticks += 10
        assert book.expired() == [("e", 2)]


def test_a_hold_that_outlives_its_lease_does_not_touch_the_next_one(book, clock):
    book.grant("e", 1, 10.0)
    with book.hold("e", 1):
        book.drop("e", 1)
        book.grant("e", 2, 10.0)
        clock.ticks += 9
    clock.ticks += 1
    assert book.expired() == [("e", 2)]


def test_only_the_present_lease_can_be_dropped(book):
    book.grant("e", 2, 10.0)
    book.drop("e", 1)
    book.drop("other", 1)
    assert len(book) == 1
    book.drop("e", 2)
    assert len(book) == 0


@pytest.mark.parametrize("jump", [-50 * YEAR, 50 * YEAR])
def test_the_calendar_may_jump_without_any_lease_noticing(book, clock, jump):
    book.grant("e", 1, 10.0)
    clock.wall += jump
    assert book.expired() == []
    clock.ticks += 10
    clock.wall -= 2 * jump
    assert book.expired() == [("e", 1)]


def add(book, fence, size, most=100):
    with book.charge_picture("e", fence, most, size):
        pass


def test_a_lease_adds_as_many_bytes_of_pictures_as_it_may_and_none_when_it_is_over(book):
    book.grant("e", 1, 10.0)
    add(book, 1, 60)
    with pytest.raises(PayloadTooLarge, match=r"60.*100.*41"):
        add(book, 1, 41)
    with pytest.raises(OSError, match="full"), book.charge_picture("e", 1, 100, 40):
        raise OSError("full")  # what is not written costs nothing
    add(book, 1, 40)
    book.drop("e", 1)
    with pytest.raises(EpisodeLeaseExpired, match=r"takes.*picture"):
        add(book, 1, 1)
    book.grant("e", 2, 10.0)  # another attempt
    add(book, 2, 100)
    with pytest.raises(EpisodeLeaseExpired):
        add(book, 1, 1)


def test_a_claim_that_is_answered_again_grants_no_new_lease(book, clock):
    before = clock.monotonic()
    book.grant("e", 1, 10.0)
    assert book.granted_since("e", 1, before)
    assert not book.granted_since("e", 2, before)
    clock.ticks += 1
    book.grant("e", 1, 10.0)
    assert not book.granted_since("e", 1, clock.monotonic())
    book.drop("e", 1)
    assert not book.granted_since("e", 1, before)
