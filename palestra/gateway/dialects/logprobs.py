"""Sampled tokens with their logprobs, in the forms of OpenAI's chat and text completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

TokenBytes = Callable[[int], bytes]  # the bytes of a token, which may be part of a character


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]], bytes_of: TokenBytes
) -> dict[str, Any]:
    """Return `choice.logprobs` of a chat completion.

    Args:
        ids: [N], the sampled tokens.
        logprobs: [N], their log-probabilities.
        top: empty, or [N], at each place the most probable tokens with their logprobs. Tokens that `top_k` or `top_p`
            have excluded are left out of the answer.
        bytes_of: returns the bytes of a token.
    """
    content = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        most = _possible(top[place]) if top else ()
        content.append(_entry(token, logprob, bytes_of) | {"top_logprobs": [_entry(t, p, bytes_of) for t, p in most]})
    return {"content": content, "refusal": None}


def _possible(top: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in top if isfinite(logprob)]


def _entry(token: int, logprob: float, bytes_of: TokenBytes) -> dict[str, Any]:
    # Bytes that are only part of a character are written as OpenAI writes them: a backslash, x, and two digits.
    data = bytes_of(token)
    return {"token": data.decode("utf-8", "backslashreplace"), "logprob": logprob, "bytes": list(data)}


class TokenTexts:
    """The tokens of a text completion as texts, and the place in the text at which each begins."""

    def __init__(self, bytes_of: TokenBytes) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # number of complete characters so far

    def logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]]
    ) -> dict[str, Any]:
        """Return `choice.logprobs` of the tokens that follow those of earlier calls.

        Args:
            ids: [N], the sampled tokens.
            logprobs: [N], their log-probabilities.
            top: empty, or [N], at each place the most probable tokens with their logprobs.
        """
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._bytes_of(token)))
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": [{self._text(t): p for t, p in _possible(most)} for most in top] or None,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        data = self._bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
