"""The bytes that a token stands for. Its text alone does not determine them if the token is part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token's id to its bytes.

    The bytes of a reply's tokens, joined, are those of its text. Tokens of formats other than byte-level BPE and
    SentencePiece have the bytes of their text.

    Args:
        tokenizer: a tokenizer of transformers, or a `ByteTokenizer`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return partial(_of_byte, tokenizer)
    kinds = _decoders(backend)
    added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}

    def find(token: int) -> bytes:
        if token in added:
            return bytes(added[token].encode())
        text: str | None = backend.id_to_token(token)
        if text is None:
            return b""
        if "ByteLevel" in kinds and all(character in BYTES for character in text):
            return bytes(BYTES[character] for character in text)
        if "ByteFallback" in kinds and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        if kinds & {"Metaspace", "Replace"}:
            return text.replace("\u2581", " ").encode()
        return str(tokenizer.decode([token], skip_special_tokens=False)).encode()

    return lru_cache(maxsize=65_536)(find)


def _of_byte(tokenizer: Any, token: int) -> bytes:
    return bytes([token]) if token < 256 else str(tokenizer.decode([token])).encode()


def _decoders(backend: Any) -> set[str]:
    """Return the types of a tokenizer's decoders."""
    if backend.decoder is None:
        return set()
    part = json.loads(backend.decoder.__getstate__())
    return {inner["type"] for inner in part.get("decoders", [part])}


def _byte_level() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE, which writes unprintable bytes as other characters."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTES = _byte_level()
