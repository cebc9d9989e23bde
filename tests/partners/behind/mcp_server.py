"""A server of MCP made with the official SDK; over stdio, or over streamable HTTP on the port of the argument."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from pydantic import BaseModel

server = MCPServer("partner")
cancelled: list[str] = []


class Point(BaseModel):
    x: int
    y: int = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def move(point: Point, steps: list[int] | None = None) -> Point:
    """Move a point."""
    return Point(x=point.x + sum(steps or []), y=point.y)


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=b"\x89PNG....", format="png")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the disk is full")


@server.tool()
async def hang() -> str:
    """Take for ever."""
    try:
        await asyncio.sleep(600)
    except BaseException:
        cancelled.append("hang")
        raise
    return "done"


@server.tool()
def seen() -> list[str]:
    """Return which calls were cancelled."""
    return cancelled


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
async def grow(context: Context) -> str:
    """Make one tool more, and say so."""

    def new() -> str:
        """Say that this tool is new."""
        return "new"

    server.add_tool(new)
    await context.session.send_tool_list_changed()
    return "grown"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
