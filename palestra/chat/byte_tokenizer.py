"""One token a byte, and ChatML's control tokens: a tokenizer without a file, for the scripted engine."""

from __future__ import annotations

from collections.abc import Sequence

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256, 257, 258 are `SPECIALS`, which text can't produce."""

    eos_token_id = 258
    unk_token_id = None
    name_or_path = "bytes"
    vocab_size = 256 + len(SPECIALS)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """UTF-8 bytes; lone surrogates are replaced."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8, and ids that are no token, become U+FFFD."""
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
        """The id of a control token; None for anything else."""
        return 256 + SPECIALS.index(token) if token in SPECIALS else None
