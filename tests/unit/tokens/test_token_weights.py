from __future__ import annotations

import pytest

from palestra.tokens import token_weights

LENGTHS = [3, 1, 0, 6]


def test_every_rollout_weighs_the_same_however_long():
    weights = token_weights(LENGTHS, "seq-mean-token-mean", 100)
    assert [n * w for n, w in zip(LENGTHS, weights, strict=True)] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_every_token_weighs_the_same():
    assert token_weights(LENGTHS, "token-mean", 100) == [0.1, 0.1, 0.0, 0.1]


def test_every_token_weighs_one_over_rollouts_times_the_longest():
    assert token_weights(LENGTHS, "seq-mean-token-sum-norm", 20) == [1 / 60, 1 / 60, 0.0, 1 / 60]


@pytest.mark.parametrize("loss_agg_mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_to_train_weighs_nothing(loss_agg_mode, lengths):
    assert token_weights(lengths, loss_agg_mode, 10) == [0.0] * len(lengths)
