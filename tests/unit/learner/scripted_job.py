"""A whole job in one process without a model: learner, store, sessions, workers. It can be stopped, and crashed."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from pathlib import Path
from typing import Any

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig
from palestra.engine.fake import FakeEngine, digits_script
from palestra.grammars.pool import Grammars
from palestra.learner import Learner, OpenRun, RunFolder, policy_spec
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import PolicyRuntime, PolicySet, SessionContext, Sessions
from palestra.store import open_run_store
from palestra.store.lifecycle import EpisodeEnd
from palestra.trainer.fake import FakeTrainer
from palestra.types.messages import GenerationRequest, text_message
from palestra.types.progress import JobProgress
from palestra.types.records import Task
from unit.building import FakeClock

TASKS = [Task(task_id=f"t{i}", data={"text": f"say {i}"}) for i in range(5)]
HELD_OUT = [Task(task_id=f"v{i}", data={"text": f"validate {i}"}) for i in range(2)]


def config(**changes: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "scripted",
            "steps": 3,
            "deterministic": True,
            "rollout": {"group_size": 2, "groups_per_step": 2, "lease_seconds": 60, "max_attempts": 5},
            "evaluation": {"every_steps": 2},
            "checkpoint": {"every_steps": 2},
            "engine": {"kind": "fake", "reply_tokens": 6},
        }
        | changes
    )


class WithoutCurve(RunFolder):
    """Drawing takes longer than all the rest; one test draws."""

    def draw_curve(self, rows: Any, title: str) -> None:
        pass


class Crash(Exception):
    """The process died."""


class ScriptedJob:
    """One life of the process of a job."""

    def __init__(
        self,
        folder: Path,
        settings: JobConfig,
        *,
        crash_at: int | None = None,
        stop_at: int | None = None,
        draw: bool = False,
        equal_rewards: bool = False,
        tasks: list[Task] = TASKS,
    ) -> None:
        """`crash_at`: the number of the commit before which the process dies; nothing is written from there on.

        `stop_at`: the number of the commit at which the job is asked to stop.
        """
        self.tasks = tasks
        self.config, self.clock, self.equal_rewards = settings, FakeClock(), equal_rewards
        self.folder = (RunFolder if draw else WithoutCurve)(folder)
        self.store = open_run_store(self.folder.store, settings.rollout, self.clock, synchronous="NORMAL")
        self.commits = 0
        self._stop_at = stop_at
        self._crash_at, self._really_submit = crash_at, self.store.db.submit
        self.store.db.submit = self._submit  # type: ignore[method-assign]
        self.engine = FakeEngine(digits_script(settings.engine.reply_tokens, 258))
        self.trainer = FakeTrainer(settings.checkpoint.keep)
        self.progress = JobProgress(job=settings.name, steps=settings.steps, run_dir=str(folder))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.policies = PolicySet.of(
            settings,
            {
                name: PolicyRuntime(
                    name=name,
                    config=policy,
                    renderer=ChatMLRenderer(ByteTokenizer()),
                    engine=self.engine,
                    grammars=Grammars(),
                )
                for name, policy in settings.policies.items()
            },
        )
        self.algorithms = {
            name: create_algorithm(settings.algorithm_of(name), settings.rollout.step_order)
            for name in settings.trained_policies
        }
        self.opened = OpenRun(
            config=settings,
            store=self.store,
            engine=self.engine,
            policies=self.policies,
            folder=self.folder,
            progress=self.progress,
            report=self._report,
        )
        self.learner = Learner(self.opened, self.trainer, self.algorithms)
        self.on_event = lambda kind, data: None
        self.silent = lambda group, agent: False  # whether an agent has no part in the episodes of a group
        context = SessionContext(
            store=self.store,
            policies=self.policies,
            seed=settings.seed,
            strict_history=settings.rollout.changed_history == "refuse",
        )
        self.sessions = Sessions(context, 1000)
        self.dead = asyncio.Event()

    @property
    def registered_up_to(self) -> int:
        """The last step that has groups."""
        with sqlite3.connect(self.folder.store) as db:
            return int(db.execute("SELECT coalesce(max(step), 0) FROM groups WHERE kind = 'train'").fetchone()[0])

    def _report(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append((kind, data))
        self.on_event(kind, data)

    def _submit(self, operation, tag=None):
        self.commits += 1
        if self._crash_at is not None and self.commits >= self._crash_at:
            self.dead.set()
            raise Crash
        if self.commits == self._stop_at:
            self.learner.stop()
        return self._really_submit(operation, tag)

    async def create_policy(self) -> None:
        """What a job's process does before the learner begins."""
        for policy, algorithm in self.algorithms.items():
            await self.trainer.create(policy, policy_spec(self.config, algorithm, policy, {}))

    async def run(self) -> str:
        """Until the job is done or stopped; returns the weights, of all policies that are trained.

        Raises:
            Crash: the process died.
        """
        before = asyncio.all_tasks()
        await self.engine.pause()  # as a job's process does, until the learner has restored the weights
        try:
            await self.create_policy()
            await self._leases_of_the_dead_run_out()
            await self.store.tasks.push("train", self.tasks, "train")
            await self.store.tasks.push("validation", HELD_OUT, "validation")
            await self.store.tasks.seal()
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._play(f"w{i}-{id(self)}")) for i in range(3)]
                await asyncio.wait_for(self.learner.run(), 60)
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as errors:
            if errors.subgroup(Crash) is not None:
                raise Crash from None
            raise
        finally:
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)  # a checkpoint, half saved
            self.store.close()
        return " ".join(map(self.trainer.digest, self.policies.trained))

    async def _leases_of_the_dead_run_out(self) -> None:
        self.clock.advance(60)
        await self.store.episodes.expire_leases()

    async def _play(self, worker: str) -> None:
        for number in itertools.count():
            episode = None
            while episode is None:
                seen = self.store.episodes.available.count
                episode = await self.store.episodes.claim(worker, f"{worker}-{number}", None)
                if episode is None:
                    await self.store.episodes.available.wait(0.05, seen)
            session = await self.sessions.open(episode.episode_id, episode.fence)
            messages = (text_message("user", episode.task.data["text"]),)
            first = await session.generate_one(GenerationRequest(policy=self.policies.roles.default, messages=messages))
            messages = (*messages, first.reply, text_message("user", "again"))
            second = await session.generate_one(
                GenerationRequest(policy=self.policies.roles.default, messages=messages)
            )
            length = 0 if self.equal_rewards else len(first.completion_ids) + int("0" + second.reply.text)
            rewards = {"agent": float(length % 3)}
            for agent, policy in self.policies.roles.of_episode(episode.players).named.items():
                if self.silent(episode.group_index, agent):
                    continue
                other = await session.generate_one(GenerationRequest(policy=policy, messages=messages, agent=agent))
                rewards[agent] = float(int("0" + other.reply.text) % 2)
            await self.store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards=rewards))
