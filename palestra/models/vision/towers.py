"""Towers of the families of models that see: transformers' own modules, from pixels to embeddings of the text model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from palestra.errors import ModelError


class Tower(Protocol):
    """What differs between families: the parts of a transformers model, and how its tower is called.

    Attributes:
        text: the transformers text model, which takes embeddings.
        names: name prefixes of all weights before the text model.
    """

    text: Any
    names: tuple[str, ...]

    def __call__(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of one picture, [F, hidden], in the order of its placeholders.

        If layers of the text model add to their output at placeholders (DeepStack), the numbers of each such layer
        follow in the same row: [F, (1 + layers) * hidden]. `pixels` are the output of the family's image processor for
        this picture alone.
        """
        ...


class Idefics3Tower:
    """Idefics3 and SmolVLM: tiles [1, n, 3, H, W] through SigLIP, with pixel shuffle and projection.

    transformers drops tiles of zeros as padding. Here each picture is computed alone, without padding, so a black
    picture keeps its tile in a model whose pixels have mean 0.
    """

    names: tuple[str, ...] = ("model.vision_model.", "model.connector.")

    def __init__(self, model: Any) -> None:
        self.text = model.model.text_model
        self._vision, self._connector = model.model.vision_model, model.model.connector

    def __call__(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return [n * image_seq_len, hidden]; see `Tower`."""
        size, tiles = self._vision.patch_size, pixels["pixel_values"][0]
        mask = pixels["pixel_attention_mask"][0].unfold(1, size, size).unfold(2, size, size)
        seen = mask.sum(dim=(-1, -2)) > 0
        states = self._vision(pixel_values=tiles, patch_attention_mask=seen).last_hidden_state
        embeddings: Tensor = self._connector(states)
        return embeddings.flatten(0, 1)


class LlavaTower:
    """Llava 1.5: one picture [1, 3, H, W] through CLIP; the patches of one layer are projected."""

    names: tuple[str, ...] = ("model.vision_tower.", "model.multi_modal_projector.")

    def __init__(self, model: Any) -> None:
        if not isinstance(model.config.vision_feature_layer, int):
            raise ModelError("llava models with several feature layers are not supported")
        self.text = model.model.language_model
        self._model = model.model

    def __call__(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return [patches, hidden]; see `Tower`."""
        return torch.cat(tuple(self._model.get_image_features(pixel_values=pixels["pixel_values"]).pooler_output))


class QwenTower:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches [n, numbers of a patch] and their grid; four neighbours are merged.

    In Qwen2.5-VL most layers attend to a window of patches. In Qwen3-VL some layers of the tower also give embeddings,
    which the first layers of the text model add to their output.
    """

    names: tuple[str, ...] = ("model.visual.",)

    def __init__(self, model: Any) -> None:
        self.text = model.model.language_model
        self._vision = model.model.visual

    def __call__(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return [n / merged, hidden]; in Qwen3-VL [n / merged, (1 + layers) * hidden]; see `Tower`."""
        seen = self._vision(pixels["pixel_values"], grid_thw=pixels["image_grid_thw"])
        return torch.cat((seen.pooler_output, *getattr(seen, "deepstack_features", ())), dim=-1)


_TOWERS: dict[str, Callable[[Any], Tower]] = {
    "idefics3": Idefics3Tower,
    "smolvlm": Idefics3Tower,
    "llava": LlavaTower,
    "qwen2_vl": QwenTower,
    "qwen2_5_vl": QwenTower,
    "qwen3_vl": QwenTower,
}
SUPPORTED = tuple(_TOWERS)  # values of `model_type` in a model's config.json


def tower_of(model: Any) -> Tower:
    """Return the tower of a transformers model."""
    made = _TOWERS.get(model.config.model_type)
    if made is None:
        raise ModelError(
            f"{model.config.model_type} models have a tower that is not supported; supported are {', '.join(SUPPORTED)}"
        )
    return made(model)
