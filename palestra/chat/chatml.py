r"""ChatML (SmolLM2, Qwen2.5): `<|im_start|>role\ncontent<|im_end|>\n`, with the bridge to the next turn.

Implements the protocol of the `renderers` package, so it can also be loaded there as a custom renderer.
Message bodies are encoded as plain text: one that contains `<|im_end|>` can't close its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict
from renderers import ParsedResponse, RenderedTokens, reject_assistant_in_extension, trim_to_turn_close
from renderers.configs import BaseRendererConfig


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc]
    """How a model's template differs from plain ChatML."""

    model_config = ConfigDict(frozen=True)
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"default_system"})

    name: Literal["chatml"] = "chatml"
    default_system: str | None = None
    """Text of the system message that the template adds where a conversation starts without one."""


class ChatMLRenderer:
    """Messages to ids for the ChatML family."""

    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        """`tokenizer` has `encode`, `decode` and `convert_tokens_to_ids`, as transformers' tokenizers do."""
        self.config = config or ChatMLConfig()
        self._tokenizer = tokenizer
        self._start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        unknown = tokenizer.unk_token_id
        if None in (self._start, self._end) or (unknown in (self._start, self._end) and unknown is not None):
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>")
        known = end_of_text is not None and tokenizer.decode([end_of_text]) == "<|endoftext|>"  # not just "unknown"
        self._stops = [self._end, end_of_text] if known else [self._end]
        self._encode = lru_cache(maxsize=4096)(_plain_encoder(tokenizer))

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """The ids of a whole conversation, each with the index of its message (-1: the template's own)."""
        if not messages:
            raise ValueError("no messages")
        if tools:
            raise ValueError("this ChatML renderer does not render tools")
        out = RenderedTokens(message_roles=[m["role"] for m in messages])
        if self.config.default_system is not None and messages[0]["role"] != "system":
            self._emit(out, -1, "system", self.config.default_system)
        for index, message in enumerate(messages):
            self._emit(out, index, message["role"], message.get("content") or "")
        if add_generation_prompt:
            self._open_turn(out)
        return out

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The ids alone."""
        return list(self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
    ) -> RenderedTokens | None:
        """Prompt and completion as they were, then the new messages and an open assistant turn.

        None where a new message is the assistant's: its sampled ids are not known here; and where the completion goes
        on after its stop token: no turn ends with these exact ids.
        """
        if not new_messages or tools or reject_assistant_in_extension(list(new_messages)):
            return None
        ids = trim_to_turn_close(
            list(previous_prompt_ids),
            list(previous_completion_ids),
            set(self._stops),
            synthesize_close=self._end,  # the reply was cut at its token limit
        )
        assert ids is not None
        if len(ids) < len(previous_prompt_ids) + len(previous_completion_ids):
            return None
        out = RenderedTokens(token_ids=ids, message_roles=[m["role"] for m in new_messages])
        out.message_indices = [-1] * len(ids)
        out.sampled_mask = [False] * len(ids)
        self._add(out, -1, self._encode("\n"))
        for index, message in enumerate(new_messages):
            self._emit(out, index, message["role"], message.get("content") or "")
        self._open_turn(out)
        return out

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """The text of a reply, without its stop token."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        return ParsedResponse(content=self._tokenizer.decode(ids, skip_special_tokens=False))

    def get_stop_token_ids(self) -> list[int]:
        """`<|im_end|>`, and `<|endoftext|>` where the tokenizer has it."""
        return list(self._stops)

    def _emit(self, out: RenderedTokens, index: int, role: str, content: str) -> None:
        sampled = role == "assistant" and index >= 0
        self._add(out, index, (self._start,))
        if sampled:
            opening = self._encode("assistant\n")
            whole = self._encode("assistant\n" + content)
            body = whole[len(opening) :] if whole[: len(opening)] == opening else None
            self._add(out, index, opening if body is not None else whole)
            self._add(out, index, body or (), sampled=True)
        else:
            self._add(out, index, self._encode(f"{role}\n{content}"))
        self._add(out, index, (self._end,), sampled=sampled)
        self._add(out, index, self._encode("\n"))

    def _open_turn(self, out: RenderedTokens) -> None:
        self._add(out, -1, (self._start,))
        self._add(out, -1, self._encode("assistant\n"))

    @staticmethod
    def _add(out: RenderedTokens, index: int, ids: Sequence[int], sampled: bool = False) -> None:
        out.token_ids.extend(ids)
        out.message_indices.extend([index] * len(ids))
        out.sampled_mask.extend([sampled] * len(ids))


def _plain_encoder(tokenizer: Any) -> Any:
    """A function from text to a tuple of ids that never yields a control token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that has no special tokens in text, such as ByteTokenizer
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    plain = type(backend).from_str(backend.to_str())
    plain.encode_special_tokens = True

    def encode(text: str) -> tuple[int, ...]:
        text = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        return tuple(plain.encode(text, add_special_tokens=False).ids)

    return encode
