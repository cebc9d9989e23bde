"""Bodies of the environment protocol, by which an environment is played over a network.

`docs/environment-protocol.md` describes what they mean. A server refuses keys that it does not know, and a client
ignores them, so that a server may say more than a client of the same version understands.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from palestra.types.messages import ChatMessage
from palestra.types.wire import Body, JsonObject, Name

PROTOCOLS = (1,)  # versions of the protocol that this package speaks
MAX_MESSAGE_BYTES = 4 * 2**20  # of one message, unless the server's operator says otherwise
MOST_MESSAGE_BYTES = 64 * 2**20  # a client has no session whose messages may be longer: it would have to hold them
LEAST_LEASE_SECONDS = 0.1  # a client sends a frame in each third of it
MAX_FRAME_MESSAGES = 64
MOST_WAITING = 4096  # messages of a server that a client holds, and observations that it has still to answer
FRAME_BYTES = 65_536  # of a frame beside its largest message, for receivers that limit frames
# Codes with which a server closes a WebSocket for good; after any other end a client connects again.
CLOSE_REFUSED, CLOSE_TOO_LARGE, CLOSE_REPLACED, CLOSE_ENDED = 1008, 1009, 4000, 4404
MAX_WAIT_SECONDS = 30.0  # for which a server holds a request of `create` or `exchange`


class CreateSession(Body):
    """Request of `POST /v1/sessions`: get an environment for episodes, one after another.

    Sent again with the same `request_id`, the request gets the same session.
    """

    request_id: Name = Field(description="The client's name for this request, which no other client may guess.")
    protocols: Annotated[tuple[int, ...], Field(min_length=1, max_length=64)] = Field(
        description="Versions of the protocol that the client speaks; the server takes the highest that it speaks too."
    )
    wait_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="How long to wait for a free session, at most 30."
    )
    system: str | None = Field(
        None, description="System message of the agent of an environment with one agent. None: the environment's own."
    )


class Lenient(BaseModel):
    """Base of what a server says: keys that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class EnvironmentFacts(Lenient):
    """Answer of `GET /v1/environment`: what is known of an environment before an episode."""

    name: str = Field(description="The environment's class, for people.")
    protocols: tuple[int, ...] = Field(description="Versions of the protocol that the server speaks.")
    roles: tuple[str, ...] = Field((), description="Names of the agents, where every episode has the same.")
    gives_choices: bool = Field(False, description="Whether observations may have `choices`.")
    moves: tuple[str, ...] = Field((), description="Texts that may be choices, as far as they are known.")
    max_steps: int | None = Field(None, description="Actions after which an episode is truncated; null: no limit.")
    time_limited: tuple[str, ...] = Field((), description="Roles whose time the environment limits by its own clock.")
    forfeit_reward: float = Field(
        0.0, allow_inf_nan=False, description="What an agent earns at most in an episode that its action has broken."
    )


class SessionCreated(Lenient):
    """A session that was made for a client."""

    session_id: str
    key: str = Field(description="Opens this session, and nothing else.")
    protocol: int = Field(description="The version that both speak from now on.")
    lease_seconds: float = Field(
        ge=LEAST_LEASE_SECONDS,
        allow_inf_nan=False,
        description="The session ends after so long without a frame of the client.",
    )
    max_message_bytes: int = Field(
        ge=1, le=MOST_MESSAGE_BYTES, description="Length of one message, in either direction."
    )
    environment: EnvironmentFacts


class SessionAnswer(Lenient):
    """Answer of `POST /v1/sessions`."""

    status: Literal["created", "waiting"] = Field(
        description="`waiting`: all sessions are in use, and none has become free in `wait_seconds`; ask again."
    )
    session: SessionCreated | None = Field(None, description="The session that was made; null: wait.")


class SessionLine(Lenient):
    """A session as the list of `GET /v1/sessions` has it."""

    session_id: str
    state: Literal["idle", "resetting", "playing", "over", "failed"]
    connected: bool = Field(description="Whether a WebSocket of the client is open.")
    age_seconds: float
    silent_seconds: float = Field(description="Since the last frame of the client.")
    episodes: int = Field(description="Episodes that were begun.")
    observations: int = Field(description="Observations that were shown.")
    actions: int = Field(description="Actions that were taken.")
    open: int = Field(description="Observations that wait for an action now.")


