"""The server of the environment protocol: plays environments for clients on other machines.

It loads neither torch nor ray. `docs/reference/environment-protocol.md` describes the protocol; the client is
`palestra.envs.remote`.
"""

from palestra.env_server.app import create_env_app
from palestra.env_server.session import SessionLimits
from palestra.env_server.sessions import SessionTable

__all__ = ["SessionLimits", "SessionTable", "create_env_app"]
