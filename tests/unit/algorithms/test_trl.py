"""Losses and aggregations against TRL's own code, on the same float32 tensors; `record_trl.py` made the fixtures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from palestra.algorithms.group_relative import DAPO
from palestra.algorithms.loss import LossInputs
from palestra.algorithms.losses import CISPOLoss, GSPOLoss, PPOClipLoss
from palestra.config import DAPOConfig
from palestra.tokens import token_weights
from unit.building import make_chat, make_trajectory

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
