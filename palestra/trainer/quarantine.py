"""The quarantine of a policy's versions: a file beside its checkpoints, from which version on nobody else gets them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from palestra.disk import make_folders, write_whole
from palestra.errors import CheckpointError

FILE = "quarantine.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Versions that an audit holds back.

    Attributes:
        since: step from which on the reward is likely to be gamed: weights of it and of later steps are neither `best`
            nor exported.
        step: step whose audit found it: its version is the first that is not served.
        reason: what was seen.
    """

    since: int
    step: int
    reason: str

    def holds(self, step: int) -> bool:
        """Return whether weights of a step are held back."""
        return step >= self.since

    def __str__(self) -> str:
        return f"quarantined since step {self.since} by the audit of step {self.step}: {self.reason}"


def read_quarantine(folder: Path) -> Quarantine | None:
    """Return the quarantine of the checkpoints in a folder; None: nothing is held back."""
    try:
        found = json.loads((folder / FILE).read_bytes())
        return Quarantine(since=int(found["since"]), step=int(found["step"]), reason=str(found["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / FILE} can't be read ({error}); nothing is served or exported until it can"
        ) from error


def write_quarantine(folder: Path, quarantine: Quarantine) -> None:
    """Hold versions back; returns when that is on disk."""
    make_folders(folder)
    write_whole(folder / FILE, json.dumps(asdict(quarantine), indent=1).encode())


def lift_quarantine(folder: Path) -> None:
    """Hold nothing back any more."""
    (folder / FILE).unlink(missing_ok=True)
