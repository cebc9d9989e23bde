"""`EpisodePictures`: the way of an episode's pictures into the run's folder, and what a tool's damaged picture becomes.

If the job does not take a picture of the environment, the attempt at the episode fails. If it does not take a picture
of a tool, the model gets an error message, as for every other failure of a tool, and the episode continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from palestra.errors import InvalidRequest
from palestra.pictures.parts import Picture, files_in
from palestra.types.messages import ChatMessage, ImagePart, Part, TextPart


class EpisodePictures:
    """Keeps the files of the pictures in an episode's messages, and remembers those that could not be read."""

    def __init__(self, keep: Callable[[Picture], Awaitable[object]]) -> None:
        """Create the pictures of one episode.

        Args:
            keep: puts the file of a picture where its digest will be looked up; see `PlayedEpisode.keep_picture`.
        """
        self._keep = keep
        # By digest. An environment server sends a file once an episode, so that only its digest comes the next time.
        self._unread: dict[str, str] = {}

    async def without_files(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return messages with image parts in the place of pictures, whose files are in the run's folder by then.

        A picture in a tool's result that can't be read is replaced by a text that says which one it is, and why.

        Args:
            messages: with pictures or without; without any, they are returned as they are.

        Raises:
            PalestraError: a picture of another message is not taken, or one could not be kept.
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
        """Return the part that takes a picture's place in a message; `place` names it within the message."""
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
