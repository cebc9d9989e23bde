"""`EpisodePictures`: stores an episode's pictures in the run's folder, and replaces damaged pictures of tools.

An unsupported picture of the environment fails the attempt at the episode. For one of a tool, the model gets an error
message, like for any other failure of a tool, and the episode continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from palestra.errors import InvalidRequest
from palestra.pictures.parts import Picture, files_in
from palestra.types.messages import ChatMessage, ImagePart, Part, TextPart


class EpisodePictures:
    """Stores the files of the pictures in an episode's messages, and remembers unreadable ones."""

    def __init__(self, keep: Callable[[Picture], Awaitable[object]]) -> None:
        """Create the pictures of one episode.

        Args:
            keep: stores a picture's file; see `PlayedEpisode.keep_picture`.
        """
        self._keep = keep
        # By digest. An environment server sends a file once an episode, so that only its digest comes the next time.
        self._unread: dict[str, str] = {}

    async def without_files(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return messages with stored pictures replaced by image parts.

        An unreadable picture in a tool's result is replaced by a text that names it and the reason.
        """
        if not self._unread and not files_in(messages):
            return tuple(messages)
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
