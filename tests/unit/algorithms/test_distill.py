from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from palestra.algorithms.base import Group
from palestra.algorithms.loss import LossInputs
from palestra.algorithms.losses import build_loss
from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig, parse_config
from palestra.errors import ConfigError
from palestra.learner.update import policy_spec
from unit.building import make_sample, make_trajectory

DISTILL = create_algorithm(parse_config({"algorithm": {"name": "distill"}}).algorithm)


def test_an_advantage_is_what_the_teacher_finds_more_probable_of_each_token_by_itself():
    row = make_sample([1, 2, 3, 4], [2, 3])
    teacher = np.array([np.nan, np.nan, -0.5, -4.0], np.float32)
    group = Group(trajectories=(make_trajectory(0, 0, 1.0, []),), rows=(row,))
    found = DISTILL.advantages([group], {"teacher_logprobs": [teacher]})
    wanted = teacher[2:] - row.logprobs[2:]
    assert found.advantages[0].tolist() == pytest.approx([0.0, 0.0, *wanted])
    assert found.metrics["teacher_kl"] == pytest.approx(-wanted.mean())


def test_a_batch_without_rows_has_no_divergence():
    found = DISTILL.advantages([Group(trajectories=())], {"teacher_logprobs": []})
    assert (found.advantages, np.isnan(found.metrics["teacher_kl"])) == ([], True)


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_expected_gradient_is_that_of_the_reverse_kl(tokens):
    """Three tokens in two independent places, enumerated: sum over samples of p x gradient = gradient of KL(p || q)."""
    logits = torch.tensor([[0.3, -0.5, 1.0], [0.0, 2.0, -1.0]], dtype=torch.float64)[:tokens].requires_grad_(True)
    teacher = torch.log_softmax(torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.5, 3.0]], dtype=torch.float64), 1)[:tokens]
    places = torch.arange(tokens)
    total = torch.zeros_like(logits)
    for sampled in itertools.product(range(3), repeat=tokens):
        chosen = torch.tensor(sampled)
        logprobs = torch.log_softmax(logits, 1)[places, chosen]
        row = make_sample([9, *sampled], list(range(1, tokens + 1)))
        row.logprobs[1:] = logprobs.detach().numpy()
        column = np.full(tokens + 1, np.nan, np.float32)
        column[1:] = teacher[places, chosen].numpy()
        (advantages,) = DISTILL.advantages(
            [Group(trajectories=(), rows=(row,))], {"teacher_logprobs": [column]}
        ).advantages
        inputs = LossInputs(
            logprobs=logprobs,
            sampling_logprobs=logprobs.detach(),
            old_logprobs=None,
            advantages=torch.tensor(advantages[1:], dtype=torch.float64),
            on_policy=torch.ones(tokens, dtype=torch.bool),
            sequence_means=torch.zeros(tokens, dtype=torch.float64),
        )
        loss = build_loss(DISTILL.loss())(inputs).loss.sum()
        total += logprobs.detach().sum().exp() * torch.autograd.grad(loss, logits)[0]
    p = torch.log_softmax(logits, 1)
    (wanted,) = torch.autograd.grad((p.exp() * (p - teacher)).sum(), logits)
    torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-5)


def job(algorithm=None, **policies) -> JobConfig:
    return JobConfig(algorithm={"name": "distill"} | (algorithm or {}), policies={"student": {}} | policies)


def test_the_teacher_is_the_only_frozen_policy_or_the_one_that_is_named():
    big, other = {"model": "big", "frozen": True}, {"model": "other", "frozen": True}
    assert policy_spec(job(big=big), DISTILL, "student", {}).teacher == "big"
    assert policy_spec(job({"teacher": "b"}, a=big, b=other), DISTILL, "student", {}).teacher == "other"
    assert policy_spec(job(big=big), DISTILL, "student", {"big": "/folder"}).teacher == "/folder"
    with pytest.raises(ConfigError, match=r"algorithm\.teacher.*'a'.*'b'"):
        job(a=big, b=other)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher.*'student'.*frozen"):
        job({"teacher": "student"}, big=big)
    with pytest.raises(ConfigError, match=r"job.*teaches"):
        policy_spec(job(), DISTILL, "student", {})
