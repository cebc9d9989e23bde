"""Tiny models that see, made on the spot: of Idefics3's and Qwen's architectures, with random weights from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from palestra.models.byte_model import byte_tokenizer, text_settings, write_random
from palestra.models.quiet import NO_CODE

TILE = 32  # side of a tile in pixels; a tile is 4 x 4 patches, of which 2 x 2 at a time become one embedding
_TILES = 6  # rows, and columns, of tiles whose places have tokens
IMAGE_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, _TILES + 1) for column in range(1, _TILES + 1)),
    "<end_of_utterance>",
)


def chat_template(picture: str) -> str:
    """Return a ChatML template in which a message's content is a text or a list of parts."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + picture + "' }}{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def make_tiny_vision(folder: Path, *, width: int = 64, longest: int = 2 * TILE, splits: bool = True) -> None:
    """Write weights, tokenizer, processor and chat template of a tiny vision-language model.

    The tower has half of the text model's `width`. `longest` is the longer side of a picture in pixels before it is
    split into tiles; unless it `splits`, each picture is one tile.
    """
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    tokenizer = byte_tokenizer(IMAGE_TOKENS)
    tokenizer.chat_template = chat_template("<image>")
    tower = {
        "hidden_size": width // 2,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": TILE // 4,
    }
    config = Idefics3Config(
        text_config={"model_type": "llama"} | text_settings(tokenizer, width),
        vision_config=tower,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    write_random(folder, lambda: Idefics3ForConditionalGeneration(config), tokenizer)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": splits,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": TILE},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": longest},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2), encoding="utf-8")
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (TILE // (TILE // 4) // 2) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")


PATCH = 8  # side of a patch in pixels; 2 x 2 of them become one embedding
_SIDE = 2 * PATCH
_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def make_tiny_qwen(folder: Path, family: Family = "qwen2_vl", *, width: int = 64) -> None:
    """Write weights, tokenizer, image processor and chat template of a tiny vision-language model.

    A picture gets 4 to 16 embeddings, depending on its size in pixels. The tower has half of the text model's `width`.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = byte_tokenizer(_TOKENS)
    tokenizer.chat_template = chat_template(_PICTURE)
    start, end, picture, video = (tokenizer.convert_tokens_to_ids(token) for token in _TOKENS)
    half = width // 8  # of the numbers of a head, in pairs
    sections = [half // 4, half * 3 // 8, half * 3 // 8]
    text = text_settings(tokenizer, width)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    if family == "qwen3_vl":
        text |= {"head_dim": width // 4}
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=_tower(family, width),
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    write_random(folder, lambda: AutoModelForImageTextToText.from_config(config, **NO_CODE), tokenizer)
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * _SIDE**2, "longest_edge": 16 * _SIDE**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2), encoding="utf-8")


def _tower(family: Family, width: int) -> dict[str, Any]:
    """Return the tower's configuration, of two layers, or of three where they differ from one another."""
    common = {"patch_size": PATCH, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        return common | {"depth": 2, "embed_dim": width // 2, "hidden_size": width, "mlp_ratio": 2}
    sizes = common | {"depth": 3, "hidden_size": width // 2, "intermediate_size": width, "out_hidden_size": width}
    if family == "qwen2_5_vl":  # windows of 2 x 2 embeddings, but for one layer
        return sizes | {"window_size": 2 * _SIDE, "fullatt_block_indexes": [1]}
    return sizes | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
