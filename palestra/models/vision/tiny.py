"""A tiny model that sees, made on the spot: of Idefics3's architecture, with random weights from a fixed seed."""

from __future__ import annotations

import json
from pathlib import Path

from palestra.models.byte_model import byte_tokenizer, text_settings, write_random

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

    Args:
        width: of the text model; the tower has half of it.
        longest: longer side of a picture before it is split into tiles, in pixels.
        splits: whether pictures are split into tiles; otherwise each is one tile.
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
