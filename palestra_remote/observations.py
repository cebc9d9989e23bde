"""Observations as messages of the environment protocol: written and checked by the server, read by the client."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from palestra.envs.rewards import checked_names
from palestra.errors import EnvironmentFailed, InvalidEnvironment, InvalidRequest, PayloadTooLarge
from palestra.pictures.blobs import picture_digest
from palestra.pictures.parts import Picture, files_in
from palestra.types.messages import ChatMessage, ImagePart, Observation, Part
from palestra_remote.wire import Observed

_INFO = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
MAX_INFO_CHARACTERS = 4_000


def encoded(message: Mapping[str, Any], max_bytes: int) -> str:
    """Return a message as JSON."""
    try:
        found = orjson.dumps(message)
    except TypeError as error:
        raise InvalidRequest(f"a message {message['type']!r} can't be sent as JSON: {error}") from error
    if len(found) > max_bytes:
        raise PayloadTooLarge(f"a message {message['type']!r} of {len(found)} bytes is over the limit of {max_bytes}")
    return found.decode()


def check_fields(observation: Observation) -> None:
    """Raise InvalidEnvironment for a field of the wrong type: the environment is a user's code."""
    agent: Any = observation.agent
    content: Any = observation.content
    reward: Any = observation.reward
    flags: tuple[Any, ...] = (observation.terminated, observation.truncated)
    if not isinstance(agent, str) or not agent:
        raise InvalidEnvironment(f"an observation is for an agent by name, not for {agent!r}")
    if not isinstance(content, tuple) or not all(isinstance(message, ChatMessage) for message in content):
        raise InvalidEnvironment(f"what {agent!r} sees is a tuple of messages, not {content!r:.80}")
    if isinstance(reward, Mapping):
        checked_names(reward)
    elif reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise InvalidEnvironment(f"a reward is a finite number or None, not {reward!r}")
    if not all(type(flag) is bool for flag in flags):
        raise InvalidEnvironment("terminated and truncated are True or False")


def message_of(
    observation: Observation, *, alone: bool, survives_failure: bool, sent: set[str] | None = None
) -> dict[str, Any]:
    """Return an observation as the fields of its message. It is checked: JSON would turn a reward that is not a number
    into null, which means "not scored".

    Args:
        alone: whether the environment is blocked until the observation is answered.
        survives_failure: whether the environment scores the failure of its agent.
        sent: digests of pictures sent before; updated. None: none.
    """
    check_fields(observation)
    return {
        "type": "observation",
        **{name: getattr(observation, name) for name in ("id", "agent", "parents", "tools", "choices")},
        "content": [message.model_dump(mode="json", exclude_none=True) for message in observation.content],
        **_pictures(observation.content, set() if sent is None else sent),
        "reward": checked_names(reward) if isinstance(reward := observation.reward, Mapping) else reward,
        "terminated": observation.terminated,
        "truncated": observation.truncated,
        "info": _info(observation.info),
        "alone": alone,
        "survives_failure": survives_failure,
    }


def _pictures(content: tuple[ChatMessage, ...], sent: set[str]) -> dict[str, Any]:
    """Return the field of the files that were not sent before; add their digests to `sent`."""
    files = {one.digest: one.data for one in files_in(content) if one.digest not in sent}
    sent.update(files)
    return {"pictures": {digest: base64.b64encode(data).decode() for digest, data in files.items()}} if files else {}


def _with_files(message: Observed, known: set[str]) -> tuple[ChatMessage, ...]:
    """Return the messages of an observation, whose pictures have their files if these came with it."""
    files = {}
    for digest, encoded in message.pictures.items():
        try:
            data = base64.b64decode(encoded, validate=True)
        except ValueError:
            raise EnvironmentFailed(f"the server sent a picture {digest:.64} that is no base64") from None
        if picture_digest(data) != digest:
            raise EnvironmentFailed(f"the server sent a picture under a digest that is not its own: {digest:.64}")
        files[digest] = Picture(digest=digest, data=data)
    known.update(files)

    def with_file(part: Part) -> Part:
        if not isinstance(part, ImagePart):
            return part
        if part.digest not in known:
            raise EnvironmentFailed(f"the server shows a picture that it has not sent: {part.digest:.64}")
        return files.get(part.digest, part)

    if not any(isinstance(part, ImagePart) for one in message.content for part in one.content):
        return message.content
    return tuple(one.model_copy(update={"content": tuple(map(with_file, one.content))}) for one in message.content)


def observation_of(message: Observed, observed_at: float, known: set[str] | None = None) -> Observation:
    """Return the observation of a message. `observed_at`: Unix seconds of the client, whose clock times the actions
    too. `known`: digests of pictures received before; updated. None: none.
    """
    own: dict[str, Any] = {one.name: getattr(message, one.name, None) for one in fields(Observation)}
    own |= {"content": _with_files(message, set() if known is None else known), "observed_at": observed_at}
    return Observation(**own)


def _info(info: Mapping[str, Any]) -> Any:
    """Return information for people as JSON; anything else, or long values, become truncated text."""
    if not info:
        return {}
    try:
        encoded = orjson.dumps(dict(info), default=str, option=_INFO)
    except TypeError:
        return {"info": repr(info)[:MAX_INFO_CHARACTERS].encode("utf-8", errors="replace").decode()}
    if len(encoded) <= MAX_INFO_CHARACTERS:
        return orjson.loads(encoded)
    return {"info": encoded.decode()[:MAX_INFO_CHARACTERS]}
