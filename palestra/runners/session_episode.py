"""`SessionEpisode`: an episode that the job's own process plays, through its session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from palestra.agents import Agent, ModelAgent, PolicyHandle
from palestra.config import AlgorithmConfig
from palestra.pictures.parts import Picture
from palestra.session import EpisodeSession, Sessions
from palestra.session.seat_table import SeatTable
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, GenerationRequest, Observation


class SeatAgent(Agent):
    """Passes each observation to the external player's worker, and waits for its action."""

    def __init__(self, table: SeatTable, player: Agent) -> None:
        """Create the agent of one episode.

        Args:
            player: replaces a worker with the policy of the role, if configured.
        """
        self._table, self._player = table, player

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Return the action of the worker, whose model calls the session has recorded, or that of the policy."""
        action = await self._table.ask(observation)
        if action is None:
            return await self._player.step(observation, policy)
        return [], action


def with_seats(agents: Mapping[str, Agent], table: SeatTable, roles: tuple[str, ...]) -> dict[str, Agent]:
    """Return the agents of an episode, with a `SeatAgent` for each external player.

    Args:
        agents: by name; "" plays all others.
    """
    players = {role: agents.get(role) or agents.get("") or ModelAgent() for role in roles}
    return {**agents, **{role: SeatAgent(table, player) for role, player in players.items()}}


AlgorithmOf = Callable[[str], AlgorithmConfig]  # by the name of a policy


class SessionEpisode:
    """The `PlayedEpisode` of a player in the job's own process."""

    def __init__(self, sessions: Sessions, session: EpisodeSession, algorithm_of: AlgorithmOf) -> None:
        """Wrap a session.

        Args:
            algorithm_of: returns a policy's algorithm, which weights named rewards.
        """
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
