"""Losses and aggregations against TRL's own code, on the same float32 tensors; `record_trl.py` made the fixtures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.algorithms import preference
from palestra.algorithms.base import Group
from palestra.algorithms.group_relative import DAPO
from palestra.algorithms.loss import LossInputs
from palestra.algorithms.losses import CISPOLoss, GSPOLoss, PPOClipLoss
from palestra.algorithms.preference import DPO, RewardModeling
from palestra.config import DAPOConfig, DPOConfig, RewardModelConfig
from palestra.tokens import token_weights
from unit.building import make_chat, make_sample, make_trajectory

RECORDED = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
MASK = torch.tensor(RECORDED["mask"]).bool()
HERE = {  # TRL's case: our loss, and our aggregation
    "grpo": (PPOClipLoss(), "seq-mean-token-mean"),
    "bnpo": (PPOClipLoss(), "token-mean"),
    "dr_grpo": (PPOClipLoss(), "seq-mean-token-sum-norm"),
    "dapo": (PPOClipLoss(clip_high_threshold=1.28), "token-mean"),
    "cispo": (CISPOLoss(clip_low_threshold=0.0, clip_high_threshold=1.3), "token-mean"),
    "gspo": (GSPOLoss(clip_low_threshold=0.97, clip_high_threshold=1.03), "seq-mean-token-mean"),
    "gspo by tokens": (GSPOLoss(clip_low_threshold=0.97, clip_high_threshold=1.04), "token-mean"),
}


def of_tokens(name: str) -> torch.Tensor:
    """A recorded column [rows, tokens] as [T], of the tokens that count."""
    column = torch.tensor(RECORDED[name])
    return (column if column.ndim == 2 else column.unsqueeze(1).expand(MASK.shape))[MASK]


def sequence_means(values: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(MASK.shape).masked_scatter(MASK, values)
    return (whole.sum(1) / MASK.sum(1)).unsqueeze(1).expand(MASK.shape)[MASK]


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_value_and_gradient_are_those_of_trl(case):
    loss, mode = HERE[case]
    logprobs = of_tokens("logprobs").requires_grad_(True)
    old = of_tokens("old_logprobs")
    inputs = LossInputs(
        logprobs=logprobs,
        sampling_logprobs=old,
        old_logprobs=None,
        advantages=of_tokens("advantages"),
        on_policy=torch.ones(len(old), dtype=torch.bool),
        sequence_means=sequence_means((logprobs - old).detach()),
    )
    by_row = token_weights(MASK.sum(1).tolist(), mode, RECORDED["max_length"])
    weights = torch.tensor(by_row).unsqueeze(1).expand(MASK.shape)[MASK]
    total = (loss(inputs).loss * weights).sum()
    total.backward()
    recorded = RECORDED["cases"][case]
    assert float(total.detach()) == pytest.approx(recorded["loss"], abs=1e-6)
    wanted = torch.tensor(recorded["gradient"])
    assert not wanted[~MASK].any()
    torch.testing.assert_close(logprobs.grad, wanted[MASK], rtol=1e-5, atol=1e-6)
    assert 0 < int((wanted[MASK] == 0).sum()) < len(old) or case == "cispo", "some tokens are clipped, and not all"


def test_the_soft_penalty_of_length_is_that_of_trl():
    recorded = RECORDED["overlong"]
    algorithm = DAPO(DAPOConfig(overlong_share=recorded["cache"] / recorded["max"]))
    for length, reward in zip(recorded["lengths"], recorded["rewards"], strict=True):
        chat = make_chat(completion=[7] * length, max_tokens=recorded["max"])
        group = [make_trajectory(0, 0, 3.0, [chat]), make_trajectory(0, 1, 0.0, [])]
        returns, _ = algorithm.shaped(group, algorithm.returns(group))
        assert list(returns.values.values()) == [pytest.approx(3.0 + reward)]


@pytest.mark.parametrize("recorded", RECORDED["pairs"], ids=lambda recorded: f"beta {recorded['beta']}")
def test_the_gradient_of_pairs_is_that_of_trl(recorded):
    """The weights of `DPO` and the log-likelihood together; TRL's batch has the chosen replies first."""
    logprobs, reference = torch.tensor(RECORDED["logprobs"]) * 2, torch.tensor(RECORDED["old_logprobs"])
    tokens = MASK.sum(1).tolist()
    rows = [make_sample([1] * n, range(n), name=f"train-{i % 3:06d}-{i // 3:02d}") for i, n in enumerate(tokens)]
    order = [0, 3, 1, 4, 2, 5]  # by pair
    groups = [
        Group(
            trajectories=(make_trajectory(pair, 0, 1.0, []), make_trajectory(pair, 1, 0.0, [])),
            rows=(rows[pair], rows[pair + 3]),
        )
        for pair in range(3)
    ]
    by_row = [[column[place][: tokens[place]].numpy() for place in order] for column in (logprobs, reference)]
    found = DPO(DPOConfig(beta=recorded["beta"])).advantages(
        groups, {"old_logprobs": by_row[0], "reference_logprobs": by_row[1]}
    )
    assert found.importance_weights is not None
    weights = token_weights([tokens[place] for place in order], "seq-mean-token-mean", 12)
    for place, weight, factors, advantages in zip(
        order, weights, found.importance_weights, found.advantages, strict=True
    ):
        wanted = torch.tensor(recorded["gradient"])[place]
        torch.testing.assert_close(torch.tensor(-weight * factors), wanted[: tokens[place]], rtol=1e-5, atol=1e-7)
        assert set(np.sign(advantages)) <= ({0, 1} if place < 3 else {0, -1})
    said = recorded["metrics"]
    names = {"chosen": "chosen_reward", "rejected": "rejected_reward", "accuracies": "pair_accuracy"}
    for trl, here in names.items():
        assert found.metrics[here] == pytest.approx(said[f"rewards/{trl}"], rel=1e-5)
    assert found.metrics["pair_margin"] == pytest.approx(said["rewards/margins"], rel=1e-4)
    assert found.metrics["pair_loss"] == pytest.approx(recorded["loss"], rel=1e-5)


