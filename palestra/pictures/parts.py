"""Pictures that environments and tools return: parts of messages that carry their files to the run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from palestra.pictures.blobs import picture_digest
from palestra.pictures.pixels import encode_picture
from palestra.types.messages import ChatMessage, ImagePart, Part, TextPart


class Picture(ImagePart, frozen=True, kw_only=True, eq=False):
    """An image part with its file, before the run's folder stores it and an `ImagePart` replaces it.

    Create one with `Picture.of(value)`.
    """

    not_dumped: ClassVar[frozenset[str]] = frozenset({"data"})

    data: bytes

    def __repr__(self) -> str:
        return f"Picture(digest={self.digest!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether another part shows the same picture, with or without its file."""
        return isinstance(other, ImagePart) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(ImagePart(digest=self.digest))  # to which it is equal

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return a part that shows a picture. It is an image of Pillow, an array of uint8 [height, width], [height,
        width, 3] or [height, width, 4], or the bytes of a file (PNG, JPEG, WebP, GIF).
        """
        data = encode_picture(value)
        return cls(digest=picture_digest(data), data=data)


def is_picture(value: Any) -> bool:
    """Return whether a value is a picture: a part, an image of Pillow, an array, or bytes of a file."""
    if isinstance(value, ImagePart | bytes):
        return True
    # Looked at by their attributes: neither Pillow nor numpy has to be installed.
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or (hasattr(value, "mode") and hasattr(value, "save"))


def parts_of(shown: Any) -> tuple[Part, ...]:
    """Return content as parts of a message. Content is a text, a picture (see `is_picture`), or a list of both, in
    order.
    """
    if isinstance(shown, list):
        return tuple(map(_part, shown))
    return (_part(shown),)


def _part(value: Any) -> Part:
    if isinstance(value, str):
        return TextPart(text=value)
    if isinstance(value, TextPart | ImagePart):
        return value
    if not is_picture(value):
        raise TypeError(f"neither a text nor a picture: {type(value).__name__}")
    return Picture.of(value)


def has_files(messages: Iterable[ChatMessage]) -> bool:
    """Return whether some pictures of messages carry their files."""
    for message in messages:
        for part in message.content:
            if isinstance(part, Picture):
                return True
    return False


def files_in(messages: Iterable[ChatMessage]) -> list[Picture]:
    """Return the pictures of messages that carry their files, in order."""
    return [part for message in messages for part in message.content if isinstance(part, Picture)]
