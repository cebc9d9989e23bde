"""Facts from a model's files, without loading it."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import ModelError

_OF_TOWERS = (
    ".visual.",
    ".vision_tower.",
    ".vision_model.",
    ".multi_modal_projector.",
    ".connector.",
)  # in names of weights, behind a dot


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts from a model's files.

    Attributes:
        parameters: number of weights; None: the folder has no safetensors.
        context: in tokens; None: unknown.
        sees: whether it is a vision-language model.
        tower: number of the vision tower's weights.
    """

    parameters: int | None
    context: int | None
    sees: bool = False
    tower: int = 0


def model_facts(folder: Path) -> ModelFacts:
    """Return the facts about a model in Hugging Face's layout."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        context = (found.get("text_config") or found).get("max_position_embeddings")
        sizes: dict[str, int] = {}
        files = sorted(folder.glob("model*.safetensors"))  # others, which some models bring as well, are not loaded
        for file in files:
            sizes |= _sizes(file)
        return ModelFacts(
            parameters=sum(sizes.values()) if files else None,
            context=None if context is None else int(context),
            sees="vision_config" in found,
            tower=sum(size for name, size in sizes.items() if any(part in f".{name}" for part in _OF_TOWERS)),
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError, struct.error) as error:
        raise ModelError(f"the model in {folder} can't be read: {type(error).__name__}: {error}") from error


def _sizes(file: Path) -> dict[str, int]:
    """Return how many numbers each tensor of a safetensors file has, from its header."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        if size > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")  # a pointer of Git LFS, say
        header = json.loads(opened.read(size))
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
