from __future__ import annotations

import math

import pytest

from palestra.config import OptimizerConfig
from palestra.learner.schedule import learning_rate


def rate(step: int, steps: int = 10, **kw) -> float:
    return learning_rate(OptimizerConfig.model_validate({"learning_rate": 2.0} | kw), step, steps)


def test_without_a_schedule_the_rate_is_constant():
    assert {rate(step) for step in range(1, 11)} == {2.0}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_warm_up_grows_in_a_line_to_the_peak(schedule):
    assert [rate(s, schedule=schedule, warmup_steps=4) for s in range(1, 6)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_linear_falls_by_the_same_each_step_and_would_be_zero_one_step_after_the_last():
    rates = [rate(s, schedule="linear") for s in range(1, 11)]
    assert rates == pytest.approx([2.0 * (10 - i) / 10 for i in range(10)])
    warm = [rate(s, schedule="linear", warmup_steps=4) for s in range(5, 11)]
    assert warm == pytest.approx([2.0 * (6 - i) / 6 for i in range(6)])


def test_cosine_is_half_a_wave():
    rates = [rate(s, schedule="cosine", warmup_steps=2) for s in range(3, 11)]
    assert rates == pytest.approx([1.0 + math.cos(math.pi * i / 8) for i in range(8)])


@pytest.mark.parametrize(("steps", "warmup"), [(10, 2), (4, 0), (30, 5), (7, 6)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_warm_up_the_rate_is_that_of_transformers(schedule, steps, warmup):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = get_scheduler(schedule, optimizer, warmup, steps)
    for step in range(1, steps + 1):
        if step > warmup:
            found = rate(step, steps=steps, schedule=schedule, warmup_steps=warmup)
            assert found == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
            assert found > 0
        optimizer.step()
        theirs.step()
    assert theirs.get_last_lr()[0] == pytest.approx(0.0, abs=1e-15)  # of the step that there is not
    assert rate(1, steps=steps, schedule=schedule, warmup_steps=warmup) > 0


def test_inverse_sqrt_is_that_of_transformers_however_many_steps_follow():
    import torch
    from transformers import get_inverse_sqrt_schedule

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = get_inverse_sqrt_schedule(optimizer, 10, timescale=10)
    for step in range(1, 101):
        if step > 10:
            found = {rate(step, steps=steps, schedule="inverse_sqrt", warmup_steps=10) for steps in (step, 1000)}
            assert len(found) == 1
            assert found.pop() == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()
    assert rate(41, schedule="inverse_sqrt", warmup_steps=10) == 1.0
    assert [rate(s, schedule="inverse_sqrt") for s in (1, 2, 5)] == [2.0, 2.0, 1.0]


def test_the_last_of_ten_steps_after_two_of_warm_up_has_an_eighth_of_the_peak():
    assert rate(10, schedule="linear", warmup_steps=2) == 2.0 * 0.125


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_has_no_rate_of_nothing(schedule):
    assert [rate(s, steps=4, schedule=schedule, warmup_steps=4) for s in range(1, 5)] == [0.5, 1.0, 1.5, 2.0]
    assert rate(1, steps=1, schedule=schedule) == 2.0


@pytest.mark.parametrize(
    ("schedule", "rates"), [("linear", [2.0, 1.5, 0.5]), ("cosine", [2.0, 1 + 2**-0.5, 1 - 2**-0.5])]
)
def test_with_a_token_budget_the_rate_falls_by_the_share_that_was_sampled(schedule, rates):
    optimizer = OptimizerConfig.model_validate({"learning_rate": 2.0, "schedule": schedule, "warmup_steps": 1})
    shares = (0.0, 0.25, 0.75)
    assert [learning_rate(optimizer, 2, 1000, share) for share in shares] == pytest.approx(rates)
    assert learning_rate(optimizer, 1, 1000, 0.9) == 2.0  # warm-up is by steps
