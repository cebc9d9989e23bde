"""What the gate is told, and what it decides. Both are only ever added to."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

Order = Literal["promote", "back", "hold", "resume"]


class VersionStage(StrEnum):
    """Where a version stands. `live` serves; only `live` and `retired` versions have passed."""

    CANDIDATE = "candidate"  # held-out tasks and audit
    SHADOW = "shadow"  # answers logged prompts, which no user sees
    CANARY = "canary"  # serves some users
    LIVE = "live"
    RETIRED = "retired"  # was live, and a better version came
    REJECTED = "rejected"
    QUARANTINED = "quarantined"  # held back by the audit
    GONE_BACK = "gone_back"  # was live, and lost


FAILED = frozenset({VersionStage.REJECTED, VersionStage.QUARANTINED, VersionStage.GONE_BACK})
TRANSITIONS: dict[VersionStage | None, frozenset[VersionStage]] = {
    None: frozenset({VersionStage.CANDIDATE, VersionStage.LIVE}),  # LIVE: the version that the run begins with
    VersionStage.CANDIDATE: frozenset(
        {VersionStage.SHADOW, VersionStage.CANARY, VersionStage.REJECTED, VersionStage.QUARANTINED}
    ),
    VersionStage.SHADOW: frozenset({VersionStage.CANARY, VersionStage.REJECTED, VersionStage.QUARANTINED}),
    VersionStage.CANARY: frozenset({VersionStage.LIVE, VersionStage.REJECTED, VersionStage.QUARANTINED}),
    VersionStage.LIVE: frozenset({VersionStage.RETIRED, VersionStage.GONE_BACK}),
    VersionStage.RETIRED: frozenset({VersionStage.LIVE}),
    VersionStage.REJECTED: frozenset(),
    VersionStage.QUARANTINED: frozenset(),
    VersionStage.GONE_BACK: frozenset(),
}


class VersionObserved(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One observation. The subclasses say which kinds there are."""


class Started(VersionObserved, frozen=True, kw_only=True, tag="started"):
    """The version that serves at first. Later ones are ignored.

    Attributes:
        key: hex, secret, random; draws who meets a canary.
        bounds: the gate's configuration, with which all is decided until it is changed by another `started`.
    """

    version: int
    key: str
    bounds: dict[str, object]


class Offered(VersionObserved, frozen=True, kw_only=True, tag="offered"):
    """A new version. It is ignored while another one is on trial."""

    version: int


class HeldOut(VersionObserved, frozen=True, kw_only=True, tag="held_out"):
    """Scores of a candidate on held-out tasks, each minus the live version's score, from -1 to 1; empty: no tasks."""

    version: int
    differences: tuple[float, ...]


class Audited(VersionObserved, frozen=True, kw_only=True, tag="audited"):
    """What the audit says of a version."""

    version: int
    passed: bool
    reason: str = ""


class Compared(VersionObserved, frozen=True, kw_only=True, tag="compared"):
    """One logged prompt, answered by a version in its shadow and by the live one.

    Attributes:
        difference: 1: the new reply is better, in both orders; -1: worse; 0: neither.
    """

    version: int
    against: int
    difference: float


class SessionEnded(VersionObserved, frozen=True, kw_only=True, tag="ended"):
    """One session that is over, with the feedback that counts.

    Attributes:
        user: a keyed hash of who used it; never a name.
        score: from 0 to 1; None: no feedback, which is not 0.
        seconds: of a call, on average.
        tokens: of a reply, on average; None: not recorded.
        cost: of a call, on average, in units of money; None: no prices, or not recorded.
        refused: whether a reply refuses to help; None: not recorded.
    """

    version: int
    user: str
    score: float | None
    seconds: float | None = None
    tokens: float | None = None
    cost: float | None = None
    refused: bool | None = None
    failed: bool = False


class Ordered(VersionObserved, frozen=True, kw_only=True, tag="ordered"):
    """What a person wants.

    Attributes:
        version: that to promote; None: of other orders.
    """

    order: Order
    by: str
    reason: str
    version: int | None = None


Observation = Started | Offered | HeldOut | Audited | Compared | SessionEnded | Ordered


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A version changes its stage, or a person's order changes what the gate does.

    Attributes:
        before: None: it is new, or its stage stays.
        after: None: its stage stays.
        why: one line.
        data: numbers that decided, by name.
    """

    version: int
    before: VersionStage | None
    after: VersionStage | None
    why: str
    data: dict[str, float]

    @property
    def event(self) -> dict[str, object]:
        """Return the data of the run's event `gate_decided`."""
        stage = "" if self.after is None else self.after.value
        return {"version": self.version, "stage": stage, "text": self.why, **self.data}
