"""Tiny models that see, pictures for them, and transformers' own model and processor beside them.

A model is `NAME`, or given by the `name` of another: a built-in one, or a folder.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from palestra.models.byte_model import byte_tokenizer
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import CausalLM, load_causal_lm, load_tokenizer
from palestra.models.vision.tiny import chat_template
from palestra.pictures.pixels import encode_picture
from palestra.renderers import ChatMLRenderer, PictureTokens
from palestra.types.messages import ChatMessage, ImagePart, TextPart

NAME = "tiny-random-vision"


class Shown:
    """Pictures by digest, in memory; counts how often each was asked for."""

    def __init__(self) -> None:
        self.images: dict[str, Image.Image] = {}
        self.asked: list[str] = []

    def add(self, image: Image.Image) -> ImagePart:
        digest = hashlib.sha256(encode_picture(image)).hexdigest()
        self.images[digest] = image
        return ImagePart(digest=digest)

    def size(self, digest: str) -> tuple[int, int]:
        return self.images[digest].size

    def image(self, digest: str) -> Image.Image:
        self.asked.append(digest)
        return self.images[digest]


def write_llava(folder: Path, *, width: int = 32, heads: int = 2, select: str = "default"):
    """Write a tiny model of Llava's architecture, and return its tokenizer."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    tokenizer = byte_tokenizer(["<image>"])
    tokenizer.chat_template = chat_template("<image>")
    size = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
    }
    config = LlavaConfig(
        vision_config=size | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        text_config=size | {"model_type": "llama", "num_key_value_heads": 1, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy=select,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return tokenizer


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def seeing(shown: Shown, *, trained: bool = False, name: str = NAME) -> CausalLM:
    """The tiny model, with these pictures."""
    model = load_causal_lm(name, torch.float32)
    assert model.vision is not None
    model.vision.pictures, model.vision.trained = shown, trained
    return model


def renderer_of(shown: Shown, name: str = NAME) -> ChatMLRenderer:
    tokenizer, layout = load_tokenizer(name), seeing_once(name).vision.layout
    return ChatMLRenderer(tokenizer, pictures=PictureTokens(tokenizer, layout, shown))


def user(*parts: str | ImagePart) -> ChatMessage:
    content = tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts)
    return ChatMessage(role="user", content=content)


@cache
def seeing_once(name: str = NAME) -> CausalLM:
    return load_causal_lm(name, torch.float32)


def pil_processor(folder: Path | str):
    """The processor in a folder of Idefics3's architecture."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    class WithPillow(Idefics3Processor):
        def check_argument_for_proper_class(self, *_):
            return None

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return WithPillow(
        Idefics3ImageProcessorPil.from_pretrained(folder),
        tokenizer,
        image_seq_len=json.loads((Path(folder) / "processor_config.json").read_text())["image_seq_len"],
        chat_template=tokenizer.chat_template,
    )


@cache
def processor():
    """The processor of transformers; `AutoProcessor` of 5.17 finds none without torchvision."""
    return pil_processor(model_folder(NAME))


@cache
def image_processor(name: str):
    """The image processor of transformers, without torchvision."""
    if name == NAME:
        return processor().image_processor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(model_folder(name))


@cache
def transformers_model(folder: Path | str | None = None):
    """The model of transformers, with its own attention everywhere."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder or model_folder(NAME), dtype=torch.float32).eval()


def own_logits(model, ids, images, name: str = NAME) -> torch.Tensor:
    """The logits of transformers' model, [P, V], for ids and the pictures among them, in order."""
    ids = torch.as_tensor(ids, dtype=torch.long)[None]
    given = dict(image_processor(name)(images=[list(images)], return_tensors="pt")) if images else {}
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, **given).logits[0]
