"""Rows are shared out whole, in order, and about evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.trainer.packing import pack
from palestra_sharded.trainer import share_out
from unit.building import make_sample


def row(ids, name):
    return make_sample(list(ids), [len(ids) - 1], 1.0, 1.0, name=name)


def computed(rows):
    """Tokens that a rank computes for its rows, by the packing of one process without a limit."""
    return sum(micro.tokens for micro in pack(rows, 10**9))


def groups(count: int, size: int, prompt: int, answer: int):
    """Groups of rows that share a prompt, all behind the same first tokens, as a chat template writes them."""
    draw = np.random.default_rng(0)
    for group in range(count):
        own = [1, 2, 3, *draw.integers(4, 200, prompt).tolist()]
        for number in range(size):
            yield row([*own, *draw.integers(4, 200, answer).tolist()], f"{group} {number}")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(2, 30), st.integers(0, 5)), max_size=12),
    st.integers(1, 5),
)
def test_each_row_is_on_one_rank_in_order_with_all_of_its_episode(drawn, ranks):
    batch = [row([first] * length, f"e{episode}") for first, length, episode in drawn]
    shares = share_out(batch, ranks)
    assert len(shares) == ranks
    assert [id(sample) for share in shares for sample in share] == [id(sample) for sample in batch]
    places = [{sample.episode_id for sample in share} for share in shares]
    assert sum(map(len, places)) == len({sample.episode_id for sample in batch})


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.1), (3, 1.35), (4, 1.2)])
def test_ranks_have_about_as_much_to_compute(ranks, most):
    batch = list(groups(8, 8, 40, 12))
    parts = [computed(share) for share in share_out(batch, ranks)]
    assert max(parts) <= most * computed(batch) / ranks


def test_a_long_prompt_is_not_computed_twice_where_groups_can_be_parted():
    batch = list(groups(4, 4, 300, 5))
    first, second = share_out(batch, 2)
    assert (len(first), len(second)) == (8, 8)
    assert computed(first) + computed(second) == computed(batch) + 3  # the template's tokens


def test_ranks_without_rows_are_named():
    (only,) = groups(1, 1, 5, 5)
    assert [len(share) for share in share_out([only], 3)] == [1, 0, 0]
    assert share_out([], 2) == [[], []]
