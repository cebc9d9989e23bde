"""Observations of simulated versions, from which tests of the gate are made."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from palestra_live.gate.machine import Gate
from palestra_live.gate.records import (
    Audited,
    Compared,
    HeldOut,
    Observation,
    Offered,
    SessionEnded,
    Started,
)
from palestra_live.gate.records import (
    VersionStage as Stage,
)
from palestra_live.gate.routing import canary_user, routing_of, version_for

KEY = "6b" * 16


def started(**bounds: Any) -> Started:
    return Started(version=0, key=KEY, bounds=bounds)


def passing(version: int) -> list[Observation]:
    """A candidate that passes held-out tasks and audit."""
    return [Offered(version=version), HeldOut(version=version, differences=()), Audited(version=version, passed=True)]


def gate_of(*observations: Observation) -> Gate:
    gate = Gate()
    for one in observations:
        gate.see(one)
    return gate


def serves(gate: Gate, user: str) -> int:
    routing = routing_of(gate)
    assert routing is not None
    return version_for(routing, user)


def use(
    gate: Gate, quality: Mapping[int, float], sessions: int, seed: int = 0, **more: Any
) -> Iterator[tuple[Observation, list[Any]]]:
    """Let new users have one session each, of the version that the gate chooses, and tell the gate."""
    rng = random.Random(seed)
    for _ in range(sessions):
        user = canary_user(gate.key, f"user-{rng.random()}")
        version = serves(gate, user)
        ended = SessionEnded(version=version, user=user, score=float(rng.random() < quality[version]), **more)
        yield ended, gate.see(ended)


def in_shadow(gate: Gate, version: int, differences: list[float]) -> None:
    for difference in differences:
        gate.see(Compared(version=version, against=gate.live or 0, difference=difference))


def in_canary(version: int = 1, **bounds: Any) -> Gate:
    gate = gate_of(started(**bounds), *passing(version))
    assert gate.stages[version] is Stage.CANARY
    return gate
