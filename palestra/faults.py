"""Named points at which a test may kill or stop the process: `PALESTRA_FAULT=before_manifest_commit:3`.

`fault_point(name)` has no effect unless the environment variable names it. Then the n-th pass sends SIGKILL to this
process, which runs no handler, flushes nothing and cannot be caught. With `:STOP` behind the number it sends SIGSTOP:
the process stops at this point until SIGCONT.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import NamedTuple


def _both_sides(*places: str) -> tuple[str, ...]:
    return tuple(f"{side}_{place}" for place in places for side in ("before", "after"))


SERVER_POINTS = (
    *_both_sides(
        "claim_commit",
        "chat_commit",
        "end_commit",
        "manifest_commit",
        "step",
        "checkpoint_rename",
        "publish",
    ),
    "during_generation",  # a reply has been sampled in part
)
# The weights of one policy were handed to the engine, and those of the next one were not.
POLICY_POINTS = ("between_publications",)
# An action of a seat was sent: it has not been accepted yet, or it was and its sender has not been answered.
SEAT_POINTS = _both_sides("seat_claim", "seat_action")
JUDGE_POINTS = _both_sides("verdict_commit", "quarantine")  # a version is held back, and not published yet
POOL_POINTS = _both_sides("pool_rename")  # a past version becomes one of its pool
# Start: the store is open and no socket listens yet. Stop: the server was asked to end and is about to save.
LIFE_POINTS = ("during_start", "during_stop")
SCHEDULER_POINTS = _both_sides("job_commit")  # a job was submitted, moved, or is to be cancelled
# A request to a Tinker server is in its journal and not answered; or its result is.
TINKER_POINTS = _both_sides("tinker_accept", "tinker_result")
FAULT_POINTS = (
    SERVER_POINTS
    + POLICY_POINTS
    + SEAT_POINTS
    + JUDGE_POINTS
    + POOL_POINTS
    + LIFE_POINTS
    + SCHEDULER_POINTS
    + TINKER_POINTS
)


class InjectedFault(NamedTuple):
    """The fault that `PALESTRA_FAULT` requests: the point, the pass (from 1), and the signal."""

    point: str
    number: int
    signal: signal.Signals


def _parse(setting: str | None) -> InjectedFault | None:
    if not setting:
        return None
    name, _, rest = setting.partition(":")
    number, colon, stop = rest.partition(":")
    if name not in FAULT_POINTS or not (number or "1").isdigit() or (colon and stop != "STOP"):
        raise ValueError(
            f"PALESTRA_FAULT={setting!r}: expected NAME:N[:STOP] with NAME one of {', '.join(FAULT_POINTS)}"
        )
    return InjectedFault(name, int(number or "1"), signal.SIGSTOP if stop else signal.SIGKILL)


armed = _parse(os.environ.get("PALESTRA_FAULT"))  # None: no point has an effect
_passes = count(1)


def fault_point(name: str) -> None:
    """Kill or stop this process if `PALESTRA_FAULT` names this point and pass."""
    if armed is not None and name == armed.point and next(_passes) == armed.number:
        os.kill(os.getpid(), armed.signal)
