from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from palestra.errors import InvalidSampler
from palestra.learner.samplers import History, Shuffled, TaskPool, TaskSampler, check_sampler, drawn
from palestra.types.records import Task

TASKS = [Task(task_id=str(i), data={}) for i in range(7)]


def shuffled(seed: int) -> Shuffled:
    return Shuffled(TaskPool(TASKS), seed)


def epoch(order: Shuffled, number: int) -> list[str]:
    return [order.pool[order.position(number * 7 + i)][0].task_id for i in range(7)]


def test_every_epoch_is_a_permutation_of_all_tasks():
    order = shuffled(3)
    for number in range(20):
        assert sorted(epoch(order, number)) == [t.task_id for t in TASKS]


def test_epochs_and_seeds_differ():
    order = shuffled(3)
    assert len({tuple(epoch(order, n)) for n in range(10)}) == 10
    assert epoch(shuffled(4), 0) != epoch(order, 0)


def test_a_groups_task_does_not_depend_on_what_was_asked_before():
    forward, backward = shuffled(3), shuffled(3)
    wanted = [forward.position(i) for i in range(40)]
    assert [backward.position(i) for i in reversed(range(40))] == wanted[::-1]


def test_the_order_is_the_same_in_every_version_of_the_program():
    assert epoch(shuffled(0), 0) == ["2", "3", "1", "0", "6", "5", "4"]


def groups_of(values: list, most: int = 8) -> list[list[str]]:
    rows = [Task(task_id=str(n), data={} if value is ... else {"group_id": value}) for n, value in enumerate(values)]
    return sorted([task.task_id for task in group] for group in TaskPool(rows, "group_id", most))


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        (["a", "b", "a"], [["0", "2"], ["1"]]),
        ([1, "1", 1.0, True], [["0"], ["1"], ["2"], ["3"]]),
        ([None, None, ...], [["0"], ["1"], ["2"]]),
        ([[1], [1], {"x": 1}, {"x": 1}], [["0", "1"], ["2", "3"]]),
        (["a"] * 5, [["0", "1", "2"], ["3", "4"]]),
    ],
)
def test_tasks_with_the_same_value_are_one_group_and_too_many_make_several(values, groups):
    assert groups_of(values, most=3) == groups


def test_without_a_key_each_task_is_a_group():
    rows = [Task(task_id=str(n), data={"group_id": 1}) for n in range(3)]
    pool = TaskPool(rows)
    assert (len(pool), pool.grouped) == (3, 0)


@pytest.mark.parametrize("before", [0, 5, 12])
def test_the_plain_order_goes_on_where_the_groups_before_end(before):
    order = shuffled(0)
    expected = [order.position(before + n) for n in range(6)]
    assert drawn(shuffled(0), 3, History(before=before), range(6)) == expected
    assert drawn(shuffled(0), 3, History(before=before), range(4, 6)) == expected[4:]


def test_an_entry_is_found_by_its_first_task_alone():
    rows = [Task(task_id=str(n), data={"group_id": value}) for n, value in enumerate(["a", "b", "a", "c"])]
    assert TaskPool(rows, "group_id", 3).entries_of(["0", "1", "2", "9"]) == {"0": 0, "1": 1}
    assert TaskPool(rows).entries_of(["3", "9", "0"]) == {"3": 3, "0": 0}


# Samplers of users


class Drawn(TaskSampler):
    """Draws by seed and step."""

    def tasks(self, step: int, history: History) -> Iterator[int]:
        yield from np.random.default_rng((self.seed, step)).permutation(len(self.pool))


class Worst(TaskSampler):
    """Plays first what was solved least."""

    def tasks(self, step: int, history: History) -> Iterator[int]:
        solved = [0.0] * len(self.pool)
        for group in history.results:
            solved[group.position] += sum(group.rewards)
        yield from sorted(range(len(self.pool)), key=solved.__getitem__)


class Unseeded(Drawn):
    def tasks(self, step, history):
        yield from np.random.permutation(len(self.pool))


class Counting(Drawn):
    """Keeps state between calls."""

    calls = 0

    def tasks(self, step, history):
        self.calls += 1
        yield from range(self.calls, len(self.pool))


class ByClass(Drawn):
    """The second object gives other tasks than the first."""

    made = 0

    def __init__(self, pool, seed):
        super().__init__(pool, seed)
        ByClass.made += 1
        self.seed = ByClass.made


class Few(Drawn):
    def tasks(self, step, history):
        yield from range(3)


class Outside(Drawn):
    def tasks(self, step, history):
        yield from range(len(self.pool) - 3, len(self.pool) + 20)


class Names(Drawn):
    def tasks(self, step, history):
        yield from map(str, range(len(self.pool)))


class Lists(Drawn):
    """Yields all positions as one value."""

    def tasks(self, step, history):
        yield np.arange(len(self.pool))
        yield from range(len(self.pool))


class Nothing(Drawn):
    def tasks(self, step, history):
        range(len(self.pool))


@pytest.mark.parametrize("make", [Drawn, Worst, Shuffled])
def test_a_sampler_that_depends_on_its_arguments_alone_passes(make):
    check_sampler(make)
    check_sampler(make, [{"id": f"t{n}", "level": n % 3} for n in range(8)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Unseeded, "not deterministic"),
        (Counting, "the same object|a second object"),
        (ByClass, "not deterministic"),
        (Few, r"ends.*3.*1"),
        (Outside, r"40.*1"),
        (Names, "gives '0'"),
        (Lists, r"gives array\("),
        (Nothing, "returns None"),
        (lambda pool, seed: random.Random(seed), r"palestra.TaskSampler"),
    ],
)
def test_a_mistake_of_a_sampler_is_one_line(make, text):
    with pytest.raises(InvalidSampler, match=text) as error:
        check_sampler(make)
    assert "\n" not in str(error.value)


def test_a_sampler_may_give_numbers_of_numpy_and_less_tasks_than_a_step_has_are_refused():
    found = drawn(Drawn(TaskPool([Task(task_id=str(n), data={}) for n in range(5)]), 0), 1, History(), range(2, 5))
    assert all(type(position) is int for position in found)
    with pytest.raises(InvalidSampler, match=r"ends.*5"):
        drawn(Drawn(TaskPool(TASKS[:5]), 0), 1, History(), range(2, 6))
