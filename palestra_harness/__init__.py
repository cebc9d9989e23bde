"""Harnesses: agents that are programs, such as coding agents, played against an episode's own key.

    palestra.train(harness="pi", reward=score, tasks=[{"prompt": "Fix the test.", "files": {"add.py": "…"}}], …)

The program gets a workspace and a home of its own, and the server's address, the episode's key and the model's name.
Without a `sandbox` it is not isolated: it may read what its user may. A package of another author brings harnesses by
the entry points of the group `palestra.harnesses`, each of which leads to a `Harness`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra_harness.harness import Harness, HarnessResult, find_harness, known_harnesses
    from palestra_harness.rollout import HarnessRollout

__all__ = ["Harness", "HarnessResult", "HarnessRollout", "find_harness", "known_harnesses"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'palestra_harness' has no attribute {name!r}")
    home = "rollout" if name == "HarnessRollout" else "harness"  # when it is used, so that the help loads none of it
    return getattr(import_module(f"palestra_harness.{home}"), name)
