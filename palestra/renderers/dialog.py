r"""Renderer for dialogs with role words, on which some vision-language models were trained.

Idefics3 and SmolVLM: `User: …<end_of_utterance>\nAssistant: …<end_of_utterance>\n`. Llava 1.5: `USER: … ASSISTANT: …`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.renderers.base import (
    NotInThisFormat,
    Renderer,
    Reply,
    Tools,
    reply_of,
)
from palestra.renderers.picture_layout import PictureTokens
from palestra.renderers.probes import NAMES
from palestra.renderers.prompt_writer import Pieces, PromptWriter, joined, pieces_of, refuse_pictures
from palestra.renderers.reply_grammar import CallFormat
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart

_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogFormat:
    """How a family writes its dialogs.

    Attributes:
        pieces: returns the texts and pictures of a message; its role is one of `_ROLES`.
        end: control token that ends a reply; None: the tokenizer's own.
        closing: text after `end` if it ends all turns of a conversation; None: it only ends sampled replies.
    """

    pieces: Callable[[ChatMessage], Pieces]
    opening: str
    end: str | None
    closing: str | None


class DialogRenderer(Renderer):
    """Renders dialogs with pictures, without tools and reasoning. Replies are parsed as a whole."""

    incremental = False
    independent_turns = False  # a reply that does not begin with a space is written with one
    unseen = NAMES
    reasons = False
    takes_images = True

    def __init__(self, tokenizer: Any, pictures: PictureTokens, written: DialogFormat, first: Sequence[int]) -> None:
        """Create a renderer. `first` are the tokens at the beginning of every conversation, such as `<|im_start|>`."""
        self.vocabulary = Vocabulary(tokenizer)
        self.format, self._first = written, tuple(first)
        end = tokenizer.eos_token if written.end is None else written.end
        found = None if end is None else tokenizer.convert_tokens_to_ids(end)
        if found is None or found == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {end or 'token that ends a reply'}")
        self._end: int = found
        self.stop_ids = tuple(dict.fromkeys((self._end, tokenizer.eos_token_id)))
        self.picture_layout, self._writer = pictures.layout, PromptWriter(tokenizer, pictures)
        self._closing = self._writer.encode(written.closing or "")

    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, int32 [P]. See `Renderer.render`."""
        if not messages:
            raise ValueError("no messages")
        return self._sequence(self._first, messages, tools, room)

    def extend(
        self,
        prompt_ids: Callable[[], Ids],
        completion_ids: Ids,
        new_messages: Sequence[ChatMessage],
        tools: Tools = (),
        room: int | None = None,
    ) -> TokenSequence:
        """Return the tokens, int32 [N], from the end of a reply to the start of the next one. See `Renderer.extend`.

        A reply that was cut at its token limit, or ended with another stop token, first gets its end token.
        """
        ended = len(completion_ids) > 0 and int(completion_ids[-1]) in self.stop_ids
        before = (*self._closing,) if ended else (self._end, *self._closing)
        return self._sequence(before, new_messages, tools, room)

    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """Return the message of a completion, int32 [C], without the space after the opening. See `Renderer.parse`."""
        ids = completion_ids.tolist()
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return reply_of(None, self.vocabulary.decode(ids).removeprefix(" "), (), call_ids)

    def _call_format(self) -> CallFormat:
        raise NotInThisFormat("this model's format has no tools")

    def _sequence(
        self, before: tuple[int, ...], messages: Sequence[ChatMessage], tools: Tools, room: int | None
    ) -> TokenSequence:
        """Return `before`, the turns of the messages, and the beginning of the assistant's reply."""
        if tools:
            raise ValueError("this model's format has no tools")
        pieces: Pieces = [before]
        for message in messages:
            pieces += self._pieces(message)
            if self.format.closing is not None:
                pieces.append((self._end, *self._closing))
        # A token may span the end of a turn that no control token ends.
        return self._writer.write(joined([*pieces, self.format.opening]), room)

    def _pieces(self, message: ChatMessage) -> Pieces:
        """Return the texts and pictures of a message."""
        if message.role not in _ROLES or message.tool_calls:
            raise ValueError("this model's format has no tools")
        if message.role != "user":
            refuse_pictures(message)
        return self.format.pieces(message)


def _of_idefics(message: ChatMessage) -> Pieces:
    content = pieces_of(message)
    space = "" if content and isinstance(content[0], ImagePart) else " "
    return [f"{_ROLES[message.role]}:{space}", *content]


def _of_llava(message: ChatMessage) -> Pieces:
    """Return the pieces of a message, with its pictures first, each on its own line."""
    role = "" if _ROLES[message.role] == "System" else f"{message.role.upper()}: "
    shown, said = list[str | ImagePart](), list[str]()
    for part in pieces_of(message):
        if isinstance(part, ImagePart):
            shown += [part, "\n"]
        else:
            said.append(f"{part} ")
    return [role, *shown, *said]


IDEFICS = DialogFormat(pieces=_of_idefics, opening="Assistant:", end="<end_of_utterance>", closing="\n")
LLAVA = DialogFormat(pieces=_of_llava, opening="ASSISTANT:", end=None, closing=None)
