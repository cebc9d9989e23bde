"""`Runner`: plays episodes in this process, through the same store and sessions as a remote worker uses over HTTP."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from palestra.agents import Agent, ModelAgent, PolicyHandle
from palestra.client.plain_values import plain_object
from palestra.config import AlgorithmConfig, GRPOConfig
from palestra.envs import ConcurrentEnvironment, MultiAgentEnvironment
from palestra.errors import JobOver, NotScored, RolloutFailed
from palestra.pictures.parts import Picture
from palestra.rollout.collect import TrajectoryCollectEngine
from palestra.rollout.orchestrator import EnvironmentPool, RolloutSpec
from palestra.rollout.result import EpisodeResult, Lost, Termination
from palestra.session import EpisodeSession, Sessions
from palestra.session.seat_table import SeatTable
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, GenerationRequest, Observation
from palestra.types.records import EpisodeEnd, EpisodeRecord, Task, Trajectory


class SeatAgent(Agent):
    """Passes each observation to the external player's worker, and waits for its action."""

    def __init__(self, table: SeatTable, role: str, player: Agent) -> None:
        """Create the agent of one episode. `player`: replaces a worker with the policy of the role, if configured."""
        self._table, self._role, self._player = table, role, player

    @property
    def asks_policy(self) -> bool:  # type: ignore[override]  # known when it has acted
        """Return False for a player whose worker has acted without this job's models."""
        return not self._table.is_played_elsewhere(self._role)

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Return the action of the worker, whose model calls the session has recorded, or that of the policy."""
        action = await self._table.ask(observation)
        if action is None:
            return await self._player.step(observation, policy)
        return [], action


def with_seats(agents: Mapping[str, Agent], table: SeatTable, roles: tuple[str, ...]) -> dict[str, Agent]:
    """Return the agents of an episode, with a `SeatAgent` for each external player. The agent "" plays all others."""
    players = {role: agents.get(role) or agents.get("") or ModelAgent() for role in roles}
    return {**agents, **{role: SeatAgent(table, role, player) for role, player in players.items()}}


AlgorithmOf = Callable[[str], AlgorithmConfig]  # by the name of a policy


class SessionEpisode:
    """The `PlayedEpisode` of a player in the job's own process."""

    def __init__(self, sessions: Sessions, session: EpisodeSession, algorithm_of: AlgorithmOf) -> None:
        self._sessions, self._session, self._algorithm_of = sessions, session, algorithm_of
        self.episode_id, self.seed = session.episode_id, sessions.context.seed
        self.job_roles = sessions.context.policies.roles
        self.roles = self.job_roles.of_episode(session.episode.players)

    @property
    def credits_agents(self) -> bool:
        """Return whether the default policy's algorithm credits each agent with its own reward."""
        return self._algorithm_of(self.job_roles.default).credits_agents

    def weighted_sum(self, policy: str, named_rewards: Mapping[str, float | None]) -> float:
        """Return named rewards as one number. See `PlayedEpisode.weighted_sum`."""
        return self._algorithm_of(policy).weighted_sum(named_rewards)

    def first_not_writable(self, policy: str, moves: Sequence[str]) -> str | None:
        """Return the first move that the policy's vocabulary cannot express, or None."""
        return self._sessions.context.policies.runtime(policy).renderer.vocabulary.first_not_writable(moves)

    def count_observation(self) -> None:
        """Count an observation for the job's status."""
        self._sessions.context.counts["observations"] += 1

    async def keep_picture(self, picture: Picture) -> None:
        """Store a picture's file in the run's folder. See `PlayedEpisode.keep_picture`."""
        context = self._sessions.context
        await context.picture_pool.run(context.store.pictures.keep, picture.data)

    async def call(self, request: GenerationRequest) -> Chat:
        """Make one model call. See `PlayedEpisode.call`."""
        with self._sessions.counted():
            return await self._session.generate_one(request)


_WEIGHTS_OF_ONE = GRPOConfig()
# The episode was stopped, or has not really begun, or a worker has left it: else the holder of one seat's key could use
# up the attempts of all episodes, and end the job.
_NO_ATTEMPTS = (Termination.CANCELLED, Termination.SEAT_UNCLAIMED, Termination.SEAT_LOST)
log = logging.getLogger("palestra.rollout")


