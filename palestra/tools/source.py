"""`ToolSource`: tools that are known only when something has been opened, such as a server that has them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from palestra.tools.tool import Tool


class OpenTools(ABC):
    """The tools of a source while it is open."""

    @property
    @abstractmethod
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools, as they were when the source was opened or last refreshed."""

    @abstractmethod
    async def refresh(self) -> bool:
        """Bring the list up to date if it is known to have changed, and return whether it has.

        Raises:
            EnvironmentFailed: the source can't be reached any more.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release what was opened. A second call does nothing."""


class ToolSource(ABC):
    """Where tools come from that are not there before an episode; given to `ToolManager` beside tools."""

    @abstractmethod
    async def open(self) -> OpenTools:
        """Open the source for one user of its tools, such as the environment of one episode.

        Raises:
            EnvironmentFailed: the source can't be reached, or has tools that can't be offered to a model.
        """
