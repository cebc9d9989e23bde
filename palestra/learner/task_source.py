"""`TaskSource`: the tasks of the groups that are registered next, by the job's samplers and its store.

Quotas say which environment each group of a step plays, in exact proportion to the environments' weights (Tijdeman
1980, "The chairman assignment problem"): of the environments whose quota is due, the one comes next whose deadline is
earliest. After any number of groups, over all steps, each of n environments has had its quota of them with an error of
at most 1 - 1 / (2n - 2) groups. Always taking the largest remainder has no such bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from hashlib import sha256
from math import lcm
from typing import NamedTuple

from palestra.config import AlgorithmConfig, JobConfig, Roles
from palestra.learner.open_run import OpenRun
from palestra.learner.samplers import (
    History,
    PlayedGroup,
    SamplerMaker,
    Shuffled,
    SuccessBand,
    TaskPool,
    TaskSampler,
    check_pool,
    drawn,
)
from palestra.learner.shares import rewards_of
from palestra.store import Groups
from palestra.threads import in_thread
from palestra.types.progress import GroupRecord
from palestra.types.records import Task
from palestra.types.states import REPLACED, EpisodeState

Shares = Mapping[str, Fraction]


def exact_shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the share of each environment; all add up to 1, exactly."""
    whole = sum(map(Fraction, weights.values()))
    return {name: Fraction(weight) / whole for name, weight in weights.items()}


def next_environments(shares: Shares, spent: Shares, cost: Shares, count: int) -> list[str]:
    """Return the environments of the next groups. `spent` is what the groups so far have taken, their number or their
    tokens; `cost` is what a group takes: 1, or an estimate of its tokens.
    """
    if len(shares) == 1:
        return list(shares) * count
    due = Fraction(1, 2 * len(shares) - 2)
    # What the mean group takes.
    a_group = 1 / sum((share / cost[name] for name, share in shares.items()), Fraction())
    total = sum(spent.values(), Fraction())
    growth = {name: share * a_group / cost[name] for name, share in shares.items()}
    lacking = {name: (share * total - spent[name]) / cost[name] for name, share in shares.items()}
    # As integers: sums of fractions take 15 times as long.
    scale = lcm(due.denominator, *(value.denominator for value in (*growth.values(), *lacking.values())))
    grows = {name: int(value * scale) for name, value in growth.items()}
    lacks, found = {name: int(value * scale) for name, value in lacking.items()}, list[str]()
    least, most = int(due * scale), int((1 - due) * scale)
    for _ in range(count):
        for name, more in grows.items():
            lacks[name] += more
        late = [name for name in shares if lacks[name] >= least] or [max(shares, key=lacks.__getitem__)]
        found.append(min(late, key=lambda name: Fraction(most - lacks[name], grows[name])))
        lacks[found[-1]] -= scale
    return found


