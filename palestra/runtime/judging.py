"""`Judging`: has the episodes of a running job judged, on an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NoReturn

from palestra.config import JudgeAccess, JudgeConfig
from palestra.database import WAKE_SECONDS
from palestra.envs.judge import Judge, JudgedGroup, last_speakers, spoken_calls
from palestra.envs.rewards import checked_names
from palestra.errors import ConfigError, JudgeFailed, PalestraError, place_of
from palestra.learner import OpenRun
from palestra.store.verdicts import WaitingGroup
from palestra.threads import on_loop, own_loop
from palestra.types.calls import AgentStepReward
from palestra.types.records import JUDGE_FAILED, SOLE_AGENT, EpisodeEnd, EpisodeRecord, Trajectory
from palestra.waiting import cancelled, ordinary_errors

ENVIRONMENT = "environment"  # name of what the environment has given without a name
MOST_AT_ONCE = 256  # questions whose trajectories are in memory


class Judging:
    """Judges what has been played, and completes it. All state is in the store, so that a restart goes on there."""

    def __init__(self, run: OpenRun, config: JudgeConfig, access: JudgeAccess, alone: bool) -> None:
        """Make the judge of a job. `alone`: whether the judge gives the only reward."""
        self._run, self._config, self._alone = run, config, alone
        self._judge: Judge = config.make(access)
        self._began = 0.0
        run.store.episodes.judged = True

    async def run(self) -> NoReturn:
        """Judge until the caller is cancelled."""
        self._began = self._run.store.clock.now()
        await self._run.sampling.wait()  # a policy that judges does not answer before
        tasks: dict[str, asyncio.Task[None]] = {}  # by group, or by episode
        with own_loop("palestra-judge") as loop:
            try:
                for text in await on_loop(loop, self._judge.open()):
                    await self._run.event("judge_doubtful", {"text": text})
                while True:
                    seen = self._run.store.episodes.played.count
                    for group, waiting in await self._due():
                        name = f"{group.kind} {group.group_index}"
                        if not self._judge.whole_groups:
                            name = waiting[0].episode_id
                        if name not in tasks and len(tasks) < MOST_AT_ONCE:
                            tasks[name] = asyncio.create_task(self._score(loop, group, waiting))
                    waking = asyncio.ensure_future(self._run.store.episodes.played.wait(WAKE_SECONDS, seen))
                    await asyncio.wait((waking, *tasks.values()), return_when=asyncio.FIRST_COMPLETED)
                    await cancelled(waking)
                    for name in [name for name, task in tasks.items() if task.done()]:
                        tasks.pop(name).result()
            finally:
                await cancelled(*tasks.values())
                await on_loop(loop, self._judge.close())

    async def _due(self) -> list[tuple[WaitingGroup, tuple[EpisodeRecord, ...]]]:
        """Return what can be judged now: groups, and which of their episodes."""
        found: list[tuple[WaitingGroup, tuple[EpisodeRecord, ...]]] = []
        for group in await self._run.store.verdicts.waiting():
            if not self._judge.whole_groups:
                found += [(group, (episode,)) for episode in group.waiting]
            elif not group.unplayed:
                found.append((group, group.waiting))
            elif self._waited_enough(group):
                late = f"not played {self._config.wait_seconds:g} s after the first episode of its group"
                await self._run.store.episodes.discard_open(group.kind, group.group_index, f"{JUDGE_FAILED}: {late}")
        return found

    def _waited_enough(self, group: WaitingGroup) -> bool:
        wait, played = self._config.wait_seconds, len(group.waiting) + len(group.judged)
        enough = group.kind == "train" and played >= self._run.config.rollout.least_completed
        since = max(group.since, self._began)  # while no server ran, nobody could play
        return wait is not None and enough and self._run.store.clock.now() - since > wait

    async def _score(
        self, loop: asyncio.AbstractEventLoop, group: WaitingGroup, waiting: tuple[EpisodeRecord, ...]
    ) -> None:
        """Have episodes of a group judged, and complete or discard each."""
        store, members = self._run.store, list(waiting)
        if self._judge.whole_groups:
            members += group.judged
            if group.kind == "validation":
                try:
                    first = await store.verdicts.first_validated(waiting[0].task.task_id, group.step)
                except JudgeFailed as error:
                    for episode in waiting:
                        await store.episodes.judge(episode, None, f"{JUDGE_FAILED}: {error}")
                    return
                members += [first] if first is not None else []
        members.sort(key=lambda episode: (episode.group_index, episode.sample_index))
        trajectories = await store.calls.trajectories([episode.episode_id for episode in members])
        asked = JudgedGroup(
            kind=group.kind,
            group_index=group.group_index,
            trajectories=tuple(trajectories),
            waiting=frozenset(episode.episode_id for episode in waiting),
            seed=self._run.config.seed,
            judged=last_speakers(trajectories, self._run.config.players),
        )
        scores: Mapping[str, Mapping[str, float]] = {}
        reason = "the judge left it out"
        try:
            with ordinary_errors():
                scores = await on_loop(loop, self._judge.judge(asked, store.verdicts))
        except JudgeFailed as error:
            reason = str(error)
        except PalestraError:
            raise
        except Exception as error:  # noqa: BLE001 - a judge's own code; what it was asked about has no reward
            reason = f"{type(error).__name__}: {error}{place_of(error)}"
        for one in trajectories:
            name = one.episode.episode_id
            if name in asked.waiting:
                rewards = self._rewards(one, scores[name]) if name in scores else None
                await store.episodes.judge(one.episode, rewards, f"{JUDGE_FAILED}: {reason}")

    def _rewards(self, trajectory: Trajectory, scores: Mapping[str, float]) -> EpisodeEnd:
        """Return the rewards of an episode with those of the judge, earned by the agent that learns and spoke last."""
        given, episode = checked_names(scores), trajectory.episode
        roles = self._run.config.players.of_episode(episode.players)
        algorithm = self._run.config.algorithm_of(roles.default)
        rewards, named = dict(episode.rewards or {}), dict(episode.named_rewards or {})
        steps = None if episode.step_rewards is None else list(episode.step_rewards)
        earned = None if episode.agent_step_rewards is None else list(episode.agent_step_rewards)
        if episode.named_rewards is None and not self._alone:
            own = roles.trained_rewards(rewards)
            named = {ENVIRONMENT: float(sum(own.values()))}
            if (weight := algorithm.reward_weights.get(ENVIRONMENT, 1.0)) != 1.0:
                rewards |= {agent: weight * reward for agent, reward in own.items()}
                steps = None if steps is None else [weight * reward for reward in steps]
                earned = earned and [
                    one._replace(reward=weight * one.reward) if one.agent in own else one for one in earned
                ]
        if taken := sorted(named.keys() & given.keys()):
            raise ConfigError(f"the judge and the environment both give the reward {taken[0]!r}; rename one of them")
        spoken = spoken_calls(trajectory, self._run.config.players)
        agent = spoken[-1].agent if spoken else next(iter(rewards), SOLE_AGENT)
        more = algorithm.weighted_sum(given)
        rewards[agent] = rewards.get(agent, 0.0) + more
        if spoken and steps is not None:
            steps[spoken[-1].time_step] += more
        if spoken and earned is not None:
            earned.append(AgentStepReward(spoken[-1].time_step, agent, more))
        return EpisodeEnd(rewards=rewards, named_rewards=named | given, step_rewards=steps, agent_step_rewards=earned)
