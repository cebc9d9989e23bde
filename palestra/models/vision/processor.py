"""Turns a picture into a tower's input with a transformers image processor that does not need torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from palestra.errors import ModelError
from palestra.models.quiet import NO_CODE
from palestra.models.vision.towers import SUPPORTED
from palestra.renderers import QWEN, PictureLayout, layout_of
from palestra.renderers.model_layouts import PatchLayout

if TYPE_CHECKING:
    from PIL.Image import Image

# What a processor is made of; the files of a hub model that is named by `org/model` lie in the hub's cache.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class PictureProcessor:
    """Prepares pictures for a model's tower, without the model's weights.

    Attributes:
        image_token: id of the token that represents one embedding.
        layout: placeholders of a picture of a given size.
        files: the processor's files by name, saved with the weights.
    """

    def __init__(self, folder: Path | str) -> None:
        """Read the files of a model. `folder` may be the name of a model on the hub."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        _check_family(config)
        self.files = processor_files(folder)
        self.layout: PictureLayout = layout_of(config.to_dict(), self.files)
        self._processor = _processor_class(config.model_type).from_pretrained(folder, **_settings(self.layout))
        found = getattr(config, "image_token_id", None)  # families call it by two names
        self.image_token = int(config.image_token_index if found is None else found)

    def pixels(self, image: Image) -> dict[str, Tensor]:
        """Return the tower's input for a picture, [1, ...] each."""
        return dict(self._processor(images=image, return_tensors="pt"))


def has_vision(config: Any) -> bool:
    """Return whether a transformers configuration describes a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def find_layout(folder: Path | str) -> PictureLayout | None:
    """Return the picture layout of a model without loading weights; None: it reads text only. `folder` may be the name
    of a model on the hub.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **NO_CODE)
    if not has_vision(config):
        return None
    _check_family(config)
    return layout_of(config.to_dict(), processor_files(folder))


def _check_family(config: Any) -> None:
    """Raise ModelError unless models with this configuration of transformers are supported."""
    if config.model_type not in SUPPORTED:
        raise ModelError(f"{config.model_type} models see, and are not supported; supported are {', '.join(SUPPORTED)}")


def _processor_class(model_type: str) -> Any:
    """Return the image processor of a family that computes with PIL and numpy."""
    if model_type == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil
    if model_type in QWEN:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil
    if model_type == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil


def _settings(layout: PictureLayout) -> dict[str, Any]:
    """Return the processor settings that follow from the layout, which fixes the number of placeholders."""
    # In transformers 5.17 the limits in one model's files become the defaults of all models that are loaded later.
    if not isinstance(layout, PatchLayout):
        return {}
    return {"size": {"shortest_edge": layout.least, "longest_edge": layout.most}}


def processor_files(folder: Path | str) -> dict[str, bytes]:
    """Return the existing files of a model's processor."""
    from huggingface_hub import try_to_load_from_cache

    found = dict[str, bytes]()
    for name in PROCESSOR_FILES:
        place = folder / name if isinstance(folder, Path) else try_to_load_from_cache(folder, name)
        if isinstance(place, str | Path) and Path(place).is_file():
            found[name] = Path(place).read_bytes()
    return found
