"""A batch small enough to be computed by hand, through the registry: every way to make one number of its tokens.

Two episodes with rewards 1 and 0, so that their advantages are +1/2 and -1/2 without scaling; the first has replies of
1 and 3 tokens, the second one of 2. A third episode is in a group of its own: it has no advantage, and 2 tokens that
count in the divisors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossInputs
from palestra.algorithms.losses import build_loss
from palestra.algorithms.registry import create_algorithm
from palestra.config import GRPOConfig
from palestra.errors import InvalidAlgorithm
from palestra.learner.batch import make_batch
from palestra.types.calls import PolicyVersion
from unit.building import SOLE, make_chat, make_trajectory

MAX_TOKENS = 10
SAMPLED = -1.0  # every token's logprob at sampling
RATIOS = {(0, 0): [1.1], (0, 1): [1.5, 1.0, 0.5], (1, 0): [0.9, 0.5]}  # pi / mu, by (episode, call)
UNCLIPPED = {"clip_low": 1.0, "clip_high": 99.0, "advantage_scale": "none"}


def trajectories():
    def episode(group: int, sample: int, reward: float, *lengths: int):
        chats = [
            make_chat(
                f"train-{group:06d}-{sample:02d}", index=n, prompt=(n + 1,), completion=[7] * m, logprobs=[SAMPLED] * m
            )
            for n, m in enumerate(lengths)
        ]
        return make_trajectory(group, sample, reward, chats)

    return [episode(0, 0, 1.0, 1, 3), episode(0, 1, 0.0, 2), episode(1, 0, 5.0, 2)]


def ratios_of(rows):
    """[N] pi / mu for each row."""
    found = []
    for row in rows:
        column = np.ones(len(row.ids), np.float32)
        for (sample, call), ratios in RATIOS.items():
            if row.episode_id == f"train-000000-{sample:02d}" and (here := row.calls == call).any():
                column[here] = ratios
        found.append(column)
    return found


def total_loss(logprobs_are_old: bool = True, **algorithm) -> tuple[float, dict[str, float]]:
    """The loss of the batch, and the algorithm's metrics; the policy's logprobs are those before the step, or mu's."""
    config = GRPOConfig(**algorithm)
    made = create_algorithm(config)
    batch = make_batch(trajectories(), made, MAX_TOKENS, PolicyVersion(0, 0), "policy", SOLE)
    old = [
        np.where(row.loss_mask, SAMPLED + np.log(ratios), np.nan).astype(np.float32)
        for row, ratios in zip(batch.samples, ratios_of(batch.samples), strict=True)
    ]
    forward = {"old_logprobs": old} if made.needs else {}
    found = made.advantages(batch.groups, forward)
    total = 0.0
    for row, now in zip(batch.with_advantages(found, forward).samples, old, strict=True):
        trained = row.loss_mask
        inputs = LossInputs(
            logprobs=torch.from_numpy((now if logprobs_are_old else row.logprobs)[trained]),
            sampling_logprobs=torch.from_numpy(row.logprobs[trained]),
            old_logprobs=None if row.old_logprobs is None else torch.from_numpy(row.old_logprobs[trained]),
            advantages=torch.from_numpy(row.advantages[trained]),
            on_policy=torch.ones(int(trained.sum()), dtype=torch.bool),
        )
        output = build_loss(made.loss())(inputs)
        total += float((output.loss * torch.from_numpy(row.loss_weights[trained])).sum())
    return total, dict(found.metrics)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("seq-mean-token-mean", 1 / (3 * 4), 1 / (3 * 2)),  # three rollouts; each shares its third by its tokens
        ("token-mean", 1 / 8, 1 / 8),  # eight tokens
        ("seq-mean-token-sum-norm", 1 / (3 * MAX_TOKENS), 1 / (3 * MAX_TOKENS)),
    ],
)
def test_each_aggregation_is_its_formula(mode, first, second):
    found, metrics = total_loss(loss_agg_mode=mode, **UNCLIPPED)
    assert found == pytest.approx(-0.5 * first * (1.1 + 1.5 + 1.0 + 0.5) + 0.5 * second * (0.9 + 0.5), rel=1e-6)
    assert metrics == {"calls_without_peers": 1.0}


