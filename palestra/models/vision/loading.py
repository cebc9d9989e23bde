"""Load models that see: transformers' weights, a tower, and what prepares pictures for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from palestra.models.quiet import NO_PICKLE
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.towers import tower_of
from palestra.models.vision.vision import Vision


def load_seeing(folder: Path | str, dtype: torch.dtype, attention: str) -> tuple[Any, Vision]:
    """Load a transformers model, and the part of it that sees.

    Args:
        folder: or the name of a model on the hub.
        attention: name of the attention of the text model; the tower has torch's own.

    Raises:
        ModelError: the family is not supported.
    """
    from transformers import AutoModelForImageTextToText

    processor = PictureProcessor(folder)
    implementations = {"text_config": attention, "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=implementations, **NO_PICKLE
    )
    return model, Vision(tower_of(model), processor)
