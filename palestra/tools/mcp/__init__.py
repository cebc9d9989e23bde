"""Tools of servers that speak MCP, the Model Context Protocol, over stdio or streamable HTTP.

`McpServer` is what users give as a tool; the rest speaks the protocol. docs/explanation/architecture.md says why no
package does.
"""

from palestra.tools.mcp.server import McpServer

__all__ = ["McpServer"]
