"""Tools of other packages, found by their entry points."""

from __future__ import annotations

import inspect

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, nearest
from palestra.tools.calculator import Calculator
from palestra.tools.tool import Tool, ToolSource

GROUP = "palestra.tools"  # entry points of packages; each names a tool, a source of tools, or what makes one
_SHIPPED = {"calculator": Calculator}


def installed_tools() -> list[str]:
    """Return the names of the tools that ship with Palestra or installed packages."""
    return [*_SHIPPED, *(name for name in extensions(GROUP) if name not in _SHIPPED)]


def load_tool(name: str) -> Tool | ToolSource:
    """Return the tool, or the source of tools, of a name.

    A package provides one by an entry point of the group `palestra.tools`: a tool, an `McpServer`, or a class or
    function without arguments that creates one.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]()
    point = extensions(GROUP).get(name)
    if point is None:
        hint = nearest(name, installed_tools(), "{!r}")
        raise ConfigError(f"there is no tool {name!r}{hint} (known are {', '.join(installed_tools())})")
    found = load_extension(point)
    if inspect.isclass(found) or inspect.isfunction(found):
        found = found()
    if not isinstance(found, Tool | ToolSource):
        raise ConfigError(f"{point.value} is a {type(found).__name__}, and no tool; decorate it with @palestra.tool")
    return found
