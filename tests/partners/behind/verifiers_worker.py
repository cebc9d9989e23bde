"""What `palestra worker` plays in the environment of verifiers; FAILS_FROM says which tasks can't be scored."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from palestra_worlds.verifiers import VerifiersRollout

rollout = VerifiersRollout(
    {
        "taskset": {"id": "verifiers_taskset", "fails_from": int(os.environ.get("FAILS_FROM", "40"))},
        "agent": {"runtime": {"type": "subprocess"}},
    }
)


def tasks():
    return rollout.tasks(8), rollout.tasks(2, first=8)
