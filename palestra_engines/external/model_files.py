"""Facts from a model's files, without loading its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from palestra.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model in Hugging Face's layout, from which a server loads it.

    Attributes:
        max_positions: context length in tokens.
        shapes: of all weights, by name; a tied head has none of its own.
        sees: whether it is a vision-language model.
    """

    folder: Path
    vocab_size: int
    max_positions: int
    shapes: dict[str, tuple[int, ...]]
    sees: bool

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(map(math.prod, self.shapes.values()))


# Keys by which a server finds another model, and loads that one: any folder of its machine, or an address.
_ELSEWHERE = ("speculators_config", "speculators_model_type", "speculators_version", "name_or_path")


def read_model_files(folder: Path) -> ModelFiles:
    """Read a model's configuration, and the headers of its safetensors."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        if elsewhere := sorted(set(_ELSEWHERE).intersection(_keys(found))):
            raise ModelError(
                f"the model in {folder} names another model in its config.json ({', '.join(elsewhere)}), which the "
                "engine's server would load in its place; name a model with its own weights"
            )
        text = found.get("text_config", found)
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if not shapes:
            raise ModelError(f"{folder} has no model*.safetensors, which the engine's server loads")
        if found.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            shapes.pop("lm_head.weight", None)
        return ModelFiles(
            folder=folder,
            vocab_size=int(text["vocab_size"]),
            max_positions=int(text.get("max_position_embeddings") or 2**20),
            shapes=shapes,
            sees="vision_config" in found,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the model in {folder} can't be read: {type(error).__name__}: {error}") from error


def _keys(found: Any) -> Iterator[str]:
    """Yield all keys of a JSON value, recursively."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from _keys(value)
    elif isinstance(found, list):
        for value in found:
            yield from _keys(value)
