"""Tool `finish`, with which an agent ends an episode."""

from __future__ import annotations

from typing import Any

from palestra.tools.tool import Tool

FINISH = "finish"


class Finish(Tool):
    """Tool `finish(answer)`: the agent hands in its answer, and an environment that sees this call ends the episode."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape, with its one argument `answer`."""
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
        """Return the argument `answer` as text. Environments read the call itself (`final_answer`), not this result."""
        return str(arguments["answer"])