@pytest.mark.parametrize("recorded", RECORDED["rewards"], ids=lambda recorded: f"centred by {recorded['coefficient']}")
def test_the_gradient_of_a_model_of_rewards_is_that_of_trl(recorded, monkeypatch):
    """By the value of each reply's last token; TRL's batch has the chosen replies first."""
    tokens, order = MASK.sum(1).tolist(), [0, 3, 1, 4, 2, 5]
    rows = [make_sample([1] * n, range(n), name=f"train-{i % 3:06d}-{i // 3:02d}") for i, n in enumerate(tokens)]
    groups = [
        Group(
            trajectories=(make_trajectory(pair, 0, 1.0, []), make_trajectory(pair, 1, 0.0, [])),
            rows=(rows[pair], rows[pair + 3]),
        )
        for pair in range(3)
    ]
    values = [np.full(tokens[place], 7.0, np.float32) for place in order]
    for place, column in zip(order, values, strict=True):
        column[-1] = recorded["rewards"][place]
    monkeypatch.setattr(preference, "CENTER_REWARDS_COEFFICIENT", recorded["coefficient"])
    found = RewardModeling(RewardModelConfig()).advantages(groups, {"action_values": values})
    assert found.importance_weights is not None
    assert found.returns is not None
    weights = token_weights([tokens[place] for place in order], "seq-mean-token-mean", 12)
    for place, weight, factors, returns in zip(order, weights, found.importance_weights, found.returns, strict=True):
        assert np.isnan(returns[:-1]).all()
        assert weight * factors[-1] * returns[-1] == pytest.approx(recorded["gradient"][place], rel=1e-5, abs=1e-7)
    assert found.metrics["pair_loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    assert found.metrics["pair_accuracy"] == pytest.approx(recorded["metrics"]["accuracy"])
    assert found.metrics["pair_margin"] == pytest.approx(recorded["metrics"]["margin"], rel=1e-4)


def test_a_pair_of_which_one_reply_is_not_trained_teaches_nothing():
    row = make_sample([1, 1], [0, 1], name="train-000000-00")
    group = Group(trajectories=(make_trajectory(0, 0, 1.0, []), make_trajectory(0, 1, 0.0, [])), rows=(row,))
    other = np.zeros(2, np.float32)
    found = DPO(DPOConfig()).advantages([group], {"old_logprobs": [other], "reference_logprobs": [other]})
    assert found.importance_weights is not None
    assert not found.importance_weights[0].any()
    assert not any(map(math.isfinite, found.metrics.values()))
