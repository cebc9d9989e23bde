"""Feedback for a session or one of its calls: its form, and the score that it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import Field, model_validator

from palestra.errors import InvalidRequest
from palestra.types.wire import Body

Kind = Literal["score", "thumbs", "comparison", "edit", "critique", "revoke"]
JUDGED = "judged"  # kind of a score that the job's judge gives where users give no feedback
MOST_TEXT = 65_536  # characters


class FeedbackBody(Body):
    """The body of `POST /feedback`: exactly one of `score`, `thumbs`, `preferred` with `over`, `edit`, `critique` and
    `revoke`.
    """

    id: str = Field(min_length=1, max_length=128, description="The client's own; a repeated id changes nothing.")
    session: str = Field(min_length=1, max_length=128)
    subject: str | None = Field(None, max_length=128, description="Whose session it has to be.")
    call: str | None = Field(None, max_length=256, description="The `id` of a recorded reply. None: the session.")
    score: float | None = Field(None, strict=True, description="From 0 to 1.")
    thumbs: Literal["up", "down"] | None = None
    preferred: str | None = Field(None, max_length=256, description="The `id` of the better of two replies.")
    over: str | None = Field(None, max_length=256, description="The `id` of the worse one.")
    edit: str | None = Field(None, max_length=MOST_TEXT, description="The reply as it should have been.")
    critique: str | None = Field(None, max_length=MOST_TEXT)
    revoke: Literal[True] | None = Field(None, description="Takes back what was given before.")

    @model_validator(mode="after")
    def _is_one_kind(self) -> FeedbackBody:
        if (self.preferred is None) != (self.over is None):
            raise ValueError("a comparison has `preferred` and `over`")
        if self.preferred is not None and self.preferred == self.over:
            raise ValueError("`preferred` and `over` are two replies")
        if len(self.given) != 1:
            raise ValueError("give exactly one of score, thumbs, preferred with over, edit, critique and revoke")
        return self

    @property
    def given(self) -> dict[Kind, Any]:
        """Return the values that are given, by kind."""
        pair = None if self.preferred is None else {"preferred": self.preferred, "over": self.over}
        found: dict[Kind, Any] = {
            "score": self.score,
            "thumbs": self.thumbs,
            "comparison": pair,
            "edit": self.edit,
            "critique": self.critique,
            "revoke": self.revoke,
        }
        return {kind: value for kind, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """Checked feedback.

    Attributes:
        subject: whose session it has to be; None: anybody's.
        call: number of the call; None: the whole session.
    """

    id: str
    session: str
    subject: str | None
    call: int | None
    kind: Kind
    value: Any


def checked_feedback(body: FeedbackBody, number_of: Callable[[str, str], int]) -> Feedback:
    """Return the feedback of a body. Raises InvalidRequest: a score is no number from 0 to 1.

    Args:
        number_of: returns the number of the session's call with an `id`, in the field that is named for messages.
    """
    ((kind, value),) = body.given.items()
    if kind == "score" and not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise InvalidRequest(f"score is {value!r}, and not a number from 0 to 1", "score")
    if kind == "comparison":
        value = {name: number_of(call, name) for name, call in value.items()}
    call = None if body.call is None else number_of(body.call, "call")
    return Feedback(id=body.id, session=body.session, subject=body.subject, call=call, kind=kind, value=value)


class Lessons(NamedTuple):
    """What a session teaches besides its score.

    Attributes:
        edits: by the number of a call, its reply as it should have been; None: of the last call.
        pairs: numbers of a better and a worse call.
    """

    edits: dict[int | None, str]
    pairs: list[tuple[int, int]]


def session_lessons(rows: Iterable[Any]) -> Lessons:
    """Return the last edit of each call, and the last comparison of each pair of calls, without revoked ones. `rows` as
    those of `session_score`.
    """
    edits: dict[int | None, str] = {}
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for row in rows:
        if row.kind == "revoke":
            edits = {call: text for call, text in edits.items() if row.call not in (None, call)}
            pairs = {both: pair for both, pair in pairs.items() if row.call is not None and row.call not in both}
        elif row.kind == "edit":
            edits[row.call] = orjson.loads(row.value)
        elif row.kind == "comparison":
            value = orjson.loads(row.value)
            pair = value["preferred"], value["over"]
            pairs[frozenset(pair)] = pair
    return Lessons(edits, list(pairs.values()))


def session_score(rows: Iterable[Any]) -> float | None:
    """Return the score of a session: the last one given for it, or the mean of the last ones given for its calls.

    A revocation takes back the scores of its call, or all of them. None: no score is left, which is not 0.

    Args:
        rows: `kind`, `call` and `value` (JSON), in order of arrival.
    """
    last: dict[int | None, float] = {}
    for row in rows:
        if row.kind == "revoke":
            if row.call is None:
                last.clear()
            last.pop(row.call, None)
        elif row.kind in ("score", JUDGED):
            last[row.call] = float(orjson.loads(row.value))
        elif row.kind == "thumbs":
            last[row.call] = float(orjson.loads(row.value) == "up")
    if None in last:
        return last[None]
    return sum(last.values()) / len(last) if last else None
