"""Tools: what a model may call. Loads neither torch nor ray."""

from palestra.tools.calculator import Calculator
from palestra.tools.finish import FINISH, Finish
from palestra.tools.function import FunctionTool, tool
from palestra.tools.manager import ToolFailure, ToolManager, ToolResult
from palestra.tools.tool import BadArguments, Tool

__all__ = [
    "FINISH",
    "BadArguments",
    "Calculator",
    "Finish",
    "FunctionTool",
    "Tool",
    "ToolFailure",
    "ToolManager",
    "ToolResult",
    "tool",
]
