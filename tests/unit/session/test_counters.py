from __future__ import annotations

from palestra.session.context import WINDOW_SECONDS, TokenRate
from unit.building import FakeClock


def test_the_rate_is_of_the_calls_that_ended_within_the_window():
    clock = FakeClock()
    rate = TokenRate(clock)
    assert rate.per_second == 0.0
    rate.add(30)
    rate.add(20)
    assert rate.per_second == 50 / WINDOW_SECONDS
    clock.advance(WINDOW_SECONDS - 1)
    rate.add(10)
    assert rate.per_second == 60 / WINDOW_SECONDS
    clock.advance(1)
    assert rate.per_second == 10 / WINDOW_SECONDS
    clock.advance(WINDOW_SECONDS)
    assert rate.per_second == 0.0


def test_it_holds_one_number_a_second():
    clock = FakeClock()
    rate = TokenRate(clock)
    for _ in range(1000):
        rate.add(1)
        clock.advance(0.05)
    assert len(rate._ended) <= WINDOW_SECONDS
