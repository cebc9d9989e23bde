"""Curricula on simulated learners, whose share of solved episodes of each task is known."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.config import CurriculumConfig
from palestra.learner import samplers as curriculum
from palestra.learner.samplers import (
    History,
    PlayedGroup,
    Shuffled,
    SuccessBand,
    TaskPool,
    TaskSampler,
    check_sampler,
    drawn,
)
from palestra.types.records import Task

GROUPS, SIZE = 8, 8


def band(pool: TaskPool, seed: int, **settings) -> SuccessBand:
    return SuccessBand(CurriculumConfig.model_validate(settings), pool, seed)


def pool_of(count: int) -> TaskPool:
    return TaskPool([Task(task_id=str(n), data={}) for n in range(count)])


def played(sampler: TaskSampler, shares, steps: int, seed: int, staleness: int = 0) -> list[PlayedGroup]:
    """Play steps of episodes that solve each task with its share."""
    chance, groups = np.random.default_rng(seed), list[PlayedGroup]()
    for step in range(1, steps + 1):
        over = step - 1 - staleness
        history = History(
            results=tuple(group for group in groups if group.step <= over),
            underway=tuple(group.position for group in groups if group.step > over),
            before=len(groups),
        )
        for position in drawn(sampler, step, history, range(GROUPS)):
            rewards = tuple((chance.random(SIZE) < shares[position]).astype(float).tolist())
            groups.append(PlayedGroup(position=position, step=step, rewards=rewards))
    return groups


def shares_of(count: int, seed: int):
    """Seven of ten tasks are never solved, fifteen of a hundred always, and the others sometimes."""
    never, always = int(0.7 * count), int(0.15 * count)
    draw = np.random.default_rng(seed)
    sometimes = draw.uniform(0.2, 0.8, count - never - always)
    return draw.permutation(np.concatenate([np.zeros(never), np.ones(always), sometimes]))


def learned(sampler: TaskSampler, difficulties, held_out, steps: int, seed: int) -> list[float]:
    """Return the held-out share of solved tasks after each step of a policy of one parameter, its skill.

    It solves a task with the probability sigmoid(skill - difficulty). A step follows the policy gradient, with rewards
    compared within groups.
    """
    chance, groups, skill = np.random.default_rng(seed), list[PlayedGroup](), 0.0
    curve: list[float] = []
    for step in range(1, steps + 1):
        history, gradient = History(results=tuple(groups), before=len(groups)), 0.0
        for position in drawn(sampler, step, history, range(GROUPS)):
            share = sigmoid(skill - difficulties[position])
            rewards = (chance.random(SIZE) < share).astype(float)
            gradient += float(np.mean((rewards - rewards.mean()) * (rewards - share))) / GROUPS
            groups.append(PlayedGroup(position=position, step=step, rewards=tuple(rewards.tolist())))
        skill += gradient
        curve.append(float(np.mean(sigmoid(skill - held_out))))
    return curve


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def informative(groups) -> float:
    return sum(len(set(group.rewards)) > 1 for group in groups) / len(groups)


def longest_wait(groups, count: int) -> int:
    """The largest number of groups between two of one task, and before its first and after its last."""
    last, longest = [-1] * count, 0
    for number, group in enumerate(groups):
        longest = max(longest, number - last[group.position])
        last[group.position] = number
    return max(longest, len(groups) - min(last))


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_at_least_twice_as_many_groups_teach_as_in_plain_order(seed, staleness):
    pool, shares = pool_of(200), shares_of(200, seed)
    plain = informative(played(Shuffled(pool, seed), shares, 80, seed, staleness))
    assert informative(played(band(pool, seed), shares, 80, seed, staleness)) >= 2 * plain


@pytest.mark.parametrize("difficult", [(-1, 4), (1, 5)], ids=["solved sometimes", "failed at first"])
@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_policy_learns_as_much_of_three_fifths_of_the_episodes(seed, difficult):
    """The same tasks as above; those that can be solved are of different difficulty."""
    draw, (least, most) = np.random.default_rng(seed), difficult
    sometimes = draw.uniform(least, most, 30)
    difficulties = draw.permutation(np.concatenate([np.full(140, 20.0), np.full(30, -20.0), sometimes]))
    held_out, steps = draw.uniform(least, most, 200), 120
    plain = learned(Shuffled(pool_of(200), seed), difficulties, held_out, steps, seed)
    chosen = learned(band(pool_of(200), seed), difficulties, held_out, steps, seed)
    assert plain[-1] - plain[0] > 0.1
    assert chosen[int(0.6 * steps) - 1] >= plain[-1]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("explore", [0.3, 0.5, 1.0])
def test_every_task_comes_back_within_its_bound(explore, staleness, monkeypatch):
    monkeypatch.setattr(curriculum, "EXPLORE", explore)
    pool, shares = pool_of(40), shares_of(40, 1)
    groups = played(band(pool, 0), shares, 120, 1, staleness)
    assert longest_wait(groups, 40) <= 40 / explore + GROUPS * (1 + staleness)


def test_a_task_that_was_too_hard_is_played_often_once_the_policy_can_solve_it():
    pool, sampler, hard = pool_of(60), band(pool_of(60), 0), 7
    shares = np.zeros(60)
    groups = played(sampler, shares, 60, 2)
    shares[hard] = 0.5
    chance, later = np.random.default_rng(0), 0
    for step in range(61, 200):
        for position in drawn(sampler, step, History(results=tuple(groups)), range(GROUPS)):
            later += position == hard
            rewards = tuple((chance.random(SIZE) < shares[position]).astype(float).tolist())
            groups.append(PlayedGroup(position=position, step=step, rewards=rewards))
    assert later > 4 * 139 * GROUPS / len(pool)


def test_what_is_known_of_a_task_is_the_recursion_of_its_docstring(monkeypatch):
    monkeypatch.setattr(curriculum, "FORGET", 0.2)
    sampler = band(pool_of(3), 0, min_reward=0.7)
    rewards = [(1.0, 0.0, 0.7), (), (0.0, 0.69)]
    results = tuple(PlayedGroup(position=1, step=1, rewards=each) for each in rewards)
    next(sampler.tasks(2, History(results=results)))
    a, b = 0.8 * 1 + 0.2 + 2, 0.8 * 1 + 0.2 + 1
    assert sampler._rates[:, 1] == pytest.approx([0.8 * a + 0.2, 0.8 * b + 0.2 + 2])
    assert sampler._rates[:, [0, 2]].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_curriculum_keeps_no_state_of_its_own(monkeypatch):
    check_sampler(lambda pool, seed: band(pool, seed))
    monkeypatch.setattr(curriculum, "EXPLORE", 1.0)
    check_sampler(lambda pool, seed: band(pool, seed), [{"id": n} for n in range(8)])


def test_no_task_is_drawn_twice_while_there_are_others():
    first = drawn(band(pool_of(10), 3), 1, History(underway=(4, 5)), range(20))
    assert sorted(first[:10]) == sorted(first[10:]) == [*range(10)]
    assert {4, 5}.isdisjoint(first[:6])
