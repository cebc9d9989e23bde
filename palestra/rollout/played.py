"""`PlayedEpisode`: what the player of an episode asks of its job, in the job's process or over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palestra.config import AlgorithmConfig, Roles
from palestra.pictures.parts import Picture
from palestra.session import EpisodeSession, GenerationRequest, Sessions
from palestra.types.calls import Chat

AlgorithmOf = Callable[[str], AlgorithmConfig]  # by the name of a policy


class PlayedEpisode(Protocol):
    """An episode that is being played, and its job, as far as its player has to know them."""

    @property
    def episode_id(self) -> str:
        """Return the episode's name."""
        ...

    @property
    def seed(self) -> int:
        """Return the job's seed."""
        ...

    @property
    def job_roles(self) -> Roles:
        """Return which policies play which agents, where no past version takes a policy's place."""
        ...

    @property
    def roles(self) -> Roles:
        """Return which policies, or past versions of them, play the agents of this episode."""
        ...

    @property
    def credits_agents(self) -> bool:
        """Return whether the default policy's algorithm credits each agent with its own reward."""
        ...

    def weighted_sum(self, policy: str, named_rewards: Mapping[str, float | None]) -> float:
        """Return rewards by name as one number, by the weights of a policy's algorithm; None: not scored."""
        ...

    def first_not_writable(self, policy: str, moves: Sequence[str]) -> str | None:
        """Return the first move that a policy's vocabulary can't express; None: it is not known that there is one."""
        ...

    def count_observation(self) -> None:
        """Count an observation for the job's status."""
        ...

    async def keep_picture(self, picture: Picture) -> None:
        """Put the file of a picture into the run's folder, so that messages may name it.

        Raises:
            PalestraError: the file is no picture that the job takes, or could not be kept.
        """
        ...

    async def call(self, request: GenerationRequest) -> Chat:
        """Make one model call; when it returns, the call is recorded in the episode.

        Raises:
            ContextOverflow: the prompt leaves no room for a reply.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
            PalestraError: the call was refused, or the engine could not finish.
        """
        ...


class SessionEpisode:
    """The `PlayedEpisode` of a player in the job's own process."""

    def __init__(self, sessions: Sessions, session: EpisodeSession, algorithm_of: AlgorithmOf) -> None:
        """Wrap a session.

        Args:
            sessions: the job's.
            session: the episode's, which makes and records model calls.
            algorithm_of: returns the algorithm of a policy, which weighs rewards by name.
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
        """Return rewards by name as one number. See `PlayedEpisode.weighted_sum`."""
        return self._algorithm_of(policy).weighted_sum(named_rewards)

    def first_not_writable(self, policy: str, moves: Sequence[str]) -> str | None:
        """Return the first move that the policy's vocabulary can't express, or None."""
        return self._sessions.context.policies.runtime(policy).renderer.vocabulary.first_not_writable(moves)

    def count_observation(self) -> None:
        """Count an observation for the job's status."""
        self._sessions.context.counts["observations"] += 1

    async def keep_picture(self, picture: Picture) -> None:
        """Put the file of a picture into the run's folder. See `PlayedEpisode.keep_picture`."""
        context = self._sessions.context
        await context.pool.run(context.store.pictures.keep, picture.data)

    async def call(self, request: GenerationRequest) -> Chat:
        """Make one model call. See `PlayedEpisode.call`."""
        with self._sessions.counted():
            return await self._session.generate_one(request)
