"""The bytes of tokens, and long texts: lower bounds of token counts, and safe cuts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from palestra.threads import check_wanted

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


PIECE = 4096  # characters per call of the tokenizer: about 2 ms, during which no other thread runs
_SPACE_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_NORMALIZERS = {"Prepend", "Replace"}  # SentencePiece's, which may stand beside those of `_COMPOSING`
_COMPOSING = {"NFC", "NFKC", "NFD", "NFKD"}
_COMPOSED = 4  # the most characters that Unicode composition turns into one
_SAMPLES = ("ab cd", "a b", "The quick brown fox Jumps", "x1 y z", "don't stop I'll go", "été ab Über", "a\n b c\t d e")
Encode = Callable[[str], Sequence[int]]


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token's id to its bytes.

    The bytes of a reply's tokens, joined, are those of its text. Formats other than byte-level BPE and SentencePiece
    use the bytes of the token's text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lru_cache(maxsize=65_536)(partial(_of_byte, tokenizer))
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
    """Return the byte of each character of byte-level BPE, which writes unprintable bytes as other characters."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTES = _byte_level()


_CHARACTERS = {byte: character for character, byte in BYTES.items()}  # byte to its character in byte-level BPE


class TooManyTokens(Exception):
    """A text has more tokens than allowed; `tokens` is a lower bound."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class LongText:
    """Properties of one tokenizer that allow bounds and cuts of long texts."""

    def __init__(self, tokenizer: Any, encode: Encode) -> None:
        """Examine a tokenizer. `encode` turns text into its ids, without ids added around a text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encode = encode
        self._longest = 1 if backend is None else _longest_token(backend)  # in characters; None: unknown
        self._lost = "" if backend is None else _lost_characters(backend)  # characters that become no token
        self._cuttable = backend is not None and _cuts_between_words(backend, encode)

    def fewest(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, without tokenising it."""
        if self._longest is None:
            return 0
        return -(-(len(text) - sum(map(text.count, self._lost))) // self._longest)

    def encode(self, text: str, room: int) -> list[int]:
        """Return the ids of a text. Raises TooManyTokens: there are more than `room` ids. If the tokenizer allows cuts,
        this is detected early. Raises Abandoned: see `check_wanted`.
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
        """Yield pieces of a text whose joined ids are those of the text."""
        start = 0
        while self._cuttable and len(text) - start > PIECE:
            end = _cut(text, start + PIECE)
            if end is None:
                break
            yield text[start:end]
            start = end
        yield text[start:]


def _cut(text: str, start: int) -> int | None:
    """Return the first position from `start` at which a text may be cut, or None."""
    while start < len(text):
        found = _SPACE_BETWEEN_WORDS.search(text, start, start + PIECE + 1)  # + 1: the letter after the space
        if found is not None:
            return found.start()
        start += PIECE
    return None


def _longest_token(backend: Any) -> int | None:
    """Return the largest number of characters of one token, or None if unbounded or unknown."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=True)
    if type(model).__name__ != "BPE":
        return None  # other models turn a whole unknown run or word into one token
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such tokens take in any number of spaces
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
        whole = all(
            _CHARACTERS[byte] in vocabulary for byte in range(0x80, 0xC0)
        )  # at least one byte of each character
    else:
        whole = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not whole:
        return None  # unknown text becomes no token, or a single one
    longest = max(map(len, vocabulary))
    return longest * (_COMPOSED if kinds & _COMPOSING else 1)


def _lost_characters(backend: Any) -> str:
    """Return the ASCII characters that a byte-level tokenizer drops, because it has no token for them."""
    if "ByteLevel" not in {split["type"] for split in _parts(backend.pre_tokenizer, "pretokenizers")}:
        return ""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return "".join(chr(byte) for byte in range(0x80) if _CHARACTERS[byte] not in vocabulary)


def _removes(normalizers: Sequence[Any]) -> bool:
    """Return whether a normalizer may make a text shorter, as far as its settings show."""
    replaced = [n for n in normalizers if n["type"] == "Replace"]
    return any(len(n["pattern"].get("String", "")) not in range(1, len(n["content"]) + 1) for n in replaced)


def _cuts_between_words(backend: Any, encode: Encode) -> bool:
    """Return whether no token, and no merge, spans a space between two ASCII letters."""
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
    """Return the settings of a normalizer or a pre-tokenizer, or of its members if it is a sequence."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), members)


def _flat(part: Any, members: str) -> list[Any]:
    if part["type"] == "Sequence":
        return [inner for member in part[members] for inner in _flat(member, members)]
    return [part]
