"""The learner's loop: evaluate, gather, fix the batch, train, publish, save.

A step that was fixed before a restart is trained again from its manifest; one that was not is gathered first. So
going on after a crash is no special case: the same code runs from the last checkpoint on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from palestra.algorithms.grpo import ClippedSurrogate
from palestra.algorithms.importance import correct
from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.faults import fault_point
from palestra.learner.batch import Batch, make_batch
from palestra.learner.evaluation import evaluate
from palestra.learner.health import RECENT, health_of
from palestra.learner.reporting import RunFolder
from palestra.learner.schedule import TaskOrder, learning_rate
from palestra.ledger import RunStore
from palestra.rollout import GroupQueueManager, RolloutSyncLock
from palestra.schemas.progress import Collecting, JobProgress
from palestra.schemas.protocols import Engine, StepReport, Trainer
from palestra.schemas.records import BatchManifest, PolicyVersion, Task, TrainSample
from palestra.schemas.states import JobState

log = logging.getLogger("palestra.learner")
Report = Callable[[str, dict[str, Any]], None]


class Learner:
    """Trains one policy of one job."""

    def __init__(
        self,
        config: JobConfig,
        store: RunStore,
        trainer: Trainer,
        engine: Engine,
        folder: RunFolder,
        progress: JobProgress,
        report: Report,
        sync: RolloutSyncLock | None = None,
    ) -> None:
        """`report` is told of every event, as it is recorded; weights are published while `sync` is held, if given."""
        self._sync = sync
        self._config, self._store, self._trainer, self._engine = config, store, trainer, engine
        self._folder, self._progress, self._report = folder, progress, report
        self._policy = config.policy_name
        self._loss = ClippedSurrogate(config.algorithm.clip_low, config.algorithm.clip_high)
        self._saving: asyncio.Task[None] | None = None
        self._saved = 0  # step of the newest checkpoint
        self._save_seconds = 0.0  # of checkpoints that were finished since the last row
        self._wall_before = 0.0
        self._resumed_step = 0  # the first that this process gathers, of a run that another one began; 0: none
        self._started = time.monotonic()
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)  # rows of training steps
        self._stopping = asyncio.Event()
        self._train_tasks: list[Task] = []
        self._validation_tasks: list[Task] = []

    def stop(self) -> None:
        """Finish the step that is being trained, or drop the one that is being gathered; then save and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Train until the job's steps are done, or `stop` is called.

        Raises:
            PalestraError: the job can't go on; the reason is in the message.
        """
        try:
            await self._train_all()
        finally:
            if self._saving is not None:  # where an error ended it, a checkpoint may still be half written
                (error,) = await asyncio.gather(self._saving, return_exceptions=True)
                if isinstance(error, Exception):
                    log.error("a checkpoint could not be written: %s: %s", type(error).__name__, error)

    async def _train_all(self) -> None:
        """From the last checkpoint to the last step."""
        unfinished = await self._restore()
        await self._open_engine()
        self._progress.move(JobState.RUNNING)
        await self._event("running", {"step": self._progress.step, "version": self._progress.version})
        await self._unless_stopped(self._wait_for_tasks())
        finished = unfinished is None
        if unfinished is not None and not self._stopping.is_set():  # else its validation tasks may not be known yet
            finished = await self._finish_step(unfinished)
        while finished and self._progress.step < self._config.steps and not self._stopping.is_set():
            started = time.monotonic()
            step = self._progress.step + 1
            manifest, gathered = await self._unless_stopped(self._manifest(step)) or (None, {})
            if manifest is None:
                break
            row = gathered | await self._train(manifest)
            row |= {"step": float(step), "time/step_seconds": time.monotonic() - started}
            await self._store.log.put_unfinished_metrics(row)  # before a checkpoint makes the step final
            self._progress.step = step
            await self._open_engine()
            await self._save_if_due(step)
            finished = await self._finish_step(row)
            self._progress.step_seconds.append(time.monotonic() - started)
        if self._stopping.is_set():
            fault_point("during_stop")
        await self._save_now()
        if finished and self._progress.step >= self._config.steps:
            await self._event("completed", {"step": self._progress.step})  # first: who follows hears of it
            self._progress.move(JobState.COMPLETED)
        self._store.episodes.available.notify()

    async def _unless_stopped(self, work: Any) -> Any:
        """The result of `work`, or None if the job is stopped first; `work` is cancelled then."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            stop.cancel()

    # Starting, and starting again

    async def _restore(self) -> dict[str, float] | None:
        """Load the last good checkpoint, if there is one, and say what the engine samples from.

        Returns the row of the step that was done last, if it still waits for its evaluation; a run begins with one.
        """
        digest = self._config.digest()
        known = await self._store.log.fact("config_digest")
        if known is not None and known != digest:
            raise ConfigError(
                f"the run in {self._folder.path} was started with another configuration of what is trained; "
                "use its config.toml, or another run_dir"
            )
        if known is None:
            await self._store.log.set_fact("config_digest", digest)
        self._folder.write_config(self._config)
        state = await self._trainer.load(self._folder.checkpoints)
        if state is not None:
            self._progress.step = self._saved = int(state["step"])
            self._wall_before = float(state["wall_seconds"])
        if known is not None:
            self._resumed_step = self._progress.step + 1
        if known is not None and not self._config.deterministic:
            incarnation = int(await self._store.log.fact("incarnation") or 0) + 1
            await self._store.log.set_fact("incarnation", str(incarnation))
            self._trainer.begin_incarnation(incarnation)
        await self._publish("restore")
        unfinished = await self._store.log.restore_metrics(self._progress.step)
        rows = await self._store.log.metrics()
        self._folder.write_metrics(rows)
        self._recent.extend(row for row in rows if "train/episodes" in row)
        if self._progress.step == 0 and not rows:
            return {"step": 0.0}  # of the evaluation before the first step
        return unfinished

    async def _wait_for_tasks(self) -> None:
        """Tasks come from files, or are pushed by a client until it says that there are no more."""
        self._progress.enter("waiting for tasks")
        await self._store.tasks.wait_sealed()
        self._train_tasks = await self._store.tasks.of_split("train")
        self._validation_tasks = (await self._store.tasks.of_split("validation"))[: self._config.evaluation.max_tasks]
        if not self._train_tasks:
            raise ConfigError("the job has no training tasks")
        self._order = TaskOrder(self._train_tasks, self._config.seed)

    # One step

    async def _manifest(self, step: int) -> tuple[BatchManifest, dict[str, float]]:
        """What the step trains on: fixed before a restart, or gathered now."""
        manifest = await self._store.log.manifest(step)
        if manifest is not None:
            self._progress.enter(f"repeating step {step} from its manifest")
            return manifest, {
                "time/rollout_seconds": 0.0,
                "train/groups_dropped": 0.0,
                "train/episodes_discarded": 0.0,
                "train/episodes_stale": 0.0,
            }
        self._progress.enter(f"gathering step {step}", Collecting("train", step))
        started = time.monotonic()
        rollout = self._config.rollout
        version = self._trainer.version(self._policy)
        gathered = await GroupQueueManager(self._store, rollout, self._order.task).gather(
            step, min(step + rollout.max_staleness, self._config.steps), version.n
        )
        manifest = BatchManifest(
            step=step,
            version=version,
            episode_ids=gathered.episode_ids,
            seed=self._config.seed,
            config_digest=self._config.digest(),
        )
        await self._store.log.commit_manifest(manifest)
        return manifest, {
            "time/rollout_seconds": time.monotonic() - started,
            "train/groups_dropped": float(gathered.dropped),
            "train/episodes_discarded": float(gathered.discarded),
            "train/episodes_stale": float(gathered.stale),
        }

    async def _train(self, manifest: BatchManifest) -> dict[str, float]:
        """Gradient, update, publication."""
        self._progress.enter(f"training step {manifest.step}")
        config, step = self._config, manifest.step
        trajectories = await self._store.calls.trajectories(manifest.episode_ids)
        version = self._trainer.version(self._policy)
        batch = await asyncio.to_thread(
            make_batch,
            trajectories,
            config.algorithm,
            config.policy.sampling.max_tokens,
            version,
            config.rollout.step_order,
        )
        batch = await self._without_untrainable(step, batch, version)
        self._progress.staleness = batch.staleness
        started = time.monotonic()
        row = batch.metrics | {"train/rows": 0.0, "train/trained_tokens": 0.0, "train/updates_skipped": 0.0}
        if batch.samples:
            row |= await self._update(step, batch)
        row["time/train_seconds"] = time.monotonic() - started
        started = time.monotonic()
        await self._publish(f"step {step}")
        row["time/publish_seconds"] = time.monotonic() - started
        row["version"] = float(self._trainer.version(self._policy).n)
        return row

    async def _without_untrainable(self, step: int, batch: Batch, version: PolicyVersion) -> Batch:
        """Leave out episodes that can't be trained; the manifest is fixed, so they would fail the step for ever."""
        if not batch.samples:
            return batch
        problems = await self._trainer.untrainable(self._policy, batch.samples, f"step {step} check")
        for episode_id, reason in problems.items():
            log.warning("step %d leaves out episode %s: %s", step, episode_id, reason)
            await self._event("episode_untrainable", {"step": step, "episode_id": episode_id, "reason": reason})
        return batch.without(problems.keys(), version)

    async def _update(self, step: int, batch: Batch) -> dict[str, float]:
        rate = learning_rate(self._config.policy.optimizer, step, self._config.steps)
        reports: list[StepReport] = []
        skipped = 0
        samples, correction = await self._corrected(step, batch)
        for epoch in range(self._config.algorithm.epochs):
            name = f"step {step} epoch {epoch}"
            reports.append(await self._trainer.forward_backward(self._policy, samples, self._loss, f"{name} gradient"))
            update = await self._trainer.optim_step(self._policy, rate, f"{name} update")
            skipped += not update.applied
        first, last = reports[0], reports[-1]
        row = {
            "train/rows": float(last.rows),
            "train/trained_tokens": float(last.trained_tokens),
            "train/merged_share": 1.0 - last.forward_tokens / max(last.flat_tokens, 1),
            "train/loss": last.metrics["loss"],
            "train/ratio_mean": last.metrics["ratio"],
            "train/clip_fraction": last.metrics["clipped"],
            "train/clip_fraction_on_policy": first.metrics["clipped_on_policy"],
            "train/entropy": last.metrics["entropy"],
            "train/logprob_gap_mean": first.metrics["gap"],
            "train/logprob_gap_max": first.metrics["gap_max"],
            "train/grad_norm": update.grad_norm,
            "train/updates_skipped": float(skipped),
            "train/learning_rate": update.learning_rate,
        } | correction
        return {name: value for name, value in row.items() if math.isfinite(value)}  # NaN is no JSON

    async def _corrected(self, step: int, batch: Batch) -> tuple[list[TrainSample], dict[str, float]]:
        """The batch's rows with the importance correction that the job asks for, and its metrics."""
        algorithm = self._config.algorithm
        if algorithm.importance == "none":
            return batch.samples, {}
        now = await self._trainer.logprobs(self._policy, batch.samples, f"step {step} logprobs")
        found = await asyncio.to_thread(correct, batch.samples, now, algorithm.importance, algorithm.importance_limit)
        return found.samples, found.metrics

    async def _publish(self, name: str) -> None:
        async with self._sync.acquire_weight_sync() if self._sync is not None else contextlib.nullcontext():
            version = await self._trainer.publish(self._policy, self._engine, f"publish {name}")
        self._progress.version = str(version)

    # What surrounds a step

    async def _finish_step(self, row: dict[str, float]) -> bool:
        """Evaluate if it is time to, and record the row. Return False if the job was stopped before that.

        The row then stays unfinished, and the job is not completed: going on makes the evaluation first.
        """
        step = int(row["step"])
        every = self._config.evaluation.every_steps
        if every and self._validation_tasks and (step % every == 0 or step == self._config.steps):
            if self._stopping.is_set():
                return False
            self._progress.enter(_evaluating(step), Collecting("validation", step))
            found = await self._unless_stopped(evaluate(self._store.groups, self._validation_tasks, step))
            if found is None:
                return False
            row |= {"version": float(self._trainer.version(self._policy).n), **found}
            await self._event("evaluated", {"step": step, **found})
        elif step == 0:
            return True
        await self._finish_row(step, row)
        return True

    async def _open_engine(self) -> None:
        """Let calls be sampled, unless a step that was fixed before a restart is still to be repeated.

        Until then the engine has older weights than those that the open episodes are played with; their calls wait.
        """
        if await self._store.log.manifest(self._progress.step + 1) is None:
            await self._engine.resume()

    async def _save_if_due(self, step: int) -> None:
        """Start writing a checkpoint; it goes on while the next episodes are played."""
        if step % self._config.checkpoint.every_steps == 0 or step == self._config.steps:
            await self._saving_done()
            self._saving = asyncio.create_task(self._save(step))

    async def _save_now(self) -> None:
        if self._progress.step > self._saved:
            self._progress.enter(f"saving step {self._progress.step}")
        await self._saving_done()
        if self._progress.step > self._saved:
            await self._save(self._progress.step)

    async def _save(self, step: int) -> None:
        started = time.monotonic()
        state = {"step": step, "wall_seconds": self._wall(), "config_digest": self._config.digest()}
        path = await self._trainer.save(self._folder.checkpoints, state, f"save {step}")
        self._saved = step
        self._save_seconds += (seconds := time.monotonic() - started)
        await self._event("saved", {"step": step, "path": str(path), "seconds": seconds})

    async def _saving_done(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def _finish_row(self, step: int, row: dict[str, float]) -> None:
        """Record a step's metrics, and show them."""
        row["wall_seconds"] = self._wall()
        row["time/checkpoint_seconds"], self._save_seconds = self._save_seconds, 0.0
        # Episodes of a step that a restart cut in two were played before, and the time says nothing of them.
        if row.get("time/rollout_seconds") and step != self._resumed_step:
            tokens = row["rollout/prompt_tokens"] + row["rollout/completion_tokens"]
            row["rollout/tokens_per_second"] = tokens / row["time/rollout_seconds"]
        await self._look_after_health(row)
        await self._store.log.put_metrics(step, row)
        self._folder.append_metrics(row)
        self._progress.last_metrics = row
        await self._event("step", row)
        if "validation/reward_mean" in row or step == self._config.steps:
            rows = await self._store.log.metrics()
            await asyncio.to_thread(self._folder.draw_curve, rows, self._config.name)

    async def _look_after_health(self, row: dict[str, float]) -> None:
        """Report each sign of a run that learns nothing when it appears."""
        if "train/episodes" not in row:
            return
        self._recent.append(row)
        config = self._config
        found = health_of(list(self._recent), config.rollout.groups_per_step, config.steps)
        row["train/warnings"] = float(len(found))
        known = {warning.code for warning in self._progress.warnings}
        self._progress.warnings = found
        for warning in found:
            if warning.code not in known:
                await self._event("warning", asdict(warning))

    async def _event(self, kind: str, data: dict[str, Any]) -> None:
        await self._store.log.add_event(kind, data)
        self._report(kind, data)

    def _wall(self) -> float:
        return self._wall_before + time.monotonic() - self._started


def _evaluating(step: int) -> str:
    return f"evaluating after step {step}" if step else "evaluating before training"
