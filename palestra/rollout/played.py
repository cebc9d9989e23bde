"""The interface between an episode's player and its job, in the job's process or over HTTP.

An unsupported picture of the environment fails the attempt at the episode. For one of a tool, the model gets an error
message, like for any other failure of a tool, and the episode continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from palestra.config import Roles
from palestra.errors import InvalidRequest
from palestra.pictures.parts import Picture, has_files
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, GenerationRequest, ImagePart, Observation, Part, TextPart


class EpisodePictures:
    """Stores the files of the pictures in an episode's messages, and remembers unreadable ones."""

    def __init__(self, keep: Callable[[Picture], Awaitable[object]]) -> None:
        """Create the pictures of one episode. `keep` stores a picture's file; see `PlayedEpisode.keep_picture`."""
        self._keep = keep
        # By digest. An environment server sends a file once an episode, so that only its digest comes the next time.
        self._unread: dict[str, str] = {}

    def change(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether `without_files` may return other messages."""
        return bool(self._unread) or has_files(messages)

    async def without_files(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return messages with stored pictures replaced by image parts.

        An unreadable picture in a tool's result is replaced by a text that names it and the reason.
        """
        return tuple([await self._without_files(message) for message in messages])

    async def _without_files(self, message: ChatMessage) -> ChatMessage:
        many = sum(isinstance(part, ImagePart) for part in message.content)
        if not many:
            return message
        content, number = list[Part](), 0
        for part in message.content:
            if isinstance(part, ImagePart):
                number += 1
                place = f"picture {number} of the {many}" if many > 1 else "the picture"
                content.append(await self._kept(part, message, place))
            else:
                content.append(part)
        return message.model_copy(update={"content": tuple(content)})

    async def _kept(self, part: ImagePart, message: ChatMessage, place: str) -> Part:
        """Return the part that replaces a picture in a message; `place` names it within the message."""
        of_tool = message.role == "tool"
        if isinstance(part, Picture) and not (of_tool and part.digest in self._unread):
            try:
                await self._keep(part)
            except InvalidRequest as error:
                if not of_tool:
                    raise
                self._unread[part.digest] = str(error)
        if of_tool and (why := self._unread.get(part.digest)) is not None:
            tool = message.name or "the tool"
            return TextPart(text=f"Error: {place} that {tool} returned could not be read: {why}")
        return ImagePart(digest=part.digest)


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
        """Return the first move that a policy's vocabulary cannot express; None: none is known."""
        ...

    def count_observation(self) -> None:
        """Count an observation for the job's status."""
        ...

    async def keep_picture(self, picture: Picture) -> None:
        """Store a picture's file in the run's folder, so that messages may name it. Raises InvalidRequest: the file is
        not a supported picture. Raises PalestraError: it could not be stored.
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
        """Record an observation of any agent. `number` is its TimeStep; None: the agent's part is over."""
        ...

    def was_taken_over(self, agent: str) -> bool:
        """Return whether a policy has replaced an external player whose worker has left."""
        ...
