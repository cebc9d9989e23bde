from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import InvalidRequest, TooManyRequests
from palestra_service import rights as limits
from palestra_service.rights import KeyLimits, RequestRates, TokenBucket
from unit.building import FakeClock


def test_a_burst_then_the_rate():
    clock = FakeClock()
    bucket = TokenBucket(2.0, 3, clock)
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    clock.advance(0.25)
    assert bucket.take() == pytest.approx(0.25)  # asking does not push it away
    clock.advance(0.25)
    assert bucket.take() == 0.0
    clock.advance(1e6)
    assert [bucket.take() for _ in range(4)][:3] == [0.0, 0.0, 0.0]
    assert bucket.take() > 0


@given(
    rate=st.floats(0.1, 100),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_in_no_time_more_than_burst_plus_rate_and_what_is_told_to_wait_is_enough(rate, burst, pauses):
    clock = FakeClock()
    bucket = TokenBucket(rate, burst, clock)
    start, taken = clock.ticks, 0
    for pause in pauses:
        clock.ticks += pause
        seconds = bucket.take()
        taken += seconds == 0
        assert taken <= burst + rate * (clock.ticks - start) + 1e-6
        if seconds:
            clock.ticks += seconds
            assert bucket.take() == 0
            taken += 1


def test_the_wall_clock_does_not_matter():
    clock = FakeClock()
    bucket = TokenBucket(1.0, 1, clock)
    assert bucket.take() == 0
    for jump in (1e9, -2e9):
        clock.wall += jump
        assert bucket.take() == 1.0


def test_keys_have_buckets_of_their_own_and_a_change_of_limits_counts_at_once():
    clock = FakeClock()
    rates = RequestRates(clock)
    slow = KeyLimits(requests_per_minute=60.0, burst=1)
    rates.count("a", slow)
    rates.count("b", slow)
    with pytest.raises(TooManyRequests) as caught:
        rates.count("a", slow)
    assert caught.value.retry_after_seconds == 1.0
    rates.count("a", KeyLimits(requests_per_minute=60.0, burst=2))


def test_the_number_of_buckets_is_bounded_and_the_one_used_longest_ago_goes(monkeypatch):
    monkeypatch.setattr(limits, "MOST_BUCKETS", 2)
    rates = RequestRates(FakeClock())
    one = KeyLimits(requests_per_minute=1.0, burst=1)
    rates.count("a", one)
    rates.count("b", one)
    with pytest.raises(TooManyRequests):
        rates.count("a", one)
    rates.count("c", one)  # b goes
    with pytest.raises(TooManyRequests):
        rates.count("a", one)
    rates.count("b", one)


@pytest.mark.parametrize("name", KeyLimits.__slots__)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 2**60])
def test_a_limit_that_would_shut_a_key_out_is_refused(name, value):
    with pytest.raises(InvalidRequest) as caught:
        KeyLimits(**{name: value})
    assert caught.value.field == f"limits.{name}"
