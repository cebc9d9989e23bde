"""Quotas of environments: no prefix of the groups is ever more than one group off, whatever is replaced."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from palestra.learner.task_source import exact_shares, next_environments, unfilled

WEIGHTS = st.lists(st.one_of(st.integers(1, 5), st.floats(1e-4, 10)), min_size=1, max_size=7)


@given(WEIGHTS, st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_every_prefix_over_all_steps_is_within_one_group_of_its_quota(weights, steps):
    shares = exact_shares({str(n): weight for n, weight in enumerate(weights)})
    one = dict.fromkeys(shares, Fraction(1))
    spent = dict.fromkeys(shares, Fraction(0))
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    for count in steps:
        for name in next_environments(shares, spent.copy(), one, count):
            spent[name] += 1
            total = sum(spent.values())
            assert max(abs(shares[each] * total - spent[each]) for each in shares) <= bound


@given(WEIGHTS, st.data())
def test_by_tokens_the_shares_of_tokens_come_within_two_groups_of_the_quota(weights, data):
    shares = exact_shares({str(n): weight for n, weight in enumerate(weights)})
    cost = {name: Fraction(data.draw(st.integers(1, 1000))) for name in shares}
    spent = dict.fromkeys(shares, Fraction(0))
    for _ in range(10):
        for name in next_environments(shares, spent.copy(), cost, 8):
            spent[name] += cost[name]
    total = sum(spent.values())
    for name in shares:
        assert abs(shares[name] * total - spent[name]) <= 2 * max(cost.values())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.data())
def test_a_replacement_plays_what_the_replaced_group_played_in_whatever_order_groups_are_lost(slots, data):
    registered: list[tuple[str, bool]] = []
    for _ in range(8):
        new = unfilled(slots, registered)
        for name in new[: data.draw(st.integers(0, len(new)))]:
            registered.append((name, False))
        kept = [place for place, (_, replaced) in enumerate(registered) if not replaced]
        for place in data.draw(st.lists(st.sampled_from(kept), unique=True, max_size=2)) if kept else ():
            registered[place] = (registered[place][0], True)
    registered += [(name, False) for name in unfilled(slots, registered)]
    assert Counter(name for name, replaced in registered if not replaced) == Counter(slots)
    assert [name for name, _ in registered[: len(slots)]] == slots
    assert unfilled(slots, registered) == []


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.lists(st.booleans(), max_size=20), st.data())
def test_replacements_in_canonical_order_do_not_depend_on_when_they_are_registered(slots, fates, data):
    """With dynamic sampling groups are settled in canonical order, a few at a time."""

    def played(pauses) -> list[str]:
        names: list[str] = list(slots)
        settled = 0
        for _fate in fates:
            if settled < len(names):
                settled += 1
            if pauses():
                lost = [(name, place < settled and fates[place]) for place, name in enumerate(names)]
                names += unfilled(slots, lost)
        lost = [(name, place < settled and fates[place]) for place, name in enumerate(names)]
        return names + unfilled(slots, lost)

    often = played(lambda: True)
    seldom = played(lambda: data.draw(st.booleans()))
    shorter = min(len(often), len(seldom))
    assert often[:shorter] == seldom[:shorter]