class Runner:
    """Plays episodes of a job, any number concurrently. As a context manager it also reuses environments."""

    def __init__(
        self,
        sessions: Sessions,
        play: RolloutSpec | Mapping[str, RolloutSpec],
        *,
        algorithm_of: AlgorithmOf = lambda policy: _WEIGHTS_OF_ONE,
        timeout_seconds: float | None = None,
        worker_id: str = "palestra-runner",
    ) -> None:
        """Create a runner. `play`: agents in an environment; or several by id, where `ID/TASK` is the name of a task.
        `timeout_seconds`: limit for one attempt; None: only that of its lease.
        """
        self._sessions, self._store = sessions, sessions.context.store
        self._plays = {"": play} if isinstance(play, RolloutSpec) else dict(play)
        self._agents = {
            name: each.agents or {"": ModelAgent(max_tokens=each.max_tokens)} for name, each in self._plays.items()
        }
        self._environments = {
            name: EnvironmentPool(each.environment, system=each.system, clock=sessions.context.clock)
            for name, each in self._plays.items()
        }
        self._algorithm_of = algorithm_of
        self._timeout_seconds, self.worker_id = timeout_seconds, worker_id

    async def __aenter__(self) -> Self:
        for pool in self._environments.values():
            pool.keep()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(pool.close() for pool in self._environments.values()))

    async def play_episode(self, reset_kwargs: Mapping[str, Any] | None = None) -> Trajectory | None:
        """Play one episode to its end: the next claimable one, or a new one; None: no episode can be claimed.

        Args:
            reset_kwargs: task of a new episode, which is recorded but never trained on; None: claim an episode.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
        """
        store, name = self._store, None
        if reset_kwargs is not None:
            request = uuid.uuid4().hex
            name = await store.episodes.register_adhoc(
                Task(task_id=f"t{request[:15]}", data=plain_object(reset_kwargs, "reset_kwargs")), request
            )
        episode = await self._claim(name)
        if episode is None:
            return None
        await self.play_claim(episode)
        return (await store.calls.trajectories([episode.episode_id]))[0]

    async def _claim(self, name: str | None) -> EpisodeRecord | None:
        """Claim an episode. If the caller is cancelled meanwhile, a claimed episode is given back."""
        claiming = asyncio.ensure_future(self._store.episodes.claim(self.worker_id, uuid.uuid4().hex, None, name))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if (episode := await claiming) is not None:
                await self.give_back(episode, Termination.CANCELLED, "the job was stopped")
            raise

    async def play_claim(self, episode: EpisodeRecord) -> EpisodeResult:
        """Play a claimed episode to its end and submit its reward.

        After a failure, a timeout or a cancellation, the episode is released. A failure is never recorded as a reward
        of 0: the policy would learn from a fault that is not its own. If an agent's action broke something, that is the
        agent's loss.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
        """
        try:
            # Model calls renew the lease, but an environment may work for long without one.
            with self._store.leases.hold(episode.episode_id, episode.fence):
                async with asyncio.timeout(self._timeout_seconds) as limit:
                    collected = await self._collect(episode, limit)
        except asyncio.CancelledError:
            await asyncio.shield(self.give_back(episode, Termination.CANCELLED, "the job was stopped"))
            raise
        except TimeoutError:
            assert limit.expired(), "everything else comes as RolloutFailed"
            late = RolloutFailed(Termination.TIMED_OUT, f"not over after {self._timeout_seconds:g} s")
            await self.give_back(episode, Termination.TIMED_OUT, str(late))
            raise late from None
        except RolloutFailed as error:
            await self.give_back(episode, Termination(error.termination), str(error))
            raise
        except JobOver as error:
            await self.give_back(episode, Termination.CANCELLED, str(error))
            raise
        except NotScored as error:
            await self.give_back(episode, Termination.NOT_SCORED, str(error), discard=True)
            return EpisodeResult(termination=Termination.NOT_SCORED)
        await self._store.episodes.end(
            episode.episode_id,
            episode.fence,
            EpisodeEnd(
                rewards=collected.final_rewards,
                step_rewards=collected.step_rewards,
                step_times=collected.step_times,
                named_rewards=collected.named_rewards,
                agent_step_rewards=collected.agent_step_rewards,
                facts=collected.facts,
            ),
        )
        return collected

    async def give_back(
        self, episode: EpisodeRecord, termination: Termination, reason: str, discard: bool = False
    ) -> None:
        """Release an episode, to be retried or discarded. `termination`: why; values in `_NO_ATTEMPTS` do not count as
        an attempt. `discard`: whether to drop the episode instead of retrying it.
        """
        try:
            await self._store.episodes.abort(
                episode.episode_id,
                episode.fence,
                f"{termination.value}: {reason}",
                discard=discard,
                counts=termination not in _NO_ATTEMPTS,
            )
        except Lost:  # its lease ran out, so it has been given back already
            log.info("episode %s was given back before: %s", episode.episode_id, reason)

    async def _collect(self, episode: EpisodeRecord, limit: asyncio.Timeout) -> EpisodeResult:
        session = await self._sessions.begin(episode)  # first: a lease that has run out has no seats any more
        name = "" if "" in self._plays else episode.task.task_id.partition("/")[0]
        book, agents = self._sessions.seats, self._agents[name]
        seats = None if book is None else book.open(episode)
        if book is not None and seats is not None:
            agents = with_seats(agents, seats, book.roles)
        async with self._environments[name].acquire() as environment:
            if book is not None and seats is not None:
                _pace(environment, book.roles, seats)
            engine = TrajectoryCollectEngine(
                environment=environment,
                agents=agents,
                seats=seats,
                episode=SessionEpisode(self._sessions, session, self._algorithm_of),
                temperature=self._plays[name].temperature,
            )
            return (await engine.collect(episode.task.data, limit)).finite()


def _pace(environment: ConcurrentEnvironment, roles: tuple[str, ...], seats: SeatTable) -> None:
    """Run an external player's clock only while a worker holds the slot and has the observation."""
    if isinstance(environment, MultiAgentEnvironment):
        environment.pace(roles, seats.miss)
        seats.world = environment
    elif limited := set(roles) & set(getattr(environment, "time_limits", {})):
        raise RolloutFailed(
            Termination.ENVIRONMENT_FAILED,
            f"the environment limits the time of {', '.join(sorted(limited))}, which are seats, and is no "
            "MultiAgentEnvironment: its limits would also run while no worker is there, so that a worker's death would "
            "make another win",
        )
