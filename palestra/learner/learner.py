"""The learner's loop: evaluate, gather, fix the batch, train, publish, save.

A step whose manifest was committed before a restart is trained again from it; any other step is gathered first. So
resuming after a crash is the same code, beginning at the last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from palestra.algorithms.base import Algorithm
from palestra.errors import BudgetSpent, ConfigError
from palestra.faults import fault_point
from palestra.learner.audit import Audit, restore_quarantine
from palestra.learner.evaluation import check_engine, validate
from palestra.learner.gathering import EpisodeSource, Gathering
from palestra.learner.metrics import environment_metrics, spent_metrics
from palestra.learner.open_run import OpenRun
from palestra.learner.pools import Pools
from palestra.learner.reporting import StepLog, checkpoints_of, role_metrics
from palestra.learner.samplers import SamplerMaker
from palestra.learner.schedule import SAMPLED, CheckpointSchedule, TrainingBudget
from palestra.learner.update import PolicyUpdate
from palestra.models.weights import WeightSource
from palestra.threads import freed, in_thread, short_turns
from palestra.trainer.base import Trainer
from palestra.types.calls import PolicyVersion
from palestra.types.metrics import by_policy, of_policy
from palestra.types.progress import Part, Phase
from palestra.types.records import JUDGE_FAILED, BatchManifest, Trajectory
from palestra.types.states import JobState
from palestra.waiting import cancelled, race, together

AFTER_PLAYING = ("time/train_seconds", "time/audit_seconds", "time/publish_seconds", "time/checkpoint_seconds")


class Learner:
    """Trains the policies of one job that are not frozen."""

    def __init__(
        self,
        run: OpenRun,
        trainer: Trainer,
        algorithms: Mapping[str, Algorithm],
        sampler: SamplerMaker | None = None,
        audit: Audit | None = None,
        given: EpisodeSource | None = None,
    ) -> None:
        """Assemble the learner; `run` trains. `sampler` is a user's own choice of tasks; None: as configured. `audit`
        looks whether the reward is gamed; None: nothing does. `given` gives the episodes; None: tasks are played.
        """
        self._run, self._trainer, self._audit = run, trainer, audit
        config, trained = run.config, run.policies.trained
        self._budget = TrainingBudget(config, run.store.groups, run.store.log)
        self._updates = {name: PolicyUpdate(run, trainer, self._budget, name, algorithms[name]) for name in trained}
        self._checkpoints = CheckpointSchedule(
            config,
            trainer,
            {name: checkpoints_of(run.folder.path, name, config) for name in trained},
            {name: update.remembered for name, update in self._updates.items()},
            self._wall,
            run.event,
        )
        self._pools = Pools(run, trainer)
        gather = None if given is None else partial(given.gather, restart=self._restart)
        self._gathering = Gathering(run, algorithms, sampler, gather)
        self._log = StepLog(run)
        self._wall_before = 0.0
        self._started = time.monotonic()
        self._stopping = asyncio.Event()
        self._sampling = False  # whether the engine is open: until then episodes wait for it, and can't end
        self._unchecked = trained if config.engine.urls else ()  # a server that runs already has any model

    async def prepare(self) -> None:
        """Check other servers needed for training, and load past versions, before this server accepts requests."""
        await self._known_digest()  # before a pool of another configuration changes what the run has on the disk
        await self._pools.open()
        try:
            for update in self._updates.values():
                if update.teacher is not None:
                    await update.teacher.check()
        except BaseException:
            await self._close_teachers()
            raise

    async def _close_teachers(self) -> None:
        """Close the connections to servers that teach."""
        for update in self._updates.values():
            if update.teacher is not None:
                await update.teacher.close()

    def stop(self) -> None:
        """Make `run` save and return after the current training step; a step being gathered is dropped."""
        self._stopping.set()

    async def run(self) -> None:
        """Train until the job's steps are done, or `stop` is called."""
        try:
            await self._train_all()
        finally:
            await self._close_teachers()
            if self._audit is not None:
                await self._audit.close()
            await self._checkpoints.close()  # after an error, one may be half written

    async def _train_all(self) -> None:
        """Train from the last checkpoint to the last step of the job."""
        unfinished = await self._restore()
        await self._open_engine()
        # It runs already where a job goes on after the loss of its base server.
        if self._run.progress.state is not JobState.RUNNING:
            self._run.progress.move(JobState.RUNNING)
        await self._run.event("running", {"step": self._run.progress.step, "version": self._run.progress.version})
        with self._run.progress.inside(Part.TASKS):
            await self._unless_stopped(self._gathering.wait_for_tasks())
        finished = unfinished is None
        if unfinished is not None and not self._stopping.is_set():  # if stopped, the validation tasks may be missing
            finished = await self._finish_step(unfinished)
        while finished and not self._budget.is_over(self._run.progress.step) and self._goes_on():
            self._run.progress.step_began = started = time.monotonic()
            step = self._run.progress.step + 1
            found = await self._unless_stopped(self._gathering.batch(step, self._versions(), self._due(step)))
            if found is None:
                break
            manifest, trajectories, gathered = found
            del found
            try:
                with short_turns():
                    row = await self._train(manifest, trajectories, gathered)
                    await freed(trajectories)
            except BudgetSpent:  # of the step a part may be trained, so that nothing is saved
                await self._complete()
                return
            row |= {
                "step": float(step),
                "time/step_seconds": time.monotonic() - started,
                **self._gathering.playing.rate(row),
            }
            await self._run.store.log.put_unfinished_metrics(row)  # before a checkpoint makes the step final
            self._run.progress.step, self._run.progress.sampled_tokens = step, self._budget.sampled
            await self._pools.add(step)
            await self._open_engine()
            with self._run.progress.inside(Part.CHECKPOINT):
                await self._checkpoints.save_if_due(step, last=self._budget.is_over(step))
            self._run.progress.step_seconds.append(time.monotonic() - started)
            self._run.progress.step_began = None
            due = bool(self._gathering.validation_tasks) and self._budget.evaluation_is_due(step)
            self._run.progress.evaluations_left = self._evaluations_left(step) + due
            finished = await self._finish_step(row)
            if self._run.metering is not None:
                self._run.metering.ledger.keep_for_end(sum(row.get(name, 0.0) for name in AFTER_PLAYING))
        if self._stopping.is_set():
            fault_point("during_stop")
        if self._run.progress.step > self._checkpoints.saved_step:
            self._run.progress.enter(f"saving step {self._run.progress.step}")
        with self._run.progress.inside(Part.CHECKPOINT):
            await self._checkpoints.save_now(self._run.progress.step)
        spent = self._run.metering is not None and self._run.metering.ledger.over
        if spent or (finished and self._budget.is_over(self._run.progress.step)):
            await self._complete()
        self._run.store.episodes.available.notify()

    async def _complete(self) -> None:
        if self._run.metering is not None:
            await self._run.metering.told_if_over()
        if self._run.progress.over:  # its time was used up meanwhile
            return
        # Before the state changes, so that followers of events see it.
        await self._run.event("completed", {"step": self._run.progress.step})
        if not self._run.progress.over:
            self._run.progress.move(JobState.COMPLETED)
        self._run.store.episodes.available.notify()

    def _goes_on(self) -> bool:
        """Return whether a step may begin: nobody has stopped the job, and its budget has room for another step."""
        if self._run.metering is not None and not self._run.metering.ledger.begin_step():
            self._run.metering.ledger.end()
            return False
        return not self._stopping.is_set()

    async def _unless_stopped(self, work: Awaitable[Any]) -> Any:
        """Return the result of `work`; if the job is stopped first, cancel it, await its end and return None."""
        winner = await race(work, self._stopping.wait())
        return winner.result if winner.index == 0 else None

    # Start and resume

    async def _known_digest(self) -> str | None:
        """Return the digest of the configuration that started the run; None: it is new."""
        known = await self._run.store.log.fact("config_digest")
        if known is not None and known != self._run.config.digest():
            raise ConfigError(self._run.folder.why_not_resumed(self._run.config))
        return known

    async def _restore(self) -> dict[str, float] | None:
        """Load the newest undamaged checkpoint and publish it; return the row whose evaluation is missing, if any."""
        known = await self._known_digest()
        if known is None:
            await self._run.store.log.set_fact("config_digest", self._run.config.digest())
        restore_quarantine(self._run)  # before anything is published
        state = await self._checkpoints.load()
        # Also without a checkpoint: a job that has lost its base server has made steps in this process already.
        self._run.progress.step = 0 if state is None else int(state["step"])
        if state is not None:
            self._wall_before = float(state["wall_seconds"])
        await self._pools.check(self._run.progress.step)
        await self._budget.restore(self._run.progress.step)
        self._run.progress.sampled_tokens = self._budget.sampled
        unfinished = await self._run.store.log.restore_metrics(self._run.progress.step)
        # Written after rows were dropped: `dashboard.runs` keeps what it has read until this file is another one.
        self._run.folder.write_config(self._run.config)
        self._gathering.playing.resumed = known is not None
        if known is not None and not self._run.config.deterministic:
            await self._begin_incarnation()
        await self._publish(self._run.policies.trained)
        rows = await self._run.store.log.metrics()
        if rows:  # a step is evaluated after its checkpoint, so its row may be of a later time
            self._wall_before = max(self._wall_before, rows[-1].get("wall_seconds", 0.0))
        if self._audit is not None:
            await self._audit.open(rows if unfinished is None else [*rows, unfinished])
        await in_thread(lambda: self._checkpoints.know_best(rows))  # hashes all weights
        await self._log.restore(rows)
        if self._run.progress.step == 0 and not rows:
            return {"step": 0.0}  # the row of the evaluation before the first step
        return unfinished

    async def _begin_incarnation(self) -> None:
        incarnation = int(await self._run.store.log.fact("incarnation") or 0) + 1
        await self._run.store.log.set_fact("incarnation", str(incarnation))
        for policy in self._run.policies.trained:
            self._trainer.begin_incarnation(policy, incarnation)

    async def _restart(self, replace: Callable[[], object]) -> None:
        """Go on with what `replace` puts in the place of the newest step's checkpoints."""
        await self._checkpoints.save_now(self._run.progress.step)
        await in_thread(replace)
        await self._checkpoints.load()
        await self._begin_incarnation()
        await self._publish(self._run.policies.trained)

    # One step

    async def _train(
        self, manifest: BatchManifest, trajectories: Sequence[Trajectory], gathered: Mapping[str, float]
    ) -> dict[str, float]:
        """Update the policies with the episodes of a manifest, and publish the new weights to the engine."""
        self._run.progress.enter(f"training step {manifest.step}")
        await self._budget.count(manifest.step)
        audited = asyncio.ensure_future(self._audited(manifest.step, trajectories))  # while the step is trained
        try:
            with self._run.progress.inside(Part.TRAINER):
                row = {**gathered, **await self._update(manifest.step, trajectories)}
            started = time.monotonic()
            if self._audit is not None:
                self._run.progress.enter(f"auditing step {manifest.step}")
                row |= await audited
                row["time/audit_seconds"] = time.monotonic() - started
                await self._audit.add(row | {"step": float(manifest.step)})
        finally:
            await cancelled(audited)
        row |= {SAMPLED: float(self._budget.sampled)}
        roles = self._run.policies.roles
        row |= await in_thread(lambda: role_metrics(trajectories, roles))
        if self._run.config.environments:
            algorithm = self._run.config.algorithm_of(roles.default)
            row |= await in_thread(lambda: environment_metrics(trajectories, roles, algorithm))
        row |= await self._judged(manifest.step)
        started = time.monotonic()
        await self._publish(self._due(manifest.step))
        row["time/publish_seconds"] = time.monotonic() - started
        return row | self._versions_of_row()

    async def _audited(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the numbers of a step's audit; empty: nothing is audited."""
        return {} if self._audit is None else await self._audit.numbers(step, trajectories)

    async def _judged(self, step: int) -> dict[str, float]:
        """Return what the job's judge has done for a step."""
        if self._run.config.judge is None:
            return {}
        store = self._run.store
        reasons = await store.groups.discard_reasons("train", step)
        failed = sum(reason.startswith(JUDGE_FAILED) for reason in reasons)
        cost = await store.verdicts.cost_of_step("train", step)
        return {f"judge/{name}": value for name, value in cost.items()} | {"judge/failed": float(failed)}

    def _due(self, step: int) -> dict[str, PolicyUpdate]:
        """Return the updates that are made in a step, by the policy's name."""
        return {name: update for name, update in self._updates.items() if update.due(step)}

    async def _update(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Make the updates of a step with the episodes of its manifest, and return its metrics by full name."""
        # All batches are made before the first update, so that no policy's rows depend on another one's update.
        batches = {name: await update.make_batch(step, trajectories) for name, update in self._due(step).items()}
        row, ages, seconds = dict[str, float](), Counter[int](), 0.0
        for name, update in self._updates.items():
            if name in batches:
                ages.update(batches[name].staleness)
                found = await update.train(step, batches[name])
                seconds += found["time/train_seconds"]
            else:
                found = await in_thread(partial(update.metrics_of, trajectories))
            row |= by_policy(found, name) if self._run.policies.roles.rivals else found
        await freed(*(batch.groups for batch in batches.values()))
        self._run.progress.staleness = dict(ages)  # number of trained tokens of all policies by age
        return row | {"time/train_seconds": seconds}

    def _versions(self) -> dict[str, PolicyVersion]:
        return {name: self._trainer.version(name) for name in self._run.policies.trained}

    def _versions_of_row(self) -> dict[str, float]:
        """Return n of the newest version of a policy that is trained; where there are several, of each as well."""
        versions = self._versions()
        own = {of_policy("version", name): float(version.n) for name, version in versions.items()}
        newest = {"version": float(max(version.n for version in versions.values()))}
        return newest | (own if self._run.policies.roles.rivals else {})

    async def _publish(self, policies: Collection[str]) -> None:
        """Hand the present weights to the engine; episodes that are claimed afterwards start with their versions."""
        if not policies:
            return
        with self._run.progress.inside(Part.WEIGHT_SYNC):
            between = self._run.config.rollout.weight_sync == "between_episodes" and self._sampling
            lock = self._run.store.episodes.sync_lock
            async with lock.acquire_weight_sync() if between else contextlib.nullcontext():
                fault_point("before_publish")
                with self._run.progress.inside(Part.TRAINER):  # ranks bring their parts together
                    sources = [(policy, await self._trainer.weights(policy)) for policy in policies]
                # All at the same time: an engine takes over what waits between two of its turns, and turns are long.
                await together(*(self._hand_over(*each, number) for number, each in enumerate(sources)))
                fault_point("after_publish")
        self._run.progress.version = str(max(self._versions().values()))

    async def _hand_over(self, policy: str, source: WeightSource, number: int) -> None:
        """Publish one policy's weights to the engine; `number` is its index among published ones."""
        if number:
            fault_point("between_publications")
        await self._run.engine.sync_weights(policy, self._trainer.version(policy), source)

    # After a step

    async def _finish_step(self, row: dict[str, float]) -> bool:
        """Evaluate if due, and record the row; return False if the job was stopped: a resumed job evaluates first."""
        step = int(row["step"])
        if self._gathering.validation_tasks and self._budget.evaluation_is_due(step):
            if self._stopping.is_set():
                return False
            when = f"after step {step}" if step else "before training"
            self._run.progress.enter(f"evaluating {when}", Phase("validation", step))
            roles = self._run.policies.roles
            algorithm = self._run.config.algorithm_of(roles.default)
            mixed, judge = bool(self._run.config.environments), self._run.config.judge
            compared = None if judge is None else judge.compares
            groups = self._run.store.groups
            evaluation = validate(groups, self._gathering.validation_tasks, step, roles, algorithm, mixed, compared)
            found = await self._unless_stopped(evaluation)
            if found is None:
                return False
            row |= self._versions_of_row() | found
            await self._run.event("evaluated", {"step": step, **found})
            self._run.progress.evaluation_seconds.append(found["time/validation_seconds"])
            self._run.progress.evaluations_left = self._evaluations_left(step)
            if not self._run.policies.held:
                await self._checkpoints.keep_best(step, found)
        elif step == 0:
            return True
        row["wall_seconds"] = self._wall()
        if self._run.metering is not None:
            row |= spent_metrics(self._run.metering.ledger.total)
        row["time/checkpoint_seconds"] = self._checkpoints.take_seconds()
        await self._log.write(step, row, last=self._budget.is_over(step))
        return True

    def _evaluations_left(self, step: int) -> int:
        """Return about how many evaluations are made after later steps than this one."""
        return self._budget.evaluations_after(step) if self._gathering.validation_tasks else 0

    async def _open_engine(self) -> None:
        """Let the engine sample, unless a step must be repeated first: open episodes were played with newer weights."""
        if await self._run.store.log.manifest(self._run.progress.step + 1) is not None:
            return
        await self._run.engine.resume()
        self._sampling = True
        self._run.sampling.set()
        if self._run.workers is not None:
            for policy in self._unchecked:
                await check_engine(self._run.workers, self._trainer, self._run.policies.runtime(policy))
        self._unchecked = ()

    def _wall(self) -> float:
        return self._wall_before + time.monotonic() - self._started
