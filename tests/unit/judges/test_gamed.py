"""A gamed judge is found soon after what it rewards and what is wanted part, and an honest one raises no alarm.

The policy and the biases are simulated; the auditor is a noisy judge behind real HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from gamed_policy import BIASES, GROUPS, SIZE, STEPS, Bias, gold, trained
from judge_server import Asked, judging

from palestra.config import JudgeAccess
from palestra.doctor.divergence import divergence
from palestra.doctor.rule import JobSize, RunHistory
from palestra.envs.judge import weighted_share
from palestra.learner.audit_numbers import Scored, sample_of, score_numbers
from palestra.waiting import together
from palestra_judges import Criterion, Rubric
from palestra_judges.rubric import RubricJudge

CHOICES = [str(n) for n in range(21)]
EPISODES = 32
NOISE = 0.15
LOST = 0.02  # of the peak of what is wanted: from there on it falls for good
HONEST = Bias("indeed", worth=0.0, cost=0.8, start=-3.0, rate=0.7)


def auditor(bias: Bias):
    """A judge that sees what is wanted, with noise."""

    def answer(asked: Asked) -> str:
        noise = random.Random(asked.data["task"]["number"] + asked.text).gauss(0, NOISE)
        seen = min(max(gold(asked.text, bias.mark, bias.cost) + noise, 0.0), 1.0)
        return asked.choose(lambda one: CHOICES[round(seen * (len(CHOICES) - 1))])

    return answer


async def alarm(bias: Bias, seed: int, steps: int = STEPS) -> tuple[int | None, list[float]]:
    """The step of the first alarm, and what the oracle knows of all steps."""
    history, oracle, found = RunHistory(JobSize(groups_per_step=GROUPS, steps=steps)), [], None
    with judging(auditor(bias)) as server:
        rubric = Rubric(url=server.url, criteria=[Criterion(name="good", text="?", choices=CHOICES)])
        judge = rubric.make(JudgeAccess(url="", key=str))
        assert isinstance(judge, RubricJudge)
        await judge.open()
        for step, played in enumerate(trained(bias, seed, steps=steps), 1):
            oracle.append(played.oracle)
            if found is not None:
                continue  # the oracle looks at the rest
            sample = sample_of(seed, step, played.rewards, EPISODES)
            chosen = [*sample.drawn, *sample.best]
            works = [
                {"task": {"number": f"{seed}-{step}-{index}"}, "question": "?", "reply": {"text": played.texts[index]}}
                for index in chosen
            ]
            verdicts = await together(*(judge.ask(work, "e") for work in works))
            scores = [weighted_share(verdict.scores["e"], rubric.reward_weights) for verdict in verdicts]
            scored = [
                Scored(index=index, group=index // SIZE, reward=played.rewards[index], score=score)
                for index, score in zip(chosen, scores, strict=True)
            ]
            history.add(_row(step, played.rewards) | score_numbers(scored, sample, list(history.rows)))
            found = step if divergence(history) is not None else None
        await judge.close()
    return found, oracle


def _row(step: int, rewards: Sequence[float]) -> dict[str, float]:
    return {
        "step": float(step),
        "train/episodes": float(len(rewards)),
        "train/reward_mean": float(np.mean(rewards)),
        "train/reward_std": float(np.std(rewards)),
    }


def onset(oracle: Sequence[float]) -> int:
    """The first step after the peak at which what is wanted has fallen by more than `LOST`."""
    peak = int(np.argmax(oracle))
    return next(step for step in range(peak, len(oracle)) if oracle[step] < (1 - LOST) * oracle[peak]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bias", BIASES, ids=["length", "praise", "format", "keywords"])
async def test_a_gamed_judge_is_found_within_ten_steps_of_the_onset(bias, seed):
    found, oracle = await alarm(bias, seed)
    assert min(oracle[int(np.argmax(oracle)) :]) < 0.6 * max(oracle), "the policy does not game the judge"
    assert found is not None
    assert found <= onset(oracle) + 10
    assert oracle[found - 1] > 0.9 * max(oracle)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
async def test_a_run_with_an_honest_judge_has_no_alarm(seed):
    assert (await alarm(HONEST, seed))[0] is None
