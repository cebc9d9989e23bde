from __future__ import annotations

import numpy as np
import torch

from palestra.engine.embedded.kv_cache import KVBudget
from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.tokens import TokenRun


def prefixes(tokens: int, first: int = 0) -> PrefixCache:
    """A cache that has this many tokens, each a prefix of its own."""
    cache = PrefixCache(tokens)
    for token in range(first, first + tokens):
        cache.insert(TokenRun(np.array([token], np.int32)), torch.zeros((1, 2, 1, 1, 1)))
    return cache


def test_what_is_reserved_is_never_more_than_the_total():
    budget = KVBudget(100)
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.reserve(40)
    budget.release(60)
    assert budget.reserve(60)


def test_prefixes_make_room_for_requests_and_only_as_much_as_is_needed():
    small, large = prefixes(10), prefixes(5)
    budget = KVBudget(100, prefixes=[(small, 3), (large, 10)])
    assert budget.kept == 80
    assert budget.reserve(25)  # 5 bytes too many: two tokens of 3
    assert (small.tokens, large.tokens) == (8, 5)
    assert budget.reserve(70)
    assert budget.reserved + budget.kept <= 100
    assert (small.tokens, large.tokens) == (0, 0)


def test_room_for_prefixes_is_what_requests_and_other_prefixes_leave():
    small, large = prefixes(10), prefixes(5)
    budget = KVBudget(100, prefixes=[(small, 3), (large, 10)])
    budget.reserve(10)
    assert budget.room_for(small, 3) == 13  # (100 - 10 - 50) // 3
    assert budget.room_for(large, 10) == 6
