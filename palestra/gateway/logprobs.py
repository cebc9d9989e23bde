"""Sampled tokens as the OpenAI dialect shows them, with their logprobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]], decode: Decode
) -> dict[str, Any]:
    """`choice.logprobs` of a chat completion; `top` is empty, or has the most probable tokens at each place."""
    content = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        most = top[place] if top else ()
        content.append(_entry(token, logprob, decode) | {"top_logprobs": [_entry(t, p, decode) for t, p in most]})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]],
    decode: Decode,
    offset: int = 0,
) -> dict[str, Any]:
    """`choice.logprobs` of a text completion, whose tokens' texts begin at `offset`."""
    texts = [decode([token]) for token in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": [{decode([t]): p for t, p in most} for most in top] or None,
        "text_offset": offsets,
    }
