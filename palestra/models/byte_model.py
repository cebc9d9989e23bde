"""A tokenizer with one token a byte, and a tiny model with random weights for it, made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from palestra.models.quiet import quiet_transformers


def make_tiny(folder: Path) -> None:
    """Write a two-layer model with one token per byte, random weights from a fixed seed, and the ChatML format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
        " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    config = LlamaConfig(**text_settings(tokenizer))
    write_random(folder, lambda: LlamaForCausalLM(config), tokenizer)


def text_settings(tokenizer: Any, width: int = 64) -> dict[str, Any]:
    """Return the common settings of tiny text models: two layers, and a head tied to the embedding."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_random(folder: Path, make: Callable[[], Any], tokenizer: Any) -> None:
    """Write a model with random weights from a fixed seed, and its tokenizer."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer(more: Sequence[str] = ()) -> Any:
    """Return a transformers tokenizer with one token per byte, ChatML's control tokens, and the tokens `more`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
