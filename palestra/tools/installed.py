"""Tools of other packages, found by their entry points."""

from __future__ import annotations

import difflib
import inspect
from importlib.metadata import entry_points

from palestra.errors import ConfigError
from palestra.tools.calculator import Calculator
from palestra.tools.source import ToolSource
from palestra.tools.tool import Tool

GROUP = "palestra.tools"  # entry points of packages; each names a tool, a source of tools, or what makes one
_SHIPPED = {"calculator": Calculator}


def installed_tools() -> list[str]:
    """Return the names of the tools that ship with Palestra, and of those that installed packages bring."""
    return [*_SHIPPED, *sorted({point.name for point in entry_points(group=GROUP)} - set(_SHIPPED))]


def load_tool(name: str) -> Tool | ToolSource:
    """Return the tool, or the source of tools, that goes by a name.

    A package brings one with an entry point of the group `palestra.tools`, whose object is a tool, an `McpServer`, or a
    class or function without arguments that makes one.

    Args:
        name: one of `installed_tools`.

    Raises:
        ConfigError: there is none of this name, or its package can't be imported, or it is no tool.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]()
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        near = difflib.get_close_matches(name, installed_tools(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no tool {name!r}{hint} (known are {', '.join(installed_tools())})")
    try:
        found = points[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the tool {name!r} can't be loaded from {points[0].value}: {error}") from error
    if inspect.isclass(found) or inspect.isfunction(found):
        found = found()
    if not isinstance(found, Tool | ToolSource):
        raise ConfigError(
            f"{points[0].value} is a {type(found).__name__}, and no tool; decorate it with @palestra.tool"
        )
    return found
