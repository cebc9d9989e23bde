"""`TaskSource`: the tasks of the groups that are registered next, by the job's sampler and the history in its store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from palestra.config import AlgorithmConfig, Roles, RolloutConfig
from palestra.learner.evaluation import rewards_of
from palestra.learner.open_run import OpenRun
from palestra.learner.samplers import (
    History,
    PlayedGroup,
    SamplerMaker,
    Shuffled,
    TaskPool,
    TaskSampler,
    check_pool,
    drawn,
)
from palestra.store import Groups
from palestra.threads import in_thread
from palestra.types.progress import GroupRecord
from palestra.types.records import Task
from palestra.types.states import EpisodeState


class TaskSource:
    """Asks a sampler for tasks.

    What it remembers of earlier steps can be read again from the store at any time.
    """

    def __init__(
        self, groups: Groups, rollout: RolloutConfig, sampler: TaskSampler, roles: Roles, algorithm: AlgorithmConfig
    ) -> None:
        """Create the source.

        Args:
            roles: rewards of agents played by frozen policies are no part of the history.
            algorithm: weights named rewards.
        """
        self._groups, self._rollout, self._sampler = groups, rollout, sampler
        self._roles, self._algorithm = roles, algorithm
        self._results: list[PlayedGroup] = []  # of the steps up to `_until`
        self._until = 0

    async def tasks(self, step: int, indices: Sequence[int]) -> dict[int, tuple[Task, ...]]:
        """Return the tasks of a step's next groups, which the episodes of each play in turn, by group index.

        Args:
            indices: the next ones of the job, in order.

        Raises:
            InvalidSampler: see `drawn`.
        """
        over = max(step - 1 - self._rollout.max_staleness, 0)  # whenever the step's groups are registered
        later = await self._groups.after("train", over)
        place = sum(record.step == step for record in later)
        history = History(before=indices[0] - place)
        if self._sampler.reads_results:
            history = await self._history(step, over, later, indices[0] - place)

        def read() -> dict[int, tuple[Task, ...]]:
            positions = drawn(self._sampler, step, history, range(place, place + len(indices)))
            return {index: self._sampler.pool[each] for index, each in zip(indices, positions, strict=True)}

        return await in_thread(read)

    async def _history(self, step: int, over: int, later: Sequence[GroupRecord], before: int) -> History:
        """Return what the sampler may know; `later` are the groups of the steps after `over`."""
        while self._until < over:
            self._results += await self._results_of(self._until + 1)
            self._until += 1
        underway: list[str] = []
        for number in range(over + 1, step):
            # Replacements are left out, because it depends on time whether there are any by now.
            of_step = [record.task_id for record in later if record.step == number]
            underway += of_step[: self._rollout.groups_per_step]
        known = await in_thread(lambda: self._sampler.pool.entries_of(underway))
        return History(
            results=tuple(self._results[: bisect_right(self._results, over, key=lambda group: group.step)]),
            underway=tuple(known[name] for name in underway if name in known),
            before=before,
        )

    async def _results_of(self, step: int) -> list[PlayedGroup]:
        """Return the groups of a step that is over."""
        of_step = await self._groups.of_step("train", step)
        names = [record.task_id for record, _ in of_step]
        known = await in_thread(lambda: self._sampler.pool.entries_of(names))
        found = []
        for record, members in of_step:
            completed = [episode for episode in members if episode.state is EpisodeState.COMPLETED]
            rewards = tuple(rewards_of(completed, self._roles, self._algorithm))
            if record.task_id in known:
                found.append(PlayedGroup(position=known[record.task_id], step=step, rewards=rewards))
        return found


async def open_source(run: OpenRun, tasks: Sequence[Task], grouped: bool, own: SamplerMaker | None) -> TaskSource:
    """Return what chooses among the training tasks of a run.

    Args:
        grouped: whether tasks with the same `rollout.group_key` are one group.
        own: a user's sampler, which is checked; None: as configured.
    """
    config, rollout, make = run.config, run.config.rollout, own or Shuffled
    key = rollout.group_key if grouped else ""
    pool = await in_thread(lambda: TaskPool(tasks, key, rollout.group_size))
    if pool.grouped:
        text = (
            f"tasks with the same {key} are played and compared as one group: {pool.grouped} groups have "
            "several; rollout.group_key says by which key"
        )
        await run.event("tasks_grouped", {"groups": pool.grouped, "text": text})
    if own is not None:
        await in_thread(lambda: check_pool(own, pool, config.seed, rollout.groups_per_step))
    roles = run.policies.roles
    algorithm = config.algorithm_of(roles.default)
    return TaskSource(run.store.groups, rollout, make(pool, config.seed), roles, algorithm)
