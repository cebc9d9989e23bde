"""Messages of the environment protocol, which plays an environment over a network.

`docs/reference/environment-protocol.md` describes them. A server refuses unknown keys. A client ignores them, so that a
newer server of the same protocol version may send more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter

from palestra.types.messages import ChatMessage
from palestra.types.wire import Body, JsonObject

PROTOCOL = 2  # version of the protocol that this package speaks
MAX_MESSAGE_BYTES = 4 * 2**20  # of one message, unless the server's operator says otherwise
MOST_MESSAGE_BYTES = 64 * 2**20  # a client has no session whose messages may be longer: it would have to hold them
MOST_WAITING = 4096  # messages that a side holds, and observations that a client has still to answer
# Codes with which a server closes the WebSocket of a session.
CLOSE_REFUSED, CLOSE_TOO_LARGE, CLOSE_ENDED = 1008, 1009, 4404


class Lenient(BaseModel):
    """Base of server messages: unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class EnvironmentFacts(Lenient):
    """Answer of `GET /v1/environment`: facts about an environment before an episode."""

    name: str = Field(description="The environment's class, for people.")
    protocol: int = Field(description="Version of the protocol that the server speaks.")
    roles: tuple[str, ...] = Field((), description="Names of the agents, where every episode has the same.")
    gives_choices: bool = Field(False, description="Whether observations may have `choices`.")
    moves: tuple[str, ...] = Field((), description="Texts that may be choices, as far as they are known.")
    max_steps: int | None = Field(None, description="Actions after which an episode is truncated; null: no limit.")
    time_limited: tuple[str, ...] = Field((), description="Roles whose time the environment limits by its own clock.")
    forfeit_reward: float = Field(
        0.0, allow_inf_nan=False, description="What an agent earns at most in an episode that its action has broken."
    )


class SessionLine(Lenient):
    """A session in the list of `GET /v1/sessions`."""

    session_id: str
    state: Literal["idle", "resetting", "playing", "over", "failed"]
    age_seconds: float
    silent_seconds: float = Field(description="Since the last message of the client.")
    episodes: int = Field(description="Episodes that were begun.")
    observations: int = Field(description="Observations that were shown.")
    actions: int = Field(description="Actions that were taken.")
    open: int = Field(description="Observations that wait for an action now.")


class SessionList(Lenient):
    """Answer of `GET /v1/sessions`."""

    environment: str
    limit: int
    waiting: int = Field(description="Clients that wait for a free session.")
    opened: int = Field(description="Sessions since the server was started.")
    draining: bool = Field(False, description="The server ends when the episodes that are being played are over.")
    sessions: tuple[SessionLine, ...]


class Open(Body):
    """The first message: get an environment for episodes, one after another; answered by `opened` or `failed`."""

    type: Literal["open"] = "open"
    protocol: int = Field(description="Version of the protocol that the client speaks.")
    wait_seconds: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="How long to wait for a free session. None: without a limit."
    )
    system: str | None = Field(
        None, description="System message of the agent of an environment with one agent. None: the environment's own."
    )


class Reset(Body):
    """Begin an episode; answered by `begun` or `failed`, before the first observation."""

    type: Literal["reset"] = "reset"
    episode: int = Field(ge=1, description="The client's number of the episode, which all messages about it have.")
    task: JsonObject


class Act(Body):
    """Answer an observation. The only response is the environment's next observation."""

    type: Literal["act"] = "act"
    observation_id: str
    action: ChatMessage


class CancelObservation(Body):
    """Give up on an observation: no action will come for it."""

    type: Literal["cancel"] = "cancel"
    observation_id: str


class Abandon(Body):
    """End the episode at any point; answered by `abandoned` when its work has stopped."""

    type: Literal["abandon"] = "abandon"


class ClientMessage(
    RootModel[Annotated[Open | Reset | Act | CancelObservation | Abandon, Field(discriminator="type")]]
):
    """A client's message."""


class Opened(Lenient):
    """A session was made for the client; it ends with the connection."""

    type: Literal["opened"] = "opened"
    max_message_bytes: int = Field(
        ge=1, le=MOST_MESSAGE_BYTES, description="Length of one message, in either direction."
    )
    environment: EnvironmentFacts


class OfEpisode(Lenient):
    """Base of all further server messages.

    Attributes:
        episode: the client's number of the episode; 0: no episode.
    """

    episode: int = Field(0, ge=0)


class Begun(OfEpisode):
    """The episode has begun: observations follow."""

    type: Literal["begun"] = "begun"


class Abandoned(OfEpisode):
    """All work of the episode has stopped."""

    type: Literal["abandoned"] = "abandoned"


class Observed(OfEpisode):
    """An observation, with the fields of `palestra.types.messages.Observation`."""

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


class Withdrawn(OfEpisode):
    """The environment no longer waits for an action, and ignores a late one."""

    type: Literal["withdrawn"] = "withdrawn"
    observation_id: str
    action: ChatMessage | None = Field(None, description="The action that was taken in the agent's place.")


class Over(OfEpisode):
    """The episode is over: no observation will come."""

    type: Literal["over"] = "over"


class SessionFailed(OfEpisode):
    """A message, or the episode, has failed: then no reward and no observation follows."""

    type: Literal["failed"] = "failed"
    code: str = Field(
        description="`environment_failed`: it raised something; `invalid_environment`: it broke the rules of "
        "environments; `not_scored`: a reward is missing on purpose; `conflict`: the message does not fit the state; "
        "another one: the error of that name."
    )
    message: str


ServerMessage = Annotated[
    Opened | Begun | Observed | Withdrawn | Over | Abandoned | SessionFailed, Field(discriminator="type")
]
SERVER_MESSAGE: TypeAdapter[ServerMessage] = TypeAdapter(ServerMessage)
