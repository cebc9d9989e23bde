r"""Renderer for ChatML (SmolLM2, Qwen2.5): `<|im_start|>role\ncontent<|im_end|>\n`, with tools, reasoning and `extend`.

Messages, tools, calls and results are encoded as plain text: a text that contains `<|im_end|>` cannot close its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palestra.renderers.base import Renderer, Reply, Tools, reply_of
from palestra.renderers.chatml_reply import THINK, ChatMLStream, read_reply, write_thought
from palestra.renderers.picture_layout import PictureTokens
from palestra.renderers.probes import NAMES
from palestra.renderers.prompt_writer import Pieces, PromptWriter, joined, pieces_of, refuse_pictures
from palestra.renderers.reply_grammar import CallFormat
from palestra.renderers.tool_calls import RESULT, call_format, offer, write_call
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, TextPart, text_message


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMLConfig:
    """How a model's template differs from plain ChatML."""

    default_system: str | None = None  # system message that the template adds to a conversation without one
    developer: Literal["developer", "system"] = "developer"  # role of a developer's message in the prompt
    reasons: bool = False  # whether the template shows reasoning; it is written and read in any case


class ChatMLRenderer(Renderer):
    """Renders the ChatML family. Its `extend` always succeeds, and never needs the prompt."""

    incremental = True
    independent_turns = True
    unseen = NAMES

    def __init__(
        self, tokenizer: Any, config: ChatMLConfig | None = None, pictures: PictureTokens | None = None
    ) -> None:
        """Create a renderer for a tokenizer with the methods of transformers' tokenizers. Without `config` it is plain
        ChatML; without `pictures` the model reads text only.
        """
        self.config = config or ChatMLConfig()
        self._system_roles = ("system",) if self.config.developer == "developer" else ("system", "developer")
        if pictures is not None:
            self.takes_images, self.picture_layout = True, pictures.layout
        self.reasons = self.config.reasons
        self.vocabulary = Vocabulary(tokenizer)
        self._start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        unknown = tokenizer.unk_token_id
        if None in (self._start, self._end) or (unknown in (self._start, self._end) and unknown is not None):
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>")
        known = (
            end_of_text is not None and tokenizer.decode([end_of_text]) == "<|endoftext|>"
        )  # an unknown token may also get an id
        self.stop_ids = (self._end, end_of_text) if known else (self._end,)
        self._writer = PromptWriter(tokenizer, pictures)
        self._turn_start, self._turn_end = (self._start,), (self._end, *self._writer.encode("\n"))
        self._opening = (self._start, *self._writer.encode("assistant\n"))

    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, int32 [P]. See `Renderer.render`.

        The system message offers the tools.
        """
        if not messages:
            raise ValueError("no messages")
        pieces: Pieces = []
        given = messages[0].role in self._system_roles
        if tools or (not given and self.config.default_system is not None):
            said = messages[0].text if given else self.config.default_system
            if given:
                refuse_pictures(messages[0])
                messages = messages[1:]
            system = "\n\n".join(([] if said is None else [said]) + ([offer(tools)] if tools else []))
            pieces += (self._turn_start, f"system\n{system}", self._turn_end)
        return self._writer.write([*pieces, *self._turns(messages), self._opening], room)

    def extend(
        self,
        prompt_ids: Callable[[], Ids],
        completion_ids: Ids,
        new_messages: Sequence[ChatMessage],
        tools: Tools = (),
        room: int | None = None,
    ) -> TokenSequence:
        """Return the tokens, int32 [N], from the end of a reply to the start of the next one. See `Renderer.extend`.

        A reply that was cut at its token limit first gets its end token.
        """
        stopped = len(completion_ids) > 0 and int(completion_ids[-1]) in self.stop_ids
        closing = self._turn_end[1:] if stopped else self._turn_end
        return self._writer.write([closing, *self._turns(new_messages), self._opening], room)

    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """Return the message of a completion, int32 [C]. See `Renderer.parse`."""
        ids = completion_ids.tolist()
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self.vocabulary.decode(ids)
        if not tools and THINK not in text:  # most replies of a model that does not reason
            return Reply(message=text_message("assistant", text), malformed=())
        return reply_of(*read_reply(text, bool(tools)), call_ids)

    def stream(
        self, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call", single_call: bool = False
    ) -> ChatMLStream:
        """Return a parser that separates reasoning, content and tool calls as text arrives. See `Renderer.stream`."""
        return ChatMLStream(bool(tools), call_ids, single_call)

    def _call_format(self) -> CallFormat:
        return call_format(self.vocabulary.added)

    def _turns(self, messages: Sequence[ChatMessage]) -> Pieces:
        """Return the turns of messages. Consecutive tool results share one user turn, as in Qwen's templates."""
        start, end = self._turn_start, self._turn_end
        pieces: Pieces = []
        results: Pieces = []
        for message in messages:
            if message.role == "tool":
                results += ["\n" if results else "user\n", RESULT[0], *pieces_of(message), RESULT[1]]
                continue
            if results:
                pieces += (start, *joined(results), end)
                results = []
            role, content = message.role, message.content
            if role == "developer":
                role = self.config.developer
            if role == "assistant":
                refuse_pictures(message)
                pieces += (start, f"{role}\n{_reply(message)}", end)
            elif len(content) == 1 and isinstance(only := content[0], TextPart):
                pieces += (start, f"{role}\n{only.text}", end)
            else:
                if role in self._system_roles:
                    refuse_pictures(message)
                pieces += (start, *joined([f"{role}\n", *pieces_of(message)]), end)
        if results:
            pieces += (start, *joined(results), end)
        return pieces


def _reply(message: ChatMessage) -> str:
    content, thought = message.text, message.reasoning_content
    calls = [write_call(call) for call in message.tool_calls]
    answer = "\n".join([content, *calls] if content or not calls else calls)
    return write_thought(thought) + answer if thought else answer