def unfilled(slots: Sequence[str], registered: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the environments of a step's groups that are not registered.

    A replacement plays the environment of the first replaced group that has none, so that quotas hold. `slots` are the
    environments of the step's first groups, in order; `registered` is the environment of each group, in order, and
    whether it was replaced.
    """
    first, later = registered[: len(slots)], registered[len(slots) :]
    waiting = [name for name, replaced in first if replaced]
    for name, replaced in later:
        waiting.remove(name)
        if replaced:
            waiting.append(name)
    return [*slots[len(first) :], *waiting]


class _Total(NamedTuple):
    """Of an environment, up to a step: all groups; those that were not replaced, and their sampled tokens."""

    groups: int = 0
    kept: int = 0
    tokens: int = 0


class TaskSource:
    """Asks the sampler of each environment for tasks, in the proportion of their weights.

    What it remembers of earlier steps can be read again from the store at any time.
    """

    def __init__(self, groups: Groups, config: JobConfig, roles: Roles, samplers: Mapping[str, TaskSampler]) -> None:
        """Create the source. Samplers are by environment; "" is the only one of a job without `environments`. Rewards
        of agents played by frozen policies are no part of the history.
        """
        self._groups, self._rollout, self._samplers, self._roles = groups, config.rollout, samplers, roles
        self._algorithm: AlgorithmConfig = config.algorithm_of(roles.default)
        self._shares = exact_shares({each.id: each.weight for each in config.environments} or {"": 1.0})
        self._policies = config.trained_policies if config.tasks.weigh == "tokens" else ()
        self._reads = len(samplers) > 1 or any(sampler.reads_results for sampler in samplers.values())
        self._results: defaultdict[str, list[PlayedGroup]] = defaultdict(list)  # in order
        self._totals: list[dict[str, _Total]] = [{}]  # by step

    async def tasks(self, step: int, indices: Sequence[int]) -> dict[int, tuple[Task, ...]]:
        """Return the tasks of a step's next groups, which the episodes of each play in turn, by group index. `indices`
        are the next ones of the job, in order. Raises InvalidSampler: see `drawn`.
        """
        over = max(step - 1 - self._rollout.max_staleness, 0)  # whenever the step's groups are registered
        while self._reads and len(self._totals) <= over:
            await self._read(len(self._totals))
        later = await self._groups.after("train", over)
        return await in_thread(lambda: self._chosen(step, over, later, indices))

    def _chosen(
        self, step: int, over: int, later: Sequence[GroupRecord], indices: Sequence[int]
    ) -> dict[int, tuple[Task, ...]]:
        """Return the result of `tasks`; `later` are the groups of the steps after `over`."""
        present = [record for record in later if record.step == step]
        of_index = dict(zip(indices, self._environments(step, over, later, len(indices)), strict=True))
        there = Counter(map(self._of, present))
        found: dict[int, tuple[Task, ...]] = {}
        for name, wanted in Counter(of_index.values()).items():
            sampler, place = self._samplers[name], there[name]
            before = indices[0] - place
            if len(self._samplers) > 1:
                counted = sum(self._of(record) == name for record in later) - place
                before = self._totals[over].get(name, _Total()).groups + counted
            history = self._history(name, step, over, later, before)
            positions = drawn(sampler, step, history, range(place, place + wanted))
            own = [index for index in indices if of_index[index] == name]
            found |= {index: sampler.pool[position] for index, position in zip(own, positions, strict=True)}
        return {index: found[index] for index in indices}

    def _environments(self, step: int, over: int, later: Sequence[GroupRecord], count: int) -> list[str]:
        """Return the environments of the next `count` groups of a step; other arguments as in `_chosen`."""
        if len(self._samplers) == 1:
            return list(self._samplers) * count
        before = self._first_groups(step, over, later)
        running = Counter(map(self._of, before))
        totals = {name: self._totals[over].get(name, _Total()) for name in self._shares}
        cost = dict.fromkeys(self._shares, Fraction(1))
        if self._policies:
            known = [total for total in totals.values() if total.tokens]
            mean = Fraction(sum(t.tokens for t in known), sum(t.kept for t in known)) if known else Fraction(1)
            cost = {name: Fraction(t.tokens, t.kept) if t.tokens else mean for name, t in totals.items()}
        taken = {name: total.tokens if self._policies else total.kept for name, total in totals.items()}
        spent = {name: taken[name] + running[name] * cost[name] for name in self._shares}
        slots = next_environments(self._shares, spent, cost, self._rollout.groups_per_step)
        return unfilled(slots, [(self._of(r), r.state in REPLACED) for r in later if r.step == step])[:count]

    def _first_groups(self, step: int, over: int, later: Sequence[GroupRecord]) -> list[GroupRecord]:
        """Return the first groups of the steps after `over`, without replacements, which depend on time."""
        found: list[GroupRecord] = []
        for number in range(over + 1, step):
            found += [record for record in later if record.step == number][: self._rollout.groups_per_step]
        return found

    def _history(self, name: str, step: int, over: int, later: Sequence[GroupRecord], before: int) -> History:
        """Return what the sampler of an environment may know."""
        sampler, results = self._samplers[name], self._results[name]
        if not sampler.reads_results:
            return History(before=before)
        underway = [r.task_id for r in self._first_groups(step, over, later) if self._of(r) == name]
        known = sampler.pool.entries_of(underway)
        return History(
            results=tuple(results[: bisect_right(results, over, key=lambda group: group.step)]),
            underway=tuple(known[task] for task in underway if task in known),
            before=before,
        )

    async def _read(self, step: int) -> None:
        of_step = await self._groups.of_step("train", step)
        tokens = await self._groups.tokens_by_group(range(step, step + 1), self._policies) if self._policies else {}
        by_name: defaultdict[str, list[str]] = defaultdict(list)
        for record, _ in of_step:
            by_name[self._of(record)].append(record.task_id)
        known = await in_thread(lambda: {name: self._samplers[name].pool.entries_of(by_name[name]) for name in by_name})
        totals = dict(self._totals[-1])
        for record, members in of_step:
            name, kept = self._of(record), record.state not in REPLACED
            total = totals.get(name, _Total())
            own = tokens.get(record.group_index, 0) if kept else 0
            totals[name] = _Total(total.groups + 1, total.kept + kept, total.tokens + own)
            completed = [episode for episode in members if episode.state is EpisodeState.COMPLETED]
            rewards = tuple(rewards_of(completed, self._roles, self._algorithm))
            position = known[name][record.task_id]
            self._results[name].append(PlayedGroup(position=position, step=step, rewards=rewards))
        self._totals.append(totals)

    def _of(self, record: GroupRecord) -> str:
        return record.task_id.partition("/")[0] if len(self._samplers) > 1 else next(iter(self._samplers))


async def open_source(
    run: OpenRun, pools: Mapping[str, Sequence[Task]], group_key: str, own: SamplerMaker | None
) -> TaskSource:
    """Return what chooses among the training tasks of a run. `pools` are the tasks of each environment, by name;
    `group_key` is as in `TaskPool`; `own` is a user's sampler, which is checked.
    """
    config = run.config
    samplers = {
        name: await in_thread(partial(_sampler, config, name, tasks, group_key, own)) for name, tasks in pools.items()
    }
    if grouped := sum(sampler.pool.grouped for sampler in samplers.values()):
        text = (
            f"tasks with the same {group_key} are played and compared as one group: {grouped} groups have several; "
            "rollout.group_key says by which key"
        )
        await run.event("tasks_grouped", {"groups": grouped, "text": text})
    return TaskSource(run.store.groups, config, run.policies.roles, samplers)


def _sampler(
    config: JobConfig, name: str, tasks: Sequence[Task], group_key: str, own: SamplerMaker | None
) -> TaskSampler:
    """Return what chooses among the tasks of an environment; arguments as in `open_source`."""
    pool = TaskPool(tasks, group_key, config.rollout.group_size)
    seed = config.seed if not name else int.from_bytes(sha256(f"{config.seed}/{name}".encode()).digest()[:7])
    if own is None:
        return Shuffled(pool, seed) if config.curriculum is None else SuccessBand(config.curriculum, pool, seed)
    check_pool(own, pool, seed, config.rollout.groups_per_step)
    return own(pool, seed)
