"""The interface between an episode's player and its job, in the job's process or over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from palestra.config import Roles
from palestra.pictures.parts import Picture
from palestra.types.calls import Chat
from palestra.types.generation import GenerationRequest
from palestra.types.messages import Observation


class PlayedEpisode(Protocol):
    """A running episode and its job, as its player sees them."""

    @property
    def episode_id(self) -> str:
        """Return the episode's id."""
        ...

    @property
    def seed(self) -> int:
        """Return the job's seed."""
        ...

    @property
    def job_roles(self) -> Roles:
        """Return which policies play which agents, without past versions."""
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
        """Return named rewards as one number, by the weights of a policy's algorithm; None: not scored."""
        ...

    def first_not_writable(self, policy: str, moves: Sequence[str]) -> str | None:
        """Return the first move that a policy's vocabulary can't express; None: none is known."""
        ...

    def count_observation(self) -> None:
        """Count an observation for the job's status."""
        ...

    async def keep_picture(self, picture: Picture) -> None:
        """Store a picture's file in the run's folder, so that messages may name it.

        Raises:
            InvalidRequest: the file is not a supported picture.
            PalestraError: it could not be stored.
        """
        ...

    async def call(self, request: GenerationRequest) -> Chat:
        """Make one model call; when it returns, the call is recorded in the episode.

        Raises:
            ContextOverflow: the prompt leaves no space for a reply.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
            PalestraError: the call was refused, or the engine failed.
        """
        ...


class ShownSeats(Protocol):
    """External players of an episode, as its player sees them."""

    @property
    def unused_calls(self) -> list[int]:
        """Return the indices of calls that must not be trained on."""
        ...

    def show(self, observation: Observation, number: int | None) -> None:
        """Record an observation of any agent.

        Args:
            number: its TimeStep; None: the agent's part is over.
        """
        ...

    def was_taken_over(self, agent: str) -> bool:
        """Return whether a policy has replaced an external player whose worker has left."""
        ...
