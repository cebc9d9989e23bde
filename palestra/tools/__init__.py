"""Tools: functions that a model may call, those that ship with Palestra and the base class for your own.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.tools.calculator import Calculator
from palestra.tools.manager import ToolFailure, ToolManager, ToolResult, installed_tools, load_tool
from palestra.tools.tool import FINISH, BadArguments, Finish, FunctionTool, OpenTools, Tool, ToolSource, tool

__all__ = [
    "FINISH",
    "BadArguments",
    "Calculator",
    "Finish",
    "FunctionTool",
    "OpenTools",
    "Tool",
    "ToolFailure",
    "ToolManager",
    "ToolResult",
    "ToolSource",
    "installed_tools",
    "load_tool",
    "tool",
]
