"""`Audit`: has a sample of each step's episodes scored by a second judge, while the step is trained.

Its scores are no rewards. The evidence that comes of them is in the step's row of metrics, and nowhere else: a resumed
job goes on with what the rows say, and the verdicts themselves are in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from palestra.config import AuditConfig, JudgeAccess
from palestra.config.budget import JUDGE
from palestra.doctor.divergence import divergence
from palestra.doctor.rule import JobSize, RunHistory
from palestra.envs.judge import Judge, JudgedGroup, ProbedJudge, last_speakers, weighted_share
from palestra.errors import ConfigError, JudgeFailed, PalestraError, VersionQuarantined, place_of
from palestra.faults import fault_point
from palestra.learner.audit_numbers import (
    AuditSample,
    Scored,
    component_numbers,
    repeat_numbers,
    reward_numbers,
    sample_of,
    score_numbers,
)
from palestra.learner.open_run import OpenRun
from palestra.learner.reporting import checkpoints_of
from palestra.learner.shares import played_by_policies, rewards_of
from palestra.threads import in_thread, on_loop, own_loop
from palestra.trainer.quarantine import Quarantine, lift_quarantine, read_quarantine, write_quarantine
from palestra.types.records import Trajectory
from palestra.waiting import ordinary_errors, together

PROBE_STEPS = 10  # steps from one probe of the job's judge to the next; it changes with nothing but its server
PROBED_TASKS = 4  # for which canned replies are judged in a probe
SHOWN = 5  # episodes that an event names
HOW_ON = (
    'mend the reward and start again from a checkpoint before, or go on with --resume and audit.action = "hold" '
    '(nobody else gets the versions) or "warn" (lifts the quarantine)'
)


T = TypeVar("T")


def restore_quarantine(run: OpenRun) -> None:
    """Hold back what was held back before a restart, also in a job that is not audited any more.

    Raises:
        VersionQuarantined: the job pauses then.
    """
    action = "hold" if run.config.audit is None else run.config.audit.action
    for policy in run.policies.trained:
        folder = checkpoints_of(run.folder.path, policy, run.config)
        if (held := read_quarantine(folder)) is None:
            continue
        if action == "warn":
            lift_quarantine(folder)
            continue
        run.policies.held[policy] = held
        if action == "pause":
            raise VersionQuarantined(f"{held}; {HOW_ON}")


@dataclass(slots=True)
class _Step:
    """A step that is audited: its episodes, and those of them that are scored."""

    number: int
    trajectories: list[Trajectory]
    rewards: list[float]
    sample: AuditSample
    asked: list[int] = field(default_factory=list)  # indices of the episodes that the judge was asked about
    scores: dict[int, float] = field(default_factory=dict)  # by index of the episode

    def paid_low(self) -> list[str]:
        """Return ids of the episodes that are paid best, the lowest scored first."""
        known = sorted(
            (self.scores[index], -self.rewards[index], index) for index in self.sample.best if index in self.scores
        )
        return [self.trajectories[index].episode.episode_id for _, _, index in known[:SHOWN]]


class Audit:
    """The audit of a job, for its learner."""

    def __init__(self, run: OpenRun, config: AuditConfig, access: JudgeAccess) -> None:
        """Prepare to audit; nothing is asked before `open`.

        Args:
            access: how its judge, and the job's, reach the job's policies.
        """
        self._run, self._config, self._access = run, config, access
        (self._policy,) = run.policies.trained
        self._folder = checkpoints_of(run.folder.path, self._policy, run.config)
        self._history = RunHistory(JobSize.of(run.config))
        self._stack = contextlib.AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._judge: Judge | None = None
        self._probed: ProbedJudge | None = None
        self._paid_low: list[str] = []  # ids of episodes of the newest step
        self._ended = False  # whether the judge could not be asked any more, which a job that only warns survives

    async def open(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Open the judges, on an event loop of their own.

        Args:
            rows: metrics of the steps before.
        """
        self._history = RunHistory(JobSize.of(self._run.config), rows)
        self._loop = loop = self._stack.enter_context(own_loop("palestra-audit"))
        if self._config.judge is not None:
            self._judge = await self._opened(loop, self._config.judge.make(self._access))
        if self._run.config.judge is not None:
            meter = None if self._run.metering is None else self._run.metering.server("audit", JUDGE)
            judge = self._run.config.judge.make(replace(self._access, meter=meter))
            if isinstance(judge, ProbedJudge):
                await self._opened(loop, judge)
                self._probed = judge

    async def _opened(self, loop: asyncio.AbstractEventLoop, judge: Judge) -> Judge:
        self._stack.push_async_callback(lambda: on_loop(loop, judge.close()))
        for text in await on_loop(loop, judge.open()):
            await self._run.event("judge_doubtful", {"text": f"audit: {text}"})
        return judge

    async def close(self) -> None:
        """Close the judges."""
        await self._stack.aclose()
        self._judge = self._probed = self._loop = None

    async def numbers(self, number: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the numbers of a step's audit by full name; verdicts that were given before are not asked again."""
        played = [one for one in trajectories if played_by_policies([one.episode])]
        algorithm = self._run.config.algorithm_of(self._policy)
        rewards = rewards_of([one.episode for one in played], self._run.policies.roles, algorithm)
        step = _Step(number, played, rewards, sample_of(self._run.config.seed, number, rewards, self._config.episodes))
        nulls: list[float] = []
        if not self._ended:
            try:
                nulls = await self._asked(step)
            except PalestraError as error:
                if self._config.action != "warn":  # what was not audited may not be served
                    error.args = (f"audit: {error}",)
                    raise
                self._ended = True
                text = f"the audit has ended, and goes on when the job is resumed: {error}"
                await self._run.event("warning", {"code": "audit_ended", "step": number, "text": text})
        self._paid_low = step.paid_low()
        found = await in_thread(partial(self._computed, step))
        if nulls:
            found |= {
                "audit/null_replies": float(len(nulls)),
                "audit/null_share": sum(score > 0.5 for score in nulls) / len(nulls),
            }
        cost = await self._run.store.audits.cost_of_step("train", number)
        return found | {f"audit/{name}": cost[name] for name in ("calls", "tokens", "seconds")}

    def _computed(self, step: _Step) -> dict[str, float]:
        scored = [
            Scored(
                index=index,
                group=step.trajectories[index].episode.group_index,
                reward=step.rewards[index],
                score=step.scores.get(index),
            )
            for index in step.asked
        ]
        weights = self._run.config.algorithm_of(self._policy).reward_weights
        return {
            **score_numbers(scored, step.sample, list(self._history.rows)),
            **reward_numbers(step.trajectories, step.rewards),
            **component_numbers(step.trajectories, step.rewards, weights),
            **repeat_numbers([step.trajectories[index] for index in (*step.sample.drawn, *step.sample.best)]),
        }

    async def _asked(self, step: _Step) -> list[float]:
        """Have a step's sample scored, and return the scores that the job's judge gives to canned replies."""
        config, own = self._config.judge, self._run.config.judge
        # A step that is repeated from its manifest is trained before the engine answers a policy that judges.
        sampling = self._run.sampling.is_set()
        if self._judge is not None and config is not None and (sampling or not config.asks_policy):
            await self._score(self._judge, step)
        if self._probed is None or own is None or step.number % PROBE_STEPS != 1:
            return []
        return await self._probe(self._probed, step) if sampling or not own.asks_policy else []

    async def _score(self, judge: Judge, step: _Step) -> None:
        indices = [*step.sample.drawn, *step.sample.best]
        asked = [[index] for index in indices]
        if judge.whole_groups:
            by_group: dict[int, list[int]] = {}
            for index in sorted(indices):
                by_group.setdefault(step.trajectories[index].episode.group_index, []).append(index)
            asked = [members for members in by_group.values() if len(members) > 1]
        names = {step.trajectories[index].episode.episode_id: index for index in indices}
        weights = self._config.judge.reward_weights if self._config.judge is not None else {}
        step.asked = [index for members in asked for index in members]
        groups = [self._group([step.trajectories[index] for index in members]) for members in asked]
        book = self._run.store.audits
        for scores in await together(*(self._ask(judge.judge(group, book)) for group in groups)):
            for name, named in (scores or {}).items():
                if name in names:
                    step.scores[names[name]] = weighted_share(named, weights)

    async def _ask(self, question: Coroutine[Any, Any, T]) -> T | None:
        """Return what a judge answers; None: it has failed."""
        assert self._loop is not None
        try:
            with ordinary_errors():
                return await on_loop(self._loop, question)
        except JudgeFailed:
            return None
        except PalestraError:
            raise
        except Exception as error:
            raise ConfigError(f"audit: {type(error).__name__}: {error}{place_of(error)}") from error

    def _group(self, trajectories: Sequence[Trajectory]) -> JudgedGroup:
        return JudgedGroup(
            kind="train",
            group_index=trajectories[0].episode.group_index,
            trajectories=tuple(trajectories),
            waiting=frozenset(one.episode.episode_id for one in trajectories),
            seed=self._run.config.seed,
            judged=last_speakers(trajectories, self._run.config.players),
        )

    async def _probe(self, judge: ProbedJudge, step: _Step) -> list[float]:
        """Return the scores of canned replies to some of the step's tasks."""
        groups = list(dict.fromkeys(step.trajectories[index].episode.group_index for index in step.sample.drawn))
        by_group = [
            self._group([one for one in step.trajectories if one.episode.group_index == group])
            for group in groups[:PROBED_TASKS]
        ]
        book = self._run.store.audits
        found = await together(*(self._ask(judge.probe(group, book)) for group in by_group))
        return [score for scores in found for score in scores or ()]

    async def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a trained step, before its version is published, and hold the version if rewards diverge.

        Raises:
            VersionQuarantined: they do, and the job pauses.
        """
        self._history.add(row)
        if self._config.action == "warn" or self._policy in self._run.policies.held:
            return
        if (found := divergence(self._history)) is None:
            return
        step = int(row["step"])
        held = Quarantine(since=found.since, step=step, reason=found.seen)
        fault_point("before_quarantine")
        await in_thread(partial(write_quarantine, self._folder, held))
        fault_point("after_quarantine")
        self._run.policies.held[self._policy] = held
        text = f"version {step} is {held}; episodes: {', '.join(self._paid_low)}"
        await self._run.event("version_quarantined", {"step": step, "text": text, "episodes": self._paid_low})
        if self._config.action == "pause":
            raise VersionQuarantined(f"{text}; {HOW_ON}")
