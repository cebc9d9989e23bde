"""Palestra's interface of a tokenizer: text to ids, ids to text, and the bytes of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from palestra.renderers.long_text import PIECE, LongText, token_bytes
from palestra.types.calls import Ids

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class Vocabulary:
    """A tokenizer with the methods that Palestra uses."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer of transformers, or a `ByteTokenizer`."""
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        """Return the size of the id range: all valid ids are below it."""
        return len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else int(self._tokenizer.vocab_size)

    def encode(self, text: str, room: int | None = None) -> Ids:
        """Return the ids of a raw prompt, int32 [N]. Text that spells a control token becomes that token.

        Tokens that the tokenizer adds around every text are included. `room` limits the tokens.
        """
        text = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        if room is None or len(text) <= PIECE:
            return np.asarray(self._tokenizer.encode(text), np.int32)
        before, after = self._around
        return np.asarray([*before, *self.long_text.encode(text, room), *after], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """Return a function from a token's id to its bytes (see `token_bytes`); a control token has the bytes of its
        name.
        """
        return token_bytes(self._tokenizer)

    def first_not_writable(self, texts: Iterable[str]) -> str | None:
        """Return the first of these texts that no sequence of ordinary tokens can spell; None: all can be."""
        for text in texts:
            if text in self._writable:
                continue
            if not self._can_write(text.encode("utf-8", errors="replace")):
                return text
            self._writable.add(text)
        return None

    def _can_write(self, text: bytes) -> bool:
        """Return whether tokens, one after another, have exactly these bytes."""
        pieces, longest = self._pieces
        reached = [True] + [False] * len(text)
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - longest), end)
            reached[end] = any(reached[start] and text[start:end] in pieces for start in starts)
        return reached[-1]

    @cached_property
    def added(self) -> dict[str, int]:
        """Return the tokens that the tokenizer matches before splitting a text, except white space."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        tokens = {} if backend is None else backend.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.content.strip()}

    @cached_property
    def _writable(self) -> set[str]:
        """Return the texts known to be sequences of tokens."""
        return set()

    @cached_property
    def _pieces(self) -> tuple[frozenset[bytes], int]:
        """Return the bytes of all tokens but control tokens, and the length of the longest."""
        control = set(getattr(self._tokenizer, "all_special_ids", ()))
        pieces = frozenset(self.bytes_of(token) for token in range(len(self)) if token not in control)
        return pieces, max(map(len, pieces))

    @cached_property
    def long_text(self) -> LongText:
        """Return bounds and cuts for long texts, with control tokens recognised."""
        return LongText(self._tokenizer, lambda text: self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after every text."""
        whole = list(self._tokenizer.encode("a"))
        bare = list(self._tokenizer.encode("a", add_special_tokens=False))
        at = next(k for k in range(len(whole) - len(bare) + 1) if whole[k : k + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]


class ByteTokenizer:
    """A tokenizer without a file, for the fake engine: one token per byte, and ChatML's control tokens.

    Ids 0 to 255 are bytes; 256, 257 and 258 are `SPECIALS`, which text cannot produce.
    """

    eos_token_id = 258
    unk_token_id = None
    name_or_path = "bytes"
    vocab_size = 256 + len(SPECIALS)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the UTF-8 bytes of a text; lone surrogates are replaced."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Bytes that are not UTF-8, and unknown ids, become U+FFFD."""
        pieces, run = [], bytearray()
        for token in token_ids:
            if token < 256:
                run.append(token)
                continue
            pieces.append(run.decode("utf-8", errors="replace"))
            run.clear()
            if token >= self.vocab_size:
                pieces.append("\ufffd")
            elif not skip_special_tokens:
                pieces.append(SPECIALS[token - 256])
        return "".join(pieces) + run.decode("utf-8", errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a control token, or None for any other text."""
        return 256 + SPECIALS.index(token) if token in SPECIALS else None
