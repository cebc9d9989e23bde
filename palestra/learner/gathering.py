"""`Gathering`: waits for a job's tasks, gathers the episodes of each step, and fixes them in its manifest."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from palestra.algorithms.base import Algorithm
from palestra.client.task_files import split_in
from palestra.errors import ConfigError
from palestra.learner.groups import DynamicSampling, Gathered, gather_groups
from palestra.learner.open_run import OpenRun
from palestra.learner.recordings import Recordings, gather_recorded, of_step
from palestra.learner.reporting import PlayingTime
from palestra.learner.samplers import SamplerMaker
from palestra.learner.task_source import open_source
from palestra.learner.update import PolicyUpdate
from palestra.types.calls import PolicyVersion
from palestra.types.progress import Phase
from palestra.types.records import BatchManifest, Task, Trajectory

Restart = Callable[[Callable[[], object]], Awaitable[None]]


class EpisodeSource(Protocol):
    """Gives the training episodes of a job in place of tasks that are played."""

    async def gather(self, step: int, groups: int, versions: Mapping[str, PolicyVersion], restart: Restart) -> None:
        """Return when `groups` groups of a step are in the store, all complete (`Groups.register_recorded`).

        After a restart the step may have some of its groups already. `versions` are those of the trained policies
        before the step. `restart(replace)` calls `replace` in a thread once the newest checkpoints are on disk, and
        continues from the ones that it has put in their place.
        """
        ...


class Gathering:
    """Gathers the batches of one job, after `wait_for_tasks`.

    Attributes:
        playing: measures the time in which the episodes of each step were played.
        validation_tasks: of all environments; empty until `wait_for_tasks` has returned.
    """

    def __init__(
        self,
        run: OpenRun,
        algorithms: Mapping[str, Algorithm],
        sampler: SamplerMaker | None,
        given: Callable[[int, int, Mapping[str, PolicyVersion]], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to gather. `sampler` is a user's own choice of tasks, and `given` gives the episodes of a step."""
        self._run, self._algorithms, self._sampler, self._given = run, algorithms, sampler, given
        self._recordings = Recordings.of(run, algorithms)
        self.playing = PlayingTime(run.config.rollout.max_staleness > 0)
        self.validation_tasks: Sequence[Task] = []

    async def wait_for_tasks(self) -> None:
        """Wait for all tasks: from files, or pushed by a client that has marked the last push."""
        validates = self._run.config.evaluation.is_on
        if self._given is not None and not validates:
            return
        self._run.progress.enter("waiting for tasks")
        if not self._run.config.brings_tasks or validates:
            await self._run.store.tasks.wait_sealed()
        config, stored = self._run.config, self._run.store.tasks
        pools = {name: await stored.stored(split_in(name, "train")) for name in config.each_environment}
        held = [await stored.stored(split_in(name, "validation")) for name in config.each_environment]
        self.validation_tasks = held[0] if len(held) == 1 else [task for tasks in held for task in tasks]
        for algorithm in map(config.algorithm_of, config.trained_policies):
            if validates and self.validation_tasks and not algorithm.trains_policy:
                raise ConfigError(
                    f"validation plays with the policy, and {algorithm.name!r} does not train it: leave its tasks out"
                )
        if self._given is not None:
            return
        trained: Mapping[str, Sequence[Task]] = pools
        if self._recordings is not None:
            trained = {"": await self._recordings.tasks()}
        for name, tasks in trained.items():
            if not tasks:
                raise ConfigError(f"{f'environment {name!r}' if name else 'the job'} has no training tasks")
        group_key = config.rollout.group_key if self._recordings is None else ""
        self._source = await open_source(self._run, trained, group_key, self._sampler)

    async def batch(
        self, step: int, versions: dict[str, PolicyVersion], due: Mapping[str, PolicyUpdate]
    ) -> tuple[BatchManifest, list[Trajectory], dict[str, float]]:
        """Return the manifest of a step, committed before a restart or gathered now; its episodes; and metrics.

        Args:
            versions: the present version of each trained policy.
            due: the updates that are made in the step, by the policy's name.
        """
        manifest = await self._run.store.log.manifest(step)
        if manifest is not None:
            self._run.progress.enter(f"repeating step {step} from its manifest")
            self.playing.not_played()
            trajectories = await self._run.store.calls.trajectories(manifest.episode_ids)
            repeated = Gathered(episode_ids=manifest.episode_ids, trajectories=trajectories)
            return manifest, trajectories, _metrics_of(repeated, 0.0)
        self._run.progress.enter(f"gathering step {step}", Phase("train", step))
        started = time.monotonic()
        rollout = self._run.config.rollout
        last_step = min(step + rollout.max_staleness, self._run.config.steps)
        if self._given is not None:
            await self._given(step, rollout.groups_per_step, versions)
            gathered = await of_step(self._run.store, step)
            self.playing.gathered(started)
        elif self._recordings is not None:
            store, groups = self._run.store, rollout.groups_per_step
            gathered = await gather_recorded(store, self._recordings, self._source.tasks, step, groups, versions)
            self.playing.not_played()
        else:
            gathered = await gather_groups(
                self._run.store,
                rollout,
                self._source.tasks,
                step,
                last_step,
                {name: versions[name].n for name in due},
                self._dynamic_sampling(due),
            )
            self.playing.gathered(started)
        manifest = BatchManifest(
            step=step,
            versions=versions,
            episode_ids=gathered.episode_ids,
            seed=self._run.config.seed,
            config_digest=self._run.config.digest(),
        )
        await self._run.store.log.commit_manifest(manifest)
        return manifest, gathered.trajectories, _metrics_of(gathered, time.monotonic() - started)

    def _dynamic_sampling(self, due: Mapping[str, PolicyUpdate]) -> DynamicSampling | None:
        """Return which groups of a step are replaced because no update learns from them; None: none."""
        most = max((self._algorithms[name].dynamic_sampling for name in due), default=0)

        async def teaches(trajectories: Sequence[Trajectory]) -> bool:
            return any(update.learns_from(trajectories) for update in due.values())

        groups = self._run.config.rollout.groups_per_step
        return DynamicSampling(teaches=teaches, most=most * groups) if most else None


def _metrics_of(gathered: Gathered, seconds: float) -> dict[str, float]:
    """Return the metrics of gathering a step; all are 0 for one that is repeated from its manifest."""
    return {
        "time/rollout_seconds": seconds,
        "train/groups_dropped": float(gathered.dropped),
        "train/groups_skipped": float(gathered.skipped),
        "train/episodes_discarded": float(gathered.discarded),
        "train/episodes_stale": float(gathered.stale),
    }
