"""Parts of answers that dialects share: ids, usage, and logprobs of sampled tokens."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from typing import Any

from palestra.types.calls import Chat

MOST_TEXTS = 8192  # of tokens, that are kept
TokenBytes = Callable[[int], bytes]  # the bytes of a token, which may be part of a character


def answer_id(kind: str, call: Chat) -> str:
    """Return the id of an answer, derived from its first call, so that a retry gets the same id. `kind`: prefix of ids
    in the format, such as `chatcmpl`.
    """
    return f"{kind}-{call.episode_id}-{call.fence}-{call.index}"


def fingerprint(chats: Sequence[Chat]) -> str:
    """Return OpenAI's `system_fingerprint`: the version of the policy that sampled the last token."""
    return f"version-{chats[-1].versions[-1].version}"


def reasoning_tokens(chat: Chat, bytes_of: TokenBytes) -> int:
    """Return how many of the sampled tokens wrote the reasoning, the tag before it included."""
    reasoning = chat.reply.reasoning_content
    if not reasoning:
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(bytes_of(token)) for token in chat.completion_ids.tolist()]
    texts[-1] += decoder.decode(b"", final=True)  # a character that the token limit has cut
    text = "".join(texts)
    start = text.find(reasoning, text.find(">") + 1)  # after the tag, which may have the same words
    end = max(start, 0) + len(reasoning)
    return min(bisect_left(list(accumulate(map(len, texts))), end) + 1, len(texts))


def usage_of(chats: Sequence[Chat], choices: int, bytes_of: TokenBytes | None = None) -> dict[str, Any]:
    """Return OpenAI's `usage` of an answer. `choices`: of each prompt, whose tokens count once. `bytes_of`: the bytes
    of a token, if the usage names the tokens of reasoning.
    """
    prompt = cached = sampled = thought = 0
    for number, chat in enumerate(chats):
        sampled += len(chat.completion_ids)
        if number % choices == 0:
            prompt += chat.prompt_tokens
            cached += chat.shared
        if bytes_of is not None and chat.reply.reasoning_content:
            thought += reasoning_tokens(chat, bytes_of)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if bytes_of is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]], bytes_of: TokenBytes
) -> dict[str, Any]:
    """Return `choice.logprobs` of a chat completion.

    Args:
        ids: [N], the sampled tokens.
        logprobs: [N].
        top: empty, or [N], the most probable tokens with their logprobs. Tokens excluded by `top_k` or `top_p` are left
            out of the answer.
        bytes_of: returns the bytes of a token.
    """
    content = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        others = [_text(t, bytes_of) | {"logprob": p} for t, p in _possible(top[place])] if top else []
        content.append(_text(token, bytes_of) | {"logprob": logprob, "top_logprobs": others})
    return {"content": content, "refusal": None}


def _possible(top: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in top if isfinite(logprob)]


@lru_cache(MOST_TEXTS)
def _text(token: int, bytes_of: TokenBytes) -> dict[str, Any]:
    # Bytes that are only part of a character are written as OpenAI writes them: a backslash, x, and two digits.
    data = bytes_of(token)
    return {"token": data.decode("utf-8", "backslashreplace"), "bytes": list(data)}


class TokenTexts:
    """The texts of a text completion's tokens, and their offsets."""

    def __init__(self, bytes_of: TokenBytes) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # number of complete characters so far

    def logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Sequence[tuple[int, float]]]
    ) -> dict[str, Any]:
        """Return `choice.logprobs` of the tokens after those of earlier calls.

        Args:
            ids: [N], the sampled tokens, possibly after those of the prompt.
            logprobs: [N]; None for a prompt's first token.
            top: empty, or [N], the most probable tokens with their logprobs.
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
