"""What the player of an episode asks of its job, in the job's process or over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from palestra.config import Roles
from palestra.pictures.parts import Picture
from palestra.types.calls import Chat
from palestra.types.generation import GenerationRequest
from palestra.types.messages import Observation


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
            InvalidRequest: the file is no picture that the job takes.
            PalestraError: it could not be kept.
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


class ShownSeats(Protocol):
    """The seats of an episode whose actions come from workers outside, as far as its player has to know them."""

    @property
    def unused_calls(self) -> list[int]:
        """Return the calls that must not be trained, by index."""
        ...

    def show(self, observation: Observation, number: int | None) -> None:
        """Note an observation of any agent.

        Args:
            number: its TimeStep; None: the agent's part is over.
        """
        ...

    def was_taken_over(self, agent: str) -> bool:
        """Return whether a policy plays the seat of an agent in the place of a worker that has left it."""
        ...