def test_ratios_beyond_the_bounds_are_clipped():
    found, _ = total_loss(clip_low=0.2, clip_high=0.3, advantage_scale="none")
    first, second = 1 / 12, 1 / 6  # of an advantage below 0 only small ratios are clipped, and the larger term counts
    assert found == pytest.approx(-0.5 * first * (1.1 + 1.3 + 1.0 + 0.5) + 0.5 * second * (0.9 + 0.8), rel=1e-6)


REPLY = 1.5 * 1.0 * 0.5  # the product of the second reply's ratios, which all of its tokens have; the others:
OTHER = 0.9 * 0.5


@pytest.mark.parametrize(
    ("mode", "limit", "first", "second", "limited"),
    [
        ("token-truncate", 1.2, [1.1, 1.2, 1.0, 0.5], [0.9, 0.5], 1),
        ("token-mask", 1.2, [1.1, 0.0, 1.0, 0.0], [0.9, 0.0], 3),
        ("sequence-truncate", 1.05, [1.05, REPLY, REPLY, REPLY], [OTHER, OTHER], 1),
        ("sequence-mask", 1.5, [1.1, REPLY, REPLY, REPLY], [0.0, 0.0], 2),
    ],
)
def test_each_importance_mode_is_its_formula(mode, limit, first, second, limited):
    """The ratio to the policy before the step is 1 in the first epoch, so the weights w alone are left."""
    found, metrics = total_loss(importance_sampling=mode, importance_limit=limit, **UNCLIPPED)
    assert found == pytest.approx(-0.5 / 12 * sum(first) + 0.5 / 6 * sum(second), rel=1e-5)
    raw = [1.1, REPLY, REPLY, REPLY, OTHER, OTHER] if mode.startswith("sequence") else [1.1, 1.5, 1.0, 0.5, 0.9, 0.5]
    assert metrics["importance_limited"] == pytest.approx(limited / 6)
    assert metrics["importance_mean"] == pytest.approx(sum(raw) / 6, rel=1e-5)


def test_with_a_correction_the_ratio_is_to_the_policy_before_the_step_in_later_epochs_too():
    found, _ = total_loss(
        logprobs_are_old=False, importance_sampling="token-truncate", importance_limit=99.0, **UNCLIPPED
    )
    assert found == pytest.approx(-0.5 / 12 * 4 + 0.5 / 6 * 2, abs=1e-6)  # (mu / pi_old) x (pi_old / mu) = 1 each


def test_only_an_algorithm_that_corrects_asks_for_a_forward_pass():
    assert create_algorithm(GRPOConfig()).needs == frozenset()
    assert create_algorithm(GRPOConfig(importance_sampling="token-mask")).needs == {"old_logprobs"}


def test_advantages_of_other_rows_than_the_batch_has_are_refused():
    config = GRPOConfig()
    made = create_algorithm(config)
    batch = make_batch(trajectories(), made, MAX_TOKENS, PolicyVersion(0, 0), "policy", SOLE)
    found = made.advantages(batch.groups, {})
    for wrong in (found.advantages[1:], [column[1:] for column in found.advantages]):
        with pytest.raises(InvalidAlgorithm, match=r"shapes.*3"):
            batch.with_advantages(replace(found, advantages=wrong), {})


def test_an_advantage_that_is_no_number_names_its_episode():
    config = GRPOConfig()
    made = create_algorithm(config)
    batch = make_batch(trajectories(), made, MAX_TOKENS, PolicyVersion(0, 0), "policy", SOLE)
    found = made.advantages(batch.groups, {})
    odd = [column * np.float32(math.nan) if n == 2 else column for n, column in enumerate(found.advantages)]
    given = batch.with_advantages(replace(found, advantages=odd), {})
    assert given.advantage_problems() == {"train-000000-01": "the advantage of the token at 1 is not finite"}
