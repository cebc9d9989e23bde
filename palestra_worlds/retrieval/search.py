"""Tool `search`: the passages nearest in meaning to a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.threads import in_thread
from palestra.tools import BadArguments, Tool
from palestra_worlds.retrieval.embedder import shared_embedder

_MAX_QUERY = 500  # characters


class PassageSearch(Tool):
    """Tool `search(query)` over your own passages; their vectors are computed at the first search."""

    def __init__(self, passages: Sequence[str], count: int = 3) -> None:
        """Create the tool.

        Args:
            passages: texts of a few sentences each.
            count: number of passages that a search returns.

        Raises:
            ValueError: there are no passages, or `count` is below 1.
        """
        if not passages or count < 1:
            raise ValueError("a search needs a passage, and a count of at least 1")
        self._passages, self._count = tuple(passages), count
        self._vectors: Any = None  # [N, 384] float32, once it is computed

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape, with its one argument `query`."""
        query = {"type": "string", "description": "What to look for, in a few words or as a question."}
        return {
            "type": "function",
            "function": {
                "name": "search",
                "description": f"Find the {self._count} passages nearest in meaning.",
                "parameters": {"type": "object", "properties": {"query": query}, "required": ["query"]},
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """Return the nearest passages, best first.

        Raises:
            BadArguments: the query is empty, or longer than 500 characters.
        """
        query = str(arguments["query"]).strip()
        if not query or len(query) > _MAX_QUERY:
            raise BadArguments(f"a query has 1 to {_MAX_QUERY} characters")
        return "\n\n".join(await in_thread(lambda: self.nearest(query), "palestra-search"))

    def nearest(self, query: str) -> list[str]:
        """Return the passages nearest to a query, best first; ties in their original order."""
        embedder = shared_embedder()
        if self._vectors is None:
            self._vectors = embedder.embed(self._passages)
        scores = self._vectors @ embedder.embed([query])[0]
        best = (-scores).argsort(kind="stable")[: self._count]
        return [self._passages[place] for place in best]
