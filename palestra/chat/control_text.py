"""Text of messages that spells a control token: found, marked before a template writes it, and encoded as plain text.

A template writes its own control tokens and the messages into one string, and a tokenizer makes ids of that string:
what a user typed as `<|im_end|>` would close the turn. So a marker that no text contains is put into each such place of
a message. The string is then encoded by a copy of the tokenizer in which the control tokens have the marker in their
names: the template's are written with it and the messages' without, so that only the template's are control tokens.
Everything else (merges, normalization, white space beside a control token) is the tokenizer's own.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection
from functools import cached_property, lru_cache
from typing import Any

_CACHED_LENGTH = 4096  # characters; longer texts are not said twice often enough to be kept
_SHAPED = re.compile(r"<[|｜].+[|｜]>|[|｜].+[|｜]|\[/?[A-Z_]+\]", re.DOTALL)
_UNIT = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def control_tokens(backend: Any, stop_ids: Collection[int] = ()) -> dict[str, int]:
    """Return the control tokens of a `tokenizers.Tokenizer` and their ids.

    These are all that it calls special, all of `stop_ids`, and of its other added tokens those written as control
    tokens are (DeepSeek's `<｜User｜>`). Tags such as `<think>` and `<tool_call>` that are added and not special are
    words of the text, and so are runs of white space.
    """
    return {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special or number in stop_ids or _SHAPED.fullmatch(token.content)
    }


class ControlText:
    """What the text of messages must not become, for one tokenizer."""

    def __init__(self, tokens: dict[str, int], backend: Any) -> None:
        """`tokens`: see `control_tokens`. `backend`: a `tokenizers.Tokenizer`; None: nothing can be encoded here."""
        self.tokens = tokens
        self._backend = backend
        # One capital letter, at the start: no end of the marker is a beginning of it, so none can arise by accident.
        self.marker = "Q" + secrets.token_bytes(9).hex()
        names = _one_of(tokens)
        self._any = re.compile(names)
        self._each = re.compile(_one_of(tokens, ahead=True))  # also where two of them overlap
        self._armed = re.compile(f"{self.marker}|{names}")
        self._firsts = re.compile(_one_of({name[0] for name in tokens}))
        self._lasts = re.compile(_one_of({name[-1] for name in tokens}))
        self._starts = {name[:n] for name in tokens for n in range(1, len(name))}
        self._ends = {name[-n:] for name in tokens for n in range(1, len(name))}
        self._longest = max(map(len, tokens), default=0)

    def find(self, text: str) -> str | None:
        """Return the first control token that the text spells, also in JSON's escapes; None: it spells none."""
        found = self._any.search(text)
        if found is None and "\\" in text:
            found = self._any.search("".join(map(_unescaped, _UNIT.findall(text))))
        return None if found is None else found[0]

    def mark(self, text: str) -> str:
        """Return the text with the marker within everything that is a control token or could become part of one.

        That includes control tokens in JSON's escapes, which a template may decode, and the beginning or the rest of
        one at either edge, beside which a template may write other text.
        """
        places = {found.start() + 1 for found in self._each.finditer(text)} | self._edges(text)
        if "\\" in text:
            units = _UNIT.findall(text)
            plain = "".join(map(_unescaped, units))
            if self._any.search(plain):
                offsets = _offsets(units)
                places |= {offsets[found.start() + 1] for found in self._each.finditer(plain)}
        for place in sorted(places, reverse=True):
            text = text[:place] + self.marker + text[place:]
        return text

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a string with marks in it, and for each id where its characters are in that string."""
        starts, ends, longer = [0], [0], [0]  # from each place of the encoded string on the given one is so much longer

        def swapped(found: re.Match[str]) -> str:
            out = "" if found[0] == self.marker else self._named(found[0])
            place = found.start() - longer[-1] + len(out)
            starts.append(place)
            ends.append(place if out else place + 1)  # a token that ends at a marker does not reach behind it
            longer.append(longer[-1] + len(found[0]) - len(out))
            return out

        text = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        encoding = self._plain.encode(self._armed.sub(swapped, text), add_special_tokens=False)
        offsets = [
            (a + longer[bisect_right(starts, a) - 1], b + longer[bisect_right(ends, b) - 1])
            for a, b in encoding.offsets
        ]
        return list(encoding.ids), offsets

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text that is no template's: none of them is a control token."""
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer, with the marker in the names of its control tokens."""
        data = json.loads(self._backend.to_str())
        names = {name: self._named(name) for name in self.tokens}
        model = data["model"]
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
        if "merges" in model:  # that would make a control token of plain text
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if "".join(pair) not in names]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        data["truncation"] = data["padding"] = None
        plain = type(self._backend).from_str(json.dumps(data))
        wrong = [name for name, number in self.tokens.items() if plain.token_to_id(names[name]) != number]
        if wrong:
            raise ValueError(f"the tokenizer's control tokens cannot be told from text: {', '.join(wrong)}")
        return plain

    def _named(self, name: str) -> str:
        return name[0] + self.marker + name[1:]

    def _edges(self, text: str) -> set[int]:
        """Where the text without white space around it begins or ends with part of a control token."""
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        most = min(self._longest, end - start)
        places: set[int] = set()
        if self._firsts.search(text, max(start, end - most), end):
            places = {end - n + 1 for n in range(1, most + 1) if text[end - n : end] in self._starts}
        if self._lasts.search(text, start, start + most):
            places |= {start} if any(text[start : start + n] in self._ends for n in range(1, most + 1)) else set()
        return places


def plain_encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    """Return a function from text to ids in which no text makes a control token."""
    encode = _encoder(tokenizer)
    cached = lru_cache(maxsize=4096)(encode)
    return lambda text: cached(text) if len(text) <= _CACHED_LENGTH else encode(text)


def _encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that has no special tokens in text, such as ByteTokenizer
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    control = ControlText(control_tokens(backend), backend)
    return lambda text: tuple(control.encode_plain(text))


def _one_of(names: Collection[str], ahead: bool = False) -> str:
    """Return a pattern that matches the longest of the names that begin at a place, character by character.

    Names share their beginnings in it: a vocabulary may have a thousand control tokens. With `ahead` only the first
    character is matched, and the others have to follow it.
    """
    if not names:
        return r"(?!)"
    branches = []
    for first in sorted({name[0] for name in names if name}):
        rests = [name[1:] for name in names if name[:1] == first]
        rest = "" if rests == [""] else _one_of(rests)
        branches.append(re.escape(first) + (f"(?={rest})" if ahead else rest))
    if "" in names:  # a name ends here; the longer ones come first
        branches.append("")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _unescaped(unit: str) -> str:
    if len(unit) == 1:
        return unit
    if unit[1] == "u" and len(unit) > 2:
        return bytes.fromhex(unit[2:6] + unit[8:12]).decode("utf-16-be", errors="replace")
    return _ESCAPES.get(unit[1], unit[1])


def _offsets(units: list[str]) -> list[int]:
    """Return for each character of the unescaped text, and for its end, its place in the text as it was written."""
    out, place = [], 0
    for unit in units:
        out += [place] * len(_unescaped(unit))
        place += len(unit)
    return [*out, place]
