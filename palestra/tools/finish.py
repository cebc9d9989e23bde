"""The tool that ends an episode."""

from __future__ import annotations

from typing import Any

from palestra.tools.tool import Tool

FINISH = "finish"


class Finish(Tool):
    """`finish(answer)`: the agent hands in its answer. An environment that sees this call ends."""

    def get_json_schema(self) -> dict[str, Any]:
        """See `Tool`."""
        answer = {"type": "string", "description": "The final answer."}
        return {
            "type": "function",
            "function": {
                "name": FINISH,
                "description": "Hand in the final answer and end.",
                "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """The answer, as text."""
        return str(arguments["answer"])
