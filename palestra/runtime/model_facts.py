"""What the files of a model say without being loaded."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the files of a model say without being loaded.

    Attributes:
        parameters: number of weights; None: the folder has no safetensors.
        context: most positions; None: the model does not say.
        sees: whether it has a tower for pictures.
    """

    parameters: int | None
    context: int | None
    sees: bool = False


def model_facts(folder: Path) -> ModelFacts:
    """Return what the files of a model say.

    Args:
        folder: has the model in Hugging Face's layout.
    """
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = found.get("text_config", found)
    files = sorted(folder.glob("*.safetensors"))
    return ModelFacts(
        parameters=sum(map(_parameters, files)) if files else None,
        context=text.get("max_position_embeddings"),
        sees="vision_config" in found,
    )


def _parameters(file: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
