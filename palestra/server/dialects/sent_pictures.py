"""Undecoded pictures of requests in the formats of all dialects, with their paths in the body.

`PictureIntake` (`server/picture_intake.py`) replaces them by image parts with digests before sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.types.messages import ChatMessage, GenerationRequest, ImagePart, Part

Detail = Literal["auto", "low", "high", "original"]
_SHA256 = "sha256:"  # before a digest in the place of a URL
_ROLES = ("user", "tool")  # whose messages may have pictures


class SentPicture(ImagePart, frozen=True, kw_only=True):
    """A picture in a request. Exactly one of `base64`, `url` and `named` is set.

    Attributes:
        place: path in the body, such as `messages.2.content.1`, for errors.
        media_type: given by the client with `base64`.
        named: the digest of a file sent earlier.
        low: whether a smaller copy is wanted.
    """

    digest: str = ""  # not known before the picture is decoded
    place: str = ""
    base64: str | None = None
    media_type: str | None = None
    url: str | None = None
    named: str | None = None
    low: bool = False

    def __repr__(self) -> str:
        return f"SentPicture(place={self.place!r})"


class ImageUrl(BaseModel):
    """A picture's URL and the wanted detail, in OpenAI's chat format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="`data:image/png;base64,…`, `sha256:<digest>`, or http(s) of an allowed host.")
    detail: Detail | None = Field(None, description="`low`: at most 512 pixels on a side.")


class ImageUrlPart(BaseModel):
    """A picture in a chat message, in OpenAI's format."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["image_url"]
    image_url: ImageUrl


def from_url(url: str, detail: Detail | None, place: str = "") -> SentPicture:
    """Return the picture of a URL: a data URL, `sha256:` and a digest, or a web address."""
    low = detail == "low"
    if url.startswith(_SHA256):
        return SentPicture(place=place, named=url.removeprefix(_SHA256), low=low)
    if url[:5].lower() == "data:":
        head, comma, encoded = url[5:].partition(",")
        media_type, *others = head.split(";")
        if not comma or "base64" not in others:
            raise InvalidRequest(_at(place, "a data URL has the form data:image/png;base64,…"), place)
        return SentPicture(place=place, base64=encoded, media_type=media_type, low=low)
    if url[:8].lower().startswith(("http://", "https://")):
        return SentPicture(place=place, url=url, low=low)
    raise InvalidRequest(
        _at(place, "a picture is a data URL, `sha256:` and a digest, or an http or https URL of an allowed host"), place
    )


def chat_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI chat message, as JSON, with its parts of type `image_url` or `image` as pictures.

    `with_places` reads their URLs, because it knows their paths.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return {**message, "content": [_chat_part(k, part) for k, part in enumerate(parts)]}


def _chat_part(number: int, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    try:
        if kind == "image_url":
            shown = ImageUrlPart.model_validate(part).image_url
            return SentPicture(url=shown.url, low=shown.detail == "low")
        if kind == "image":
            return SentPicture(named=ImagePart.model_validate(part).digest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, ("content", number, *first["loc"])))
        raise ValueError(f"{place}: {first['msg']}") from None
    return part


def with_places(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return the messages of a chat with the paths of their pictures; the same object without pictures."""
    if not any(map(pictures_of, messages)):
        return messages

    def placed(number: int, message: ChatMessage) -> ChatMessage:
        parts = [
            _placed(part, f"messages.{number}.content.{k}") if type(part) is SentPicture else part
            for k, part in enumerate(message.content)
        ]
        return message.model_copy(update={"content": tuple(parts)})

    return tuple(placed(k, message) if pictures_of(message) else message for k, message in enumerate(messages))


def _placed(picture: SentPicture, place: str) -> SentPicture:
    if picture.url is not None:
        return from_url(picture.url, "low" if picture.low else None, place)
    return picture.model_copy(update={"place": place})


def pictures_of(message: ChatMessage) -> list[SentPicture]:
    """Return the pictures of one message."""
    return [part for part in message.content if type(part) is SentPicture]


def pictures_in(messages: Sequence[ChatMessage]) -> tuple[SentPicture, ...]:
    """Return the pictures of a conversation, in order. Raises UnsupportedField: a message other than a user's or a
    tool's has one.
    """
    found: list[SentPicture] = []
    for message in messages:
        for part in message.content:
            if type(part) is SentPicture:
                if message.role not in _ROLES:
                    text = f"messages of the role {message.role!r} can't have pictures"
                    raise UnsupportedField(_at(part.place, text), part.place)
                found.append(part)
    return tuple(found)


def with_digests(call: GenerationRequest, digest_of: Callable[[SentPicture], str]) -> GenerationRequest:
    """Return a call with its pictures replaced by image parts with the digests from `digest_of`."""

    def settled(part: Part) -> Part:
        return ImagePart(digest=digest_of(part)) if type(part) is SentPicture else part

    messages = tuple(
        message.model_copy(update={"content": tuple(map(settled, message.content))})
        if pictures_of(message)
        else message
        for message in call.messages
    )
    return replace(call, messages=messages)


def _at(place: str, text: str) -> str:
    return f"{place}: {text}" if place else text
