"""Environments on other machines: `RemoteEnvironment`, the server that it asks, and seats of another job's episodes.

It loads neither torch nor ray. `docs/reference/environment-protocol.md` describes the protocol.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra_remote.environment import RemoteEnvironment
    from palestra_remote.seat import SeatEnvironment
    from palestra_remote.session import SessionLimits
    from palestra_remote.sessions import SessionTable

_HOMES = {
    "RemoteEnvironment": "environment",
    "SeatEnvironment": "seat",
    "SessionLimits": "session",
    "SessionTable": "sessions",
}
__all__ = ["RemoteEnvironment", "SeatEnvironment", "SessionLimits", "SessionTable"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra_remote' has no attribute {name!r}")
    return getattr(import_module(f"palestra_remote.{_HOMES[name]}"), name)  # when it is used: the help loads none of it
