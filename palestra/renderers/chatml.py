r"""Renderer for ChatML (SmolLM2, Qwen2.5): `<|im_start|>role\ncontent<|im_end|>\n`, with tools, reasoning and `extend`.

Messages, tools, calls and results are encoded as plain text: a text that contains `<|im_end|>` cannot close its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palestra.renderers.base import Renderer, Reply, Tools, reply_of
from palestra.renderers.chatml_reply import THINK, ChatMLStream, read_reply, write_thought
from palestra.renderers.control_text import plain_encoder
from palestra.renderers.long_text import LongText
from palestra.renderers.picture_layout import PictureTokens
from palestra.renderers.probes import NAMES
from palestra.renderers.prompt_writer import Pieces, PromptWriter, joined, pieces_of, refuse_pictures
from palestra.renderers.reply_grammar import CallFormat
from palestra.renderers.tool_calls import RESULT, call_format, offer, write_call
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart, TextPart, text_message


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
        self.config, self._pictures = config or ChatMLConfig(), pictures
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
        self._encode = plain_encoder(tokenizer)
        self._turn_start, self._turn_end = (self._start,), (self._end, *self._encode("\n"))
        self._opening = (self._start, *self._encode("assistant\n"))
        self._long = LongText(tokenizer, self._encode)

    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, int32 [P]. See `Renderer.render`.

        The system message offers the tools.
        """
        if not messages:
            raise ValueError("no messages")
        return self._sequence(self._turns(messages, tools), [], room)

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
        return self._sequence(_turns(new_messages, self.config.developer), self._closing(completion_ids), room)

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

    def _turns(self, messages: Sequence[ChatMessage], tools: Tools) -> list[Pieces]:
        """Return the turns of a whole conversation; first a system turn if there is a system message or a tool."""
        given = messages[0].role == "system" or (messages[0].role, self.config.developer) == ("developer", "system")
        said = messages[0].text if given else self.config.default_system
        turns = _turns(messages[1:] if given else messages, self.config.developer)
        if said is None and not tools:
            return turns
        if given:
            refuse_pictures(messages[0])
        system = "\n\n".join(([] if said is None else [said]) + ([offer(tools)] if tools else []))
        return [[f"system\n{system}"], *turns]

    def _sequence(self, turns: Iterable[Pieces], before: Sequence[int], room: int | None) -> TokenSequence:
        """Return `before` followed by the ids of the turns, and the beginning of the assistant's reply."""
        writer = PromptWriter(self._encode, self._long, self._pictures, room, before)
        for pieces in turns:
            writer.turn(pieces, self._turn_start, self._turn_end)
        return writer.sequence(self._opening)

    def _closing(self, completion_ids: Ids) -> Sequence[int]:
        stopped = len(completion_ids) > 0 and int(completion_ids[-1]) in self.stop_ids
        return self._turn_end[1:] if stopped else self._turn_end


def _turns(messages: Sequence[ChatMessage], developer: str) -> list[Pieces]:
    """Return the pieces between the start and end token of each turn.

    Consecutive tool results share one user turn, as in Qwen's templates.
    """
    turns: list[Pieces] = []
    results: list[str | ImagePart] = []
    for message in messages:
        if message.role == "tool":
            results += ["\n" if results else "", RESULT[0], *pieces_of(message), RESULT[1]]
            continue
        if results:
            turns.append(joined(["user\n", *results]))
            results = []
        role, content = developer if message.role == "developer" else message.role, message.content
        if role == "assistant":
            refuse_pictures(message)
            turns.append([f"{role}\n{_reply(message)}"])
        elif len(content) == 1 and isinstance(only := content[0], TextPart):
            turns.append([f"{role}\n{only.text}"])
        else:
            turns.append(joined([f"{role}\n", *pieces_of(message)]))
    if results:
        turns.append(joined(["user\n", *results]))
    return turns


def _reply(message: ChatMessage) -> str:
    content, thought = message.text, message.reasoning_content
    calls = [write_call(call) for call in message.tool_calls]
    answer = "\n".join([content, *calls] if content or not calls else calls)
    return write_thought(thought) + answer if thought else answer
