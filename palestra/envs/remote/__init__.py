"""Environments on other machines: the client of the environment protocol, and what both of its sides share.

`docs/reference/environment-protocol.md` describes the protocol; the server is `palestra.env_server`.
"""

from palestra.envs.remote.environment import RemoteEnvironment
from palestra.envs.remote.seat import SeatEnvironment

__all__ = ["RemoteEnvironment", "SeatEnvironment"]
