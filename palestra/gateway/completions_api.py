"""`/v1/completions`: prompts as they are, in text or token ids, recorded in the same session as chats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest
from palestra.gateway.answering import EventWriter, Played, answer
from palestra.gateway.bodies import parse_aside, read_body
from palestra.gateway.callers import caller_of
from palestra.gateway.chat_answers import completion_id, fingerprint, usage_of
from palestra.gateway.fields import (
    MAX_CHOICES,
    SamplingFields,
    call_fields,
    refuse_others,
)
from palestra.gateway.logprobs import TokenBytes, TokenTexts
from palestra.gateway.openapi import request_schema
from palestra.gateway.plane import DataPlane
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, ReplyPiece

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_HARMLESS: dict[str, tuple[Any, ...]] = {"echo": (False,), "best_of": (1,), "suffix": ("",)}
_IGNORED = ("user",)
_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}}]}


def _prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids, to several."""
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
    """The fields of OpenAI's text completion request that this server acts on."""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT)] = Field(
        description="Text (control tokens in it are meant), token ids, or a list of these."
    )
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="Logprobs of the sampled tokens, and of so many of the most probable at each place."
    )


def add_completions_route(app: FastAPI, plane: DataPlane) -> None:
    """The route for prompts that are not messages."""

    @app.post("/v1/completions", tags=["model"], openapi_extra=request_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Sample what follows a prompt. Recorded like a chat call; it goes on from the call it starts with, id by id.

        `max_tokens` is 16 if it is not given, as with OpenAI. Reasoning and tool calls are text here.
        """
        session_of = caller_of(plane, request)
        calls, wanted = await parse_aside(partial(parse_completion, request), request, plane.pool)
        bytes_of = plane.sessions.context.runtime(wanted.model).token_bytes
        shown = None if wanted.logprobs is None else bytes_of
        ids, n = bool(wanted.return_token_ids), wanted.n or 1
        writer = None
        if wanted.stream:
            usage = wanted.stream_options is not None and bool(wanted.stream_options.include_usage)
            writer = CompletionStream(wanted.model, plane.store.clock.now(), shown, ids, n if usage else None)
        return await answer(
            request, plane, session_of, calls, lambda played: text_completion(played, shown, ids, n), writer
        )


def parse_completion(request: Request, body: bytes) -> tuple[list[GenerationRequest], CompletionRequest]:
    """Check a request body; a call for each prompt.

    Raises:
        InvalidRequest: not JSON, or a value of the wrong type.
        UnsupportedField: something this server does not do.
    """
    wanted = read_body(CompletionRequest, body)
    refuse_others(wanted, _IGNORED, _HARMLESS)
    if len(wanted.prompt) * (wanted.n or 1) > MAX_CHOICES:
        raise InvalidRequest(f"{len(wanted.prompt)} prompts x n is over {MAX_CHOICES} choices", "n")
    first = GenerationRequest(
        policy=wanted.model,
        prompt=wanted.prompt[0],
        max_tokens=wanted.max_tokens or DEFAULT_MAX_TOKENS,
        top_logprobs=wanted.logprobs or 0,
        **wanted.sampling(),
        **call_fields(body, request),
    )
    others = [
        dataclasses.replace(first, prompt=prompt, digest=f"{first.digest}/{number}")
        for number, prompt in enumerate(wanted.prompt[1:], 1)
    ]
    return [first, *others], wanted


def text_completion(played: Played, bytes_of: TokenBytes | None, return_ids: bool, n: int) -> dict[str, Any]:
    """OpenAI's `text_completion`; with logprobs where `bytes_of` is given; `n` choices a prompt."""
    first, choices = played.chats[0], []
    for number, (chat, top) in enumerate(zip(played.chats, played.top, strict=True)):
        ids = chat.completion_ids.tolist()
        logprobs = None if bytes_of is None else TokenTexts(bytes_of).logprobs(ids, chat.logprobs.tolist(), top)
        choice = {
            "index": number,
            "text": chat.reply.text,
            "finish_reason": chat.finish_reason,
            "logprobs": logprobs,
        }
        if return_ids:
            choice |= {"prompt_token_ids": chat.prompt_ids.tolist(), "token_ids": ids}
        choices.append(choice)
    return {
        "id": completion_id(first.episode_id, first.fence, first.index, "cmpl"),
        "object": "text_completion",
        "created": int(first.finished_at),
        "model": first.policy,
        "choices": choices,
        "usage": usage_of(played.chats, n),
        "system_fingerprint": fingerprint(played.chats),
    }


class CompletionStream(EventWriter):
    """The same in chunks, and `[DONE]`."""

    def __init__(
        self, model: str, created: float, bytes_of: TokenBytes | None, return_ids: bool, usage: int | None
    ) -> None:
        """`usage`: with a last chunk for the usage of so many choices a prompt."""
        super().__init__()
        self._bytes_of, self._ids, self._usage = bytes_of, return_ids, usage
        self._head: dict[str, Any] = {"id": "", "object": "text_completion", "created": int(created), "model": model}
        self._prompts: dict[int, list[int]] = {}  # of choices of which nothing was told yet
        self._texts: dict[int, TokenTexts] = {}

    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""
        if not self._head["id"]:
            self._head["id"] = completion_id(start.episode_id, start.fence, start.index, "cmpl")
        if self._bytes_of is not None:
            self._texts[choice] = TokenTexts(self._bytes_of)
        if self._ids:
            self._prompts[choice] = start.prompt_ids.tolist()

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""
        entry: dict[str, Any] = {"text": piece.delta.content, "logprobs": None}
        if choice in self._texts and piece.ids:
            entry["logprobs"] = self._texts[choice].logprobs(piece.ids, piece.logprobs, piece.top)
        if self._ids:
            entry["token_ids"] = list(piece.ids)
        if piece.delta.content or entry["logprobs"] is not None or entry.get("token_ids"):
            self._chunk(choice, entry, None)

    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""
        self._chunk(choice, {"text": "", "logprobs": None}, chat.finish_reason)

    def ended(self, chats: Sequence[Chat]) -> None:
        """See `EventWriter`."""
        if self._usage is not None:
            self.write(self._head | {"choices": [], "usage": usage_of(chats, self._usage)})
        self.write(b"[DONE]")

    def _chunk(self, choice: int, entry: dict[str, Any], finish_reason: str | None) -> None:
        if choice in self._prompts:
            entry["prompt_token_ids"] = self._prompts.pop(choice)
        choices = [{"index": choice, "finish_reason": finish_reason} | entry]
        self.write(self._head | {"choices": choices, "usage": None})
