r"""ChatML (SmolLM2, Qwen2.5): `<|im_start|>role\ncontent<|im_end|>\n`, with tools and the bridge to the next turn.

Implements the protocol of the `renderers` package, so it can also be loaded there as a custom renderer.
Message bodies, tools, calls and results are encoded as plain text: one that contains `<|im_end|>` can't close its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict
from renderers import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

from palestra.chat.long_text import PIECE, LongText, TooManyTokens
from palestra.chat.plain_text import plain_encoder
from palestra.chat.thoughts import read_thought
from palestra.chat.tool_calls import Attempt, read_calls
from palestra.chat.turns import Turn, first_turn, turns
from palestra.threads import check_wanted


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc]
    """How a model's template differs from plain ChatML."""

    model_config = ConfigDict(frozen=True)
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"default_system", "developer", "reasons"})

    name: Literal["chatml"] = "chatml"
    default_system: str | None = None
    """Text of the system message that the template adds where a conversation starts without one."""
    developer: Literal["developer", "system"] = "developer"
    """The role under which a developer's message stands."""
    reasons: bool = False
    """Whether the model's template has a place for reasoning. The renderer writes and reads reasoning in any case."""


class ChatMLRenderer:
    """Messages to ids for the ChatML family."""

    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        """`tokenizer` has `encode`, `decode` and `convert_tokens_to_ids`, as transformers' tokenizers do."""
        self.config = config or ChatMLConfig()
        self.reasons = self.config.reasons
        self._tokenizer = tokenizer
        self._start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        unknown = tokenizer.unk_token_id
        if None in (self._start, self._end) or (unknown in (self._start, self._end) and unknown is not None):
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>")
        known = end_of_text is not None and tokenizer.decode([end_of_text]) == "<|endoftext|>"  # not just "unknown"
        self._stops = [self._end, end_of_text] if known else [self._end]
        self._encode = plain_encoder(tokenizer)
        self._long = LongText(tokenizer, self._encode)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """The ids of a whole conversation, each with the index of its message (-1: the template's own)."""
        out = RenderedTokens(message_roles=[m["role"] for m in messages])
        for turn in self._layout(messages, tools):
            self._attribute(out, turn)
        if add_generation_prompt:
            _add(out, -1, self._opening())
        return out

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        room: int | None = None,
    ) -> list[int]:
        """The ids alone.

        Raises:
            TooManyTokens: there are more than `room`.
        """
        ids = self._ids(self._layout(messages, tools), [], room)
        return ids + self._opening() if add_generation_prompt else ids

    def continuation(
        self, completion_ids: Sequence[int], new_messages: Sequence[Any], room: int | None = None
    ) -> list[int]:
        """What follows a prompt and its completion: the new messages and an open assistant turn.

        A completion that was cut at its token limit is closed first; only its last id is looked at. There may be
        replies among the messages (an agent changed a later one), or no message (a second reply is asked for).

        Raises:
            TooManyTokens: there are more than `room`.
        """
        return self._ids(turns(self._roles(new_messages)), self._closing(completion_ids), room) + self._opening()

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
    ) -> RenderedTokens:
        """Prompt and completion as they were, then the `continuation`. The tools are those of the prompt."""
        ids = [*previous_prompt_ids, *previous_completion_ids, *self._closing(previous_completion_ids)]
        out = RenderedTokens(message_roles=[m["role"] for m in new_messages])
        _add(out, -1, ids)
        for turn in turns(self._roles(new_messages)):
            self._attribute(out, turn)
        _add(out, -1, self._opening())
        out.sampled_mask = [False] * len(out.token_ids)
        return out

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Content, reasoning and, where there are tools, calls. What can't be understood stays in the content, too."""
        reasoning, content, attempts = self.read_reply(token_ids, bool(tools))
        return ParsedResponse(content=content, reasoning_content=reasoning, tool_calls=[_parsed(a) for a in attempts])

    def read_reply(self, completion_ids: Sequence[int], calls: bool) -> tuple[str | None, str, list[Attempt]]:
        """Reasoning, content, and with `calls` the tool calls, of a reply without the stop tokens at its end."""
        ids = list(completion_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        reasoning, content = read_thought(self._tokenizer.decode(ids, skip_special_tokens=False))
        if not calls:
            return reasoning, content, []
        return reasoning, *read_calls(content)

    def get_stop_token_ids(self) -> list[int]:
        """`<|im_end|>`, and `<|endoftext|>` where the tokenizer has it."""
        return list(self._stops)

    def _layout(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> Iterator[Turn]:
        if not messages:
            raise ValueError("no messages")
        messages = self._roles(messages)
        first = first_turn(messages, tools or (), self.config.default_system)
        if first is not None:
            yield first
        yield from turns(messages, start=1 if messages[0]["role"] == "system" else 0)

    def _roles(self, messages: Sequence[Any]) -> Sequence[Any]:
        if self.config.developer == "developer":
            return messages
        return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]

    def _ids(self, turns: Iterable[Turn], ids: list[int], room: int | None) -> list[int]:
        """`ids`, and those of the turns."""
        for turn in turns:
            text = "".join(piece.text for piece in turn)
            if room is None or len(text) <= PIECE:
                body: Sequence[int] = self._encode(text)
            else:
                body = self._long.encode(text, max(room - len(ids), 0))
            ids += [self._start, *body, self._end, *self._encode("\n")]
            if room is not None and len(ids) > room:
                raise TooManyTokens(len(ids))
            check_wanted()
        return ids

    def _opening(self) -> list[int]:
        return [self._start, *self._encode("assistant\n")]

    def _closing(self, completion_ids: Sequence[int]) -> list[int]:
        stopped = len(completion_ids) > 0 and int(completion_ids[-1]) in self._stops
        return [*([] if stopped else [self._end]), *self._encode("\n")]

    def _attribute(self, out: RenderedTokens, turn: Turn) -> None:
        """Add a turn. A token that two pieces share belongs to the later one."""
        first, last = turn[0], turn[-1]
        body = self._encode("".join(piece.text for piece in turn))
        _add(out, first.message, [self._start])
        done, text = 0, ""
        for piece in turn:
            text += piece.text
            until = len(body) if piece is last else _shared(body, self._encode(text))
            _add(out, piece.message, body[done:until], piece.sampled)
            done = max(done, until)
        _add(out, last.message, [self._end], last.sampled)
        _add(out, last.message, self._encode("\n"))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _add(out: RenderedTokens, message: int, ids: Sequence[int], sampled: bool = False) -> None:
    out.token_ids.extend(ids)
    out.message_indices.extend([message] * len(ids))
    out.sampled_mask.extend([sampled] * len(ids))


def _parsed(attempt: Attempt) -> ParsedToolCall:
    status = ToolCallParseStatus.OK if attempt.problem is None else ToolCallParseStatus.MALFORMED_STRUCTURE
    return ParsedToolCall(raw=attempt.text, name=attempt.name, arguments=attempt.arguments, status=status)
