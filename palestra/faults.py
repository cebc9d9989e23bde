"""Named points at which a test may kill the process: `PALESTRA_FAULT=before_manifest:3`.

`fault_point(name)` does nothing unless the environment variable names it; then the n-th pass sends SIGKILL to this
process, which is the one way of dying that runs no handler, flushes nothing and can't be caught.
"""

from __future__ import annotations

import os
import signal
from itertools import count


def _both_sides(*places: str) -> tuple[str, ...]:
    return tuple(f"{side}_{place}" for place in places for side in ("before", "after"))


SERVER_POINTS = _both_sides(
    "claim_commit",
    "chat_commit",
    "end_commit",
    "manifest_commit",
    "step",
    "checkpoint_rename",
    "publish",
)
SCHEDULER_POINTS = _both_sides("job_commit")  # a job was submitted, moved, or is to be cancelled
FAULT_POINTS = SERVER_POINTS + SCHEDULER_POINTS


def _parse(setting: str | None) -> tuple[str, int] | None:
    if not setting:
        return None
    name, _, number = setting.partition(":")
    if name not in FAULT_POINTS or not (number or "1").isdigit():
        raise ValueError(f"PALESTRA_FAULT={setting!r}: expected NAME:N with NAME one of {', '.join(FAULT_POINTS)}")
    return name, int(number or "1")


_armed = _parse(os.environ.get("PALESTRA_FAULT"))
_passes = count(1)


def fault_point(name: str) -> None:
    """Kill this process if `PALESTRA_FAULT` names this point and this pass; otherwise do nothing."""
    if _armed is not None and name == _armed[0] and next(_passes) == _armed[1]:
        os.kill(os.getpid(), signal.SIGKILL)
