"""Which version serves a session: drawn once for each user and canary, so that it is the same on every server."""

from __future__ import annotations

import hashlib
import hmac

from palestra_live.gate.machine import Gate
from palestra_live.gate.records import Stage


def hashed(key: bytes, *parts: str) -> bytes:
    """Return a keyed hash of some texts."""
    return hmac.digest(key, "\0".join(parts).encode("utf-8", "surrogatepass"), hashlib.sha256)


def user_of(gate: Gate, subject: str) -> str:
    """Return the name of a user in the gate's records, from which nobody without the key learns who it is."""
    return hashed(gate.key, "user", subject).hex()[:24]


def version_for(gate: Gate, user: str) -> int:
    """Return the version that serves a new session of a user.

    Raises:
        RuntimeError: the gate has not been started.
    """
    if gate.live is None:
        raise RuntimeError("the gate has not been started")
    trial = gate.trial
    if trial is None or gate.stages[trial.version] is not Stage.CANARY:
        return gate.live
    drawn = int.from_bytes(hashed(gate.key, "canary", str(trial.version), user)[:8], "big") / 2**64
    return trial.version if drawn < gate.bounds.canary else gate.live
