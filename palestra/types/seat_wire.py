"""Bodies of the routes for external players: observe, and act."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from palestra.types.messages import ChatMessage, Text, TextPart, ToolCall
from palestra.types.wire import Body, Name

MAX_ACTION_CHARACTERS = 65_536  # of an action's texts together
MAX_ACTION_CALLS = 64


class ObserveSeat(Body):
    """Request of `POST /observe_seat`: wait until the player has to act, until something changes, or for a time.

    It is idempotent: sent again, it gets the same observation until that is answered.
    """

    episode_id: Name
    events_seen: int | None = Field(
        None,
        ge=0,
        description="The number of the last event that the worker has read; the answer has all newer ones. If it is "
        "left out, the answer has the events that no earlier answer had.",
    )
    wait_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, strict=True, description="How long to wait, at most 60 s."
    )


class SeatObservation(Body):
    """An observation for an external player, waiting for an action."""

    observation_id: str
    agent: str = Field(description="The seat, or a subagent of it.")
    step: int = Field(description="The TimeStep of the episode; calls of the model before the action belong to it.")
    content: tuple[ChatMessage, ...] = Field(description="Messages that are new to the agent's conversation.")
    tools: tuple[dict[str, Any], ...] = Field((), description="Tools that the action may call, in OpenAI's shape.")
    choices: tuple[str, ...] = Field(
        (), description="Texts of which the action has to be one, such as the legal moves of a game; (): any text."
    )
    reward: float | dict[str, float | None] | None = Field(
        None, description="Reward of what came before; None: there is none yet."
    )


class SeatEvent(Body):
    """An event of another external player of the episode."""

    number: int = Field(description="Counts the events of the episode, from 1.")
    kind: Literal["seat_claimed", "seat_left", "seat_played", "seat_lost"] = Field(
        description="`seat_left`: its worker is gone; `seat_played`: the policy of its role plays it from now on; "
        "`seat_lost`: no worker plays it any more, and the environment scores that."
    )
    role: str


class SeatAnswer(Body):
    """Answer of `POST /observe_seat`.

    `act`: with an observation to answer; `waiting`: none now, observe again; `over`: the episode is over, and its
    rewards are on disk.
    """

    status: Literal["act", "waiting", "over"]
    observation: SeatObservation | None = None
    to_act: tuple[str, ...] = Field((), description="The seats whose action the episode waits for.")
    events: tuple[SeatEvent, ...] = Field((), description="What happened to other seats after `events_seen`.")
    last: tuple[ChatMessage, ...] = Field((), description="What the environment showed the seat when its part ended.")
    reward: float | None = Field(None, description="The seat's own, of the whole episode; None before it is over.")
    truncated: bool = Field(False, description="The episode is over because the environment has cut it off.")

    @model_validator(mode="after")
    def _has_what_it_says(self) -> SeatAnswer:
        """Refuse an answer that is `act` without an observation, or the reverse."""
        if (self.status == "act") != (self.observation is not None):
            raise ValueError("an answer has an observation if, and only if, its status is `act`")
        return self


class ActSeat(Body):
    """Request of `POST /act_seat`: answer an observation. Repeating the same action has no effect."""

    episode_id: Name
    observation_id: Name
    content: Text = Field("", max_length=MAX_ACTION_CHARACTERS, description="The action's text.")
    reasoning_content: Text | None = Field(None, max_length=MAX_ACTION_CHARACTERS)
    tool_calls: tuple[ToolCall, ...] = Field((), max_length=MAX_ACTION_CALLS)

    @model_validator(mode="after")
    def _is_short(self) -> ActSeat:
        """Raise an error for an action whose parts together are longer than one of them may be."""
        calls = sum(len(call.id) + len(call.function.name) + len(call.function.arguments) for call in self.tool_calls)
        length = len(self.content) + len(self.reasoning_content or "") + calls
        if length > MAX_ACTION_CHARACTERS:
            raise ValueError(f"an action has at most {MAX_ACTION_CHARACTERS} characters, not {length}")
        return self

    @property
    def action(self) -> ChatMessage:
        """Return the action as the environment gets it."""
        return ChatMessage(
            role="assistant",
            content=(TextPart(text=self.content),) if self.content else (),
            reasoning_content=self.reasoning_content,
            tool_calls=self.tool_calls,
        )


class ActionAccepted(Body):
    """Answer of `POST /act_seat`: the environment has the action, or the time for it was over."""

    episode_id: str
    observation_id: str
    taken: bool = Field(
        True, description="False: the seat's time for it was over, and the environment did what it does then."
    )
