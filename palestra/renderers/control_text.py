"""Text in messages that spells a control token: detected, marked before a template writes it, and encoded as plain
text.

A template writes its own control tokens and the messages into one string, which a tokenizer turns into ids: a user's
`<|im_end|>` would close the turn. Therefore a marker that no text contains is inserted at each such position of a
message. A copy of the tokenizer, whose control tokens' names contain the marker, then encodes the string: the template
writes its control tokens with the marker, messages without, so only the template's become control tokens. Everything
else (merges, normalization, white space next to a control token) is the tokenizer's own.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

_SHAPED = re.compile(r"<[|｜].+[|｜]>|[|｜].+[|｜]|\[/?[A-Z_]+\]", re.DOTALL)
_UNIT = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def control_tokens(backend: Any, stop_ids: Collection[int] = ()) -> dict[str, int]:
    """Return the control tokens of a `tokenizers.Tokenizer` and their ids.

    These are all special tokens, all of `stop_ids`, and other added tokens written like control tokens (DeepSeek's
    `<｜User｜>`). Added tokens that are not special, such as `<think>`, `<tool_call>` and runs of white space, count as
    ordinary text.
    """
    return {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special or number in stop_ids or _SHAPED.fullmatch(token.content)
    }


class ControlText:
    """Detects, marks and encodes text that spells a control token of one tokenizer."""

    def __init__(self, tokens: dict[str, int], backend: Any) -> None:
        """Prepare the search for control tokens. `tokens` are control tokens and their ids. Without `backend`, a
        `tokenizers.Tokenizer`, text can be searched and marked, but not encoded.
        """
        self.tokens = tokens
        self._backend = backend
        # One capital letter, at the start: no end of the marker is also its beginning, so text beside a marker can't
        # form a second one.
        self.marker = "Q" + secrets.token_bytes(9).hex()
        names = _one_of(tokens)
        self._any = re.compile(names)
        self._each = re.compile(_one_of(tokens, ahead=True))  # finds overlapping ones, too
        self._armed = re.compile(f"{self.marker}|{names}")
        self._firsts = re.compile(_one_of({name[0] for name in tokens}))
        self._lasts = re.compile(_one_of({name[-1] for name in tokens}))
        self._starts = {name[:n] for name in tokens for n in range(1, len(name))}
        self._ends = {name[-n:] for name in tokens for n in range(1, len(name))}
        self._longest = max(map(len, tokens), default=0)

    def find(self, text: str) -> str | None:
        """Return the first control token that the text spells, including JSON escapes, or None."""
        found = self._any.search(text)
        if found is None and "\\" in text:
            found = self._any.search("".join(map(_unescaped, _UNIT.findall(text))))
        return None if found is None else found[0]

    def mark(self, text: str) -> str:
        """Return the text with the marker wherever it is a control token or could become part of one.

        This includes control tokens in JSON escapes, which a template may decode, and parts of control tokens at the
        edges of the text, next to which a template may write other text.
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
        """Return the ids of a marked string, and each id's range of characters in it."""
        starts, ends, longer = [0], [0], [0]  # by place in the encoded string: how much longer the given one is

        def swapped(found: re.Match[str]) -> str:
            out = "" if found[0] == self.marker else self._named(found[0])
            place = found.start() - longer[-1] + len(out)
            starts.append(place)
            ends.append(place if out else place + 1)  # a token that ends at a marker excludes it
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
        """Return the ids of a text without control tokens."""
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> Any:
        """Return a copy of the tokenizer with the marker in the names of its control tokens."""
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
        if "merges" in model:  # drop merges that build a control token from plain text
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if "".join(pair) not in names]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        data["truncation"] = data["padding"] = None
        plain = type(self._backend).from_str(json.dumps(data))
        wrong = [name for name, number in self.tokens.items() if plain.token_to_id(names[name]) != number]
        if wrong:
            raise ValueError(f"the tokenizer's control tokens cannot be distinguished from text: {', '.join(wrong)}")
        return plain

    def _named(self, name: str) -> str:
        return name[0] + self.marker + name[1:]

    def _edges(self, text: str) -> set[int]:
        """Return where the text, without white space around it, begins or ends with part of a control token."""
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        most = min(self._longest, end - start)
        places: set[int] = set()
        if self._firsts.search(text, max(start, end - most), end):
            places = {end - n + 1 for n in range(1, most + 1) if text[end - n : end] in self._starts}
        if self._lasts.search(text, start, start + most):
            places |= {start} if any(text[start : start + n] in self._ends for n in range(1, most + 1)) else set()
        return places


def plain_encoder(tokenizer: Any) -> Callable[[str], array[int]]:
    """Return a function from text to ids that never produces a control token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # ByteTokenizer, for instance, finds no special tokens in text
        return lambda text: array("i", tokenizer.encode(text, add_special_tokens=False))
    control = ControlText(control_tokens(backend), backend)
    return lambda text: array("i", control.encode_plain(text))


def _one_of(names: Collection[str], ahead: bool = False) -> str:
    """Return a pattern for the longest of the names at a position.

    It is a prefix tree, because a vocabulary may have a thousand control tokens. With `ahead`, only the first character
    is consumed.
    """
    if not names:
        return r"(?!)"
    branches = []
    for first in sorted({name[0] for name in names if name}):
        rests = [name[1:] for name in names if name[:1] == first]
        rest = "" if rests == [""] else _one_of(rests)
        branches.append(re.escape(first) + (f"(?={rest})" if ahead else rest))
    if "" in names:  # a name ends here; longer names are tried first
        branches.append("")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _unescaped(unit: str) -> str:
    if len(unit) == 1:
        return unit
    if unit[1] == "u" and len(unit) > 2:
        return bytes.fromhex(unit[2:6] + unit[8:12]).decode("utf-16-be", errors="replace")
    return _ESCAPES.get(unit[1], unit[1])


def _offsets(units: list[str]) -> list[int]:
    """Return the position in the escaped text of each character of the unescaped text, and of its end."""
    out, place = [], 0
    for unit in units:
        out += [place] * len(_unescaped(unit))
        place += len(unit)
    return [*out, place]
