"""Whatever tenants ask for: the trainer is not idle, shares follow weights, and no wait is longer than the bound."""

from __future__ import annotations

from collections import Counter, deque
from itertools import permutations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from palestra_bases.training.shares import FairShares

QUANTUM, MOST = 100, 60  # tokens of a round, and of the longest piece
WEIGHTS = st.lists(st.sampled_from([0.2, 0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5)
DRAWS = st.integers(0, 2**32).map(Random)


def shares_of(weights: list[float]) -> FairShares:
    shares = FairShares(QUANTUM)
    for number, weight in enumerate(weights):
        shares.add(str(number), weight)
    return shares


@given(WEIGHTS, DRAWS)
def test_work_is_never_left_waiting_and_each_piece_is_done_once(weights, draw):
    shares, lines = shares_of(weights), {str(n): deque() for n in range(len(weights))}
    todo = deque((draw.choice(list(lines)), draw.randint(1, MOST)) for _ in range(200))
    wanted, done = Counter(todo), Counter()
    while todo or any(lines.values()):
        for _ in range(min(draw.randint(0, 3), len(todo))):
            tenant, tokens = todo.popleft()
            lines[tenant].append(tokens)
        waiting = [tenant for tenant, line in lines.items() if line]
        if not waiting:
            continue
        chosen = shares.choose(waiting)
        assert chosen in waiting
        tokens = lines[chosen].popleft()
        shares.charge(chosen, tokens)
        done[chosen, tokens] += 1
    assert done == wanted


@given(WEIGHTS, DRAWS)
def test_tokens_of_tenants_that_always_wait_are_as_their_weights_within_a_quantum_and_a_piece(weights, draw):
    """The bound of Shreedhar and Varghese: the tokens of any two, divided by their weights, never differ by more."""
    shares, used = shares_of(weights), [0] * len(weights)
    waiting = [str(number) for number in range(len(weights))]
    for _ in range(500):
        chosen, tokens = int(shares.choose(waiting)), draw.randint(1, MOST)
        shares.charge(str(chosen), tokens)
        used[chosen] += tokens
        for (mine, weight), (other, lighter) in permutations(zip(used, weights, strict=True), 2):
            assert abs(mine / weight - other / lighter) <= QUANTUM + MOST / min(weight, lighter)


@given(WEIGHTS, DRAWS)
def test_nobody_waits_longer_than_the_bound_however_the_others_come_and_go(weights, draw):
    """Its bound is what the others may use in the rounds that pay for the last piece of its tenant."""
    shares, others = shares_of(weights), [str(number) for number in range(1, len(weights))]
    rounds = 1 + -(-MOST // (QUANTUM * weights[0]))
    bound = rounds * sum(QUANTUM * weight + MOST for weight in weights[1:])
    waited, mine = 0, False
    for _ in range(500):
        mine = mine or draw.random() < 0.5
        waiting = [*(["0"] if mine else []), *draw.sample(others, draw.randint(0 if mine else 1, len(others)))]
        chosen, tokens = shares.choose(waiting), draw.randint(1, MOST)
        shares.charge(chosen, tokens)
        if chosen == "0":
            waited, mine = 0, draw.random() < 0.5
        elif mine:
            waited += tokens
            assert waited <= bound


@given(st.lists(st.integers(1, 24), min_size=1, max_size=4), st.integers(1, 40))
def test_one_that_comes_is_served_at_once_while_it_has_tokens_left(work, pieces):
    shares = shares_of([1.0, 1.0])
    for _ in range(pieces):
        assert shares.choose(["0"]) == "0"
        shares.charge("0", 30)
    for tokens in work:
        assert shares.choose(["0", "1"]) == "1"
        shares.charge("1", tokens)


def test_a_tenant_that_was_away_has_saved_nothing():
    shares, served = shares_of([1.0, 1.0]), Counter()
    for _ in range(50):
        shares.charge(shares.choose(["0"]), 50)
    for _ in range(40):
        chosen = shares.choose(["0", "1"])
        shares.charge(chosen, 50)
        served[chosen] += 50
    assert served == {"0": 900, "1": 1100}  # the rest of one round, and then one each


def test_what_was_used_beyond_the_share_is_owed_also_by_one_that_was_away():
    shares, found = shares_of([1.0, 1.0]), []
    shares.charge("0", 350)
    for _ in range(4):
        found.append(shares.choose(["0", "1"]))
        shares.charge(found[-1], QUANTUM)
        shares.choose(["1"])
    assert found == ["1", "1", "1", "0"]
