"""`ToolSource`: tools that are known only when something has been opened, such as a server that has them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from palestra.tools.tool import Tool


class OpenTools(ABC):
    """The tools of a source while it is open."""

    @property
    @abstractmethod
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools, as of opening or the last refresh."""

    @abstractmethod
    async def refresh(self) -> bool:
        """Update the list if it has changed, and return whether it has.

        Raises:
            EnvironmentFailed: the source can't be reached any more.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the resources; idempotent."""


class ToolSource(ABC):
    """A source of tools that only exist during an episode; passed to `ToolManager` like tools."""

    @abstractmethod
    async def open(self) -> OpenTools:
        """Open the source for one user of its tools, such as the environment of one episode.

        Raises:
            EnvironmentFailed: the source can't be reached, or its tools can't be offered to a model.
        """
