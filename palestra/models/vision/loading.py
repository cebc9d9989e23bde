"""Loads vision-language models: transformers' weights, a tower, and the image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from palestra.models.quiet import NO_PICKLE
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.towers import tower_of
from palestra.models.vision.vision import Vision


def load_vision_model(folder: Path | str, dtype: torch.dtype, attention: str) -> tuple[Any, Vision]:
    """Load a transformers vision-language model and its tower.

    Args:
        folder: or the name of a model on the hub.
        attention: name of the text model's attention; the tower uses torch's.
    """
    from transformers import AutoModelForImageTextToText

    processor = PictureProcessor(folder)
    implementations = {"text_config": attention, "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=implementations, **NO_PICKLE
    )
    return model, Vision(tower_of(model), processor)
