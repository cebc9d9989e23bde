"""Tools of servers that speak MCP, the Model Context Protocol, over stdio or streamable HTTP.

Users pass an `McpServer` as a tool; the rest implements the protocol. docs/explanation/architecture.md explains why no
package is used.
"""

from palestra_mcp.server import McpServer

__all__ = ["McpServer"]
