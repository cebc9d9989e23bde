"""Which version serves a session: drawn once for each user and canary, so that it is the same on every server."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from palestra_live.gate.machine import Gate
from palestra_live.gate.records import VersionStage


def hashed(key: bytes, *parts: str) -> bytes:
    """Return a keyed hash of some texts."""
    return hmac.digest(key, "\0".join(parts).encode("utf-8", "surrogatepass"), hashlib.sha256)


class Routing(NamedTuple):
    """What decides which version serves a new session.

    Attributes:
        canary: the version that some users meet; None: no canary.
        share: of the users who meet it.
    """

    key: bytes
    live: int
    canary: int | None
    share: float


def routing_of(gate: Gate) -> Routing | None:
    """Return the present routing of a gate; None: it has not been started."""
    if gate.live is None:
        return None
    trial = gate.trial
    canary = trial.version if trial is not None and gate.stages[trial.version] is VersionStage.CANARY else None
    return Routing(gate.key, gate.live, canary, gate.bounds.canary)


def canary_user(key: bytes, subject: str) -> str:
    """Return the name of a user in the gate's records, from which nobody without the key learns who it is."""
    return hashed(key, "user", subject).hex()[:24]


def version_for(routing: Routing, user: str) -> int:
    """Return the version that serves a new session of a user."""
    if routing.canary is None:
        return routing.live
    drawn = int.from_bytes(hashed(routing.key, "canary", str(routing.canary), user)[:8], "big") / 2**64
    return routing.canary if drawn < routing.share else routing.live
