"""OpenAI's text completions, `/v1/completions`: raw prompts as text or token ids, recorded like chat calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from palestra.errors import InvalidRequest
from palestra.http.bodies import parse_body
from palestra.server.dialects.answers import TokenBytes, TokenTexts, answer_id, fingerprint, usage_of
from palestra.server.dialects.base import Dialect, DialectRequest, EventWriter
from palestra.server.dialects.fields import MAX_CHOICES, Flag, SamplingFields, call_fields
from palestra.server.dialects.others import other_fields
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_HARMLESS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
_UNUSED = ("user",)
_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}}]}


def _prompts(value: Any) -> Any:
    """Return a tuple of prompts, each text or token ids, from one prompt or a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise ValueError(f"a prompt is text, or token ids; or a list of 1 to {MAX_CHOICES} of these")
    return tuple(prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a prompt is text, or a list of at least one token id")
    if not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("token ids are whole numbers from 0")
    return tuple(value)


class CompletionRequest(SamplingFields):
    """The fields of OpenAI's text completion request that this server supports."""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT)] = Field(
        description="Text (control tokens in it count as such), token ids, or a list of these."
    )
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="Return logprobs of the sampled tokens, and of so many most probable tokens at each place."
    )
    echo: Flag | None = Field(
        None,
        description="Return the prompt before the reply, and with `logprobs` the logprob of each of its tokens but the "
        "first, at temperature 1. Not with `stream`.",
    )


class Completions(Dialect[CompletionRequest]):
    """The dialect of OpenAI's text completions: prompts without a chat template, for older clients."""

    path = "/v1/completions"
    body = CompletionRequest
    description = """Sample what follows a prompt. Recorded like a chat call; it extends the call whose tokens it starts
with.

`max_tokens` is 16 if it is not given, as with OpenAI. Reasoning and tool calls are text here."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[CompletionRequest]:
        """Parse a request; each prompt of a list becomes a call. See `Dialect.parse`."""
        wanted = parse_body(CompletionRequest, body)
        others = other_fields(wanted, _UNUSED, _HARMLESS, ())
        if wanted.echo and wanted.stream:
            raise InvalidRequest("a prompt is echoed in whole answers only; leave stream out", "echo")
        if len(wanted.prompt) * (wanted.n or 1) > MAX_CHOICES:
            raise InvalidRequest(f"{len(wanted.prompt)} prompts x n is over {MAX_CHOICES} choices", "n")
        first = GenerationRequest(
            policy=wanted.model,
            prompt=wanted.prompt[0],
            max_tokens=wanted.max_tokens or DEFAULT_MAX_TOKENS,
            top_logprobs=wanted.logprobs or 0,
            **wanted.sampling(),
            **call_fields(body, headers, self.path),
        )
        following = [
            dataclasses.replace(first, prompt=prompt, digest=f"{first.digest}/{number}")
            for number, prompt in enumerate(wanted.prompt[1:], 1)
        ]
        return DialectRequest(
            body=wanted,
            calls=(first, *following),
            stream=bool(wanted.stream),
            scores=() if wanted.echo else None,
            others=others,
        )

    def render(
        self, request: DialectRequest[CompletionRequest], chats: Sequence[Chat], runtime: PolicyRuntime
    ) -> dict[str, Any]:
        """Return the `text_completion` object of the recorded choices."""
        bytes_of = _bytes_shown(request.body, runtime)
        first, choices, scores = chats[0], [], request.scores
        for number, chat in enumerate(chats):
            ids, values, before = chat.completion_ids.tolist(), chat.logprobs.tolist(), ""
            top: list[list[tuple[int, float]]] = [] if chat.top is None else chat.top.rows()
            if scores:
                prompt = chat.prompt_ids.tolist()
                ids_shown, values, before = prompt + ids, [None, *scores[number], *values], _text(prompt, runtime)
                top = [[]] * len(prompt) + top if top else top
            else:
                ids_shown = ids
            logprobs = None if bytes_of is None else TokenTexts(bytes_of).logprobs(ids_shown, values, top)
            choice = {
                "index": number,
                "text": before + chat.reply.text,
                "finish_reason": chat.finish_reason,
                "logprobs": logprobs,
            }
            if request.body.return_token_ids:
                choice |= {"prompt_token_ids": chat.prompt_ids.tolist(), "token_ids": ids}
            choices.append(choice)
        return {
            "id": answer_id("cmpl", first),
            "object": "text_completion",
            "created": int(first.finished_at),
            "model": first.policy,
            "choices": choices,
            "usage": usage_of(chats, request.body.n or 1),
            "system_fingerprint": fingerprint(chats),
        }

    def sse(self, request: DialectRequest[CompletionRequest], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return the writer of `text_completion` chunks."""
        return _CompletionChunks(request.body, runtime, created)


