"""`Transport`: how the messages of MCP get to a server and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
MAX_MESSAGE_BYTES = 16 << 20


class Transport(ABC):
    """Carries JSON-RPC messages between this process and one server.

    Attributes:
        where: the server, in words, for errors.
        ended_by_itself: whether the server is a process that was started here, and that nobody has killed.
    """

    where: str
    ended_by_itself: bool = False

    @abstractmethod
    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Connect to the server.

        Args:
            receive: is called with each message of the server.
            lost: is called once, with the reason, when no further message can come.

        Raises:
            EnvironmentFailed: the server can't be reached.
        """

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Send a message; of a request, the answer may have been received when this returns.

        Raises:
            EnvironmentFailed: the message could not be sent.
        """

    def agreed(self, protocol: str) -> None:  # noqa: B027 - stdio has nothing to do
        """Take notice of the version of MCP on which server and client have agreed."""

    def listen(self) -> None:  # noqa: B027
        """Begin to receive what the server says unasked; over stdio that comes with everything else."""

    @abstractmethod
    async def close(self) -> None:
        """End the connection, and a process that was started for it."""
