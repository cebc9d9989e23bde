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
        where: describes the server, for errors.
        ended_by_itself: whether the server is a process started here that was not killed.
    """

    where: str
    ended_by_itself: bool = False

    @abstractmethod
    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Connect to the server. `receive` is called with each message of the server, `lost` once, with the reason,
        when no further message can come. Raises EnvironmentFailed: the server cannot be reached.
        """

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Send a message; the answer to a request may arrive before this returns. Raises EnvironmentFailed: the message
        could not be sent.
        """

    def agreed(self, protocol: str) -> None:  # noqa: B027 - stdio has nothing to do
        """Set the negotiated version of MCP."""

    def listen(self) -> None:  # noqa: B027
        """Begin to receive notifications; over stdio they come with everything else."""

    @abstractmethod
    async def close(self) -> None:
        """End the connection, and a process started for it."""