def _text(ids: Sequence[int], runtime: PolicyRuntime) -> str:
    """Return the text of a prompt, replacing invalid characters."""
    return b"".join(map(runtime.renderer.vocabulary.bytes_of, ids)).decode(errors="replace")


def _bytes_shown(wanted: CompletionRequest, runtime: PolicyRuntime) -> TokenBytes | None:
    return None if wanted.logprobs is None else runtime.renderer.vocabulary.bytes_of


class _CompletionChunks(EventWriter):
    """Writes `text_completion` chunks, and `[DONE]` at the end."""

    def __init__(self, wanted: CompletionRequest, runtime: PolicyRuntime, created: float) -> None:
        super().__init__()
        self._bytes_of, self._ids = _bytes_shown(wanted, runtime), bool(wanted.return_token_ids)
        self._usage = (wanted.n or 1) if wanted.usage_wanted else None  # choices of each prompt; None: send no usage
        self._head: dict[str, Any] = {"id": "", "object": "text_completion", "created": int(created)}
        self._head["model"] = runtime.name
        self._prompts: dict[int, list[int]] = {}  # prompts of choices without a chunk so far
        self._texts: dict[int, TokenTexts] = {}

    def started(self, choice: int, chat: Chat) -> None:
        """Name the answer after its first call and prepare the choice. See `Listener`."""
        if not self._head["id"]:
            self._head["id"] = answer_id("cmpl", chat)
        if self._bytes_of is not None:
            self._texts[choice] = TokenTexts(self._bytes_of)
        if self._ids:
            self._prompts[choice] = chat.prompt_ids.tolist()

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write a chunk with the new text, and with logprobs and token ids if they were asked for."""
        entry: dict[str, Any] = {"text": piece.delta.content, "logprobs": None}
        if choice in self._texts and piece.ids:
            entry["logprobs"] = self._texts[choice].logprobs(piece.ids, piece.logprobs, piece.top)
        if self._ids:
            entry["token_ids"] = list(piece.ids)
        if piece.delta.content or entry["logprobs"] is not None or entry.get("token_ids"):
            self._chunk(choice, entry, None)

    def finished(self, choice: int, chat: Chat) -> None:
        """Write the choice's last chunk, with the finish reason."""
        self._chunk(choice, {"text": "", "logprobs": None}, chat.finish_reason)

    def ended(self, chats: Sequence[Chat]) -> None:
        """Write the chunk with the usage, if it was asked for, and `[DONE]`."""
        if self._usage is not None:
            self.write(self._head | {"choices": [], "usage": usage_of(chats, self._usage)})
        self.write(b"[DONE]")

    def _chunk(self, choice: int, entry: dict[str, Any], finish_reason: str | None) -> None:
        if choice in self._prompts:
            entry["prompt_token_ids"] = self._prompts.pop(choice)
        choices = [{"index": choice, "finish_reason": finish_reason} | entry]
        self.write(self._head | {"choices": choices, "usage": None})
