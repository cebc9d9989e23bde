"""Long texts: how few tokens one can have, where it may be cut, and its ids as far as there is room for them.

What can't fit into a model's context is found before all of it is tokenised. Never is a text refused that would fit:
the bound below holds for every text, and a text is cut only where the tokenizer cuts it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from palestra.chat.token_bytes import BYTES
from palestra.threads import check_wanted

PIECE = 4096  # characters that are encoded in one go: about 2 ms, during which no other thread runs
_SPACE_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_NORMALIZERS = {"Prepend", "Replace"}  # of those that may stand beside NFC and the like: SentencePiece's
_COMPOSING = {"NFC", "NFKC", "NFD", "NFKD"}
_COMPOSED = 4  # the most characters that composition makes one of
_SAMPLES = ("ab cd", "a b", "The quick brown fox Jumps", "x1 y z", "don't stop I'll go", "été ab Über", "a\n b c\t d e")

_CHARACTERS = {byte: character for character, byte in BYTES.items()}  # as byte-level BPE writes them
Encode = Callable[[str], Sequence[int]]


class TooManyTokens(Exception):
    """A text has more tokens than there is room for: at least `tokens`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class LongText:
    """What is known of how one tokenizer treats long texts."""

    def __init__(self, tokenizer: Any, encode: Encode) -> None:
        """`tokenizer`: of transformers, or `ByteTokenizer`. `encode`: text to its ids, with none added around them."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encode = encode
        self._longest = 1 if backend is None else _longest_token(backend)  # None: not known
        self._lost = "" if backend is None else _lost_characters(backend)  # they become no token
        self._cuttable = backend is not None and _cuts_between_words(backend, encode)

    def fewest(self, text: str) -> int:
        """Return how many tokens a text has at least; found without making them."""
        if self._longest is None:
            return 0
        return -(-(len(text) - sum(map(text.count, self._lost))) // self._longest)

    def encode(self, text: str, room: int) -> list[int]:
        """Return the ids of a text.

        Raises:
            TooManyTokens: there are more than `room`. Where the tokenizer allows to cut the text, not much more than so
                many have been made.
            Abandoned: see `check_wanted`.
        """
        fewest = self.fewest(text)
        if fewest > room:
            raise TooManyTokens(fewest)
        ids: list[int] = []
        for piece in self.pieces(text):
            check_wanted()
            ids.extend(self._encode(piece))
            if len(ids) > room:
                raise TooManyTokens(len(ids))
        return ids

    def pieces(self, text: str) -> Iterator[str]:
        """Yield pieces of a text whose ids, put together, are those of the text."""
        start = 0
        while self._cuttable and len(text) - start > PIECE:
            end = _cut(text, start + PIECE)
            if end is None:
                break
            yield text[start:end]
            start = end
        yield text[start:]


def _cut(text: str, start: int) -> int | None:
    """Return the first place from `start` on where a text may be cut; None: there is none."""
    while start < len(text):
        found = _SPACE_BETWEEN_WORDS.search(text, start, start + PIECE + 1)  # the letter behind it has to be seen
        if found is not None:
            return found.start()
        start += PIECE
    return None


def _longest_token(backend: Any) -> int | None:
    """Return how many characters one token stands for at most; None: there is no such number, or it is not known."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=True)
    if type(model).__name__ != "BPE":
        return None  # others make a single token of a run, or of a word, that they do not know
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # they swallow any number of spaces
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    if any(split["type"] not in ("ByteLevel", "Metaspace", "Digits", "Split") for split in splits):
        return None
    if any(split.get("behavior") == "Removed" for split in splits):
        return None
    normalizers = _parts(backend.normalizer, "normalizers")
    kinds = {normalizer["type"] for normalizer in normalizers}
    if not kinds <= _NORMALIZERS | _COMPOSING or _removes(normalizers):
        return None
    if "ByteLevel" in {split["type"] for split in splits}:
        whole = all(_CHARACTERS[byte] in vocabulary for byte in range(0x80, 0xC0))  # one at least of each character's
    else:
        whole = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not whole:
        return None  # what the tokenizer does not know becomes no token, or a single one
    longest = max(map(len, vocabulary))
    return longest * (_COMPOSED if kinds & _COMPOSING else 1)


def _lost_characters(backend: Any) -> str:
    """Return the ASCII characters for which a byte-level tokenizer has no token: they are left out."""
    if "ByteLevel" not in {split["type"] for split in _parts(backend.pre_tokenizer, "pretokenizers")}:
        return ""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return "".join(chr(byte) for byte in range(0x80) if _CHARACTERS[byte] not in vocabulary)


def _removes(normalizers: Sequence[Any]) -> bool:
    """Whether a replacement makes a text shorter, as far as can be seen."""
    replaced = [n for n in normalizers if n["type"] == "Replace"]
    return any(len(n["pattern"].get("String", "")) not in range(1, len(n["content"]) + 1) for n in replaced)


def _cuts_between_words(backend: Any, encode: Encode) -> bool:
    """Return whether no token, and no merge, reaches over a space between two ASCII letters."""
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    kinds = {split["type"] for split in splits}
    if "ByteLevel" not in kinds or not kinds <= {"ByteLevel", "Digits", "Split"}:
        return False
    if any(split.get("add_prefix_space") for split in splits):
        return False
    if any(normalizer["type"] not in _COMPOSING for normalizer in _parts(backend.normalizer, "normalizers")):
        return False
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        if token.lstrip or token.rstrip or " " in text or text[0].isalpha() or text[-1].isalpha():
            return False
    return all(_alike(sample, encode) for sample in _SAMPLES)


def _alike(text: str, encode: Encode) -> bool:
    pieces = _SPACE_BETWEEN_WORDS.sub("\0 ", text).split("\0")
    return list(encode(text)) == [token for piece in pieces for token in encode(piece)]


def _parts(component: Any, members: str) -> list[Any]:
    """Return the settings of a normalizer or a pre-tokenizer; of one that is a sequence, those of its members."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), members)


def _flat(part: Any, members: str) -> list[Any]:
    if part["type"] == "Sequence":
        return [inner for member in part[members] for inner in _flat(member, members)]
    return [part]
