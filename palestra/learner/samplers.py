"""`TaskSampler`: chooses the tasks of each step, as a function of the seed and of what was played before.

A sampler keeps no state. The learner asks it again after every restart, with a history that it reads from the run's
store, so that kills, late episodes and resumed jobs get the same tasks.
"""

from __future__ import annotations

import operator
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice
from typing import ClassVar, overload

import numpy as np

from palestra.config import CurriculumConfig
from palestra.database import to_json
from palestra.errors import InvalidSampler
from palestra.store.tasks import StoredTasks
from palestra.types.records import Task


class TaskPool(Sequence[tuple[Task, ...]]):
    """The training tasks of one environment; each entry is the tasks that the episodes of a group play in turn.

    Attributes:
        grouped: number of entries with several tasks.
    """

    def __init__(self, tasks: Sequence[Task], group_key: str = "", most: int = 1) -> None:
        """Determine the entries.

        Args:
            tasks: of the environment, in the order of its file.
            group_key: task key with equal values within an entry; empty: each task is alone.
            most: limit of tasks in an entry; a larger one is split.
        """
        self._tasks, self._groups = tasks, _grouped(tasks, group_key, most)
        self._entry_of: dict[int, int] | None = None
        self.grouped = sum(len(group) > 1 for group in self._groups or ())

    def __len__(self) -> int:
        return len(self._tasks) if self._groups is None else len(self._groups)

    @overload
    def __getitem__(self, place: int) -> tuple[Task, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> list[tuple[Task, ...]]: ...

    def __getitem__(self, place: int | slice) -> tuple[Task, ...] | list[tuple[Task, ...]]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        if self._groups is None:
            return (self._tasks[place],)
        return tuple(self._tasks[each] for each in self._groups[place])

    def entries_of(self, task_ids: Sequence[str]) -> dict[str, int]:
        """Return the position of the entry that begins with a task, by the task's id; unknown ids are left out."""
        if isinstance(self._tasks, StoredTasks):
            found = self._tasks.positions_of(task_ids)
        else:
            wanted = set(task_ids)
            found = {task.task_id: place for place, task in enumerate(self._tasks) if task.task_id in wanted}
        if self._groups is None:
            return found
        if self._entry_of is None:
            self._entry_of = {group[0]: entry for entry, group in enumerate(self._groups)}
        return {name: self._entry_of[place] for name, place in found.items() if place in self._entry_of}


def _grouped(tasks: Sequence[Task], key: str, most: int) -> list[tuple[int, ...]] | None:
    """Return the positions of the tasks of each group, in order of their first; None: each task is alone."""
    if not key:
        return None
    if isinstance(tasks, StoredTasks):
        values = tasks.values_of(key)
    else:
        values = {place: task.data.get(key) for place, task in enumerate(tasks)}
    if all(value is None for value in values.values()):
        return None
    found: dict[str | int, list[int]] = {}
    for place in range(len(tasks)):
        value = values.get(place)
        found.setdefault(place if value is None else to_json(value), []).append(place)
    return [tuple(group[start : start + most]) for group in found.values() for start in range(0, len(group), most)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedGroup:
    """A group of an earlier step, all of whose episodes are over.

    Attributes:
        position: of its tasks in the pool.
        step: the step that it was played for.
        rewards: of its completed episodes; discarded ones have none, so that () is a group without any.
    """

    position: int
    step: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a sampler may know of a job before a step. All of it is the same after a restart.

    Attributes:
        results: groups of all steps that were over for certain when the step's first group was registered: up to
            `step - 1 - rollout.max_staleness`, in order, with replaced groups.
        underway: positions of the first `groups_per_step` groups of the steps between these and this one.
        before: number of all other steps' groups that are registered, for samplers that go through the tasks in order.
    """

    results: tuple[PlayedGroup, ...] = ()
    underway: tuple[int, ...] = ()
    before: int = 0


class TaskSampler(ABC):
    """Chooses the tasks of each step. Derive from it, and give the class to `palestra.train(sampler=…)`.

        class Newest(palestra.TaskSampler):
            def tasks(self, step, history):
                draw = numpy.random.default_rng((self.seed, step))
                yield from draw.permutation(len(self.pool))

    `check_sampler` tests a class. With several environments, each has a sampler of its own.

    Attributes:
        reads_results: whether `tasks` reads `history.results` and `history.underway`, which take a query of the store.
    """

    reads_results: ClassVar[bool] = True

    def __init__(self, pool: TaskPool, seed: int) -> None:
        """Keep the tasks and the seed of the job, or of one of its environments."""
        self.pool, self.seed = pool, seed

    @abstractmethod
    def tasks(self, step: int, history: History) -> Iterator[int]:
        """Yield positions in the pool for the groups of a step.

        The first `rollout.groups_per_step` are the step's groups; later ones replace groups that were lost or that had
        nothing to teach. The result may depend on the arguments, the pool and the seed alone. Called in a thread.

        Args:
            step: from 1.
            history: groups and results of the steps before.
        """


SamplerMaker = Callable[[TaskPool, int], TaskSampler]


class Shuffled(TaskSampler):
    """All tasks in a new random order every epoch."""

    reads_results = False

    def __init__(self, pool: TaskPool, seed: int) -> None:
        super().__init__(pool, seed)
        self._epoch, self._order = -1, array("q")

    def tasks(self, step: int, history: History) -> Iterator[int]:
        """Yield the positions that follow those of the groups before."""
        return map(self.position, count(history.before))

    def position(self, number: int) -> int:
        """Return the position of the entry with a number in the whole order, from 0."""
        epoch, place = divmod(number, len(self.pool))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", range(len(self.pool)))
            random.Random(f"{self.seed}:{epoch}").shuffle(self._order)
        return self._order[place]


def drawn(sampler: TaskSampler, step: int, history: History, places: range) -> list[int]:
    """Return the positions that a sampler gives at some places of a step. Raises InvalidSampler: it gives too few, or
    something that is no position in the pool.
    """
    name = type(sampler).__name__
    given: object = sampler.tasks(step, history)
    if not isinstance(given, Iterable):
        raise InvalidSampler(f"{name}.tasks returns {given!r:.60}; it has to yield positions in the pool")
    found = list(islice(given, places.start, places.stop))
    if len(found) < len(places):
        raise InvalidSampler(
            f"{name}.tasks ends after task {places.start + len(found)} of step {step}, and {places.stop} are needed; "
            "yield more, at best without an end: they replace groups that are lost"
        )
    checked: list[int] = []
    for position in found:
        number = -1
        with suppress(TypeError):  # no integer, neither Python's nor numpy's
            number = operator.index(position)
        if not 0 <= number < len(sampler.pool):
            raise InvalidSampler(
                f"{name}.tasks gives {position!r:.60} for step {step}; positions in the pool are integers from 0 to "
                f"{len(sampler.pool) - 1}"
            )
        checked.append(number)
    return checked


_STEPS, _GROUPS = 6, 8  # of the made-up run, and groups of its steps


def check_sampler(sampler: SamplerMaker, tasks: Sequence[Mapping[str, object]] = ()) -> None:
    """Check that a sampler gives tasks that exist, and the same ones whenever it is asked.

    Args:
        sampler: a `TaskSampler` class, or a function `(pool, seed)` that makes one.
        tasks: JSON objects to choose from; (): 40 with the keys `id` and `prompt`.

    Raises:
        InvalidSampler: a made-up run of six steps shows a mistake; the message names it.
    """
    data = [dict(each) for each in tasks] or [{"id": str(n), "prompt": f"task {n}"} for n in range(40)]
    pool = TaskPool([Task(task_id=str(each.get("id", n)), data=each) for n, each in enumerate(data)])
    check_pool(sampler, pool, 0, _GROUPS)


def check_pool(make: SamplerMaker, pool: TaskPool, seed: int, groups: int) -> None:
    """Check a sampler with the tasks of a job, and its `groups` in a step; see `check_sampler`."""
    made = make(pool, seed)
    if not isinstance(made, TaskSampler):
        raise InvalidSampler(f"the sampler is a {type(made).__name__}; derive a class from palestra.TaskSampler")
    asked: list[tuple[int, History]] = []
    found: list[list[int]] = []
    results: list[PlayedGroup] = []
    rewards = random.Random(0)
    for step in range(1, _STEPS + 1):
        asked.append((step, History(results=tuple(results), before=len(results))))
        found.append(drawn(made, *asked[-1], range(groups)))
        for position in found[-1]:
            scored = tuple(float(rewards.random() < position % 3 / 2) for _ in range(4))
            results.append(PlayedGroup(position=position, step=step, rewards=scored))
    for which, other in (("a second object", make(pool, seed)), ("the same object, asked again,", made)):
        for (step, history), expected in reversed(list(zip(asked, found, strict=True))):
            for places in (range(groups), range(groups // 2, groups)):
                if (again := drawn(other, step, history, places)) != expected[places.start :]:
                    raise InvalidSampler(
                        f"{type(made).__name__}.tasks is not deterministic: for step {step} it gives "
                        f"{expected[places.start :]}, and {which} gives {again}; draw with a generator that is made of "
                        "self.seed and step, and keep nothing between calls"
                    )


FORGET = 0.1  # share of what is known of a task that each new group of it replaces, since the policy changes
EXPLORE = 0.3  # share of the groups that play the task that has waited longest


class SuccessBand(TaskSampler):
    """Thompson sampling of tasks whose share of solved episodes is near a target.

    What is known of a task is a Beta distribution of that share, which begins as (1, 1). A group of n episodes, of
    which s are solved, makes (a, b) to

        a <- (1 - FORGET) a + FORGET + s,    b <- (1 - FORGET) b + FORGET + n - s

    Each step draws a share for every task from its distribution, and takes the tasks whose shares are nearest to
    `target`. One group of every 1 / `EXPLORE` plays the task that has waited longest instead, whatever is known of it.
    So each of N tasks comes back within N / `EXPLORE` groups, and so do those that were too hard.
    """

    def __init__(self, config: CurriculumConfig, pool: TaskPool, seed: int) -> None:
        super().__init__(pool, seed)
        self._config = config
        self._known: tuple[PlayedGroup, ...] = ()  # which the next two are made of
        self._rates = np.ones((2, len(pool)))  # a and b of each task
        self._last = np.full(len(pool), -1)  # number of each task's last group; -1: none

    def tasks(self, step: int, history: History) -> Iterator[int]:
        """Yield each task once, in turn near the target and from those that have waited longest, and then again."""
        self._learn(history.results)
        draw = np.random.Generator(np.random.Philox(key=_key(self.seed, step)))
        distance, last = np.abs(draw.beta(*self._rates) - self._config.target), self._last.copy()
        number = len(history.results)
        for position in history.underway:  # these come again after all others
            distance[position] += 1.0
            last[position], number = number, number + 1
        near = np.argsort(distance, kind="stable").tolist()
        waiting = np.lexsort((draw.permutation(len(self.pool)), last)).tolist()
        while True:
            yield from self._merged(near, waiting, number)
            number += len(self.pool)

    def _merged(self, near: list[int], waiting: list[int], number: int) -> Iterator[int]:
        """Yield each task once, from two orders of them; `number` of the first group decides which is next."""
        orders, drawn = (iter(near), iter(waiting)), set[int]()
        for each in range(number, number + len(near)):
            explores = int((each + 1) * EXPLORE) > int(each * EXPLORE)
            position = next(one for one in orders[explores] if one not in drawn)
            drawn.add(position)
            yield position

    def _learn(self, results: tuple[PlayedGroup, ...]) -> None:
        """Bring what is known of the tasks to these results."""
        if results[: len(self._known)] != self._known:
            self._known = ()
            self._rates[:], self._last[:] = 1.0, -1
        keep = 1.0 - FORGET
        for number, group in enumerate(results[len(self._known) :], len(self._known)):
            self._last[group.position] = number
            if group.rewards:
                solved = sum(reward >= self._config.min_reward for reward in group.rewards)
                counts = np.array([solved, len(group.rewards) - solved])
                self._rates[:, group.position] = keep * self._rates[:, group.position] + (1.0 - keep) + counts
        self._known = results


def _key(seed: int, step: int) -> int:
    """Return the key of a step's generator, of 128 bits."""
    return int.from_bytes(sha256(f"{seed}/{step}".encode()).digest()[:16])