class SessionList(Lenient):
    """Answer of `GET /v1/sessions`."""

    environment: str
    limit: int
    waiting: int = Field(description="Requests that wait for a free session.")
    opened: int = Field(description="Sessions since the server was started.")
    draining: bool = Field(False, description="The server ends when the episodes that are being played are over.")
    sessions: tuple[SessionLine, ...]


class Numbered(BaseModel):
    """Base of all messages: each side numbers its own of a session from 1, without gaps."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int = Field(ge=1)


class Reset(Numbered):
    """Begin an episode; answered by `done` or `failed`, before the first observation."""

    type: Literal["reset"] = "reset"
    task: JsonObject


class Act(Numbered):
    """Answer an observation. Nothing answers an action but what the environment shows next."""

    type: Literal["act"] = "act"
    observation_id: str
    action: ChatMessage


class Cancel(Numbered):
    """Give up on an observation: no action will come for it."""

    type: Literal["cancel"] = "cancel"
    observation_id: str


class Abandon(Numbered):
    """End the episode at any point; answered by `done` when none of its work is running."""

    type: Literal["abandon"] = "abandon"


class Close(Numbered):
    """End the session; answered by `done`."""

    type: Literal["close"] = "close"


ClientMessage = Annotated[Reset | Act | Cancel | Abandon | Close, Field(discriminator="type")]


class Observed(Numbered):
    """An observation; see `palestra.types.messages.Observation`, whose fields these are."""

    type: Literal["observation"] = "observation"
    id: str
    agent: str
    parents: tuple[str, ...] = ()
    content: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    reward: float | dict[str, float | None] | None = Field(None, description="null: not scored, which is not 0.")
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)
    pictures: dict[str, str] = Field(
        default_factory=dict,
        description="Files of pictures that `content` names and that no earlier message of the episode had: base64, by "
        "the SHA-256 of the file in hex.",
    )
    alone: bool = Field(False, description="Nothing can happen until this observation is answered.")
    survives_failure: bool = Field(
        False, description="The environment scores a `cancel` of this observation, so that the episode continues."
    )


class Withdrawn(Numbered):
    """The environment no longer waits for an action, and ignores one that is on its way."""

    type: Literal["withdrawn"] = "withdrawn"
    observation_id: str
    action: ChatMessage | None = Field(None, description="The action that was taken in the agent's place.")


class Over(Numbered):
    """The episode is over: no observation will come."""

    type: Literal["over"] = "over"


class Done(Numbered):
    """What a message of the client asked for is done."""

    type: Literal["done"] = "done"
    of: int = Field(description="Number of the client's message.")


class Failed(Numbered):
    """A message of the client, or the episode, has failed. An episode that failed has no reward, and shows no more."""

    type: Literal["failed"] = "failed"
    of: int | None = Field(None, description="Number of the client's message that failed; null: the environment did.")
    status: int = Field(description="The status of HTTP that says the same, such as 409 for `conflict`.")
    code: str = Field(
        description="`environment_failed`: it raised something; `invalid_environment`: it broke the rules of "
        "environments; `not_scored`: a reward is missing on purpose; `conflict`: the message does not fit the state; "
        "another one: the error of that name."
    )
    message: str


ServerMessage = Annotated[Observed | Withdrawn | Over | Done | Failed, Field(discriminator="type")]


class ClientFrame(Body):
    """What a client sends: over the WebSocket, or as the body of `POST /v1/sessions/ID/exchange`."""

    ack: int = Field(ge=0, description="Number of the last message of the server that the client has.")
    messages: Annotated[tuple[ClientMessage, ...], Field(max_length=MAX_FRAME_MESSAGES)] = ()
    wait_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Of `exchange`: how long to wait for a message of the server."
    )


class ServerFrame(Lenient):
    """What a server sends: over the WebSocket, or as the answer of `exchange`."""

    ack: int = Field(ge=0, description="Number of the last message of the client that the server has handled.")
    messages: tuple[ServerMessage, ...] = ()


CLIENT_FRAME: TypeAdapter[ClientFrame] = TypeAdapter(ClientFrame)
SERVER_FRAME: TypeAdapter[ServerFrame] = TypeAdapter(ServerFrame)
